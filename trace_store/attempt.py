"""What the catalog is made of: segments, attempts with their record groups, trajectories.

An attempt keeps its record groups in plain arrays: for each group the segment, the first index row, the token span and
the set of sites; rows of a group are consecutive. 20 bytes a group here and 74 a record in the segment's index.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from trace_store.intervals import covered
from trace_store.naming import parse_segment_name
from trace_store.segment.index import SegmentIndex
from trace_store.segment.schema import FORMAT_VERSION

SiteSet = tuple[int, ...]


@dataclass
class Segment:
    """One segment as the catalog knows it. ``path`` and ``index`` change when it is sealed or rewritten.

    Attributes:
        disk_bytes: bytes on the local disk; 0 when it is only in the object store.
        local: whether ``path`` is there; else the object store has it.
        uploaded: whether the object store has it.
        foreign: whether another server wrote it.
        object_bytes: size of the object, when it is not local.
        read_at: when a read last wanted it, on the engine's clock.
        entered_rows: index rows that the catalog has; the writer adds rows to the index first and enters them after.
        version: format version of the file.
        sequence, epoch: of its name: order among the segments of one opening of one server, and which that was.
    """

    number: int
    path: Path
    index: SegmentIndex
    disk_bytes: int = 0
    local: bool = True
    uploaded: bool = False
    foreign: bool = False
    object_bytes: int = 0
    read_at: float = 0.0
    entered_rows: int = 0
    version: str = FORMAT_VERSION
    sequence: int = field(init=False)
    epoch: str = field(init=False)

    def __post_init__(self) -> None:
        self.sequence, self.epoch = parse_segment_name(self.path.stem)

    def replace_index(self, index: SegmentIndex) -> None:
        """Stand on another file with other rows or places; the partition is rebuilt next where the rows differ."""
        self.index, self.entered_rows = index, len(index)


@dataclass
class Holding:
    """Group ``position`` of an attempt, unpacked."""

    segment: int
    first_row: int
    start: int
    stop: int
    sites: SiteSet


class Attempt:
    """Record groups of one attempt.

    Attributes:
        sealed: None, or (tokens, prompt tokens).
        sealed_rows: token rows over all sites that the attempt held when it was sealed.
        version: which of the seals of this number it was, the same on every server; 0 while open.
        seal_segment: number of the segment that holds the seal.
        stop_max: end of the last group.
    """

    __slots__ = ("_columns", "_site_sets", "number", "seal_segment", "sealed", "sealed_rows", "stop_max", "version")

    def __init__(self, number: int, site_sets: list[SiteSet]) -> None:
        self.number = number
        self.sealed: tuple[int, int] | None = None
        self.sealed_rows = self.version = self.seal_segment = 0
        self.stop_max = 0
        self._columns = array("I")
        self._site_sets = site_sets

    def __len__(self) -> int:
        return len(self._columns) // 5

    def seal(self, tokens: int, prompt_tokens: int, rows: int, segment: Segment) -> None:
        """Close it to new rows; ``segment`` holds the seal."""
        self.sealed, self.sealed_rows, self.seal_segment = (tokens, prompt_tokens), rows, segment.number
        self.version = xxhash.xxh3_64_intdigest(segment.path.stem.encode()) or 1

    def add(self, segment: int, first_row: int, start: int, stop: int, site_set: int) -> None:
        self._columns.extend((segment, first_row, start, stop, site_set))
        self.stop_max = max(self.stop_max, stop)

    def columns(self) -> npt.NDArray[np.uint32]:
        """uint32 [groups, 5]: segment, first row, start, stop, site set. A copy: the array may grow later."""
        return np.array(self._columns, np.uint32).reshape(-1, 5)

    def overlapping(self, start: int, stop: int) -> Iterator[Holding]:
        """Groups that share tokens with [start, stop), oldest first."""
        # Rollouts append at the end, so this is the common case and keeps a long trajectory linear.
        if start >= self.stop_max:
            return
        columns = self.columns()
        for segment, first, low, high, sites in columns[(columns[:, 2] < stop) & (columns[:, 3] > start)].tolist():
            yield Holding(segment, first, low, high, self._site_sets[sites])

    def records(self) -> int:
        return sum(len(self._site_sets[sites]) for sites in self._columns[4::5])

    def rows(self) -> int:
        """Token rows over all sites; one that is held twice (damaged, then sent again) counts once."""
        columns = self.columns().astype(np.int64)
        columns = columns[np.argsort(columns[:, 2], kind="stable")]
        if not (columns[1:, 2] < np.maximum.accumulate(columns[:, 3])[:-1]).any():
            return self.stored_rows()
        # Sites that are in the same sets have the same rows: sixty of them are counted at once.
        spans = {
            n: list(map(tuple, columns[columns[:, 4] == n, 2:4].tolist())) for n in np.unique(columns[:, 4]).tolist()
        }
        members = {number: set(self._site_sets[number]) for number in spans}
        patterns = Counter(tuple(n for n in spans if site in members[n]) for site in set().union(*members.values()))
        return sum(
            count * sum(high - low for low, high in covered([span for n in pattern for span in spans[n]]))
            for pattern, count in patterns.items()
        )

    def stored_rows(self) -> int:
        """Token rows over all sites, every copy counted."""
        columns = self.columns().astype(np.int64)
        sites = np.array([len(sites) for sites in self._site_sets], np.int64)
        return int(((columns[:, 3] - columns[:, 2]) * sites[columns[:, 4]]).sum()) if len(columns) else 0

    @property
    def damaged(self) -> bool:
        """Whether rows that were there at the seal are gone: the disk lost them and recovery dropped what was left."""
        return self.sealed is not None and self.rows() < self.sealed_rows

    def segments(self) -> set[int]:
        return set(self._columns[0::5])


class Trajectory:
    """The visible (sealed) attempt and newer ones; a newer sealed attempt replaces the visible one as a whole.

    ``pending`` holds attempts whose seal is written and not yet durable, oldest first: usually none, one for a moment.
    """

    __slots__ = ("open", "pending", "sealed")

    def __init__(self) -> None:
        self.sealed: Attempt | None = None
        self.pending: tuple[Attempt, ...] = ()
        self.open: Attempt | None = None

    @property
    def newest(self) -> Attempt | None:
        return self.open or (self.pending[-1] if self.pending else self.sealed)

    def find(self, number: int) -> Attempt | None:
        return next((a for a in (self.open, *self.pending, self.sealed) if a is not None and a.number == number), None)
