"""A release reaches the bucket and, through it, the other servers; a lost bucket is not mistaken for one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.tier.conftest import PARTITION, RUN, Sidecar, eventually
from tests.tier.test_reading import segment_keys
from tests.tier.test_upload import refuse_all
from trace_store.storage.s3 import ObjectInfo, ObjectStore
from trace_store.storage.selfcheck import IDENTITY_KEY
from trace_store.tier.marks import UPLOADED_MODE

Make = Callable[..., Sidecar]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trace_store.deleter.RETRY_FIRST_S", 0.05)
    monkeypatch.setattr("trace_store.tier.tier.RELIST_S", 0.0)


def release(sidecar: Sidecar, partition: str = PARTITION) -> int:
    return sidecar.engine.release(RUN, partition).result(30)


def test_a_release_removes_the_objects_and_other_servers_follow(sidecar: Make, store: ObjectStore) -> None:
    first, second = sidecar("a"), sidecar("b")
    first.write("t")
    first.write("kept", partition="step-2")
    first.upload()
    assert second.reasons("t") == set()
    assert release(first) == 1
    eventually(lambda: not [key for key in segment_keys(store) if "/step-1" in key], "deletion of the objects")
    assert first.reasons("t") == {"RELEASED"}
    second.tier.follow()
    assert second.reasons("t") == {"RELEASED"}
    assert second.reasons("kept", partition="step-2") == set()


def test_a_reader_of_an_object_that_vanished_meanwhile_hears_released(sidecar: Make, store: ObjectStore) -> None:
    first, second = sidecar("a"), sidecar("b")
    first.write("t")
    first.upload()
    assert second.reasons("t") == set()
    store.delete(segment_keys(store))
    assert second.reasons("t") == {"RELEASED"}


def test_local_copies_go_too_when_another_server_releases(sidecar: Make) -> None:
    first, second = sidecar("a"), sidecar("b")
    first.write("t")
    first.upload()
    assert release(second) == 1  # of a partition that it knows from the bucket only
    assert second.engine._volume.deleter.drain(30)
    first.tier.follow()
    assert first.reasons("t") == {"RELEASED"}
    assert not list(first.root.glob("runs/*/*/*.arrow"))


def test_a_server_that_was_down_during_the_release_drops_its_copies_at_start(sidecar: Make) -> None:
    first, second = sidecar("a"), sidecar("b")
    first.write("t")
    first.upload()
    first.engine.close()
    release(second)
    assert second.engine._volume.deleter.drain(30)
    again = sidecar("a")
    assert again.reasons("t") == {"RELEASED"}
    again.upload()
    assert not list(again.root.glob("runs/*/*/*.arrow"))
    assert again.tier.status().uploaded == 0


def test_released_trajectories_are_released_everywhere(sidecar: Make) -> None:
    first, second = sidecar("a"), sidecar("b")
    first.write("t")
    first.write("kept")
    first.upload()
    assert second.engine.release(RUN, PARTITION, ["t"]).result(30) == 1
    second.upload()
    first.tier.follow()
    for server in (first, second, sidecar("c")):
        assert server.reasons("t") == {"RELEASED"}
        assert server.reasons("kept") == set()


def test_a_release_that_the_store_did_not_hear_of_is_finished_after_a_restart(
    sidecar: Make, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sidecar("a")
    first.write("t")
    first.upload()
    with monkeypatch.context() as patch:
        refused: list[object] = []
        patch.setattr(ObjectStore, "delete", lambda *arguments: refused.append(arguments) or refuse_all())
        assert release(first) == 1
        eventually(lambda: refused, "refused deletion")
        assert first.engine.usage().deletions_pending == 1
        first.engine.close()
    assert segment_keys(store)
    again = sidecar("a")
    eventually(lambda: not segment_keys(store), "deletion of the objects")
    assert again.engine._volume.deleter.drain(30)
    assert not list(again.root.glob("runs/*/.released-*"))
    assert again.reasons("t") in ({"RELEASED"}, {"UNKNOWN_TRAJECTORY"})


def test_a_partition_written_anew_survives_the_deletion_of_the_old_one(
    sidecar: Make, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sidecar("a")
    first.write("old")
    first.upload()
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "delete", refuse_all)
        release(first)
        first.write("new")
        first.upload()
    assert first.engine._volume.deleter.drain(30)
    assert len(segment_keys(store)) == 1
    second = sidecar("b")
    assert second.reasons("new") == set()
    assert second.reasons("old") == {"UNKNOWN_TRAJECTORY"}


def test_released_objects_are_gone_before_they_are_deleted(
    sidecar: Make, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows must not come back under the seal of what is written anew, shorter, under the same names."""
    first = sidecar("a")
    first.write("t", 40)
    first.upload()

    def check(*servers: Sidecar) -> None:
        for server in servers:
            slices, reasons = server.read("t", 40)
            assert ({row for _, row, *_ in slices if row >= 20}, reasons) == (set(), {"NOT_RECORDED"})

    delete = ObjectStore.delete

    def refuse_segments(self: ObjectStore, keys: Sequence[str]) -> None:
        if any("/step-1" in key for key in keys):
            refuse_all()
        delete(self, keys)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "delete", refuse_segments)
        release(first)
        assert first.reasons("t") == {"RELEASED"}
        first.write("t", 20)
        first.tier.follow()
        check(first)
        first.upload()
        check(first, sidecar("b"))  # which sees the old objects as well
        first.engine.close()
        again = sidecar("a")
        check(again)
    assert again.engine._volume.deleter.drain(30)
    again.tier.follow()
    check(again, sidecar("c"))
    assert len(segment_keys(store)) == 1


def test_no_clock_decides_what_a_release_deletes(
    sidecar: Make, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note of a release is an hour ahead of what another server writes after it."""
    first, second = sidecar("a"), sidecar("b")
    first.write("old")
    first.upload()
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "delete", refuse_all)
        release(first)
        first.engine.close()
    note = next(first.root.glob("runs/*/.released-*/objects"))
    os.utime(note, (time.time() + 3600,) * 2)
    second.write("new")
    second.upload()
    again = sidecar("a")
    assert again.engine._volume.deleter.drain(30)
    second.tier.follow()
    assert second.reasons("new") == set()
    assert sidecar("c").reasons("new") == set()


def test_an_upload_under_way_does_not_bring_a_released_partition_back(
    sidecar: Make, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sidecar("a")
    put = ObjectStore.put
    state: list[str] = []

    def late(self: ObjectStore, key: str, data: bytes, *, create: bool = True) -> None:
        if "/step-1" in key and not state:
            state.append("started")
            eventually(lambda: "released" in state, "release")
        put(self, key, data, create=create)

    monkeypatch.setattr(ObjectStore, "put", late)
    first.write("t")
    first.engine.roll().result(30)
    first.tier.tick()
    eventually(lambda: state, "start of the upload")
    release(first)
    assert first.engine._volume.deleter.drain(30)
    state.append("released")
    eventually(lambda: not first.tier._uploader._queues, "end of the upload")
    assert segment_keys(store) == []


def test_an_emptied_bucket_is_no_release(sidecar: Make, store: ObjectStore) -> None:
    first = sidecar("a")
    first.write("t")
    first.upload()
    store.delete([info.key for info in store.listing("")])
    first.tier.follow()
    assert first.reasons("t") == set()
    first.engine.close()
    assert store.head(IDENTITY_KEY) is not None  # a new one: another bucket, as far as anybody can tell
    again = sidecar("a")
    again.upload()
    assert again.reasons("t") == set()
    assert sidecar("b").reasons("t") == set()  # uploaded again


def test_a_new_partition_of_another_server_survives_a_late_deletion(
    sidecar: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = sidecar("a"), sidecar("b")
    first.write("old")
    first.upload()
    with monkeypatch.context() as patch:
        refused: list[object] = []
        patch.setattr(ObjectStore, "delete", lambda *arguments: refused.append(arguments) or refuse_all())
        release(first)
        eventually(lambda: refused, "refused deletion")
        second.write("new")
        second.upload()
    assert first.engine._volume.deleter.drain(30)
    third = sidecar("c")
    assert third.reasons("new") == set()
    assert third.reasons("old") == {"UNKNOWN_TRAJECTORY"}


def test_a_directory_that_changes_buckets_is_uploaded_to_the_new_one(sidecar: Make, tmp_path: Path, url: str) -> None:
    first = sidecar("a")
    first.write("t")
    first.upload()
    first.engine.close()
    moved = Sidecar(tmp_path / "a", url + "-new", "a", None, None)
    try:
        moved.upload()
        assert moved.reasons("t") == set()
        assert len(segment_keys(ObjectStore(url + "-new"))) == 1
    finally:
        moved.engine.close()


def test_what_a_listing_leaves_out_is_asked_for_by_name_before_it_counts_as_released(
    sidecar: Make, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store may list an object late, or lose it from a page while others are added."""
    first, second = sidecar("a"), sidecar("b")
    first.write("t")
    first.upload()
    assert second.reasons("t") == set()
    listing = ObjectStore.listing

    def without_segments(self: ObjectStore, prefix: str) -> Iterator[ObjectInfo]:
        return (info for info in listing(self, prefix) if "/step-1" not in info.key)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "listing", without_segments)
        for server in (first, second):
            server.tier.follow()
            assert server.reasons("t") == set()
            assert server.tier.status().vanished == 0
        first.engine.close()
        assert sidecar("a").reasons("t") == set()  # at a start too
    assert len(segment_keys(store)) == 1


def test_a_mark_is_on_the_disk_before_its_upload_counts(sidecar: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first, fsync = sidecar("a"), os.fsync
    synced: list[bool] = []

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        if os.fstat(descriptor).st_mode & 0o777 == UPLOADED_MODE:
            (segment,) = first.engine.snapshot_runs()[0].partitions[PARTITION].segments.values()
            synced.append(segment.uploaded)

    first.write("t")
    monkeypatch.setattr(os, "fsync", noted)
    first.upload()
    assert synced == [False]


def test_a_segment_whose_mark_was_lost_is_uploaded_again_rather_than_lost_and_can_be_released_again(
    sidecar: Make, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell a put whose mark a kill prevented from one that never was: ``marks`` says which way it errs."""
    first, second = sidecar("a"), sidecar("b")
    with monkeypatch.context() as patch:
        patch.setattr("trace_store.tier.tier.mark_uploaded", lambda path: None)
        first.write("t")
        first.upload()
        first.engine.close()
    assert release(second) == 1
    assert second.engine._volume.deleter.drain(30)
    again = sidecar("a")
    again.upload()
    assert again.reasons("t") == set()
    assert release(again) == 1
    assert again.engine._volume.deleter.drain(30)
    assert segment_keys(store) == []
