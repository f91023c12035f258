"""kill -9 at random moments under load, and at every boundary of writing, sealing, releasing and recovering."""

from __future__ import annotations

import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trace_store.engine import Engine
from trace_store.testing.load import broken_promises, count
from trace_store.testing.steps import AFTER, BEFORE, PART, Kill, run_open, run_steps

KILLS = 8
EVERY_BOUNDARY = 7


def kill_at_random_moments(
    root: Path, start_load: Callable[..., Any], chance: random.Random, kills: int
) -> Counter[str]:
    """Each round loads a partition of its own, kills, opens and checks; the last three partitions are kept."""
    totals: Counter[str] = Counter()
    for number in range(kills):
        load = start_load(root, f"p{number}", number)
        if number % 4:  # on a slow machine too there is something to check
            load.run_until(append=4, seal=1)
        load.run_for(chance.uniform(0.0, 0.5))
        messages = load.kill()
        engine = Engine(root)
        try:
            broken = broken_promises(engine, f"p{number}", messages)
            assert not broken, (number, len(broken), broken[:5])
            assert count(messages, "failed") == 0
            if number >= 3:
                engine.release("load", f"p{number - 3}").result(60)
        finally:
            engine.close()
        totals += Counter(message.split()[0] for message in messages)
    return totals


def boundaries(calls: list[str]) -> list[Kill]:
    """Every place to die in a life with these calls."""
    return [
        Kill(number, where)
        for number, call in enumerate(calls)
        for where in ((BEFORE, PART, AFTER) if call == "writev" else (BEFORE, AFTER))
    ]


def calls_of(messages: list[str]) -> list[str]:
    return messages[-1].split()[1:]


def check(root: Path, messages: list[str], where: object) -> None:
    engine = Engine(root)
    try:
        broken = broken_promises(engine, "p", messages)
        assert not broken, (where, len(broken), broken[:5])
        if "ready" in messages:
            assert engine.sites("load"), where
    finally:
        engine.close()
    shutil.rmtree(root)


def die_and_check(spawn: Callable[..., Any], root: Path, kill: Kill) -> None:
    child = spawn(run_steps, root, kill)
    messages = child.finish()
    assert child.process.exitcode == -signal.SIGKILL, kill
    check(root, messages, kill)


def die_recovering_and_check(spawn: Callable[..., Any], root: Path, kill: Kill, every: int) -> int:
    """Die, then die at the boundaries of the recovery from that, each from the same state. Number of kills."""
    messages = spawn(run_steps, root, kill).finish()
    root.mkdir(parents=True, exist_ok=True)  # the kill may have come before the first mkdir
    probe = root.with_name("probe")
    shutil.copytree(root, probe)
    found = boundaries(calls_of(spawn(run_open, probe, Kill()).finish()))
    shutil.rmtree(probe)
    for again in found[::every]:
        shutil.copytree(root, probe)
        child = spawn(run_open, probe, again)
        child.finish()
        assert child.process.exitcode == -signal.SIGKILL, (kill, again)
        check(probe, messages, (kill, again))
    shutil.rmtree(root)
    return len(found[::every])


def test_acknowledged_rows_survive_a_kill_at_a_random_moment(
    tmp_path: Path, start_load: Any, chance: random.Random
) -> None:
    totals = kill_at_random_moments(tmp_path / "data", start_load, chance, KILLS)
    assert totals["append"] > 20
    assert totals["seal"] > 5


def test_fr26_acknowledged_rows_survive_a_kill_at_a_boundary(tmp_path: Path, spawn: Any) -> None:
    calls = calls_of(spawn(run_steps, tmp_path / "data", Kill()).finish())
    assert {"open", "writev", "fdatasync", "fsync", "rename", "mkdir"} <= set(calls)
    for kill in boundaries(calls)[3::EVERY_BOUNDARY]:
        die_and_check(spawn, tmp_path / "again", kill)


@pytest.mark.parametrize(("call", "nth", "where"), [("writev", -3, PART), ("rename", -1, BEFORE)])
def test_fr26_a_recovery_that_is_killed_is_done_again(
    tmp_path: Path, spawn: Any, call: str, nth: int, where: str
) -> None:
    calls = calls_of(spawn(run_steps, tmp_path / "data", Kill()).finish())
    number = [position for position, name in enumerate(calls) if name == call][nth]
    assert die_recovering_and_check(spawn, tmp_path / "again", Kill(number, where), every=3) >= 2
