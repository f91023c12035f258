"""Count the rows of sealed attempts: one with fewer than its seal says has lost the rest, with a segment or out of one.
Compare rows that are held more than once: a damaged record may have been stored again, and copies must not differ.

The catalog decides, as it does for a server: what an attempt is, in which order segments count, and what was released.
Partitions come one after another, so that one at a time is in memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trace_store.attempt import Attempt, Segment
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


@dataclass(frozen=True)
class Difference:
    """Rows of one attempt of which two copies are stored that are not the same."""

    run: str
    partition: str
    trajectory: str
    attempt: int
    site: str
    start: int
    stop: int


class Tally:
    """Segments of one partition."""

    def __init__(self) -> None:
        self._partition: Partition | None = None
        self._numbers: dict[str, int] = {}
        self._damaged: set[tuple[int, int]] = set()

    def add(self, path: str, header: SegmentHeader, index: SegmentIndex, damaged: Collection[int] = ()) -> bool:
        """Enter a segment; False if it has another run, site table or partition than the ones before.

        Args:
            damaged: index rows whose bytes are not what their checksums say.
        """
        if self._partition is None:
            self._partition = Partition(Run(header.run, header.sites, Path()), header.partition, Path())
        partition, run = self._partition, self._partition.run
        if (run.name, run.sites, partition.name) != (header.run, header.sites, header.partition):
            return False
        stem = Path(path).stem
        if stem not in self._numbers:  # after a crash both names may be there: the sealed one comes first
            number = self._numbers[stem] = len(self._numbers) + 1
            self._damaged.update((number, row) for row in damaged)
            partition.segments[number] = Segment(
                number, Path(path), index, entered_rows=len(index), version=header.version
            )
        return True

    def count(self) -> None:
        """Put together what was entered; before the questions below."""
        if self._partition is not None:
            self._partition.rebuild()

    def is_held_again(self, path: str, row: int) -> bool:
        """Whether the same record as a damaged one is stored whole elsewhere, and its attempt has both."""
        partition, number = self._partition, self._numbers.get(Path(path).stem)
        if partition is None or number is None:
            return False
        place = (number, row)
        index = partition.segments[place[0]].index
        record = index.rows[row]
        start, stop, site = int(record["start"]), int(record["stop"]), int(record["site"])
        entry = partition.trajectories.get(index.trajectories[int(record["trajectory"])])
        attempt = entry.find(int(record["attempt"])) if entry is not None else None
        copies = list(_copies(attempt, start, stop, site)) if attempt is not None else []
        good = [copy for copy in copies if copy not in self._damaged]
        return place in copies and any(self._key(copy) == self._key(place) for copy in good)

    def _key(self, place: tuple[int, int]) -> tuple[int, int, int]:
        """What tells the rows of a record, of all that have the same span."""
        assert self._partition is not None
        row = self._partition.segments[place[0]].index.rows[place[1]]
        return int(row["policy_version"]), int(row["tensor_bytes"]), int(row["checksum"])

    def differences(self) -> Iterator[Difference]:
        """Records of one attempt with the same span, policy version and kind of scales, and other bytes."""
        partition = self._partition
        if partition is None:
            return
        for name, entry in sorted(partition.trajectories.items()):
            for attempt in filter(None, (entry.sealed, *entry.pending, entry.open)):
                for site, start, stop in self._differing(partition.run, attempt):
                    site_name = partition.run.sites[site].name
                    yield Difference(partition.run.name, partition.name, name, attempt.number, site_name, start, stop)

    def _differing(self, run: Run, attempt: Attempt) -> Iterator[tuple[int, int, int]]:
        """Site and span of records that differ from another one of theirs."""
        columns = attempt.columns()
        spans = columns[:, 2].astype(np.uint64) << np.uint64(32) | columns[:, 3]
        order = np.argsort(spans, kind="stable")
        starts = np.flatnonzero(np.diff(spans[order], prepend=~spans[order[:1]]))
        for same in np.split(columns[order], starts[1:]):
            sets = [run.site_sets[number] for number in same[:, 4].tolist()]
            if len(same) == 1 or len(set().union(*sets)) == sum(map(len, sets)):
                continue  # hosts that write disjoint sites share none
            found: dict[tuple[int, int, int], set[int]] = defaultdict(set)
            for (number, first, _, _, _), sites in zip(same.tolist(), sets, strict=True):
                for row, site in enumerate(sites, first):
                    version, size, checksum = self._key((number, row))
                    found[(site, version, size)].add(checksum)
            for site in sorted({key[0] for key, checksums in found.items() if len(checksums) > 1}):
                yield site, int(same[0, 2]), int(same[0, 3])

    def shortages(self) -> Iterator[Shortage]:
        """Sealed attempts that lack rows, by trajectory."""
        partition = self._partition
        if partition is None:
            return
        for name, entry in sorted(partition.trajectories.items()):
            attempt = entry.sealed
            if attempt is not None and attempt.damaged:
                held, sealed = attempt.rows(), attempt.sealed_rows
                yield Shortage(partition.run.name, partition.name, name, attempt.number, sealed - held, sealed)


def _copies(attempt: Attempt, start: int, stop: int, site: int) -> Iterator[tuple[int, int]]:
    """Segment number and index row of every record of a span at a site."""
    for holding in attempt.overlapping(start, stop):
        if (holding.start, holding.stop) == (start, stop) and site in holding.sites:
            yield holding.segment, holding.first_row + holding.sites.index(site)
