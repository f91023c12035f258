"""The local disk as a bounded cache of the bucket, and retention over both."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.tier.conftest import RUN, Sidecar, eventually
from tests.tier.test_reading import segment_keys
from tests.tier.test_upload import refuse_all
from trace_store import TokenSpan
from trace_store.errors import StorageFailed, StorageFull
from trace_store.gather.places import Places
from trace_store.retention import DISK_BYTES_MIN, Limits
from trace_store.storage.s3 import ObjectStore

Make = Callable[..., Sidecar]

FREE = {"free_min": 0, "free_low": 0}
CAP = Limits(disk_bytes_max=DISK_BYTES_MIN, **FREE)
TOKENS = 5000
"""About 2.6 MB a trajectory: six of them are over the share of the cap at which eviction starts."""


def local_bytes(sidecar: Sidecar) -> int:
    return sum(path.stat().st_size for path in sidecar.root.glob("runs/*/*/*.arrow"))


def away(*arguments: object, **more: object) -> None:
    raise StorageFailed("away, says the test")


def accepts(sidecar: Sidecar, number: int) -> bool:
    try:
        sidecar.write(f"t{number}", TOKENS, partition=f"step-{number}")
    except StorageFull:
        return False
    return True


def test_uploaded_segments_are_evicted_least_recently_read_first(sidecar: Make) -> None:
    first = sidecar("a", CAP)
    first.engine._keeper.close()  # its rounds are made by hand here
    for number in range(6):
        first.write(f"t{number}", TOKENS, partition=f"step-{number}")
        first.upload()
        first.engine._gate.observe(local_bytes(first))
    before = [first.read(f"t{number}", TOKENS, f"step-{number}") for number in range(6)]
    first.read("t0", TOKENS, "step-0")  # the oldest, and now the one read last
    held = local_bytes(first)
    assert held > 0.9 * DISK_BYTES_MIN
    first.engine._keeper.tick()
    eventually(lambda: local_bytes(first) <= 0.85 * DISK_BYTES_MIN, "eviction")
    assert first.engine._volume.deleter.drain(30)
    status = first.engine.usage()
    assert local_bytes(first) == status.disk_bytes
    assert status.tier.evicted >= 1
    assert status.tier.evicted_bytes == held - local_bytes(first)
    kept = {path.parent.name[:6] for path in first.root.glob("runs/*/*/*.arrow")}
    assert "step-0" in kept
    assert "step-1" not in kept
    assert [first.read(f"t{number}", TOKENS, f"step-{number}") for number in range(6)] == before
    first.engine.close()
    again = sidecar("a", CAP)
    assert [again.read(f"t{number}", TOKENS, f"step-{number}") for number in range(6)] == before
    assert again.tier.status().uploaded == 0


def test_what_is_read_again_and_again_is_fetched_to_the_disk(sidecar: Make) -> None:
    first = sidecar("a")
    first.write("t", 400)
    first.upload()
    whole = first.read("t", 400)
    second = sidecar("b", Limits(**FREE))
    for _ in range(3):
        assert second.read("t", 400) == whole
    eventually(lambda: second.tier.status().cached == 1, "caching")
    status = second.engine.usage()
    assert status.disk_bytes == status.tier.cached_bytes == local_bytes(second)
    assert status.tier.remote_segments == 0
    assert second.read("t", 400) == whole
    second.engine.close()
    again = sidecar("b", Limits(**FREE))  # it is a local copy like any other
    assert again.read("t", 400) == whole
    assert again.tier.status().uploaded == 0


def test_nothing_is_cached_without_room(sidecar: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first = sidecar("a")
    first.write("t", 400)
    first.upload()
    second = sidecar("b")
    monkeypatch.setattr("trace_store.gate.DiskGate._free", lambda gate: (0, 1 << 40))
    for _ in range(4):
        assert second.reasons("t", 400) == set()
    second.engine.close()
    assert local_bytes(second) == 0


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
def test_a_segment_that_is_released_while_it_is_fetched_leaves_no_file(
    sidecar: Make, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    first = sidecar("a")
    first.write("t", 400)
    first.upload()
    second = sidecar("b", Limits(**FREE))
    read, fetching, go_on = ObjectStore.read, threading.Event(), threading.Event()

    def slow(self: ObjectStore, *arguments: Any) -> memoryview:
        content = read(self, *arguments)
        if threading.current_thread().name.startswith("trace-store-fetch"):
            fetching.set()
            go_on.wait(200)
        return content

    monkeypatch.setattr(ObjectStore, "read", slow)
    for _ in range(3):
        assert second.reasons("t", 400) == set()
    assert fetching.wait(30)
    releasing = first if elsewhere else second
    releasing.engine.release(RUN, "step-1").result(30)
    assert releasing.engine._volume.deleter.drain(30)
    second.tier.follow()
    go_on.set()
    second.tier.cache.close()  # waits for the fetch
    assert [path for path in second.root.glob("runs/*/*/*") if path.is_file()] == []
    assert second.tier.status().cached == 0


def test_a_reader_keeps_what_it_reads_while_it_is_evicted(sidecar: Make) -> None:
    first = sidecar("a")
    first.write("t")
    first.upload()
    run = first.engine.snapshot_runs()[0]
    (segment,) = run.partitions["step-1"].segments.values()
    whole, _ = first.read("t")
    with first.engine.read(RUN, "step-1", [TokenSpan("t", 0, 40)], [0, 1, 2]) as read:
        assert first.tier.evict(segment) > 0
        assert first.engine._volume.deleter.drain(30)
        assert not segment.path.exists()
        assert sum(piece.rows for piece in read) == 120
        assert read.missing == []
    assert first.read("t") == (whole, set())


@pytest.mark.usefixtures("rolls_by_itself")
def test_what_is_not_uploaded_is_never_evicted_and_the_cap_refuses_writes(
    sidecar: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trace_store.tier.tier.CLOSE_UPLOAD_S", 0.0)
    first = sidecar("a", CAP)
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "put", refuse_all)
        numbers = iter(range(20))
        eventually(lambda: not accepts(first, next(numbers)), "refusal")
        assert first.engine.usage().tier.evicted == 0
        assert first.reasons("t0", TOKENS, "step-0") == set()
    eventually(lambda: accepts(first, 20), "room after the upload")
    assert first.reasons("t0", TOKENS, "step-0") == set()


def test_rows_that_the_disk_damaged_come_from_the_bucket(sidecar: Make) -> None:
    first = sidecar("a")
    first.write("t")
    first.upload()
    whole = first.read("t")
    (segment,) = first.engine.snapshot_runs()[0].partitions["step-1"].segments.values()
    content = bytearray(segment.path.read_bytes())
    for row in segment.index.rows[:2]:
        content[int(row["codes_offset"])] ^= 1
    segment.path.chmod(0o640)
    with open(segment.path, "r+b") as file:
        file.write(content)
    assert first.read("t") == whole
    assert not segment.local  # and from now on without asking the disk
    assert first.read("t") == whole
    assert len(list((first.root / "set-aside").iterdir())) == 1


def gathered(sidecar: Sidecar) -> tuple[bytes, list[int]]:
    """Trajectory ``t`` read into one buffer, pieces one after another, and the pieces that were not delivered."""
    with sidecar.engine.read(RUN, "step-1", [TokenSpan("t", 0, 40)], [0, 1, 2]) as read:
        pieces = read.pieces()
        sites = [sidecar.engine.sites(RUN)[site] for site in pieces.site.tolist()]
        sizes = [
            [rows * site.code_bytes for site, rows in zip(sites, pieces.rows.tolist(), strict=True)],
            [rows * site.scale_bytes for site, rows in zip(sites, pieces.rows.tolist(), strict=True)],
            [4 * rows for rows in pieces.rows.tolist()],
        ]
        offsets = np.cumsum([0, *sizes[0], *sizes[1], *sizes[2]])
        target = bytearray(int(offsets[-1]))
        places = Places(*(part.astype(np.int64) for part in np.split(offsets[:-1], 3)))
        undelivered = read.gather(pieces, memoryview(target), places)
        return bytes(target), undelivered


def test_damaged_rows_are_gathered_from_the_bucket_too(sidecar: Make) -> None:
    first = sidecar("a")
    first.write("t")
    first.upload()
    whole = gathered(first)
    assert whole[1] == []
    (segment,) = first.engine.snapshot_runs()[0].partitions["step-1"].segments.values()
    content = bytearray(segment.path.read_bytes())
    content[int(segment.index.rows[3]["codes_offset"])] ^= 1
    segment.path.chmod(0o640)
    with open(segment.path, "r+b") as file:
        file.write(content)
    assert gathered(first) == whole
    assert gathered(first) == whole  # from the bucket alone
    assert not segment.local


def test_rows_that_the_disk_damaged_are_missing_while_the_bucket_is_away(
    sidecar: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sidecar("a")
    first.write("t")
    first.upload()
    whole = first.read("t")
    (segment,) = first.engine.snapshot_runs()[0].partitions["step-1"].segments.values()
    content = bytearray(segment.path.read_bytes())
    content[int(segment.index.rows[0]["codes_offset"])] ^= 1
    segment.path.chmod(0o640)
    segment.path.write_bytes(content)
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "read_ranges", away)
        slices, reasons = first.read("t")
        assert reasons == {"STORAGE_FAILED"}
        assert len(slices) == len(whole[0]) - 1  # the good rows of the local copy are still served
        assert segment.local
    assert first.read("t") == whole


def test_a_segment_that_the_disk_damaged_is_taken_from_the_bucket_at_start(sidecar: Make) -> None:
    first = sidecar("a")
    first.write("t")
    first.upload()
    whole = first.read("t")
    first.engine.close()
    (path,) = first.root.glob("runs/*/*/*.arrow")
    path.chmod(0o640)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    again = sidecar("a")
    assert again.read("t") == whole
    assert again.tier.status().upload_conflicts == 0


def test_only_the_newest_partitions_are_kept_in_the_bucket(sidecar: Make, store: ObjectStore) -> None:
    first = sidecar("a")
    for number in range(4):
        first.write("t", partition=f"step-{number}")
        first.upload()
    second = sidecar("b", Limits(partitions_kept=2, **FREE))  # it has loaded none of them
    # The objects' times have a resolution of a second, so which two of four stay is only certain between servers.
    eventually(lambda: len(segment_keys(store)) == 2, "release by count")
    first.tier.follow()
    left = [number for number in range(4) if first.reasons("t", partition=f"step-{number}") == set()]
    assert len(left) == 2
    assert second.engine.usage().retention.count == 2
