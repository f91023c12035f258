"""Nothing is taken off the disk before the bucket says that it holds it; an emptied one is filled again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.tier.conftest import PARTITION, Sidecar, eventually
from tests.tier.test_cache import CAP, TOKENS, away, local_bytes
from tests.tier.test_reading import segment_keys
from trace_store.attempt import Segment
from trace_store.retention import DISK_BYTES_MIN
from trace_store.storage.s3 import ObjectStore

Make = Callable[..., Sidecar]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trace_store.deleter.RETRY_FIRST_S", 0.05)
    monkeypatch.setattr("trace_store.tier.tier.RELIST_S", 0.0)
    monkeypatch.setattr("trace_store.tier.tier.CLOSE_UPLOAD_S", 0.5)
    monkeypatch.setattr("trace_store.storage.s3.PAUSE_S", 0.2)


def segments(sidecar: Sidecar) -> list[Segment]:
    with sidecar.engine.catalog_lock:
        partitions = [p for run in sidecar.engine.snapshot_runs() for p in run.partitions.values()]
        return [segment for partition in partitions for segment in partition.segments.values()]


def empty(store: ObjectStore) -> None:
    store.delete([info.key for info in store.listing("")])


@pytest.fixture
def full(sidecar: Make) -> Sidecar:
    """Server a, above the share of its cap at which eviction starts; its rounds are made by hand."""
    first = sidecar("a", CAP)
    first.engine._keeper.close()
    for number in range(6):
        first.write(f"t{number}", TOKENS, partition=f"step-{number}")
        first.upload()
        first.engine._gate.observe(local_bytes(first))
    assert local_bytes(first) > 0.9 * DISK_BYTES_MIN
    return first


def all_there(sidecar: Sidecar) -> bool:
    return all(sidecar.reasons(f"t{number}", TOKENS, f"step-{number}") == set() for number in range(6))


def test_an_emptied_bucket_takes_nothing_off_the_disk_and_is_filled_again(
    full: Sidecar, sidecar: Make, store: ObjectStore
) -> None:
    before = sorted(segment_keys(store))
    empty(store)
    held = local_bytes(full)
    for segment in segments(full):
        assert full.tier.evict(segment) == 0
    full.engine._keeper.tick()
    assert full.engine._volume.deleter.drain(30)
    assert (local_bytes(full), full.tier.status().evicted) == (held, 0)
    full.tier.follow()
    assert all_there(full)
    full.upload()
    assert sorted(segment_keys(store)) == before
    second = sidecar("b")
    assert all_there(second)
    full.tier.follow()  # the new bucket has everything: from now on a lack in it is a release
    second.engine.release("run", "step-5").result(30)
    assert second.engine._volume.deleter.drain(30)
    full.tier.follow()
    assert full.reasons("t5", TOKENS, "step-5") == {"RELEASED"}
    full.engine._keeper.tick()
    eventually(lambda: local_bytes(full) <= 0.85 * DISK_BYTES_MIN, "eviction from the new bucket")
    assert full.reasons("t0", TOKENS, "step-0") == set()


def test_a_lost_object_is_not_evicted_and_others_are_in_its_place(full: Sidecar, store: ObjectStore) -> None:
    store.delete([key for key in segment_keys(store) if "/step-0" in key])  # the one that was read least recently
    full.engine._keeper.tick()
    eventually(lambda: full.tier.evictor._doubtful, "question")
    full.engine._keeper.tick()
    eventually(lambda: full.tier.status().evicted, "eviction of another one")
    assert list(full.root.glob("runs/*/step-0-*/*.arrow"))
    full.tier.follow()
    assert full.reasons("t0", TOKENS, "step-0") == {"RELEASED"}  # the bucket is the same: so it was released


def test_an_object_of_another_size_does_not_stand_for_the_segment(sidecar: Make, store: ObjectStore) -> None:
    first = sidecar("a")
    first.write("t")
    first.upload()
    (key,) = segment_keys(store)
    store.put(key, b"cut short", create=False)
    (segment,) = segments(first)
    assert first.tier.evict(segment) == 0
    first.tier.tick()
    eventually(lambda: first.tier.status().upload_conflicts, "conflict")
    assert segment.path.exists()
    assert first.reasons("t") == set()


def test_a_store_that_does_not_answer_keeps_the_disk_as_it_is_and_holds_nothing_up(
    full: Sidecar, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held, asked, go_on = local_bytes(full), threading.Event(), threading.Event()

    def hang(*arguments: Any) -> None:
        asked.set()
        go_on.wait(200)
        away()

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "head", hang)
        full.engine._keeper.tick()
        assert asked.wait(30)
        full.engine._keeper.tick()  # does not wait for the store
        assert full.engine.release("run", "step-5").result(30) == 1
        go_on.set()
        eventually(lambda: not full.tier.evictor._asked, "answers")
        for segment in segments(full):
            assert full.tier.evict(segment) == 0
    assert len([line for line in caplog.records if "nothing is evicted" in line.message]) == 1
    assert full.tier.status().evicted == 0
    assert local_bytes(full) <= held
    for number in range(5):
        assert full.reasons(f"t{number}", TOKENS, f"step-{number}") == set()


def test_segments_that_the_emptied_bucket_alone_had_are_lost_and_not_released(
    sidecar: Make, store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    first = sidecar("a")
    first.write("here")
    first.upload()
    first.write("there", partition="step-2")
    first.upload()
    (segment,) = (s for s in segments(first) if "step-2" in s.path.parent.name)
    assert first.tier.evict(segment) > 0
    empty(store)
    first.tier.follow()
    first.upload()
    first.tier.follow()
    assert first.reasons("here", partition=PARTITION) == set()
    assert first.reasons("there", partition="step-2") == {"UNKNOWN_TRAJECTORY"}
    assert "lost with the bucket" in caplog.text
