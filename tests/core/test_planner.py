"""A plan covers every requested row exactly once: as a piece or as missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from trace_store import Site, TokenSpan
from trace_store.catalog import Partition, Run
from trace_store.planner import ALL_SITES, Missing, MissingReason, ReadPlan, plan_read

TABLE = tuple(Site(layer, "moe_in", 16) for layer in range(3))
GROUPS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6), st.sets(st.integers(0, 2), min_size=1)), max_size=6)


def missing_of(plan: ReadPlan, sites: Sequence[int]) -> list[Missing]:
    """What a plan did not find, a site each."""
    each = [replace(item, site=site) for item in plan.absent for site in sites]
    assert all(item.site == ALL_SITES for item in plan.absent)
    return [*plan.missing, *each]


def make_partition(groups: list[tuple[int, int, set[int]]]) -> tuple[Partition, dict[tuple[int, int], int]]:
    """A partition whose groups overlap nowhere, and the group of each (site, token)."""
    run = Run("run", TABLE, Path())
    partition = Partition(run, "p", Path())
    owner: dict[tuple[int, int], int] = {}
    row = 0
    for number, (start, length, sites) in enumerate(groups):
        rows = {(site, token) for site in sites for token in range(start, start + length)}
        if rows & set(owner):
            continue
        owner |= dict.fromkeys(rows, number)
        partition.attempt("t", 0).add(number, row, start, start + length, run.site_set(tuple(sorted(sites))))
        row += len(sites)
    return partition, owner


@given(GROUPS, st.lists(st.tuples(st.integers(0, 24), st.integers(1, 10)), min_size=1, max_size=3))
@settings(max_examples=150, deadline=None)
def test_every_row_is_planned_once(groups: list[tuple[int, int, set[int]]], wanted: list[tuple[int, int]]) -> None:
    partition, owner = make_partition(groups)
    spans = [TokenSpan("t", start, start + length, 100 * n) for n, (start, length) in enumerate(wanted)]
    plan = plan_read(partition, spans, [2, 0], include_open=True, policy_version_min=0)
    seen: dict[tuple[int, int, int], int | None] = {}
    for segment, site, rows, dest, number in zip(
        plan.segment, plan.site, plan.rows, plan.dest_row, plan.span, strict=True
    ):
        span = spans[int(number)]
        for offset in range(int(rows)):
            key = (int(number), int(site), span.start + int(dest) - span.dest_row + offset)
            assert key not in seen
            seen[key] = int(segment)
    for gap in missing_of(plan, (2, 0)):
        expected = MissingReason.NOT_RECORDED if partition.trajectories else MissingReason.UNKNOWN_TRAJECTORY
        assert gap.reason == expected
        for token in range(gap.start, gap.stop):
            assert (gap.span, gap.site, token) not in seen
            seen[(gap.span, gap.site, token)] = None
    assert seen == {
        (number, site, token): owner.get((site, token))
        for number, span in enumerate(spans)
        for site in (2, 0)
        for token in range(span.start, span.stop)
    }


@given(GROUPS, st.integers(0, 10), st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_a_row_that_is_held_twice_is_planned_once_and_every_other_copy_is_kept_in_reserve(
    groups: list[tuple[int, int, set[int]]], first: int, length: int
) -> None:
    run = Run("run", TABLE, Path())
    partition = Partition(run, "p", Path())
    holders: dict[tuple[int, int], list[int]] = {}
    for number, (start, tokens, sites) in enumerate(groups):
        partition.attempt("t", 0).add(number, 100, start, start + tokens, run.site_set(tuple(sorted(sites))))
        for key in ((site, token) for site in sites for token in range(start, start + tokens)):
            holders.setdefault(key, []).insert(0, number)
    span = TokenSpan("t", first, first + length, 50)
    plan = plan_read(partition, [span], [2, 0], include_open=True, policy_version_min=0)
    found: dict[tuple[int, int], list[int]] = {}
    for part in (plan, plan.doubles):
        pieces = (
            zip(part.segment, part.row, part.site, part.skip, part.rows, part.dest_row, strict=True) if part else ()
        )
        for segment, row, site, skip, rows, dest in ([int(value) for value in piece] for piece in pieces):
            start, _, sites = groups[segment]
            assert sorted(sites)[row - 100] == site
            assert start + skip == first + dest - 50
            for token in range(start + skip, start + skip + rows):
                found.setdefault((site, token), []).append(segment)
        if part is plan:
            assert all(len(segments) == 1 for segments in found.values())
    wanted = {(site, token) for site in (2, 0) for token in range(first, first + length)}
    assert found == {key: segments for key, segments in holders.items() if key in wanted}
    gaps = {(gap.site, token) for gap in missing_of(plan, (2, 0)) for token in range(gap.start, gap.stop)}
    assert gaps == wanted - holders.keys()


def test_nothing_is_known_of_an_unknown_partition() -> None:
    plan = plan_read(None, [TokenSpan("t", 0, 3)], [0, 1], include_open=True, policy_version_min=0)
    assert [(gap.site, gap.start, gap.stop) for gap in plan.absent] == [(ALL_SITES, 0, 3)]
