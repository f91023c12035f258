"""What several servers wrote of one partition, put together without an order between them.

Servers share a bucket and no clock. So a SEAL or RELEASE speaks of exactly the rows that its server knew when it wrote
it: those in front of it of the same epoch, and the segments of other epochs that KNOWN rows in its segment name.

    RELEASE     forgets the rows and seals that it knew, of one trajectory or of all (with an empty name); what another
                server wrote meanwhile stays
    SEAL        its attempt is the rows that it knew, and those that knew it (they replace what a disk lost)
    two SEALs   of one attempt, neither knowing the other's rows: the one with more rows as a whole, never a mixture
    no SEAL     all rows of the attempt

Names of which one epoch alone has rows need none of this: there the order of rows says it (``catalog``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trace_store.attempt import Attempt, Segment, SiteSet, Trajectory
from trace_store.checksum import RowKind
from trace_store.naming import parse_segment_name
from trace_store.segment.writer import ControlRow

if TYPE_CHECKING:
    from trace_store.catalog import Run

_GROUP_KEY = ("kind", "trajectory", "attempt", "start", "stop")
"""Consecutive rows that agree in these are one group."""


class Event(NamedTuple):
    """Rows of one key and span in a segment: a record group, a seal or a release.

    ``start``, ``stop`` and ``rows`` of a seal: prompt tokens, tokens, token rows over all sites.
    """

    kind: int
    attempt: int
    segment: Segment
    row: int
    start: int
    stop: int
    rows: int
    sites: SiteSet


def events_of(segment: Segment, first_row: int, end_row: int) -> Iterator[tuple[str, Event]]:
    """Trajectory and event for index rows [first_row, end_row) of a segment, in order."""
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
            for first, part in _without_doubles(first_row + low, sites[low:high]):
                yield names[trajectory], Event(kind, number, segment, first, start, stop, version, part)
        elif kind in (RowKind.SEAL, RowKind.RELEASE) and names[trajectory]:
            yield names[trajectory], Event(kind, number, segment, first_row + low, start, stop, version, ())


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


def shared_names(segments: Iterable[Segment], names: Collection[str] | None) -> set[str]:
    """Trajectories of which more than one epoch has rows."""
    by_epoch: dict[str, set[str]] = {}
    for segment in segments:
        by_epoch.setdefault(segment.epoch, set()).update(segment.index.trajectories)
    seen: set[str] = set()
    shared: set[str] = set()
    for found in by_epoch.values():
        shared |= seen & found
        seen |= found
    return shared if names is None else shared.intersection(names)


@dataclass(frozen=True)
class Known:
    """What a seal or release was decided on: names of segments of other epochs, and the state of the catalog."""

    stems: tuple[str, ...]
    changes: int


def releases_all(segment: Segment) -> int | None:
    """Row of the segment's release of the whole partition, None if it has none."""
    if "" not in segment.index.trajectories:
        return None
    rows = segment.index.rows
    name = segment.index.trajectories.index("")
    found = np.flatnonzero((rows["kind"] == RowKind.RELEASE) & (rows["trajectory"] == name))
    return int(found[-1]) if len(found) else None


def without_released(segments: Collection[Segment]) -> list[Segment]:
    """Segments that no release of the whole partition knew. Such a release begins what is written anew."""
    knowledge = Knowledge()
    released: dict[str, list[tuple[int, int]]] = {}
    for segment in segments:
        place = releases_all(segment)
        if place is not None:
            for epoch, told in knowledge.told(segment).items():
                released.setdefault(epoch, []).extend((start, stop) for row, start, stop in told if row < place)
    if not released:
        return list(segments)
    return [s for s in segments if not any(low <= s.sequence < high for low, high in released.get(s.epoch, ()))]


def release_rows(stems: Collection[str]) -> list[ControlRow]:
    """Rows of a release of the whole partition that knew these segments."""
    return [*known_rows(stems, set())[1], (RowKind.RELEASE, "", 0, 0, 0, 0)]


def known_rows(stems: Collection[str], told: set[str]) -> tuple[set[str], list[ControlRow]]:
    """KNOWN rows for the names of segments that are not ``told`` yet, and the names that are told with them."""
    news = [stem for stem in stems if stem not in told]
    by_epoch: dict[str, list[int]] = {}
    for sequence, epoch in map(parse_segment_name, news):
        by_epoch.setdefault(epoch, []).append(sequence)
    rows: list[ControlRow] = []
    for other, sequences in sorted(by_epoch.items()):
        ordered = np.array(sorted(sequences))
        # Only neighbours share a row: a number between them may be a segment that is not known here.
        for run in np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1):
            rows.append((RowKind.KNOWN, other, 0, int(run[0]), int(run[-1]) + 1, 0))
    return told.union(news), rows


class Knowledge:
    """Which rows the writer of a row knew. Reads each segment's KNOWN rows once."""

    def __init__(self) -> None:
        self._told: dict[int, dict[str, list[tuple[int, int, int]]]] = {}

    def knows(self, later: Event, earlier: Event) -> bool:
        """Whether ``later`` was written by somebody who had ``earlier``."""
        ours, theirs = later.segment, earlier.segment
        if ours.epoch == theirs.epoch:
            return (theirs.sequence, earlier.row) < (ours.sequence, later.row)
        if ours.version == "1":
            return theirs.path.stem < ours.path.stem
        told = self.told(ours).get(theirs.epoch, ())
        return any(row < later.row and start <= theirs.sequence < stop for row, start, stop in told)

    def told(self, segment: Segment) -> dict[str, list[tuple[int, int, int]]]:
        """KNOWN rows of a segment by epoch: index row, first sequence, last sequence + 1."""
        found = self._told.get(segment.number)
        if found is None:
            found = self._told[segment.number] = {}
            rows = segment.index.rows
            for row in np.flatnonzero(rows["kind"] == RowKind.KNOWN).tolist():
                epoch = segment.index.trajectories[int(rows["trajectory"][row])]
                found.setdefault(epoch, []).append((row, int(rows["start"][row]), int(rows["stop"][row])))
        return found


def settle(events: Sequence[Event], run: Run, unpublished: Collection[int] = ()) -> Trajectory | None:
    """The state of one trajectory from all its events in the order of segment names; None if all of it was released.

    ``unpublished``: attempts whose seal is written here and not durable yet.
    """
    knowledge = Knowledge()
    releases = [event for event in events if event.kind == RowKind.RELEASE]
    alive = [
        event
        for event in events
        if event.kind != RowKind.RELEASE and not any(knowledge.knows(release, event) for release in releases)
    ]
    if not alive:
        return None
    entry = Trajectory()
    for number in sorted({event.attempt for event in alive}):
        mine = [event for event in alive if event.attempt == number]
        seals = [event for event in mine if event.kind == RowKind.SEAL]
        records = [event for event in mine if event.kind == RowKind.RECORD]
        if not seals:
            entry.open = _build(number, records, run)
            continue
        candidates = [_sealed(seal, records, knowledge, run) for seal in seals]
        # A retried seal may know nothing of the rows. Among equals the one of the last name, the same on every server.
        chosen = max(reversed(candidates), key=lambda attempt: (attempt.rows(), not attempt.damaged))
        entry.open = None
        if number in unpublished:
            entry.pending = (*entry.pending, chosen)
        else:
            entry.sealed, entry.pending = chosen, ()
    return entry


def _sealed(seal: Event, records: list[Event], knowledge: Knowledge, run: Run) -> Attempt:
    known = [r for r in records if knowledge.knows(seal, r) or knowledge.knows(r, seal)]
    attempt = _build(seal.attempt, known, run)
    attempt.seal(seal.stop, seal.start, seal.rows, seal.segment)
    return attempt


def _build(number: int, records: list[Event], run: Run) -> Attempt:
    attempt = Attempt(number, run.site_sets)
    for record in records:
        attempt.add(record.segment.number, record.row, record.start, record.stop, run.site_set(record.sites))
    return attempt
