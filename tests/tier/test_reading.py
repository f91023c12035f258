"""A second server with an empty disk serves what the bucket holds, and says what it cannot serve."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.tier.conftest import PARTITION, RUN, SITES, TABLE, Sidecar, eventually
from trace_store import TokenSpan
from trace_store.errors import NotFound, SchemaMismatch
from trace_store.storage.s3 import ObjectStore
from trace_store.testing.records import make_chunk

Make = Callable[..., Sidecar]


@pytest.fixture
def always_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that misses lists its partition every time."""
    monkeypatch.setattr("trace_store.tier.tier.RELIST_S", 0.0)


def segment_keys(store: ObjectStore) -> list[str]:
    return sorted(info.key for info in store.listing("runs") if "/manifest-" not in info.key)


def damage(store: ObjectStore, key: str, position: int) -> None:
    """Flip a bit of an object."""
    info = store.head(key)
    assert info is not None
    content = bytearray(store.read(key, 0, info.size))
    content[position] ^= 0x10
    store.put(key, bytes(content), create=False)


def test_an_empty_disk_serves_every_sealed_trajectory_byte_for_byte(sidecar: Make) -> None:
    first = sidecar("a")
    for number in range(4):
        first.write(f"t{number}", partition=f"step-{number % 2}")
    first.upload()
    second = sidecar("b")
    for number in range(4):
        expected, missing = first.read(f"t{number}", partition=f"step-{number % 2}")
        assert missing == set()
        assert len(expected) == 2 * len(TABLE)
        assert second.read(f"t{number}", partition=f"step-{number % 2}") == (expected, set())
    assert not list(second.root.glob("runs/*/*/*.arrow"))  # by ranged reads, not by copying


@pytest.mark.usefixtures("rolls_by_itself")
def test_a_trajectory_is_in_the_bucket_seconds_after_its_seal(sidecar: Make, always_list: None) -> None:
    first, second = sidecar("a"), sidecar("b")
    first.write("t")

    def there() -> bool:
        try:
            return second.reasons("t") == set()
        except NotFound:  # not even the run is there yet
            return False

    eventually(there, "sight of the trajectory", 20)
    eventually(lambda: first.engine.usage().tier.waiting == 0, "end of the upload")  # it is seen before it is noted


def test_segments_uploaded_later_appear_to_a_reader_that_misses(sidecar: Make, always_list: None) -> None:
    first, second = sidecar("a"), sidecar("b")
    first.write("old")
    first.upload()
    assert second.reasons("old") == set()
    assert second.reasons("new") == {"UNKNOWN_TRAJECTORY"}
    first.write("new")
    first.upload()
    assert second.read("new") == first.read("new")


def test_a_newer_attempt_from_another_server_replaces_the_old_one(sidecar: Make) -> None:
    first, second = sidecar("a"), sidecar("b")
    first.write("t")
    first.upload()
    old = second.read("t")
    chunk = make_chunk(RUN, PARTITION, TABLE, "t", 0, 40, attempt=1)
    first.engine.append(RUN, PARTITION, chunk).result(30)
    first.engine.seal(RUN, PARTITION, "t", tokens=41, prompt_tokens=0, attempt=1).result(30)
    first.upload()
    second.tier.follow()
    assert second.read("t") == first.read("t") != old


def test_servers_write_one_partition_side_by_side(sidecar: Make, always_list: None) -> None:
    first, second = sidecar("a"), sidecar("b")
    first.write("from-a")
    second.write("from-b")
    first.upload()
    second.upload()
    for reader in (first, second, sidecar("c")):
        assert reader.reasons("from-a") == reader.reasons("from-b") == set()


def test_rows_of_an_unfinished_trajectory_elsewhere_are_not_uploaded(sidecar: Make, always_list: None) -> None:
    first, second = sidecar("a"), sidecar("b")
    first.write("t", seal=False)
    first.upload()
    assert first.reasons("t") == {"NOT_SEALED"}
    assert second.reasons("t") == {"NOT_UPLOADED"}


def test_a_run_keeps_its_table_over_all_servers(sidecar: Make) -> None:
    first, second = sidecar("a"), sidecar("b")
    first.write("t")
    first.upload()
    with pytest.raises(SchemaMismatch):
        second.engine.register(RUN, TABLE[:1])
    assert second.engine.register(RUN, TABLE) is False


def test_a_listing_shows_what_is_only_in_the_bucket(sidecar: Make) -> None:
    first = sidecar("a")
    first.write("t", partition="step-1")
    first.write("u", partition="step-2")
    first.upload()
    second = sidecar("b")
    second.engine.load_listing("")
    second.engine.load_listing(RUN)
    run = second.engine.snapshot_runs()[0]
    assert (run.name, sorted(run.partitions)) == (RUN, ["step-1", "step-2"])
    assert list(run.partitions["step-2"].trajectories) == ["u"]


def test_a_flipped_bit_in_an_object_costs_its_own_record_only(sidecar: Make, store: ObjectStore) -> None:
    first = sidecar("a")
    first.write("t")
    first.upload()
    whole, _ = first.read("t")
    (key,) = segment_keys(store)
    run = first.engine.snapshot_runs()[0]
    segment = next(iter(run.partitions[PARTITION].segments.values()))
    row = segment.index.rows[1]
    damage(store, key, int(row["codes_offset"]) + 3)
    second = sidecar("b")
    slices, reasons = second.read("t")
    assert reasons == {"DATA_LOSS"}
    assert len(slices) == len(whole) - 1
    assert set(slices) < set(whole)


def test_an_object_with_a_damaged_index_still_gives_its_records(sidecar: Make, store: ObjectStore) -> None:
    first = sidecar("a")
    first.write("t")
    first.upload()
    (key,) = segment_keys(store)
    info = store.head(key)
    assert info is not None
    damage(store, key, info.size - 20)
    assert sidecar("b").read("t") == first.read("t")


def test_a_foreign_object_is_ignored(sidecar: Make, store: ObjectStore) -> None:
    first = sidecar("a")
    first.write("t")
    first.upload()
    place = segment_keys(store)[0].rpartition("/")[0]
    store.put(f"{place}/9999999999-feedfacefeedface.arrow", b"not a segment")
    store.put(f"{place}/notes.txt", b"hello")
    store.put("runs/elsewhere/deeper/still/0000000000-00.arrow", b"")
    assert sidecar("b").reasons("t") == set()


def test_a_microbatch_is_few_requests(sidecar: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first = sidecar("a")
    for number in range(8):
        first.write(f"t{number}")
    first.upload()
    second = sidecar("b")
    assert second.reasons("t0") == set()  # loads the indexes
    calls: list[int] = []
    ranges = ObjectStore.read_ranges

    def counted(self: ObjectStore, key: str, wanted: list[tuple[int, int]]) -> list[memoryview]:
        calls.append(len(wanted))
        return ranges(self, key, wanted)

    monkeypatch.setattr(ObjectStore, "read_ranges", counted)
    spans = [TokenSpan(f"t{number}", 0, 40, 40 * number) for number in range(8)]
    with second.engine.read(RUN, PARTITION, spans, SITES) as read:
        assert sum(piece.rows for piece in read) == 8 * 40 * len(TABLE)
        assert read.missing == []
    assert calls == [1]  # one segment below 8 MiB: one range holds all of it


def test_a_record_that_is_damaged_in_the_bucket_is_read_from_the_copy_that_was_sent_again(
    sidecar: Make, store: ObjectStore
) -> None:
    first, second = sidecar("a"), sidecar("b")
    first.write("t")
    first.upload()
    good = first.read("t")
    first.engine.close()
    chunk = make_chunk(RUN, PARTITION, TABLE, "t", 0, 20)
    assert second.reasons("t") == set()
    segment = next(iter(second.engine.snapshot_runs()[0].partitions[PARTITION].segments.values()))
    damage(store, segment_keys(store)[0], int(segment.index.rows[1]["codes_offset"]))
    assert second.reasons("t") == {"DATA_LOSS"}
    assert second.engine.append(RUN, PARTITION, chunk).result(30).stored == len(TABLE)
    assert second.read("t") == good
    second.upload()
    third = sidecar("c")
    assert third.read("t") == good
    assert third.read("t") == good
