"""Catalog: which segment rows hold which tokens of which trajectory. Kept in memory, rebuilt from segments at start.

    Run -> Partition -> Trajectory -> sealed attempt (visible), pending ones (their seal is being synced), open attempt

Rows of one server apply in their order; where several servers wrote of one trajectory, ``history`` puts them together.
All methods want the engine's lock held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trace_store.attempt import Attempt, Segment, SiteSet, Trajectory
from trace_store.checksum import RowKind
from trace_store.chunk import RecordGroup
from trace_store.errors import TraceStoreError
from trace_store.history import Event, events_of, releases_all, settle, shared_names, without_released
from trace_store.intervals import gaps
from trace_store.record import Site

RELEASED_MAX = 10_000


@dataclass
class Partition:
    """One RL step of a run: the unit of retention, one directory of segments."""

    run: Run
    name: str
    directory: Path
    trajectories: dict[str, Trajectory] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)
    segments: dict[int, Segment] = field(default_factory=dict)
    unpublished: set[tuple[str, int]] = field(default_factory=set)
    """Trajectory and attempt of seals that are written and not durable yet."""
    changes: int = 0
    """How often something else than the writer's own rows changed it."""
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

    def is_sealed(self, trajectory: str, number: int) -> bool:
        entry = self.trajectories.get(trajectory)
        found = entry.find(number) if entry is not None else None
        return found is not None and found.sealed is not None

    def _seal(self, trajectory: str, event: Event) -> None:
        """Close an attempt to new rows. It becomes visible with ``publish``, once its seal is durable."""
        attempt = self.attempt(trajectory, event.attempt)
        attempt.seal(event.stop, event.start, event.rows, event.segment)
        entry = self.trajectories[trajectory]
        if entry.open is attempt:
            entry.pending, entry.open = (*entry.pending, attempt), None

    def publish(self, trajectory: str, number: int) -> None:
        """Make a sealed attempt the visible one; older ones are forgotten."""
        self.unpublished.discard((trajectory, number))
        entry = self.trajectories.get(trajectory)
        for attempt in entry.pending if entry is not None else ():
            if entry is not None and attempt.number == number:
                entry.sealed = attempt
                entry.pending = tuple(a for a in entry.pending if a.number > number)

    def release(self, trajectory: str) -> bool:
        self.released.add(trajectory)
        return self.trajectories.pop(trajectory, None) is not None

    def load(self, *segments: Segment) -> None:
        """Enter whole segments: what is in a file at a start, or in the bucket, is durable and its seals visible."""
        names: set[str] = set()
        for segment in segments:
            self.segments[segment.number] = segment
            segment.entered_rows = len(segment.index)
            names.update(segment.index.trajectories)
        everything = len(segments) == len(self.segments) or any(
            releases_all(segment) is not None for segment in segments
        )
        self.rebuild(None if everything else names)

    def rebuild(self, names: set[str] | None = None) -> None:
        """Derive trajectories (None: all) again from the segments' indexes; attempts not yet visible stay so.

        The writer reads the catalog without the lock while it admits a chunk, so the new state replaces the old one at
        the end and nobody sees it half built.
        """
        segments = sorted(without_released(self.segments.values()), key=lambda segment: segment.path.stem)
        if names is not None:
            segments = [segment for segment in segments if not names.isdisjoint(segment.index.trajectories)]
        shared = shared_names(segments, names)
        fresh = Partition(self.run, self.name, self.directory, unpublished=set(self.unpublished))
        events: dict[str, list[Event]] = {name: [] for name in shared}
        for segment in segments:
            for name, event in events_of(segment, 0, segment.entered_rows):
                if name in shared:
                    events[name].append(event)
                elif names is None or name in names:
                    fresh._apply(name, event)
        for entry_name, entry in fresh.trajectories.items():
            fresh._publish_durable(entry_name, entry)
        for name in shared:
            fresh._settle(name, events[name])
        self.changes += 1
        if names is None:
            if len(segments) < len(self.segments):
                every = {name for segment in self.segments.values() for name in segment.index.trajectories}
                fresh.released.update(every.difference(fresh.trajectories))
            self.trajectories, self.released = fresh.trajectories, fresh.released
            return
        self.trajectories.update(fresh.trajectories)
        for name in names.difference(fresh.trajectories):
            self.trajectories.pop(name, None)
        self.released.difference_update(names)
        self.released.update(fresh.released)

    def _settle(self, name: str, events: list[Event]) -> None:
        unpublished = {number for trajectory, number in self.unpublished if trajectory == name}
        entry = settle(events, self.run, unpublished) if events else None
        if entry is not None:
            self.trajectories[name] = entry
        elif events:
            self.released.add(name)

    def _publish_durable(self, name: str, entry: Trajectory) -> None:
        for attempt in entry.pending:
            if (name, attempt.number) not in self.unpublished:
                self.publish(name, attempt.number)

    def drop(self, numbers: set[int]) -> None:
        """Forget segments that another server released; trajectories that go with them count as released."""
        before = set(self.trajectories)
        for number in numbers:
            self.segments.pop(number, None)
        self.rebuild()
        self.released.update(before.difference(self.trajectories))

    def apply(self, segment: Segment, first_row: int, changes: int) -> None:
        """Enter rows that were written here, from ``first_row`` to the last one.

        ``changes``: of the partition, when it was decided to write them. If others' segments were entered since, rows
        must not join what they did not know.
        """
        segment.entered_rows = len(segment.index)
        names: set[str] = set()
        for name, event in events_of(segment, first_row, segment.entered_rows):
            if event.kind == RowKind.SEAL and not self._is_visible(name, event.attempt):
                self.unpublished.add((name, event.attempt))
            names.add(name)
            self._apply(name, event)
        if changes != self.changes:
            self.rebuild(names)

    def apply_groups(self, segment: Segment, first_row: int, groups: Sequence[RecordGroup], changes: int) -> None:
        """``apply`` for a chunk that was written here: 5 us instead of 30, since its groups need not be found."""
        segment.entered_rows = len(segment.index)
        for group in groups:
            span = (first_row, group.start, group.stop, group.policy_version)
            self._add_group(group.trajectory, Event(RowKind.RECORD, group.attempt, segment, *span, group.sites))
            first_row += len(group.sites)
        if changes != self.changes:
            self.rebuild({group.trajectory for group in groups})

    def _apply(self, name: str, event: Event) -> None:
        """Apply the next event of a writer that knew all that is here."""
        if event.kind == RowKind.RECORD:
            self._add_group(name, event)
        elif event.kind == RowKind.RELEASE:
            self.release(name)
        elif self._is_current(name, event.attempt):
            self._seal(name, event)

    def _add_group(self, name: str, event: Event) -> None:
        self.released.discard(name)
        number = event.attempt
        entry = self.trajectories.get(name)
        attempt = entry.open if entry is not None else None
        if attempt is None or attempt.number != number:
            if not self._is_current(name, number) and (entry is None or entry.find(number) is None):
                return
            attempt = self.attempt(name, number)
        site_set = self.run.site_set(event.sites)
        attempt.add(event.segment.number, event.row, event.start, event.stop, site_set)

    def _is_visible(self, name: str, number: int) -> bool:
        entry = self.trajectories.get(name)
        return entry is not None and entry.sealed is not None and entry.sealed.number == number

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
