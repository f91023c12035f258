"""A server is started while its object store is away: it serves and takes what its disk allows, and joins later."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import trace_client
from tests.tier.conftest import PARTITION, RUN, TABLE, S3Server, Sidecar, eventually
from tests.tier.test_reading import segment_keys
from trace_store.errors import Incomplete, StorageFailed
from trace_store.retention import Limits
from trace_store.storage.s3 import READ_TIMEOUT_S, CredentialsRefused, ObjectStore
from trace_store.testing.records import make_chunk
from trace_store.tier.marks import IDENTITY_FILE

Make = Callable[..., Sidecar]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trace_store.storage.s3.PAUSE_S", 0.2)
    monkeypatch.setattr("trace_store.tier.joining.KNOWN_WAIT_S", 30.0)  # one that is killed refuses at once
    monkeypatch.setattr("trace_store.tier.joining.START_WAIT_S", 0.0)
    monkeypatch.setattr("trace_store.tier.tier.JOIN_RETRY_S", 0.1)
    monkeypatch.setattr("trace_store.tier.tier.RELIST_S", 0.0)
    monkeypatch.setattr("trace_store.deleter.RETRY_FIRST_S", 0.05)


def evict_all(sidecar: Sidecar, partition: str) -> None:
    with sidecar.engine.catalog_lock:
        for segment in list(sidecar.engine.snapshot_runs()[0].partitions[partition].segments.values()):
            sidecar.tier.evict(segment)
    assert sidecar.engine._volume.deleter.drain(30)


def joined(sidecar: Sidecar) -> bool:
    found: bool = sidecar.tier.status().joined
    return found


@pytest.fixture
def away(sidecar: Make, s3: S3Server) -> Sidecar:
    """Server a, started again without the store: step-1 on its disk, step-2 in the bucket alone."""
    first = sidecar("a")
    first.write("here")
    first.write("there", partition="step-2")
    first.upload()
    evict_all(first, "step-2")
    first.engine.close()
    s3.kill()
    return sidecar("a")


def test_what_is_on_the_disk_is_served_and_written_and_uploaded_once_the_store_is_back(
    away: Sidecar, s3: S3Server, sidecar: Make
) -> None:
    status = away.tier.status()
    assert (status.joined, bool(status.error), status.waiting) == (False, True, 0)
    assert away.reasons("here") == set()
    away.write("new")
    away.write("new", partition="step-3")
    away.engine.roll().result(30)
    away.tier.tick()
    assert away.reasons("new") == away.reasons("new", partition="step-3") == set()
    # What the bucket may hold is neither denied nor promised.
    assert away.reasons("there", partition="step-2") == {"STORAGE_FAILED"}
    assert away.reasons("unheard-of") == {"STORAGE_FAILED"}
    with pytest.raises(StorageFailed):
        away.engine.find("another run")
    with pytest.raises(StorageFailed):
        away.engine.load_listing("")
    s3.start()
    eventually(lambda: joined(away), "join")
    away.upload()
    assert away.tier.status().error == ""
    second = sidecar("b")
    for name, partition in (("here", PARTITION), ("there", "step-2"), ("new", PARTITION), ("new", "step-3")):
        rows = away.read(name, partition=partition)
        assert rows[1] == set()
        assert second.read(name, partition=partition) == rows
    assert away.reasons("unheard-of") == {"UNKNOWN_TRAJECTORY"}


def test_a_join_that_fails_half_way_is_none(
    away: Sidecar, s3: S3Server, store: ObjectStore, sidecar: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment without its object may have been released elsewhere, or the bucket is another one: until the store has
    said which, the local copy stays, and nothing of the bucket counts."""
    away.engine.close()
    s3.start()
    store.delete([key for key in segment_keys(store) if "/step-1" in key])
    head = ObjectStore.head

    def refuse(self: ObjectStore, key: str) -> Any:
        if "/step-1" in key:
            raise StorageFailed("refused by the test")
        return head(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "head", refuse)
        again = sidecar("a")
        assert not joined(again)
        evict_all(again, PARTITION)
        assert again.tier.status().evicted == 0
        assert again.reasons("here") == set()
        assert again.reasons("there", partition="step-2") == {"STORAGE_FAILED"}
    eventually(lambda: joined(again), "join")
    assert again.reasons("here") == {"RELEASED"}
    assert again.reasons("there", partition="step-2") == set()


def retire(sidecar: Sidecar, partition: str) -> None:
    """Release as retention does."""
    done = threading.Event()
    with sidecar.engine.catalog_lock:
        found = sidecar.engine.snapshot_runs()[0].partitions[partition]
    sidecar.engine._release_for_keeper(found, done.set)
    assert done.wait(30)


def test_a_release_is_whole_or_refused(away: Sidecar, s3: S3Server, store: ObjectStore, sidecar: Make) -> None:
    """Part of step-1 is on the disk, part of it in the bucket, where this server has not seen it."""
    s3.start()
    other = sidecar("b")
    other.write("elsewhere")
    other.upload()
    away.engine.close()
    s3.kill()
    again = sidecar("a")
    for names in (None, ["here"]):
        for partition in (PARTITION, "step-2", "step-3"):
            with pytest.raises(StorageFailed, match="nothing is released"):
                again.engine.release(RUN, partition, names)
    assert again.reasons("here") == set()
    s3.start()
    eventually(lambda: joined(again), "join")
    assert again.reasons("here") == set()
    assert again.engine.release(RUN, PARTITION).result(30) == 2
    assert again.engine._volume.deleter.drain(30)
    again.tier.follow()
    assert not [key for key in segment_keys(store) if "/step-1" in key]
    third = sidecar("c")
    for trajectory in ("here", "elsewhere"):
        assert again.reasons(trajectory) == {"RELEASED"}
        assert third.reasons(trajectory) == {"UNKNOWN_TRAJECTORY"}


def test_a_listing_is_enough_to_release_a_partition(
    sidecar: Make, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that cannot be read must not keep its partition for ever; which trajectories it has is not known."""
    first, second = sidecar("a"), sidecar("b")
    first.write("t")
    first.upload()

    def refuse(self: ObjectStore, key: str, start: int, stop: int) -> Any:
        raise StorageFailed("refused by the test")

    second.engine.find(RUN)
    monkeypatch.setattr(ObjectStore, "read", refuse)
    with pytest.raises(StorageFailed, match="nothing is released"):
        second.engine.release(RUN, PARTITION, ["t"])
    second.engine.release(RUN, PARTITION).result(30)
    assert second.engine._volume.deleter.drain(30)
    assert not segment_keys(store)


def test_what_retention_releases_goes_from_the_bucket_once_it_is_back(
    away: Sidecar, s3: S3Server, store: ObjectStore, sidecar: Make
) -> None:
    away.write("unsent", partition="step-3")
    for partition in (PARTITION, "step-3"):
        retire(away, partition)
        assert away.reasons("here", partition=partition) <= {"RELEASED", "STORAGE_FAILED"}
    eventually(lambda: not list(away.root.glob("runs/*/.released-*/*.arrow")), "room on the disk")
    away.write("later")
    s3.start()
    eventually(lambda: joined(away), "join")
    away.upload()
    assert away.engine._volume.deleter.drain(30)
    assert away.reasons("here") == {"UNKNOWN_TRAJECTORY"}
    assert away.reasons("later") == set()
    assert len([key for key in segment_keys(store) if "/step-1" in key]) == 1
    assert not list(away.root.glob("runs/*/.released-*"))
    assert sidecar("b").reasons("here") == {"UNKNOWN_TRAJECTORY"}
    assert away.engine.release(RUN, "step-2").result(30) == 1


def test_retention_releases_again_what_an_outage_hid_from_it(sidecar: Make, s3: S3Server, store: ObjectStore) -> None:
    first = sidecar("a")
    first.write("hidden")
    first.upload()
    evict_all(first, PARTITION)
    first.write("here")
    first.upload()
    first.write("newer", partition="step-2")
    first.upload()
    first.engine.close()
    assert len([key for key in segment_keys(store) if "/step-1" in key]) == 2
    s3.kill()
    again = sidecar("a", limits=Limits(partitions_kept=1))
    eventually(lambda: not list(again.root.glob("runs/*/step-1*")), "release of what is known")
    s3.start()
    eventually(lambda: not [key for key in segment_keys(store) if "/step-1" in key], "release of the rest")
    assert again.reasons("newer", partition="step-2") == set()


def test_a_release_is_finished_although_the_server_was_killed_before_the_store_came_back(
    away: Sidecar, s3: S3Server, store: ObjectStore, sidecar: Make
) -> None:
    retire(away, PARTITION)
    away.engine.close()
    s3.start()
    again = sidecar("a")
    assert again.engine._volume.deleter.drain(30)
    assert not [key for key in segment_keys(store) if "/step-1" in key]
    assert again.reasons("here") in ({"UNKNOWN_TRAJECTORY"}, {"RELEASED"})


def test_what_another_server_released_meanwhile_goes_at_the_join(away: Sidecar, s3: S3Server, sidecar: Make) -> None:
    assert away.reasons("here") == set()
    s3.start()
    other = sidecar("b")
    assert other.engine.release(RUN, PARTITION).result(30) == 1
    assert other.engine._volume.deleter.drain(30)
    eventually(lambda: joined(away), "join")
    away.tier.follow()
    assert away.reasons("here") == {"RELEASED"}
    away.upload()
    assert other.reasons("here") == {"RELEASED"}


def test_a_store_that_hangs_holds_neither_start_nor_stop_up(
    sidecar: Make, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trace_store.tier.joining.KNOWN_WAIT_S", 0.5)
    monkeypatch.setattr("trace_store.tier.tier.CLOSE_UPLOAD_S", 0.5)
    first = sidecar("a")
    first.write("t")
    first.upload()
    first.engine.close()
    s3.pause()
    begun = time.monotonic()
    again = sidecar("a", timeouts=None)  # those of production: minutes for a put
    assert again.reasons("t") == set()
    again.write("u")
    again.engine.close()
    assert time.monotonic() - begun < 2 * READ_TIMEOUT_S
    s3.resume()
    last = sidecar("a")
    eventually(lambda: joined(last), "join")
    last.upload()
    assert sidecar("b").reasons("u") == set()


def test_a_directory_that_never_saw_the_bucket_and_refused_credentials_are_no_outage(
    sidecar: Make, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sidecar("a")
    first.write("t")
    first.upload()
    first.engine.close()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(CredentialsRefused):
        sidecar("a")
    monkeypatch.undo()
    monkeypatch.setattr("trace_store.tier.joining.START_WAIT_S", 0.0)
    s3.kill()
    with pytest.raises(StorageFailed):
        sidecar("new")
    assert not (first.root.with_name("new") / IDENTITY_FILE).exists()


def test_the_server_says_that_it_has_not_joined(
    new_server: Callable[..., Any], url: str, s3: S3Server, sites: Any, records: Any
) -> None:
    server = new_server("--object-store", url).start()
    server.terminate()
    s3.kill()
    server.start()

    def gauge() -> float:
        with urllib.request.urlopen(f"http://{server.metrics}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return float(next(line for line in lines if line.startswith("trace_store_object_store_joined ")).split()[1])

    with trace_client.connect(server.address) as client:
        assert gauge() == 0
        assert "has not answered" in client.status()["object_store_error"]
        with urllib.request.urlopen(f"http://{server.metrics}/health") as answer:
            assert answer.status == 200  # it serves, and takes rollouts
        client.register("run", sites)
        with client.writer("run", PARTITION) as writer:
            writer.append("t", 0, records(10))
            writer.seal("t", tokens=11, prompt_tokens=0)
        s3.start()
        eventually(lambda: gauge() == 1, "join")
        eventually(lambda: not client.status()["object_store_error"], "end of the error")
    assert "until it answers" in Path(server.log).read_text()


def test_a_trajectory_whose_beginning_is_in_the_bucket_alone_is_sealed_after_the_join(
    sidecar: Make, s3: S3Server
) -> None:
    first = sidecar("a")
    first.write("t", 20, seal=False)
    first.upload()
    evict_all(first, PARTITION)
    first.engine.close()
    s3.kill()
    again = sidecar("a")
    again.engine.append(RUN, PARTITION, make_chunk(RUN, PARTITION, TABLE, "t", 20, 40)).result(30)
    with pytest.raises(StorageFailed, match=r"0/k \[0, 20\).*has not answered"):
        again.engine.seal(RUN, PARTITION, "t", tokens=41, prompt_tokens=0).result(30)
    s3.start()

    def sealed() -> bool:
        with suppress(StorageFailed):
            return bool(again.engine.seal(RUN, PARTITION, "t", tokens=41, prompt_tokens=0).result(30))
        return False

    eventually(sealed, "seal")  # by no more than trying again
    again.upload()
    rows = again.read("t")
    assert rows[1] == set()
    assert sidecar("b").read("t") == rows


def test_rows_that_are_nowhere_are_called_missing_once_the_store_answers(away: Sidecar, s3: S3Server) -> None:
    def seal() -> None:
        away.engine.seal(RUN, PARTITION, "half", tokens=41, prompt_tokens=0).result(30)

    away.write("half", 20, seal=False)
    with pytest.raises(StorageFailed):
        seal()
    s3.start()
    eventually(lambda: joined(away), "join")
    away.tier.follow()
    with pytest.raises(Incomplete) as caught:
        seal()
    assert ("0/k", 20, 40) in caught.value.holes


def test_an_outage_after_the_join_hides_rows_from_seals_and_reads_alike(
    sidecar: Make, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a look that is held back because another one failed a moment ago."""
    second = sidecar("b")
    second.engine.register(RUN, TABLE)
    first = sidecar("a")
    first.write("t", 20, seal=False)
    first.write("whole")
    first.upload()
    monkeypatch.setattr("trace_store.tier.tier.RELIST_S", 60.0)
    listing = ObjectStore.listing

    def refuse(self: ObjectStore, prefix: str) -> Any:
        raise StorageFailed("refused by the test")

    def seal() -> None:
        second.engine.seal(RUN, PARTITION, "t", tokens=41, prompt_tokens=0).result(30)

    monkeypatch.setattr(ObjectStore, "listing", refuse)
    second.engine.prepare(RUN, PARTITION)
    second.engine.append(RUN, PARTITION, make_chunk(RUN, PARTITION, TABLE, "t", 20, 40)).result(30)
    with pytest.raises(StorageFailed, match="refused by the test"):
        seal()
    for _ in range(2):
        assert second.reasons("whole") == {"STORAGE_FAILED"}
    monkeypatch.setattr(ObjectStore, "listing", listing)
    second.tier.follow()
    seal()
    assert second.reasons("t") == second.reasons("whole") == set()
