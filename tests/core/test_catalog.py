"""The catalog's arithmetic, and that indexes alone bring back what was there."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_store import Site
from trace_store.attempt import Attempt, Segment, Trajectory
from trace_store.catalog import Partition, Run, holes
from trace_store.checksum import RowKind
from trace_store.intervals import covered, gaps
from trace_store.segment.schema import SegmentHeader
from trace_store.segment.writer import SegmentWriter
from trace_store.testing.records import make_chunk

TABLE = (Site(0, "k", 64), Site(0, "moe_in", 64))
SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)).map(lambda s: (s[0], s[0] + s[1])), max_size=6)


@given(SPANS, st.integers(0, 20), st.integers(0, 20))
@settings(max_examples=200, deadline=None)
def test_gaps_are_what_no_span_covers(spans: list[tuple[int, int]], start: int, length: int) -> None:
    stop = start + length
    held = {token for low, high in spans for token in range(low, high)}
    missing = [token for low, high in gaps(spans, start, stop) for token in range(low, high)]
    assert missing == [token for token in range(start, stop) if token not in held]
    assert {token for low, high in covered(spans) for token in range(low, high)} == held


def partition(tmp_path: Path) -> Partition:
    return Partition(Run("run", TABLE, tmp_path), "p", tmp_path)


def write(tmp_path: Path, sequence: int = 0) -> SegmentWriter:
    return SegmentWriter(tmp_path, str(sequence), SegmentHeader("run", "p", TABLE, "s", sequence))


def test_holes_expect_k_from_token_0_and_moe_from_the_first_generated_one(tmp_path: Path) -> None:
    found = partition(tmp_path)
    attempt = Attempt(0, found.run.site_sets)
    attempt.add(1, 0, 2, 4, found.run.site_set((0, 1)))
    assert holes(attempt, found.run, 6, 2) == [(0, 0, 2), (0, 4, 5), (1, 4, 5)]
    assert holes(None, found.run, 2, 1) == [(0, 0, 1)]
    assert holes(None, found.run, 1, 0) == []


def test_overlapping_finds_groups_in_any_order(tmp_path: Path) -> None:
    found = partition(tmp_path)
    attempt = Attempt(0, found.run.site_sets)
    for row, (start, stop) in enumerate([(8, 12), (0, 4), (4, 8)]):
        attempt.add(1, row, start, stop, found.run.site_set((row % 2,)))
    assert [(h.start, h.stop, h.sites) for h in attempt.overlapping(3, 9)] == [
        (8, 12, (0,)),
        (0, 4, (1,)),
        (4, 8, (0,)),
    ]
    assert list(attempt.overlapping(12, 90)) == []
    assert attempt.rows() == 12


def test_rows_of_two_appends_over_one_span_become_one_group_on_reload(tmp_path: Path) -> None:
    writer = write(tmp_path)
    for site in (1, 0):
        writer.append_chunk(make_chunk("run", "p", TABLE, "t", 0, 4, sites=[site]))
    found = partition(tmp_path)
    found.load(Segment(1, writer.path, writer.index))
    attempt = found.trajectories["t"].open
    assert attempt is not None
    assert [(h.first_row, h.start, h.stop, h.sites) for h in attempt.overlapping(0, 1)] == [(0, 0, 4, (1, 0))]
    writer.close()


def test_reloading_in_order_gives_what_was_there(tmp_path: Path) -> None:
    first, second = write(tmp_path), write(tmp_path, 1)
    first.append_chunk(make_chunk("run", "p", TABLE, "t", 0, 4))
    first.append_controls([(RowKind.SEAL, "t", 0, 1, 5, 8)])
    first.append_chunk(make_chunk("run", "p", TABLE, "t", 0, 2, attempt=1))
    first.append_chunk(make_chunk("run", "p", TABLE, "gone", 0, 2))
    second.append_controls([(RowKind.RELEASE, "gone", 0, 0, 0, 0)])
    second.append_chunk(make_chunk("run", "p", TABLE, "back", 0, 2))
    found = partition(tmp_path)
    found.load(*(Segment(number, writer.path, writer.index) for number, writer in enumerate((first, second))))
    entry = found.trajectories["t"]
    assert entry.newest is not None
    assert (entry.newest.number, entry.pending) == (1, ())
    assert entry.sealed is not None
    assert (entry.sealed.number, entry.sealed.sealed, entry.sealed.damaged) == (0, (5, 1), False)
    assert found.released == {"gone"}
    assert set(found.trajectories) == {"t", "back"}


def test_a_rebuild_does_not_show_what_was_not_visible(tmp_path: Path) -> None:
    writer = write(tmp_path)
    found = partition(tmp_path)
    for attempt, name in enumerate("aab"):
        writer.append_chunk(make_chunk("run", "p", TABLE, name, 0, 4, attempt=attempt))
        writer.append_controls([(RowKind.SEAL, name, attempt, 0, 5, 8)])
    segment = found.segments[0] = Segment(0, writer.path, writer.index)
    found.apply(segment, 0, found.changes)
    found.publish("a", 0)
    found.rebuild()

    def visible(entry: Trajectory) -> int | None:
        return entry.sealed.number if entry.sealed else None

    assert [visible(found.trajectories[name]) for name in "ab"] == [0, None]
    found.publish("a", 1)
    found.publish("b", 2)
    assert [visible(found.trajectories[name]) for name in "ab"] == [1, 2]
    writer.close()


def test_a_rebuild_between_a_write_and_its_entry_does_not_enter_the_rows_twice(tmp_path: Path) -> None:
    """Another thread may rebuild while the writer has written rows and waits for the lock to enter them."""
    writer = write(tmp_path)
    found = partition(tmp_path)
    segment = Segment(0, writer.path, writer.index)
    writer.append_chunk(make_chunk("run", "p", TABLE, "t", 0, 4))
    found.load(segment)
    writer.append_chunk(make_chunk("run", "p", TABLE, "t", 4, 8))
    found.rebuild()
    assert found.trajectories["t"].open is not None
    assert found.trajectories["t"].open.rows() == 8
    found.apply(segment, 2, found.changes)
    assert found.trajectories["t"].open.rows() == 16
    found.rebuild()
    assert found.trajectories["t"].open.rows() == 16
    writer.close()


@pytest.mark.parametrize("rows", [7, 8, 9])
def test_an_attempt_with_fewer_rows_than_its_seal_says_is_damaged(tmp_path: Path, rows: int) -> None:
    found = partition(tmp_path)
    attempt = Attempt(0, found.run.site_sets)
    attempt.add(1, 0, 0, 4, found.run.site_set((0, 1)))
    assert not attempt.damaged
    attempt.sealed, attempt.sealed_rows = (5, 0), rows
    assert attempt.damaged == (rows > 8)


ROWS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5), st.sets(st.integers(0, 3), min_size=1)), max_size=6)


@given(ROWS)
@settings(max_examples=200, deadline=None)
def test_a_row_that_is_held_twice_counts_once(groups: list[tuple[int, int, set[int]]]) -> None:
    run = Run("run", TABLE, Path())
    attempt = Attempt(0, run.site_sets)
    for start, length, sites in groups:
        attempt.add(1, 0, start, start + length, run.site_set(tuple(sorted(sites))))
    held = {(site, token) for start, n, sites in groups for site in sites for token in range(start, start + n)}
    assert attempt.rows() == len(held)
