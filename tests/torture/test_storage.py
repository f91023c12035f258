"""Issue's numbers: 500 kills, every boundary, 50 power cuts a file system, 10,000 flips, a long stateful run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

KILLS, SERVER_KILLS, CUTS, FLIPS = 500, 40, 50, 10_000
STATEFUL_EXAMPLES, STATEFUL_STEPS = 400, 50


def test_kills_at_random_moments(tmp_path: Path, module: Any, start_load: Any, report: Any) -> None:
    kill = module("integration/test_kill.py")
    totals = kill.kill_at_random_moments(tmp_path / "data", start_load, random.Random(1), KILLS)
    report(f"kills at random moments={KILLS} acknowledged appends={totals['append']} seals={totals['seal']} broken=0")


def test_kills_at_every_boundary(tmp_path: Path, module: Any, spawn: Any, report: Any) -> None:
    kill = module("integration/test_kill.py")
    calls = kill.calls_of(spawn(kill.run_steps, tmp_path / "data", kill.Kill()).finish())
    places = kill.boundaries(calls)
    for place in places:
        kill.die_and_check(spawn, tmp_path / "again", place)
    report(f"kills at boundaries={len(places)} calls={len(calls)} broken=0")


def test_kills_at_every_boundary_of_recovery(tmp_path: Path, module: Any, spawn: Any, report: Any) -> None:
    kill = module("integration/test_kill.py")
    calls = kill.calls_of(spawn(kill.run_steps, tmp_path / "data", kill.Kill()).finish())
    kills = sum(
        kill.die_recovering_and_check(spawn, tmp_path / "again", place, every=2)
        for place in kill.boundaries(calls)[::4]
    )
    report(f"kills inside recovery={kills} broken=0")


def test_kills_of_a_server_under_clients(
    module: Any, new_server: Any, report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trace_client.writer.RESUME_TIMEOUT_S", 0.2)
    held = module("integration/test_server_kill.py").kill_under_clients(new_server(), random.Random(6), SERVER_KILLS)
    report(f"kills of a server under three clients={SERVER_KILLS} receipts held={held} broken=0")


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_power_cuts(kind: str, module: Any, make_disk: Any, start_load: Any, report: Any) -> None:
    cut = module("integration/test_power_cut.py")
    totals = cut.cut_and_check(make_disk(kind, 340), start_load, random.Random(2), CUTS)
    report(f"power cuts on {kind}={CUTS} acknowledged appends={totals['append']} seals={totals['seal']} broken=0")


def test_bit_flips(tmp_path: Path, module: Any, report: Any) -> None:
    flips = module("integration/test_bit_flips.py")
    flips.fill(tmp_path / "pristine")
    stopped = flips.flip_before_start(tmp_path / "pristine", tmp_path / "work", random.Random(3), FLIPS // 2)
    running = flips.flip_while_open(tmp_path / "pristine", random.Random(4), FLIPS // 2)
    report(f"bits flipped={FLIPS} served as good=0 stopped store={dict(stopped)} running store={dict(running)}")


def test_stateful(module: Any, report: Any) -> None:
    machine = module("core/test_stateful.py").EngineMachine
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=STATEFUL_EXAMPLES,
            stateful_step_count=STATEFUL_STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )
    report(f"stateful examples={STATEFUL_EXAMPLES} steps={STATEFUL_STEPS} differences=0")


def test_random_mixes_of_errors(tmp_path: Path, module: Any, strace: Any, report: Any) -> None:
    disk = module("integration/test_disk.py")
    promises = disk.mix_errors(tmp_path, strace, random.Random(5), rounds=60)
    assert promises > 0
    report(f"runs under random write and sync errors=60 acknowledged={promises} broken=0")
