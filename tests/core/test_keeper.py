"""Retention and the disk's marks in a running engine: deletion keeps pace, a stuck one blocks nothing, reads go on."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trace_store import Site, TokenSpan
from trace_store.deleter import Deleter
from trace_store.engine import Engine
from trace_store.errors import StorageFull
from trace_store.retention import DISK_BYTES_MIN, Limits
from trace_store.testing.records import make_chunk

TABLE = (Site(0, "moe_in", 2048), Site(1, "moe_in", 2048))
TOKENS = 2000
FREE = {"free_min": 0, "free_low": 0}


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """``engine(limits)`` on the test's directory."""
    made: list[Engine] = []

    def make(limits: Limits, **more: Any) -> Engine:
        made.append(Engine(tmp_path / "data", "test", limits=limits, **more))
        made[-1].register("run", TABLE)
        return made[-1]

    yield make
    for item in made:
        item.close()


def write(engine: Engine, partition: str, trajectory: str = "t", tokens: int = TOKENS) -> None:
    chunk = make_chunk("run", partition, TABLE, trajectory, 0, tokens)
    engine.append("run", partition, chunk).result(30)
    engine.seal("run", partition, trajectory, tokens=tokens + 1, prompt_tokens=0).result(30)


def is_taken(engine: Engine, partition: str) -> bool:
    """Write a partition, unless the disk is full."""
    try:
        write(engine, partition)
    except StorageFull:
        return False
    return True


def bytes_below(root: Path, *, released: bool) -> int:
    """Bytes of files of the partitions, and of those ``released`` and not yet deleted.

    Directories are renamed meanwhile: counted again then, since Path.glob raises where a directory goes between its
    listing and its turn (Python 3.11), and skipping it would miss the bytes under its new name.
    """
    while True:
        total = 0
        try:
            for directory in [entry for run in (root / "data" / "runs").iterdir() for entry in os.scandir(run)]:
                if directory.is_dir() and (released or not directory.name.startswith(".")):
                    for path in os.scandir(directory):
                        with contextlib.suppress(FileNotFoundError):
                            total += path.stat().st_size
        except FileNotFoundError:
            continue
        return total


def missing(engine: Engine, partition: str, trajectory: str = "t") -> set[str]:
    with engine.read("run", partition, [TokenSpan(trajectory, 0, TOKENS)], [0, 1]) as read:
        rows = sum(piece.rows for piece in read)
        reasons = {item.reason.name for item in read.missing}
    assert rows == (0 if reasons else 2 * TOKENS)
    return reasons


def eventually(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.01)


def test_old_partitions_go_by_count(engine: Callable[..., Engine]) -> None:
    store = engine(Limits(partitions_kept=2, **FREE))
    for number in range(5):
        write(store, f"step-{number}", tokens=TOKENS)
    eventually(lambda: store.usage().retention.count == 3, "release by count")
    eventually(lambda: store.usage().partitions == 2, "release")
    assert missing(store, "step-4") == missing(store, "step-3") == set()
    assert missing(store, "step-0") == {"RELEASED"}


def test_old_partitions_go_by_age_and_a_jump_of_the_wall_clock_ages_nothing(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    store = engine(Limits(age_s=3600, **FREE), clock=clock)
    write(store, "old")
    clock.now += 3000
    write(store, "new")
    monkeypatch.setattr(time, "time", lambda: 4e9)
    store._keeper.tick()
    assert missing(store, "old") == set()
    clock.now += 1000
    store._keeper.tick()
    eventually(lambda: missing(store, "old") == {"RELEASED"}, "release by age")
    assert missing(store, "new") == set()


def test_age_goes_on_over_a_restart(engine: Callable[..., Engine], tmp_path: Path) -> None:
    store = engine(Limits(**FREE))
    write(store, "old")
    write(store, "new")
    store.close()
    for path in tmp_path.glob("data/runs/*/old-*/*"):
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    store = engine(Limits(age_s=3600, **FREE))
    eventually(lambda: missing(store, "old") != set(), "release by age")
    assert missing(store, "new") == set()


def test_a_clock_that_is_wrong_at_start_releases_nothing_by_age_and_keeps_the_order(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right, day = time.time(), 86400.0
    limits = Limits(age_s=4 * day, partitions_kept=4, **FREE)
    for life, clock in enumerate((right, right + 5000 * day, right + 5001 * day, 100.0, right + day)):
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        store = engine(limits)
        write(store, f"step-{life}")
        store.roll().result(30)
        store._keeper.tick()
        for number in range(max(life - 3, 0), life + 1):
            assert missing(store, f"step-{number}") == set(), f"life {life}"
        assert store.usage().retention.age == 0
        store.close()
        for path in tmp_path.glob(f"data/runs/*/step-{life}-*/*"):
            if abs(path.stat().st_mtime - right) < day / 2:  # the kernel's time, which this test cannot set
                os.utime(path, (clock, clock))
    # The first went by count in the fifth life, as the oldest, although the fourth was written in "1970".
    assert missing_after_start(engine, limits) == {"step-0": True, "step-3": False}


def missing_after_start(engine: Callable[..., Engine], limits: Limits) -> dict[str, bool]:
    store = engine(limits)
    store._keeper.tick()
    eventually(lambda: store.usage().partitions == 4, "release by count")
    return {name: bool(missing(store, name)) for name in ("step-0", "step-3")}


def test_rows_that_a_killed_server_left_are_as_old_as_its_end_whatever_the_machines_clock_says(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files get the kernel's time, and here it is a year behind that of the store: so was the last one of a crash."""
    right, year = time.time(), 365 * 86400.0
    monkeypatch.setattr(time, "time", lambda: right + year)
    limits = Limits(age_s=86400.0, partitions_kept=2, **FREE)
    first = engine(limits)
    for name in ("a", "b"):
        write(first, name)
    first.roll().result(30)
    write(first, "last")
    eventually(lambda: first.usage().partitions == 2, "release by count")
    assert first._volume.deleter.drain(30)  # a directory that vanishes meanwhile cannot be copied
    shutil.copytree(tmp_path / "data", tmp_path / "killed")  # what a kill would leave
    assert list((tmp_path / "killed").glob("runs/*/last-*/*.open"))
    for path in tmp_path.glob("killed/runs/*/b-*/*.arrow"):
        os.utime(path, (right + year, right + year))  # as the store does where it can see that the kernel is behind
    store = Engine(tmp_path / "killed", "test", limits=limits)
    try:
        store._keeper.tick()
        write(store, "next")
        eventually(lambda: missing(store, "b") != set(), "release by count")
        assert vars(store.usage().retention) == {"age": 0, "count": 1, "cap": 0}
        assert missing(store, "last") == missing(store, "next") == set()
    finally:
        store.close()


def test_ingest_over_the_cap_goes_on_because_the_oldest_go(engine: Callable[..., Engine], tmp_path: Path) -> None:
    store = engine(Limits(disk_bytes_max=DISK_BYTES_MIN, **FREE))
    largest = 0
    for number in range(60):  # 5 caps
        eventually(lambda number=number: is_taken(store, f"step-{number}"), "room for the next")  # type: ignore[misc]
        largest = max(largest, bytes_below(tmp_path, released=False))
    assert largest <= 1.1 * DISK_BYTES_MIN
    assert store.usage().retention.cap > 30
    assert missing(store, "step-59") == set()


def test_a_stuck_deletion_blocks_neither_writes_nor_other_deletions(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stuck, release = threading.Event(), threading.Event()
    remove = shutil.rmtree

    def hang(path: Path, *arguments: Any, **more: Any) -> None:
        if "step-0" in str(path):
            stuck.set()
            release.wait(200)
        remove(path, *arguments, **more)

    monkeypatch.setattr(shutil, "rmtree", hang)
    store = engine(Limits(**FREE))
    for number in range(4):
        write(store, f"step-{number}")
    for number in range(3):
        assert store.release("run", f"step-{number}").result(30) == 1
    assert stuck.wait(30)
    eventually(lambda: len(list(tmp_path.glob("data/runs/*/.released-*"))) == 1, "the other deletions")
    write(store, "step-4")
    assert missing(store, "step-3") == missing(store, "step-4") == set()
    assert missing(store, "step-0") == {"RELEASED"}
    assert store.usage().deletions_pending == 1
    release.set()
    eventually(lambda: store.usage().deletions_pending == 0, "the stuck deletion")


def test_a_full_disk_refuses_writes_and_lets_reads_seals_and_releases_go_on(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [1 << 40]
    monkeypatch.setattr("trace_store.gate.DiskGate._free", lambda gate: (free[0], 1 << 41))
    store = engine(Limits(free_min=1 << 30, free_low=2 << 30))
    write(store, "step-1")
    chunk = make_chunk("run", "step-2", TABLE, "t", 0, TOKENS)
    store.append("run", "step-2", chunk).result(30)
    free[0] = 1 << 29
    with pytest.raises(StorageFull, match="nearly full"):
        store.append("run", "step-2", make_chunk("run", "step-2", TABLE, "u", 0, TOKENS)).result(30)
    assert store.usage().disk_state == "full"
    assert store.usage().write_refusal
    assert missing(store, "step-1") == set()
    store.seal("run", "step-2", "t", tokens=TOKENS + 1, prompt_tokens=0).result(30)
    assert missing(store, "step-2") == set()
    assert store.release("run", "step-1").result(30) == 1
    free[0] = 1 << 40
    write(store, "step-3")  # by itself, without a restart
    assert (store.usage().disk_state, store.usage().appends_refused) == ("ok", 1)


def test_a_filling_disk_slows_appends_first(engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("trace_store.gate.DiskGate._free", lambda gate: (3 << 29, 1 << 41))
    store = engine(Limits(free_min=1 << 30, free_low=2 << 30))
    store._gate._sleep = slept.append
    write(store, "step-1")
    assert store.usage().disk_state == "slow"
    payload = make_chunk("run", "step-1", TABLE, "t", 0, TOKENS).payload_bytes
    assert slept == [pytest.approx(0.5 * payload / (32 << 20), rel=0.01)]
    assert store.usage().slowed_seconds == sum(slept)


def test_slow_deletions_slow_ingest_instead_of_running_past_the_cap(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    remove = shutil.rmtree

    def slowly(path: Path) -> None:
        time.sleep(0.3)
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", slowly)
    store = engine(Limits(disk_bytes_max=DISK_BYTES_MIN, **FREE))
    largest = refused = 0

    def is_written(number: int) -> bool:
        nonlocal refused
        taken = is_taken(store, f"step-{number}")
        refused += not taken
        return taken

    for number in range(40):
        eventually(lambda number=number: is_written(number), "room for the next")  # type: ignore[misc]
        largest = max(largest, bytes_below(tmp_path, released=True))
    assert largest <= 1.1 * DISK_BYTES_MIN  # what awaits its deletion included
    assert refused > 0
    assert missing(store, "step-39") == set()


def test_failed_deletions_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trace_store.deleter.RETRY_FIRST_S", 0.01)
    deleter = Deleter()
    tries: list[int] = []

    def job() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("not yet")

    deleter.submit("job", job)
    assert deleter.drain(30)
    assert len(tries) == 3
    deleter.close()


def test_a_hanging_deletion_holds_one_thread_only() -> None:
    deleter = Deleter(threads_max=2)
    release, done = threading.Event(), threading.Event()
    deleter.submit("hangs", lambda: release.wait(200) and None)
    for _ in range(20):
        deleter.submit("quick", lambda: None)
    deleter.submit("last", done.set)
    assert done.wait(30)
    release.set()
    assert deleter.drain(30)
    deleter.close()
