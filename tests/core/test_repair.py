"""Failing disks in mid-run: typed refusals, reads go on, no acknowledged row lost, recovery without restart."""

from __future__ import annotations

import errno
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trace_store import repair, shard
from trace_store.errors import Incomplete, StorageFailed, StorageFull
from trace_store.planner import MissingReason


class Disk:
    """Stands before the system calls of the segment writer. ``fail`` maps a call's name to an errno or to nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fail: dict[str, int] = {}
        self.partial_bytes = 0
        self.before: dict[str, Callable[[], None]] = {}
        for name in ("writev", "fdatasync", "fsync", "rename", "open", "unlink", "mkdir", "ftruncate"):
            wrapped = self._wrap(name, getattr(os, name))
            monkeypatch.setattr(os, name, wrapped)
            # Python 3.10's pathlib took its own references to some of these when it was imported.
            accessor = getattr(pathlib, "_NormalAccessor", None)
            if name in ("mkdir", "unlink", "rename") and accessor is not None:
                monkeypatch.setattr(accessor, name, staticmethod(wrapped))

    def _wrap(self, name: str, real: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            if name in self.before:
                self.before.pop(name)()
            if name in self.fail and not (name == "open" and arguments[1] & os.O_ACCMODE == os.O_RDONLY):
                if name == "writev" and self.partial_bytes:
                    taken, self.partial_bytes = self.partial_bytes, 0
                    return real(arguments[0], [memoryview(b"".join(arguments[1]))[:taken]])
                raise OSError(self.fail[name], os.strerror(self.fail[name]))
            return real(*arguments, **more)

        return call


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    monkeypatch.setattr(repair, "DOUBTFUL_RETRY_S", 0.0)
    monkeypatch.setattr(repair, "UNSEALED_RETRY_S", 0.0)
    monkeypatch.setattr(shard, "REPAIR_TICK_S", 0.01)
    made = Disk(monkeypatch)
    yield made
    made.fail.clear()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.01)


def catalog_paths(store: Any) -> list[Path]:
    with store.engine.catalog_lock:
        return sorted(s.path for s in store.engine.snapshot_runs()[0].partitions["step-1"].segments.values())


@pytest.mark.parametrize("partial_bytes", [0, 1, 500, 1000])
@pytest.mark.parametrize("truncate", [True, False])
def test_a_full_disk_in_the_middle_of_a_write(store: Any, disk: Disk, partial_bytes: int, truncate: bool) -> None:
    store.append("t", 0, 4)
    store.append("t", 4, 6, durability="written")
    disk.partial_bytes = partial_bytes
    disk.fail = {"writev": errno.ENOSPC, **({} if truncate else {"ftruncate": errno.EIO})}
    with pytest.raises(StorageFull, match="no room"):
        store.append("t", 6, 9)
    with pytest.raises(StorageFull):
        store.seal("t", 10, allow_holes=True)
    gaps = store.check("t", 0, 9, include_open=True)
    assert {(gap.start, gap.stop, gap.reason) for gap in gaps} == {(6, 9, MissingReason.NOT_RECORDED)}
    assert store.engine.usage().write_refusal == ""
    disk.fail = {}
    store.append("t", 6, 9)
    store.seal("t", 10)
    assert store.check("t", 0, 9) == []
    eventually(lambda: len(store.segments(".open")) == 1 and len(store.segments()) == 1)
    assert store.check("t", 0, 9) == []
    store.reopen()
    assert store.check("t", 0, 9) == []
    assert store.segments(".open") == []
    assert not list((store.root / "set-aside").glob("*")) if (store.root / "set-aside").exists() else True


def test_a_full_disk_before_the_first_row_leaves_no_file(store: Any, disk: Disk) -> None:
    disk.fail = {"writev": errno.ENOSPC}
    for _ in range(3):
        with pytest.raises(StorageFull):
            store.append("t", 0, 4)
    assert store.segments(".open") == []
    disk.fail = {}
    store.append("t", 0, 4)


def test_an_append_synced_before_a_failed_write_is_still_answered(store: Any, disk: Disk) -> None:
    """The failed write ends the segment; the sync that others wait for covers the rows before it."""
    futures = []

    def fail_writes() -> None:
        futures.append(store.engine.append("run", "step-1", store.chunk("t", 4, 8), "synced"))
        futures[-1].exception(30)
        disk.fail = {}

    store.append("t", 0, 2, durability="written")
    disk.fail = {"writev": errno.ENOSPC}
    disk.before = {"fdatasync": fail_writes}
    disk.fail = {}
    store.append("t", 2, 4, durability="written")
    disk.fail = {"writev": errno.ENOSPC}
    assert store.append("t", 0, 4).duplicates == 4
    assert isinstance(futures[0].exception(30), StorageFull)


@pytest.mark.parametrize("lose", [False, True])
def test_a_failed_sync_refuses_writes_until_the_rows_are_copied(store: Any, disk: Disk, lose: bool) -> None:
    store.append("t", 0, 4)
    disk.fail = {"fdatasync": errno.EIO}
    with pytest.raises(StorageFailed):
        store.append("t", 4, 8)
    assert "input/output error" in store.engine.usage().write_refusal
    assert store.check("t", 0, 4, include_open=True) == []
    # A duplicate of the rows whose sync failed must not be called synced.
    with pytest.raises(StorageFailed):
        store.append("t", 4, 8)
    with pytest.raises(StorageFailed):
        store.append("u", 0, 4, durability="written")
    if lose:
        _zero_tail_rows(store.segments(".open")[0])
    disk.fail = {}
    result = store.append("t", 4, 8)
    assert (result.stored, result.duplicates) == ((4, 0) if lose else (0, 4))
    assert store.engine.usage().write_refusal == ""
    store.seal("t", 9)
    assert store.check("t", 0, 8) == []
    store.reopen()
    assert store.check("t", 0, 8) == []


def _zero_tail_rows(path: Path) -> None:
    """What the kernel may do after a failed sync: the second record batch is gone from the cache and never hit disk."""
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(size - 300)
        file.write(bytes(300))


def test_a_sync_that_fails_while_others_write_fails_them_too(store: Any, disk: Disk) -> None:
    disk.fail = {"fdatasync": errno.EIO}
    first = store.engine.append("run", "step-1", store.chunk("a", 0, 4), "synced")
    rest = [
        store.engine.append(
            "run", f"step-{number % 3}", store.chunk("a", 0, 4, partition=f"step-{number % 3}"), "synced"
        )
        for number in range(9)
    ]
    assert isinstance(first.exception(30), StorageFailed)
    assert all(isinstance(future.exception(30), StorageFailed) for future in rest)
    disk.fail = {}
    for number in range(3):
        store.append("a", 0, 4, partition=f"step-{number}")
        store.seal("a", 5, partition=f"step-{number}")
    store.reopen()
    for number in range(3):
        assert store.check("a", 0, 4, partition=f"step-{number}") == []


def test_a_duplicate_is_not_called_synced_when_the_sync_of_its_original_fails_meanwhile(store: Any, disk: Disk) -> None:
    gate, entered = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert gate.wait(200)

    disk.fail, disk.before = {"fdatasync": errno.EIO}, {"fdatasync": hold}
    original = store.engine.append("run", "step-1", store.chunk("t", 0, 4), "synced")
    assert entered.wait(30)
    duplicate = store.engine.append("run", "step-1", store.chunk("t", 0, 4), "synced")
    assert store.append("t", 0, 4, durability="written").duplicates == 4  # the writer has seen both
    gate.set()
    assert isinstance(original.exception(30), StorageFailed)
    assert isinstance(duplicate.exception(30), StorageFailed)
    disk.fail = {}
    assert store.append("t", 0, 4).duplicates == 4


def test_a_failed_seal_is_not_visible_and_its_repetition_is(store: Any, disk: Disk) -> None:
    store.append("t", 0, 9)
    disk.fail = {"fdatasync": errno.EIO}
    with pytest.raises(StorageFailed):
        store.seal("t", 10)
    assert store.reasons("t", 0, 9) == {MissingReason.NOT_SEALED}
    disk.fail = {}
    store.seal("t", 10)
    assert store.check("t", 0, 9) == []


def test_a_copy_that_fails_and_cannot_be_removed_is_made_again(store: Any, disk: Disk) -> None:
    disk.fail = {"fdatasync": errno.EIO}
    with pytest.raises(StorageFailed):
        store.append("t", 0, 4)
    # The copy meets the same disk, and its removal fails too.
    disk.before = {"fdatasync": lambda: disk.fail.update(unlink=errno.EIO)}
    for _ in range(3):
        with pytest.raises(StorageFailed, match="input/output error"):
            store.append("t", 0, 4)
    assert len(store.segments(".recovering")) == 1
    disk.fail = {}
    assert store.append("t", 0, 4).duplicates == 4
    assert store.segments(".recovering") == []


@pytest.mark.parametrize("call", ["writev", "fdatasync", "rename", "fsync"])
def test_a_roll_that_fails_loses_nothing(store: Any, disk: Disk, call: str) -> None:
    store.append("t", 0, 9)
    disk.fail = {call: errno.EIO}
    store.engine.roll().exception(30)
    assert store.check("t", 0, 9, include_open=True) == []
    disk.fail = {}
    store.seal("t", 10)
    assert store.check("t", 0, 9) == []
    eventually(lambda: len(store.segments()) == 1)
    # An object store takes the files that the catalog names; reads would find a renamed one.
    eventually(lambda: catalog_paths(store) == sorted(store.segments() + store.segments(".open")))
    store.reopen()
    assert store.check("t", 0, 9) == []
    assert len(store.segments(".open")) == 0


def test_a_copy_has_the_stores_time_as_any_sealed_segment(store: Any, disk: Disk) -> None:
    volume = store.engine._volume
    volume.set_time(volume.now() + 1e6)  # as after a start with a clock that is behind
    store.append("t", 0, 4)
    disk.fail = {"rename": errno.EIO}
    store.engine.roll().result(30)
    assert store.segments(".arrow") == []
    disk.fail = {}
    store.append("u", 0, 4, partition="step-2")
    eventually(lambda: store.segments(".arrow") != [])
    eventually(lambda: abs(store.segments(".arrow")[0].stat().st_mtime - volume.now()) < 100)


def test_fr32_a_disk_that_turns_read_only_refuses_writes_serves_reads_and_recovers(store: Any, disk: Disk) -> None:
    store.append("t", 0, 9)
    store.seal("t", 10)
    disk.fail = dict.fromkeys(("writev", "fdatasync", "fsync", "rename", "open", "unlink", "mkdir"), errno.EROFS)
    for durability in ("written", "synced"):
        with pytest.raises(StorageFailed):
            store.append("u", 0, 4, durability=durability)
        assert store.check("t", 0, 9) == []
    with pytest.raises(StorageFailed):
        store.engine.release("run", "step-1").result(30)
    assert store.check("t", 0, 9) == []
    # The loss of a row that was answered from memory is said by the seal.
    store.append("u", 0, 4, durability="memory")
    with pytest.raises(StorageFailed):
        store.seal("u", 5)
    disk.fail = {}
    with pytest.raises(Incomplete):
        store.seal("u", 5)
    store.append("u", 0, 4)
    store.seal("u", 5)
    store.reopen()
    assert store.check("t", 0, 9) == []
    assert store.check("u", 0, 4) == []


def test_a_registration_that_fails_can_be_repeated(store: Any, disk: Disk) -> None:
    for call in ("mkdir", "writev", "fdatasync", "rename", "fsync", "open"):
        disk.fail = {call: errno.ENOSPC}
        with pytest.raises(StorageFull):
            store.engine.register("second", store.engine.sites("run"))
        disk.fail = {}
    assert store.engine.register("second", store.engine.sites("run")) is True
    store.reopen()
    assert store.engine.sites("second") == store.engine.sites("run")


def test_a_release_that_is_not_durable_is_refused_until_it_is(store: Any, disk: Disk) -> None:
    store.append("t", 0, 4)
    disk.fail = {"fsync": errno.EIO}
    for _ in range(2):
        with pytest.raises(StorageFailed):
            store.engine.release("run", "step-1").result(30)
        assert store.check("t", 0, 4, include_open=True) != []
    disk.fail = {}
    assert store.engine.release("run", "step-1").result(30) == 0
    store.append("t", 0, 4, seed=1)
    assert store.check("t", 0, 4, seed=1, include_open=True) == []


def test_a_partition_released_while_its_sync_fails_leaves_the_others_working(store: Any, disk: Disk) -> None:
    store.append("t", 0, 4)
    disk.fail = {"fdatasync": errno.EIO}
    with pytest.raises(StorageFailed):
        store.append("t", 4, 8)
    assert store.engine.release("run", "step-1").result(30) == 1
    disk.fail = {}
    store.append("u", 0, 4, partition="step-2")
    store.append("t", 0, 4, seed=1)
    store.seal("t", 5)
    assert store.check("t", 0, 4, seed=1) == []


def test_a_partition_released_while_its_segment_is_being_synced_or_sealed(store: Any, disk: Disk) -> None:
    for call in ("fdatasync", "rename"):
        released = []
        submitted = threading.Event()

        def release(submitted: threading.Event = submitted, released: list[Any] = released) -> None:
            submitted.wait(200)
            released.append(store.engine.release("run", "step-1"))
            released[0].result(30)

        store.append("t", 0, 4, durability="written")
        disk.before = {call: release}
        waiting = [store.engine.append("run", "step-1", store.chunk("t", 4, 8), "synced"), store.engine.roll()]
        submitted.set()
        for future in waiting:
            future.exception(30)
        assert released[0].result(30) == 1
        store.append("other", 0, 4, partition="step-2")
    assert store.engine.usage().write_refusal == ""
    store.append("t", 0, 4, seed=2)
    store.seal("t", 5)
    store.reopen()
    assert store.check("t", 0, 4, seed=2) == []


def test_emfile_is_a_typed_refusal_and_passes(store: Any, disk: Disk) -> None:
    disk.fail = {"open": errno.EMFILE}
    with pytest.raises(StorageFailed, match="too many open files"):
        store.append("t", 0, 4)
    disk.fail = {}
    store.append("t", 0, 4)
    store.seal("t", 5)
    assert store.check("t", 0, 4) == []
