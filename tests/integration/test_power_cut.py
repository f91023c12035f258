"""Power cuts on real file systems: synced rows are there, written ones may lose their tail, nothing is wrong.

Only what was acknowledged before the cut began is a promise: while the kernel carries it out, its own fdatasync can
return 0 for bytes that are then gone. A bare write-and-fdatasync loop showed that (Linux 6.18, 3 of 10 such answers on
ext4, 1 of 10 on XFS, none of those before the cut); with real power nobody would have heard them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from trace_store.engine import Engine
from trace_store.testing.load import broken_promises

CUTS = 2


def cut_and_check(disk: Any, start_load: Callable[..., Any], chance: random.Random, cuts: int) -> Counter[str]:
    """Load, cut the power under it, mount again, check what was promised as synced. Totals of messages."""
    totals: Counter[str] = Counter()
    root = disk.path / "data"
    for number in range(cuts):
        load = start_load(root, f"p{number}", number)
        if number % 4 < 2:  # on a slow machine too there is something to check
            load.run_until(append=3, seal=1)
        load.run_for(chance.uniform(0.05, 0.6))
        load.drain()
        promised = list(load.messages)
        disk.cut_power()
        messages = load.kill()
        disk.unmount()
        disk.mount()
        engine = Engine(root)
        try:
            wrong = [message for message in messages[len(promised) :] if message.startswith("wrong")]
            broken = broken_promises(engine, f"p{number}", [*promised, *wrong], ("synced",))
            assert not broken, (number, len(broken), broken[:5])
            engine.release("load", f"p{number}").result(60)
        finally:
            engine.close()
        totals += Counter(message.split()[0] for message in promised)
    return totals


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_fr26_synced_rows_survive_a_power_cut(
    kind: str, make_disk: Any, start_load: Any, chance: random.Random
) -> None:
    totals = cut_and_check(make_disk(kind, 340), start_load, chance, CUTS)
    assert totals["append"] > 5
    assert totals["seal"] > 1
