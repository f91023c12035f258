"""Uploads against a store that dies, hangs, crawls, cuts connections, and holds what it should not."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tier.conftest import PARTITION, QUICK, RUN, TABLE, S3Server, Sidecar, eventually
from tests.tier.proxy import Proxy
from tests.tier.test_reading import segment_keys
from trace_store.errors import Sealed
from trace_store.storage.s3 import ObjectStore
from trace_store.testing.records import make_chunk

Make = Callable[..., Sidecar]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits between tries."""
    monkeypatch.setattr("trace_store.tier.uploader.BACKOFF_FIRST_S", 0.05)
    monkeypatch.setattr("trace_store.tier.uploader.BACKOFF_MAX_S", 0.2)
    monkeypatch.setattr("trace_store.storage.s3.PAUSE_S", 0.2)
    monkeypatch.setattr("trace_store.tier.tier.CLOSE_UPLOAD_S", 0.5)
    monkeypatch.setattr("trace_store.tier.tier.RELIST_S", 0.0)


def digests(paths: list[Path]) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def bucket_digests(store: ObjectStore) -> dict[str, str]:
    found = {}
    for key in segment_keys(store):
        info = store.head(key)
        assert info is not None
        found[key.rpartition("/")[2]] = hashlib.sha256(store.read(key, 0, info.size)).hexdigest()
    return found


def refuse_all(*arguments: object, **more: object) -> None:
    raise OSError("refused by the test")


def local_segments(sidecar: Sidecar) -> list[Path]:
    return list(sidecar.root.glob("runs/*/*/*.arrow"))


def test_a_store_killed_in_mid_upload_gets_everything_after_its_restart(
    s3: S3Server, sidecar: Make, store: ObjectStore
) -> None:
    first = sidecar("a")
    for number in range(3):
        first.write(f"t{number}", 400, partition=f"step-{number}")
    first.engine.roll().result(30)
    first.tier.tick()
    s3.kill()
    first.write("later", partition="step-0")  # writes go on
    assert first.reasons("later", partition="step-0") == set()
    first.engine.roll().result(30)
    first.tier.tick()
    failing = eventually(lambda: (s := first.tier.status()).upload_failures and s, "failed upload")
    assert failing.error
    assert failing.lag_s > 0
    s3.start()
    first.upload()
    assert first.tier.status().error == ""
    assert bucket_digests(store) == digests(local_segments(first))
    second = sidecar("b")
    assert second.read("later", partition="step-0") == first.read("later", partition="step-0")
    assert second.read("t2", 400, "step-2") == first.read("t2", 400, "step-2")


def test_a_put_that_gets_no_answer_is_unknown_and_not_repeated_blindly(
    s3: S3Server, sidecar: Make, store: ObjectStore
) -> None:
    first = sidecar("a", timeouts=QUICK)
    first.write("t")
    s3.pause()
    first.engine.roll().result(30)
    first.tier.tick()
    eventually(lambda: first.tier.status().upload_unknown, "unclear outcome")
    assert first.reasons("t") == set()  # reads from the disk go on
    s3.resume()
    first.upload()
    status = first.tier.status()
    assert (status.upload_conflicts, status.stuck) == (0, 0)
    assert bucket_digests(store) == digests(local_segments(first))


def test_a_put_that_took_effect_without_an_answer_is_recognized(
    proxy: Proxy, sidecar: Make, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, sent = ObjectStore.put, []

    def counted(self: ObjectStore, key: str, *arguments: Any, **more: Any) -> None:
        sent.append(key)
        put(self, key, *arguments, **more)

    first = sidecar("a", timeouts=QUICK)
    first.write("t")
    first.upload()
    first.write("u")
    monkeypatch.setattr(ObjectStore, "put", counted)
    proxy.swallow_answers = True
    first.engine.roll().result(30)
    first.tier.tick()
    eventually(lambda: first.tier.status().upload_unknown, "unclear outcome")
    proxy.swallow_answers = False
    first.upload()
    assert first.tier.status().upload_conflicts == 0
    assert len(sent) == 1  # 64 MiB are not sent again to learn that they are there
    assert bucket_digests(store) == digests(local_segments(first))


def test_a_cut_connection_leaves_no_partial_object(proxy: Proxy, sidecar: Make, store: ObjectStore) -> None:
    first = sidecar("a")
    first.write("big", 2000)
    size = sum(path.stat().st_size for path in first.root.glob("runs/*/*/*.open"))
    proxy.cut_after = size // 2
    first.engine.roll().result(30)
    first.tier.tick()
    eventually(lambda: first.tier.status().upload_failures > 1, "cut uploads")
    assert proxy.forwarded >= size // 2
    proxy.cut_after = None
    assert segment_keys(store) == []
    first.upload()
    assert bucket_digests(store) == digests(local_segments(first))


def test_a_slow_store_holds_up_no_writer(proxy: Proxy, sidecar: Make) -> None:
    first = sidecar("a", timeouts=None)
    first.write("t", 1000)
    proxy.bytes_per_s = 300_000
    first.engine.roll().result(30)
    first.tier.tick()
    for number in range(5):
        first.write(f"u{number}", partition="step-2")
    status = first.tier.status()
    assert status.waiting >= 1
    assert status.waiting_bytes > 0
    proxy.bytes_per_s = 0
    first.upload()
    assert first.tier.status().lag_s == 0


def test_another_object_of_the_name_is_neither_replaced_nor_believed(sidecar: Make, store: ObjectStore) -> None:
    first = sidecar("a")
    first.write("t")
    (path,) = first.root.glob("runs/*/*/*.open")
    key = f"runs/{path.parent.parent.name}/{path.parent.name}/{path.stem}.arrow"
    store.put(key, b"written by somebody else")
    first.engine.roll().result(30)
    first.tier.tick()
    eventually(lambda: first.tier.status().upload_conflicts, "conflict")
    assert bytes(store.read(key, 0, 100)) == b"written by somebody else"
    assert first.reasons("t") == set()
    assert sidecar("b").engine  # and a second server starts in spite of it


def test_what_was_not_uploaded_is_uploaded_after_a_restart(
    sidecar: Make, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sidecar("a")
    first.write("t")
    first.upload()
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "put", refuse_all)
        first.write("u")
        first.engine.close()
    assert len(segment_keys(store)) == 1
    second = sidecar("a")
    second.upload()
    assert second.tier.status().uploaded == 1  # the first segment is known to be there
    assert bucket_digests(store) == digests(local_segments(second))
    assert sidecar("b").reasons("u") == set()


def test_a_later_segment_never_passes_an_earlier_one_of_its_partition(
    sidecar: Make, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sidecar("a")
    put = ObjectStore.put
    blocked = {"0000000000-"}

    def refuse(self: ObjectStore, key: str, data: bytes, *, create: bool = True) -> None:
        if "/step-1" in key and any(name in key for name in blocked):
            raise OSError("refused by the test")
        put(self, key, data, create=create)

    monkeypatch.setattr(ObjectStore, "put", refuse)
    first.write("t")
    first.engine.roll().result(30)
    first.write("u")
    first.engine.roll().result(30)
    first.write("v", partition="other")
    first.engine.roll().result(30)
    first.tier.tick()
    eventually(lambda: any("/other" in key for key in segment_keys(store)), "upload of the other partition")
    eventually(lambda: first.tier.status().upload_failures > 2, "repeated tries")
    assert not [key for key in segment_keys(store) if "/step-1" in key]
    blocked.clear()
    first.upload()
    assert len([key for key in segment_keys(store) if "/step-1" in key]) == 2


def test_an_unreachable_store_costs_remote_rows_only_and_recovers(s3: S3Server, sidecar: Make) -> None:
    first = sidecar("a")
    first.write("t")
    first.upload()
    second = sidecar("b", timeouts=QUICK)
    eventually(lambda: second.reasons("t") == set(), "sight of the trajectory")
    second.engine.register(RUN, first.engine.sites(RUN))
    second.write("mine")
    s3.pause()
    assert second.reasons("t") == {"STORAGE_FAILED"}
    assert second.reasons("mine") == set()
    s3.resume()
    eventually(lambda: second.reasons("t") == set(), "recovery")


def test_a_sealed_segment_waits_for_an_earlier_one_that_could_not_be_sealed(
    sidecar: Make, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the bucket would show a seal without the records before it, as a trajectory that lost them."""
    monkeypatch.setattr("trace_store.repair.UNSEALED_RETRY_S", 0.05)
    first = sidecar("a")
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if "step-1" in str(source) and Path(source).name.startswith("0000000000-"):
            raise OSError(errno.EIO, "refused by the test")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        first.write("t")
        first.engine.roll().result(30)
        first.write("u")
        first.engine.roll().result(30)
        assert [path.name[:11] for path in local_segments(first)] == ["0000000001-"]
        first.tier.tick()
        first.write("v", partition="other")
        first.engine.roll().result(30)
        first.tier.tick()
        eventually(lambda: not first.tier.status().waiting, "upload of what may be uploaded")
        assert {key.split("/")[2].rpartition("-")[0] for key in segment_keys(store)} == {"other"}
    first.upload()
    assert len([key for key in segment_keys(store) if "/step-1" in key]) == 2
    second = sidecar("b")
    assert second.read("t") == first.read("t")
    assert second.reasons("u") == set()


@pytest.mark.parametrize("gone", ["first", "only"])
def test_a_segment_that_somebody_removed_holds_up_no_later_one(
    gone: str, sidecar: Make, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = sidecar("a")
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "put", refuse_all)
        first.write("t", seal=False)
        first.engine.roll().result(30)
        (path,) = local_segments(first)
        if gone == "first":
            chunk = make_chunk(RUN, PARTITION, TABLE, "t", 40, 60)
            first.engine.append(RUN, PARTITION, chunk).result(30)
            first.engine.seal(RUN, PARTITION, "t", tokens=61, prompt_tokens=0).result(30)
            first.engine.roll().result(30)
        path.unlink()
    first.write("u")
    first.upload()
    status = first.tier.status()
    assert (status.waiting, status.stuck, status.error, len(segment_keys(store))) == (0, 0, "", 1 + (gone == "first"))
    assert first.reasons("u") == set()
    assert [line.levelname for line in caplog.records if "is lost" in line.message] == ["ERROR"]
    if gone == "first":
        slices, reasons = first.read("t", 60)
        assert (len(slices), reasons) == (len(TABLE), {"DATA_LOSS"})  # the second half is there and good
        with pytest.raises(Sealed):  # nobody could tell whether these are the lost rows; a new attempt says it is new
            first.engine.append(RUN, PARTITION, make_chunk(RUN, PARTITION, TABLE, "t", 0, 40)).result(30)
        chunk = make_chunk(RUN, PARTITION, TABLE, "t", 0, 60, attempt=1)
        first.engine.append(RUN, PARTITION, chunk).result(30)
        first.engine.seal(RUN, PARTITION, "t", tokens=61, prompt_tokens=0, attempt=1).result(30)
        assert first.reasons("t", 60) == set()
    else:
        first.write("t")  # all of it may be written anew
        assert first.reasons("t") == set()
    first.upload()
    assert sidecar("b").reasons("t", 60 if gone == "first" else 40) == set()


def test_a_directory_that_is_away_is_no_loss(
    sidecar: Make, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sidecar("a")
    first.write("t")
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "put", refuse_all)
        first.engine.roll().result(30)
        (path,) = local_segments(first)
        path.parent.rename(path.parent.parent / "away")
    first.tier.tick()
    eventually(lambda: first.tier.status().upload_failures > 2, "repeated tries")
    (path.parent.parent / "away").rename(path.parent)
    first.upload()
    assert first.reasons("t") == set()
    assert len(segment_keys(store)) == 1
