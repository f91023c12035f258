"""Count the rows of sealed attempts: one with fewer than its seal says has lost the rest, with a segment or out of one.

The catalog decides, as it does for a server: what an attempt is, in which order segments count, and what was released.
Partitions come one after another, so that one at a time is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trace_store.attempt import Segment
from trace_store.catalog import Partition, Run
from trace_store.segment.index import SegmentIndex
from trace_store.segment.schema import SegmentHeader


@dataclass(frozen=True)
class Shortage:
    """A sealed attempt without all its rows; token rows over all sites."""

    run: str
    partition: str
    trajectory: str
    attempt: int
    missing: int
    sealed: int


class Tally:
    """Segments of one partition."""

    def __init__(self) -> None:
        self._partition: Partition | None = None
        self._names: set[str] = set()

    def add(self, path: str, header: SegmentHeader, index: SegmentIndex) -> bool:
        """Enter a segment; False if it has another run, site table or partition than the ones before."""
        if self._partition is None:
            self._partition = Partition(Run(header.run, header.sites, Path()), header.partition, Path())
        partition, run = self._partition, self._partition.run
        if (run.name, run.sites, partition.name) != (header.run, header.sites, header.partition):
            return False
        if Path(path).stem not in self._names:  # after a crash both names may be there: the sealed one comes first
            self._names.add(Path(path).stem)
            number = len(self._names)
            partition.segments[number] = Segment(
                number, Path(path), index, entered_rows=len(index), version=header.version
            )
        return True

    def shortages(self) -> Iterator[Shortage]:
        """Sealed attempts that lack rows, by trajectory."""
        partition = self._partition
        if partition is None:
            return
        partition.rebuild()
        for name, entry in sorted(partition.trajectories.items()):
            attempt = entry.sealed
            if attempt is not None and attempt.damaged:
                held, sealed = attempt.rows(), attempt.sealed_rows
                yield Shortage(partition.run.name, partition.name, name, attempt.number, sealed - held, sealed)
