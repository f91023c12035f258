"""Catalog: which segment rows hold which tokens of which trajectory. Kept in memory, rebuilt from segments at start.

    Run -> Partition -> Trajectory -> sealed attempt (visible), pending ones (their seal is being synced), open attempt

An attempt keeps its record groups in plain arrays: for each group the segment, the first index row, the token span and
the set of sites; rows of a group are consecutive. 20 bytes a group here and 74 a record in the segment's index.
All methods want the engine's lock held.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trace_store.checksum import RowKind
from trace_store.errors import TraceStoreError
from trace_store.record import Site
from trace_store.segment.index import SegmentIndex

SiteSet = tuple[int, ...]

_GROUP_KEY = ("kind", "trajectory", "attempt", "start", "stop")
"""Consecutive rows that agree in these are one group."""

RELEASED_MAX = 10_000


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
        stop_max: end of the last group.
    """

    __slots__ = ("_columns", "_site_sets", "number", "sealed", "sealed_rows", "stop_max")

    def __init__(self, number: int, site_sets: list[SiteSet]) -> None:
        self.number = number
        self.sealed: tuple[int, int] | None = None
        self.sealed_rows = 0
        self.stop_max = 0
        self._columns = array("I")
        self._site_sets = site_sets

    def __len__(self) -> int:
        return len(self._columns) // 5

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
            sites = np.array([len(sites) for sites in self._site_sets], np.int64)
            return int(((columns[:, 3] - columns[:, 2]) * sites[columns[:, 4]]).sum()) if len(columns) else 0
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


@dataclass
class Partition:
    """One RL step of a run: the unit of retention, one directory of segments."""

    run: Run
    name: str
    directory: Path
    trajectories: dict[str, Trajectory] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)
    segments: dict[int, Segment] = field(default_factory=dict)
    written_at: float = 0.0
    """When it last got a row, in seconds since 1970 on the engine's clock."""
    deferred: dict[tuple[str, int], TraceStoreError] = field(default_factory=dict)
    """Errors of appends that were answered from memory, by trajectory and attempt, until its next append or seal."""

    @property
    def disk_bytes(self) -> int:
        """Bytes of its segments on the local disk."""
        return sum(segment.disk_bytes for segment in self.segments.values())

    def attempt(self, trajectory: str, number: int) -> Attempt:
        """The attempt to write to, made when new; an older open attempt is forgotten."""
        entry = self.trajectories.setdefault(trajectory, Trajectory())
        found = entry.find(number)
        if found is None:
            found = entry.open = Attempt(number, self.run.site_sets)
        return found

    def mark_sealed(self, trajectory: str, number: int, tokens: int, prompt_tokens: int, rows: int) -> None:
        """Close an attempt to new rows. It becomes visible with ``publish``, once its seal is durable."""
        attempt = self.attempt(trajectory, number)
        attempt.sealed, attempt.sealed_rows = (tokens, prompt_tokens), rows
        entry = self.trajectories[trajectory]
        if entry.open is attempt:
            entry.pending, entry.open = (*entry.pending, attempt), None

    def publish(self, trajectory: str, number: int) -> None:
        """Make a sealed attempt the visible one; older ones are forgotten."""
        entry = self.trajectories.get(trajectory)
        for attempt in entry.pending if entry is not None else ():
            if entry is not None and attempt.number == number:
                entry.sealed = attempt
                entry.pending = tuple(a for a in entry.pending if a.number > number)

    def release(self, trajectory: str) -> bool:
        self.released.add(trajectory)
        return self.trajectories.pop(trajectory, None) is not None

    def rebuild(self) -> None:
        """Derive everything again from the segments' indexes, in their order; attempts not yet visible stay so.

        The writer reads the catalog without the lock while it admits a chunk, so the new state replaces the old one at
        the end and nobody sees it half built.
        """
        visible = {name: entry.sealed.number for name, entry in self.trajectories.items() if entry.sealed is not None}
        pending = {name for name, entry in self.trajectories.items() if entry.pending}
        fresh = Partition(self.run, self.name, self.directory, segments=self.segments)
        for segment in sorted(self.segments.values(), key=lambda segment: segment.path.name):
            fresh._enter(segment, 0, segment.entered_rows)
        for name, entry in fresh.trajectories.items():
            if name not in pending:
                self._publish_all(entry)
            elif name in visible:
                fresh.publish(name, visible[name])
        self.trajectories, self.released = fresh.trajectories, fresh.released

    def drop(self, numbers: set[int]) -> None:
        """Forget segments that another server released; trajectories that go with them count as released."""
        before = set(self.trajectories)
        for number in numbers:
            self.segments.pop(number, None)
        self.rebuild()
        self.released.update(before.difference(self.trajectories))

    def load(self, segment: Segment) -> None:
        """Enter a segment and apply its rows in order."""
        self.segments[segment.number] = segment
        self.apply(segment, 0)

    def publish_all(self) -> None:
        """After a start: all that was read from disk is durable, so every sealed attempt is visible."""
        for entry in self.trajectories.values():
            self._publish_all(entry)

    @staticmethod
    def _publish_all(entry: Trajectory) -> None:
        if entry.pending:
            entry.sealed, entry.pending = entry.pending[-1], ()

    def apply(self, segment: Segment, first_row: int) -> None:
        """Enter index rows from ``first_row`` to the last one."""
        segment.entered_rows = len(segment.index)
        self._enter(segment, first_row, segment.entered_rows)

    def _enter(self, segment: Segment, first_row: int, end_row: int) -> None:
        """Enter index rows [first_row, end_row); consecutive rows of one key and span form a group."""
        rows = segment.index.rows[first_row:end_row]
        if not len(rows):
            return
        # Two appends of one span with disjoint sites may stand side by side: they form one group with all sites, which
        # says the same.
        differs = np.zeros(len(rows) - 1, bool)
        for name in _GROUP_KEY:
            column = rows[name]
            differs |= column[1:] != column[:-1]
        starts = np.concatenate(([0], np.flatnonzero(differs) + 1))
        sites = rows["site"].tolist()
        columns = [rows[name][starts].tolist() for name in (*_GROUP_KEY, "policy_version")]
        names = segment.index.trajectories
        for low, high, kind, trajectory, number, start, stop, version in zip(
            starts.tolist(), [*starts[1:].tolist(), len(rows)], *columns, strict=True
        ):
            if kind == RowKind.RECORD:
                for first, part in _without_doubles(low, sites[low:high]):
                    site_set = self.run.site_set(part)
                    self._add_group(names[trajectory], number, segment.number, first_row + first, start, stop, site_set)
            elif kind == RowKind.RELEASE:
                self.release(names[trajectory])
            elif kind == RowKind.SEAL and self._is_current(names[trajectory], number):
                self.mark_sealed(names[trajectory], number, stop, start, version)

    def _add_group(
        self, name: str, number: int, segment: int, first_row: int, start: int, stop: int, site_set: int
    ) -> None:
        self.released.discard(name)
        entry = self.trajectories.get(name)
        if entry is None or entry.open is None or entry.open.number != number:
            if not self._is_current(name, number) and (entry is None or entry.find(number) is None):
                return
            self.attempt(name, number).add(segment, first_row, start, stop, site_set)
            return
        entry.open.add(segment, first_row, start, stop, site_set)

    def _is_current(self, name: str, number: int) -> bool:
        """Whether no newer attempt of the trajectory is known."""
        entry = self.trajectories.get(name)
        newest = entry.newest if entry is not None else None
        return newest is None or number >= newest.number


@dataclass
class Run:
    """A run: its site table, and the site sets that groups refer to."""

    name: str
    sites: tuple[Site, ...]
    directory: Path
    partitions: dict[str, Partition] = field(default_factory=dict)
    site_sets: list[SiteSet] = field(default_factory=list)
    released: dict[str, None] = field(default_factory=dict)
    """Partitions released since the start, the last RELEASED_MAX of them, so that a read can say so."""
    _site_set_numbers: dict[SiteSet, int] = field(default_factory=dict)

    def forget(self, partition: str) -> None:
        """Take a released partition out of the catalog."""
        self.partitions.pop(partition, None)
        self.released[partition] = None
        if len(self.released) > RELEASED_MAX:
            del self.released[next(iter(self.released))]

    def site_set(self, sites: SiteSet) -> int:
        number = self._site_set_numbers.get(sites)
        if number is None:
            number = self._site_set_numbers[sites] = len(self.site_sets)
            self.site_sets.append(sites)
        return number


def _without_doubles(first: int, sites: Sequence[int]) -> Iterator[tuple[int, SiteSet]]:
    """Runs of rows that name no site twice: a record that was stored again may stand beside its damaged copy."""
    if len(set(sites)) == len(sites):
        yield first, tuple(sites)
        return
    low = 0
    for high in range(1, len(sites) + 1):
        if high == len(sites) or sites[high] in sites[low:high]:
            yield first + low, tuple(sites[low:high])
            low = high


def covered(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Union of half-open spans, sorted and merged."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def gaps(spans: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Parts of [start, stop) that no span covers."""
    missing = []
    for low, high in covered(spans):
        if low >= stop:
            break
        if low > start:
            missing.append((start, low))
        start = max(start, high)
    if start < stop:
        missing.append((start, stop))
    return missing


def holes(attempt: Attempt | None, run: Run, tokens: int, prompt_tokens: int) -> list[tuple[int, int, int]]:
    """Expected rows that an attempt lacks, as (site number, start, stop).

    K and V are expected from token 0, other kinds from the first generated token, all up to the last token, which was
    sampled but never ran a forward.
    """
    columns = attempt.columns() if attempt is not None else np.zeros((0, 5), np.uint32)
    spans_of_set = {
        int(number): list(map(tuple, columns[columns[:, 4] == number, 2:4].tolist()))
        for number in np.unique(columns[:, 4])
    }
    missing: list[tuple[int, int, int]] = []
    found: dict[tuple[tuple[int, ...], int], list[tuple[int, int]]] = {}
    membership: dict[int, list[int]] = {}
    for number in spans_of_set:
        for member in run.site_sets[number]:
            membership.setdefault(member, []).append(number)
    for site_number, site in enumerate(run.sites):
        first = 0 if site.kind in ("k", "v") else prompt_tokens
        key = (tuple(membership.get(site_number, ())), first)
        if key not in found:
            spans = [span for number in key[0] for span in spans_of_set[number]]
            found[key] = gaps(spans, first, tokens - 1)
        missing.extend((site_number, low, high) for low, high in found[key])
    return missing
