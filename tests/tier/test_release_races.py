"""Releases of partitions that cross uploads, are half done, or are only half known: no released row comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.tier.conftest import PARTITION, RUN, Sidecar, eventually
from tests.tier.test_reading import segment_keys
from tests.tier.test_several_servers import append, content, expected, seal, write
from tests.tier.test_upload import refuse_all
from trace_store.checksum import RowKind
from trace_store.storage.s3 import ObjectStore
from trace_store.tier.bucket import BucketView
from trace_store.tier.layout import Place

Make = Callable[..., Sidecar]

delete_objects = ObjectStore.delete


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trace_store.deleter.RETRY_FIRST_S", 0.05)
    monkeypatch.setattr("trace_store.tier.tier.RELIST_S", 0.0)


def refuse_segments(self: ObjectStore, keys: Sequence[str]) -> None:
    if any("/step-1" in key for key in keys):
        refuse_all()
    delete_objects(self, keys)


def test_an_upload_that_ends_after_its_partition_was_released_does_not_show_it_again(
    sidecar: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release comes when the object is in the bucket and this server has not entered it yet."""
    first = sidecar("a")
    add, released = BucketView.add, []

    def late(self: BucketView, place: Place, name: str, size: int) -> None:
        if place[1]:
            released.append(first.engine.release(RUN, PARTITION).result(30))
        add(self, place, name, size)

    monkeypatch.setattr(ObjectStore, "delete", refuse_segments)
    monkeypatch.setattr(BucketView, "add", late)
    write(first, "t")
    first.engine.roll().result(30)
    first.tier.tick()
    eventually(lambda: released and not first.tier._uploader._queues, "end of the upload")
    assert released == [1]
    assert content(first, "t") == ({}, {"RELEASED"})
    first.tier.follow()
    assert content(first, "t") == ({}, {"RELEASED"})


def test_what_a_half_done_deletion_leaves_looks_unfinished_and_not_damaged(
    sidecar: Make, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seal that outlived its rows would be an alarm: data loss where there was a release."""
    first, second = sidecar("a"), sidecar("b")
    for low, high in ((0, 4), (4, 8)):
        append(first, "t", low, high)
        first.upload()
    seal(first, "t", 8)
    first.upload()
    assert content(second, "t") == (expected("t"), set())
    deleted: list[str] = []

    def half(self: ObjectStore, keys: Sequence[str]) -> None:
        if any("/step-1" in key for key in keys) and not deleted:
            delete_objects(self, keys[:1])
            deleted.extend(keys[:1])
        refuse_segments(self, keys)

    monkeypatch.setattr(ObjectStore, "delete", half)
    first.engine.release(RUN, PARTITION).result(30)
    eventually(lambda: deleted, "deletion of the first object")
    assert len(segment_keys(store)) == 2
    second.tier.follow()
    for server in (second, sidecar("c")):
        assert content(server, "t") == ({}, {"NOT_UPLOADED"})


def test_rows_written_anew_never_mix_with_released_ones_even_if_they_lost_the_word_of_the_release(
    sidecar: Make, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old objects are there until their deletion goes through; under their epoch the new seal would know them."""
    first = sidecar("a")
    write(first, "t", 8, seed=1)
    first.upload()
    (old,) = segment_keys(store)
    monkeypatch.setattr(ObjectStore, "delete", refuse_segments)
    assert first.engine.release(RUN, PARTITION).result(30) == 1
    write(first, "t", 4, seed=2)
    first.upload()
    assert content(sidecar("b"), "t", 4) == (expected("t", 4, seed=2), set())
    (new,) = (key for key in segment_keys(store) if key != old)
    (segment,) = first.engine.snapshot_runs()[0].partitions[PARTITION].segments.values()
    damage_rows(store, new, segment.index.rows, {RowKind.KNOWN, RowKind.RELEASE})
    assert content(sidecar("c"), "t")[0] in (expected("t", 8, seed=1), expected("t", 4, seed=2))


def damage_rows(store: ObjectStore, key: str, rows: Any, kinds: set[RowKind]) -> None:
    """Change rows' checksums in an object, and in its index too, so that it is scanned and the rows are dropped."""
    info = store.head(key)
    assert info is not None
    content = bytes(store.read(key, 0, info.size))
    for checksum in rows["checksum"][np.isin(rows["kind"], list(kinds))].tolist():
        good = np.uint64(checksum).tobytes()
        assert content.count(good) == 2
        content = content.replace(good, bytes(byte ^ 0x10 for byte in good))
    store.put(key, content, create=False)
