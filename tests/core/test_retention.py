"""Retention decisions: which partitions and segments go, in which order, and when writes are braked."""

from __future__ import annotations

import pytest

from trace_store.errors import InvalidRequest
from trace_store.retention import (
    Limits,
    PartitionFacts,
    SegmentFacts,
    append_delay,
    pressure,
    to_evict,
    to_release,
)

MIB = 1 << 20
NO_MARKS = {"free_min": 0, "free_low": 0}


def partitions(*rows: tuple[str, str, float, int], now: float = 1000.0) -> list[PartitionFacts[str]]:
    return [PartitionFacts(key, run, written, size, now - written) for key, run, written, size in rows]


def test_without_rules_nothing_goes() -> None:
    facts = partitions(("a", "r", 0.0, 1 << 40), ("b", "r", 1.0, 1 << 40))
    assert to_release(Limits(), facts, evictable=False) == []


def test_age_counts_from_the_last_write() -> None:
    facts = partitions(("new", "r", 950.0, 1), ("old", "r", 100.0, 1), ("older", "r", 50.0, 1))
    assert to_release(Limits(age_s=600), facts, evictable=True) == [("older", "age"), ("old", "age")]
    assert to_release(Limits(age_s=900), facts, evictable=True) == [("older", "age")]
    assert to_release(Limits(age_s=950), facts, evictable=True) == []


def test_the_newest_partitions_of_each_run_are_kept() -> None:
    facts = partitions(("a1", "a", 1, 1), ("b1", "b", 2, 1), ("a2", "a", 3, 1), ("a3", "a", 4, 1))
    assert to_release(Limits(partitions_kept=2), facts, evictable=False) == [("a1", "count")]
    assert to_release(Limits(partitions_kept=1), facts, evictable=False) == [("a1", "count"), ("a2", "count")]


def test_over_the_cap_the_oldest_go_until_there_is_room() -> None:
    limits = Limits(disk_bytes_max=100 * MIB)
    facts = partitions(*((f"p{i}", "r", float(i), 10 * MIB) for i in range(10)))
    assert to_release(limits, facts, evictable=False) == [("p0", "cap"), ("p1", "cap")]
    assert to_release(limits, facts[:9], evictable=False) == []  # 90 %: not over the start
    assert to_release(limits, facts, evictable=True) == []  # eviction keeps the cap


def test_the_cap_never_takes_the_newest_partition_of_a_run() -> None:
    limits = Limits(disk_bytes_max=20 * MIB)
    facts = partitions(("idle", "a", 1.0, 5 * MIB), ("old", "b", 2.0, 5 * MIB), ("current", "b", 3.0, 90 * MIB))
    assert to_release(limits, facts, evictable=False) == [("old", "cap")]


def test_the_cap_counts_what_other_rules_already_release() -> None:
    limits = Limits(disk_bytes_max=100 * MIB, partitions_kept=2)
    facts = partitions(("a", "r", 1.0, 50 * MIB), ("b", "r", 2.0, 40 * MIB), ("c", "r", 3.0, 40 * MIB))
    assert to_release(limits, facts, evictable=False) == [("a", "count")]


def test_eviction_takes_the_least_recently_read() -> None:
    limits = Limits(disk_bytes_max=100 * MIB, **NO_MARKS)
    segments = [SegmentFacts(i, float(read), 10 * MIB) for i, read in enumerate((5, 1, 9, 3))]
    used = 95 * MIB
    assert to_evict(limits, used, 1 << 40, 1 << 41, segments) == [1]
    assert to_evict(limits, used + 10 * MIB, 1 << 40, 1 << 41, segments) == [1, 3]
    assert to_evict(limits, 90 * MIB, 1 << 40, 1 << 41, segments) == []


def test_eviction_also_keeps_the_low_mark_of_free_disk() -> None:
    limits = Limits(free_min=10 * MIB, free_low=50 * MIB)
    segments = [SegmentFacts(i, float(i), 10 * MIB) for i in range(5)]
    assert to_evict(limits, 50 * MIB, 35 * MIB, 1 << 40, segments) == [0, 1]
    assert to_evict(limits, 50 * MIB, 60 * MIB, 1 << 40, segments) == []


@pytest.mark.parametrize(
    ("free", "state"), [(200, "ok"), (100, "ok"), (99, "slow"), (51, "slow"), (50, "full"), (0, "full")]
)
def test_free_disk_slows_then_refuses(free: int, state: str) -> None:
    value = pressure(Limits(free_min=50 * MIB, free_low=100 * MIB), 0, free * MIB, 1 << 40)
    assert state == ("full" if value >= 1 else "slow" if value > 0 else "ok")


@pytest.mark.parametrize(("used", "state"), [(94, "ok"), (95, "ok"), (96, "slow"), (99, "slow"), (100, "full")])
def test_the_cap_slows_then_refuses(used: int, state: str) -> None:
    value = pressure(Limits(disk_bytes_max=100 * MIB, **NO_MARKS), used * MIB, 1 << 40, 1 << 41)
    assert state == ("full" if value >= 1 else "slow" if value > 0 else "ok")


def test_default_marks_fit_small_and_large_disks() -> None:
    assert Limits().free_marks(8 * MIB) == (167_772, 419_430)
    assert Limits().free_marks(1 << 42) == (1 << 30, 4 << 30)


def test_an_append_waits_longer_the_fuller_the_disk() -> None:
    assert append_delay(0.0, MIB) == 0
    assert 0 < append_delay(0.5, MIB) < append_delay(1.0, MIB) == 1 / 32


@pytest.mark.parametrize(
    "bad",
    [
        {"age_s": 1.0},
        {"age_s": float("nan")},
        {"partitions_kept": 0},
        {"disk_bytes_max": 1},
        {"free_min": 2, "free_low": 1},
        {"free_min": -1, "free_low": 1},
    ],
)
def test_settings_out_of_bounds_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest):
        Limits(**bad)  # type: ignore[arg-type]
