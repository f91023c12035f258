"""Full, failing and read-only disks, too many open files, and clocks that jump: real ones, in real processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trace_store import repair
from trace_store.engine import Engine
from trace_store.errors import StorageFailed, StorageFull, TraceStoreError
from trace_store.testing.load import RUN, TABLE, broken_promises, check_rows, count
from trace_store.testing.records import make_chunk

RUN_TIMEOUT_S = 120.0
"""For programs of a second or two. A machine that shares its cores with seven others took 15."""


def append(engine: Engine, name: str, start: int, stop: int, partition: str = "p", durability: str = "synced") -> Any:
    chunk = make_chunk(RUN, partition, TABLE, name, start, stop)
    return engine.append(RUN, partition, chunk, durability).result(60)


def fill_up(engine: Engine, partition: str) -> int:
    """Append until the disk refuses; tokens stored."""
    for start in range(0, 1_000_000, 40):
        try:
            append(engine, "t", start, start + 40, partition)
        except StorageFull:
            return start
    raise AssertionError("the disk never filled up")


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk_refuses_serves_and_works_again_after_a_release(kind: str, make_tmpfs: Any, make_disk: Any) -> None:
    root = (make_tmpfs("size=6m") if kind == "tmpfs" else make_disk("ext4", 12).path) / "data"
    engine = Engine(root)
    try:
        engine.register(RUN, TABLE)
        append(engine, "kept", 0, 40, "other")
        stored = fill_up(engine, "p")
        assert stored > 1000
        for durability in ("written", "synced"):
            with pytest.raises(StorageFull):
                append(engine, "u", 0, 4000, "p", durability)
        assert check_rows(engine, "p", "t", 0, stored, include_open=True) == []
        assert check_rows(engine, "other", "kept", 0, 40, include_open=True) == []
        engine.release(RUN, "p").result(60)
        fill_again = 0
        while fill_again < stored // 2:  # the files are deleted on a thread of their own
            try:
                append(engine, "t", fill_again, fill_again + 40, "q")
                fill_again += 40
            except StorageFull:
                continue
        engine.seal(RUN, "other", "kept", tokens=41, prompt_tokens=0).result(60)
    finally:
        engine.close()
    engine = Engine(root)
    assert check_rows(engine, "q", "t", 0, fill_again, include_open=True) == []
    assert check_rows(engine, "other", "kept", 0, 40, include_open=False) == []
    engine.close()


def kill_with_an_open_segment_that_has_no_room(disk: Path, start_load: Any) -> Any:
    """Fill the disk under a load and kill it, again until what it leaves open is larger than what is free."""
    for seed in range(1, 30):
        with open(disk / "ballast", "wb", buffering=0) as ballast:
            load = start_load(disk / "data", "p", seed)
            load.run_until(append=1)
            load.run_for(0.3)
            with contextlib.suppress(OSError):
                while True:
                    ballast.write(bytes(4096))
            load.run_until(failed=1)
            messages = load.kill()
        left = max((path.stat().st_size for path in (disk / "data").rglob("*.open")), default=0)
        if count(messages, "failed") and left > shutil.disk_usage(disk).free:
            return messages
        (disk / "ballast").unlink()
        shutil.rmtree(disk / "data")
    raise AssertionError("no try left a segment open on a full disk")


def test_a_killed_store_starts_on_a_full_disk_and_seals_what_was_open_once_there_is_room(
    make_tmpfs: Any, start_load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "UNSEALED_RETRY_S", 0.1)
    disk = make_tmpfs("size=3m")
    messages = kill_with_an_open_segment_that_has_no_room(disk, start_load)
    for _ in range(2):
        engine = Engine(disk / "data")
        try:
            assert broken_promises(engine, "p", messages) == []
            with pytest.raises(StorageFull):
                append(engine, "u", 0, 400)
        finally:
            engine.close()
    engine = Engine(disk / "data")
    try:
        left = list((disk / "data" / "runs").rglob("*.open"))
        assert left
        (disk / "ballast").unlink()
        append(engine, "u", 0, 4)  # wakes the writer, which then finds room
        deadline = time.monotonic() + 60
        while any(path.exists() for path in left):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert broken_promises(engine, "p", messages) == []
    finally:
        engine.close()


def test_a_disk_without_inodes_refuses_new_partitions_only(make_tmpfs: Any) -> None:
    root = make_tmpfs("size=8m,nr_inodes=24") / "data"
    engine = Engine(root)
    try:
        engine.register(RUN, TABLE)
        append(engine, "t", 0, 8, "first")
        refusals = 0
        for number in range(40):
            try:
                append(engine, "t", 0, 8, f"p{number}")
            except StorageFull:
                refusals += 1
        assert refusals > 10
        append(engine, "t", 8, 16, "first")
        assert check_rows(engine, "first", "t", 0, 16, include_open=True) == []
    finally:
        engine.close()


def test_fr32_files_that_turn_immutable_refuse_writes_serve_reads_and_recover(make_disk: Any, tools: Any) -> None:
    """A file system cannot be remounted read-only while a segment is open for writing; this refuses the same calls."""
    tools("chattr")
    disk = make_disk("ext4", 24)
    engine = Engine(disk.path / "data")
    try:
        engine.register(RUN, TABLE)
        append(engine, "t", 0, 8)
        subprocess.run(["chattr", "-R", "+i", str(disk.path / "data" / "runs")], check=True)
        for durability in ("written", "synced"):
            with pytest.raises(StorageFailed):
                append(engine, "t", 8, 16, "p", durability)
        assert check_rows(engine, "p", "t", 0, 8, include_open=True) == []
        with pytest.raises(StorageFailed):
            engine.release(RUN, "p").result(60)
        assert check_rows(engine, "p", "t", 0, 8, include_open=True) == []
        subprocess.run(["chattr", "-R", "-i", str(disk.path / "data" / "runs")], check=True)
        _until_taken(engine, "t", 8, 16)
        engine.seal(RUN, "p", "t", tokens=17, prompt_tokens=0).result(60)
        assert check_rows(engine, "p", "t", 0, 16, include_open=False) == []
    finally:
        subprocess.run(["chattr", "-R", "-i", str(disk.path / "data" / "runs")], check=True)
        engine.close()


def _until_taken(engine: Engine, name: str, start: int, stop: int) -> None:
    """A client's retry: the engine tries its repairs at most once a second."""
    deadline = time.monotonic() + 60
    while True:
        try:
            append(engine, name, start, stop)
        except TraceStoreError:
            assert time.monotonic() < deadline, "the engine does not recover"
            continue
        return


def test_fr32_a_read_only_directory_at_start_fails_at_once(make_disk: Any) -> None:
    disk = make_disk("ext4", 24)
    engine = Engine(disk.path / "data")
    engine.close()
    subprocess.run(["mount", "-o", "remount,ro", str(disk.path)], check=True, capture_output=True)
    with pytest.raises(StorageFailed, match="read-only file system"):
        Engine(disk.path / "data")
    subprocess.run(["mount", "-o", "remount,rw", str(disk.path)], check=True, capture_output=True)
    Engine(disk.path / "data").close()


@pytest.mark.parametrize(
    "injection",
    [
        "fdatasync:error=EIO:when=3",
        "fdatasync:error=EIO:when=2..4",
        "fsync:error=EIO:when=4+3",
        "writev:error=ENOSPC:when=4",
        "writev:error=EIO:when=3+2",
        "rename:error=EROFS:when=2",
        "fdatasync:delay_enter=30000",
    ],
)
def test_injected_errors_break_no_promise_and_need_no_hand(tmp_path: Path, strace: Any, injection: str) -> None:
    result = strace([injection], "-m", "trace_store.testing.steps", tmp_path / "data")
    messages = result.stdout.splitlines()
    assert result.returncode == 0 or "StorageF" in result.stderr, result.stderr
    assert "delay" in injection or count(messages, "failed") > 0 or result.returncode, messages
    engine = Engine(tmp_path / "data")
    try:
        assert broken_promises(engine, "p", messages) == []
        engine.register(RUN, TABLE)
        append(engine, "after", 0, 4)
    finally:
        engine.close()


def test_verify_names_what_the_disk_cannot_read_and_goes_on(tmp_path: Path, tools: Any) -> None:
    tools("strace")
    root = tmp_path / "data"
    engine = Engine(root)
    engine.register(RUN, TABLE)
    for partition in ("p", "q", "r"):
        append(engine, "t", 0, 8, partition)
    engine.close()
    (unreadable,) = root.glob("runs/*/p-*/*.arrow")
    (unlisted,) = root.glob("runs/*/q-*")
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "-P", str(unreadable), "-P", str(unlisted)]
    command += ["-e", "inject=read:error=EIO", "-e", "inject=getdents64:error=EIO"]
    command += [
        sys.executable,
        "-c",
        "import sys; from trace_store.verify import command; sys.exit(command(sys.argv[1:]))",
    ]
    result = subprocess.run([*command, str(root), "--json"], capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
    report = json.loads(result.stdout)
    assert result.returncode == 1, result.stderr
    assert {(item["segment"], item["what"].lower()) for item in report["damaged"]} == {
        (unreadable.relative_to(root / "runs").as_posix(), "cannot be read: input/output error"),
        (unlisted.relative_to(root / "runs").as_posix(), "cannot be listed: input/output error"),
    }
    assert report["segments"] == 2  # the manifest and the third partition


EMFILE = """
import os, resource, sys
from pathlib import Path
from trace_store.engine import Engine
from trace_store.errors import StorageFailed
from trace_store.record import TokenSpan
from trace_store.testing.load import RUN, TABLE, check_rows
from trace_store.testing.records import make_chunk
engine = Engine(Path(sys.argv[1]))
engine.register(RUN, TABLE)
def append(partition):
    engine.append(RUN, partition, make_chunk(RUN, partition, TABLE, "t", 0, 8), "synced").result(60)
append("p")
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
def leased():
    return engine.read(RUN, "p", [TokenSpan("t", 0, 8)], range(3), include_open=True)
held = [leased()]
resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
for refused in (leased, lambda: append("q")):
    try:
        refused()
    except StorageFailed as error:
        assert "too many open files" in str(error).lower(), error
    else:
        raise AssertionError("it was not refused")
assert [piece.rows for piece in held[0]] == [8, 8, 8]
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
append("q")
for partition in "pq":
    assert check_rows(engine, partition, "t", 0, 8, include_open=True) == []
held[0].close()
engine.close()
print("fine")
"""


def test_emfile_refuses_with_a_type_and_passes(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", EMFILE, str(tmp_path)], capture_output=True, text=True, timeout=RUN_TIMEOUT_S
    )
    assert result.stdout == "fine\n", result.stderr


@pytest.mark.parametrize("when", ["2030-01-01 00:00:00", "1971-01-01 00:00:00", "+0 x500", "-3600s"])
def test_clock_jumps_change_nothing(tmp_path: Path, tools: Any, when: str) -> None:
    tools("faketime")
    command = ["faketime", "-f", when if when[0] in "+-" else f"@{when}", sys.executable]
    messages: list[str] = []
    for _ in range(2):
        result = subprocess.run(
            [*command, "-m", "trace_store.testing.steps", str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
        )
        assert result.returncode == 0, result.stderr
        messages += result.stdout.splitlines()
    assert count(messages, "seal") == 6
    engine = Engine(tmp_path)
    assert broken_promises(engine, "p", messages) == []
    engine.close()


AGED = """
import sys
from pathlib import Path
from trace_store.engine import Engine
from trace_store.retention import Limits
from trace_store.testing.load import RUN, TABLE, check_rows
from trace_store.testing.records import make_chunk
engine = Engine(Path(sys.argv[1]), limits=Limits(age_s=86400.0, partitions_kept=int(sys.argv[3])))
engine.register(RUN, TABLE)
engine.append(RUN, sys.argv[2], make_chunk(RUN, sys.argv[2], TABLE, "t", 0, 8), "synced").result(60)
for _ in range(2):
    engine._keeper.tick()
engine.close()
engine = Engine(Path(sys.argv[1]))
print(*(name for name in ("first", "ahead", "again", "behind")
        if not check_rows(engine, name, "t", 0, 8, include_open=True)))
engine.close()
"""


def test_a_clock_that_is_wrong_at_start_releases_nothing(tmp_path: Path, tools: Any) -> None:
    """Retention by age and count, in lives on a right clock, one years ahead (twice), and one that begins in 1970."""
    tools("faketime")
    lives = [("first", []), ("ahead", ["+20y"]), ("again", ["+20y"]), ("behind", ["@1971-01-01 00:00:00"])]
    for number, (partition, clock) in enumerate(lives, 1):
        command = [*(["faketime", "-f", *clock] if clock else []), sys.executable, "-c", AGED]
        kept = "4" if number < 4 else "2"
        result = subprocess.run(
            [*command, str(tmp_path), partition, kept],
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            env={**os.environ, "NO_FAKE_STAT": "1"},
        )
        expected = [name for name, _ in lives[:number]][-int(kept) :]
        assert result.stdout.split() == expected, result.stderr


def mix_errors(tmp_path: Path, strace: Any, chance: random.Random, rounds: int) -> int:
    """Lives of a store under random write and sync errors; then what each acknowledged must be there.

    Returns how many appends and seals were acknowledged: with none, nothing was checked.
    """
    promises = 0
    for number in range(rounds):
        calls = chance.sample(("fdatasync", "writev", "fsync", "rename"), 2)
        # From the fifth call on: earlier, most lives end at their registration and acknowledge nothing to check.
        injections = [f"{call}:error=EIO:when={chance.randint(5, 12)}+{chance.randint(2, 5)}" for call in calls]
        result = strace(injections, "-m", "trace_store.testing.steps", tmp_path / str(number))
        try:
            engine = Engine(tmp_path / str(number))
        except TraceStoreError as error:
            raise AssertionError(f"a restart needs a hand: {error}") from error
        messages = result.stdout.splitlines()
        promises += count(messages, "append") + count(messages, "seal")
        assert broken_promises(engine, "p", messages) == [], injections
        engine.close()
    return promises


def test_a_random_mix_of_write_and_sync_errors(tmp_path: Path, strace: Any, chance: random.Random) -> None:
    assert mix_errors(tmp_path, strace, chance, rounds=4) > 0
