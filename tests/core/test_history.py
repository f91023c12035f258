"""What rows of several epochs add up to: the rules of FORMAT.md section 5, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from trace_store import Site
from trace_store.attempt import Attempt, Segment
from trace_store.catalog import Partition, Run
from trace_store.checksum import RowKind
from trace_store.history import known_rows, release_rows
from trace_store.segment.schema import SegmentHeader
from trace_store.segment.writer import ControlRow, SegmentWriter
from trace_store.testing.records import make_chunk

TABLE = (Site(0, "k", 64),)

Step = tuple[str, int, int] | ControlRow
"""A record (trajectory, start, stop), or a control row."""


def seal(name: str, rows: int, attempt: int = 0) -> ControlRow:
    return (RowKind.SEAL, name, attempt, 0, rows + 1, rows)


def known(epoch: str, start: int, stop: int) -> ControlRow:
    return (RowKind.KNOWN, epoch, 0, start, stop, 0)


def release(name: str) -> ControlRow:
    return (RowKind.RELEASE, name, 0, 0, 0, 0)


class Writers:
    """Segments by name, and the partition that loads them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.partition = Partition(Run("run", TABLE, root), "p", root)
        self._names: dict[int, str] = {}

    def segment(self, name: str, *steps: Step, version: str = "2", attempt: int = 0) -> Segment:
        header = SegmentHeader("run", "p", TABLE, "s", int(name[:10]), version)
        writer = SegmentWriter(self._root, name, header)
        for step in steps:
            if isinstance(step[0], RowKind):
                writer.append_controls([step])  # type: ignore[list-item]
            else:
                writer.append_chunk(make_chunk("run", "p", TABLE, step[0], step[1], step[2], attempt=attempt))  # type: ignore[arg-type]
        writer.close()
        number = len(self._names)
        self._names[number] = name
        return Segment(number, writer.path, writer.index, version=version)

    def load(self, *segments: Segment) -> dict[str, Any]:
        """Spans of each trajectory's visible attempt, by segment; "open" where it has none."""
        for segment in segments:
            self.partition.load(segment)
        return {
            name: self._spans(entry.sealed) if entry.sealed is not None else "open"
            for name, entry in self.partition.trajectories.items()
        }

    def _spans(self, attempt: Attempt) -> list[tuple[str, int, int]]:
        return [(self._names[h.segment], h.start, h.stop) for h in attempt.overlapping(0, attempt.stop_max)]


@pytest.fixture
def writers(tmp_path: Path) -> Writers:
    return Writers(tmp_path)


A0, A1, B0, B1, B2 = "0000000000-aa", "0000000001-aa", "0000000000-bb", "0000000001-bb", "0000000002-bb"


def orders(segments: Sequence[Segment]) -> list[list[Segment]]:
    return [list(segments), list(reversed(segments))]


@pytest.mark.parametrize("turned", [False, True], ids=["in order", "reversed"])
class TestInEitherOrderOfArrival:
    def test_a_seal_takes_the_rows_that_it_knew(self, writers: Writers, turned: bool) -> None:
        made = [
            writers.segment(A0, ("t", 0, 4)),
            writers.segment(B0, ("t", 4, 8), known("aa", 0, 1), seal("t", 8)),
        ]
        assert writers.load(*orders(made)[turned]) == {"t": [(A0, 0, 4), (B0, 4, 8)]}

    def test_and_no_others(self, writers: Writers, turned: bool) -> None:
        made = [writers.segment(A0, ("t", 0, 4)), writers.segment(B0, ("t", 0, 8), seal("t", 8))]
        assert writers.load(*orders(made)[turned]) == {"t": [(B0, 0, 8)]}

    def test_rows_stored_after_a_seal_count_if_their_writer_knew_it(self, writers: Writers, turned: bool) -> None:
        made = [
            writers.segment(A0, ("t", 0, 4), seal("t", 8)),  # four of its eight rows are lost
            writers.segment(B1, known("aa", 0, 1), ("t", 4, 8)),
            writers.segment(B2[:-2] + "cc", ("t", 5, 6)),
        ]
        assert writers.load(*orders(made)[turned]) == {"t": [(A0, 0, 4), (B1, 4, 8)]}
        assert not writers.partition.trajectories["t"].sealed.damaged  # type: ignore[union-attr]

    def test_a_release_removes_what_it_knew(self, writers: Writers, turned: bool) -> None:
        made = [
            writers.segment(A0, ("t", 0, 4), seal("t", 4)),
            writers.segment(B1, known("aa", 0, 1), release("t")),
        ]
        assert writers.load(*orders(made)[turned]) == {}
        assert writers.partition.released == {"t"}

    def test_and_nothing_else(self, writers: Writers, turned: bool) -> None:
        made = [
            writers.segment(A0, ("t", 0, 4), seal("t", 4)),
            writers.segment(A1, release("t"), ("t", 0, 2), seal("t", 2)),
            writers.segment(B1, known("aa", 0, 1), release("t")),
        ]
        assert writers.load(*orders(made)[turned]) == {"t": [(A1, 0, 2)]}
        assert writers.partition.released == set()

    def test_a_release_of_the_partition_removes_all_that_it_knew(self, writers: Writers, turned: bool) -> None:
        made = [
            writers.segment(A0, ("t", 0, 8), seal("t", 8), ("gone", 0, 1)),
            writers.segment(B0, ("u", 0, 1), seal("u", 1)),
            writers.segment(B1[:-2] + "cc", *release_rows([A0]), ("t", 0, 4), seal("t", 4)),
        ]
        assert writers.load(*orders(made)[turned]) == {"t": [(B1[:-2] + "cc", 0, 4)], "u": [(B0, 0, 1)]}

    def test_of_two_seals_that_with_more_rows_counts(self, writers: Writers, turned: bool) -> None:
        made = [
            writers.segment(A0, ("t", 0, 8), seal("t", 8)),
            writers.segment(B0, ("t", 0, 4), seal("t", 8)),
        ]
        assert writers.load(*orders(made)[turned]) == {"t": [(A0, 0, 8)]}

    def test_the_last_of_two_whole_ones(self, writers: Writers, turned: bool) -> None:
        made = [
            writers.segment(A0, ("t", 0, 8), seal("t", 8)),
            writers.segment(B0, ("t", 0, 5), ("t", 5, 8), seal("t", 8)),
        ]
        assert writers.load(*orders(made)[turned]) == {"t": [(B0, 0, 5), (B0, 5, 8)]}

    def test_a_newer_open_attempt_hides_no_sealed_one(self, writers: Writers, turned: bool) -> None:
        made = [
            writers.segment(A0, ("t", 0, 4), attempt=3),
            writers.segment(B0, ("t", 0, 8), seal("t", 8)),
        ]
        assert writers.load(*orders(made)[turned]) == {"t": [(B0, 0, 8)]}
        newest = writers.partition.trajectories["t"].newest
        assert newest is not None
        assert newest.number == 3

    def test_in_version_1_a_row_knew_all_lower_names(self, writers: Writers, turned: bool) -> None:
        made = [
            writers.segment(A0, ("t", 0, 4), ("gone", 0, 1), version="1"),
            writers.segment(B1, ("t", 4, 8), seal("t", 8), release("gone"), version="1"),
        ]
        assert writers.load(*orders(made)[turned]) == {"t": [(A0, 0, 4), (B1, 4, 8)]}


def test_a_known_row_covers_neighbours_only(writers: Writers) -> None:
    segments = [writers.segment(name) for name in (A0, A1, "0000000003-aa", B2)]
    stems = [segment.path.stem for segment in segments]
    told, rows = known_rows(stems, set())
    assert rows == [known("aa", 0, 2), known("aa", 3, 4), known("bb", 2, 3)]
    assert known_rows(stems, told) == (told, [])
    assert known_rows(stems, told - {B2})[1] == [known("bb", 2, 3)]


def test_a_known_row_says_nothing_of_rows_in_front_of_it(writers: Writers) -> None:
    made = [
        writers.segment(A0, ("t", 0, 4)),
        writers.segment(B0, ("t", 4, 8), seal("t", 4), known("aa", 0, 1)),
    ]
    assert writers.load(*made) == {"t": [(B0, 4, 8)]}
