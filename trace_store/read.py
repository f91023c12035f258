"""A read in progress: its plan, the segments it holds, and other copies of what turns out to be damaged.

A segment that was uploaded has a good copy in the object store. Where the local one fails or does not match its
checksums, the rows come from there, and the owner is told to stop trusting the local file. Rows that were stored again
(``doubles``) stand in for each other. The owner also hears of every damaged row: one that is sent again must be taken.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cached_property
from types import TracebackType

import numpy as np
import numpy.typing as npt

from trace_store.fetch import OpenSegment, Slice, Undelivered, fetch
from trace_store.gather.gather import gather
from trace_store.gather.places import Places, file_order, select
from trace_store.planner import ALL_SITES, Missing, ReadPlan
from trace_store.record import TokenSpan
from trace_store.rescue import Rescue
from trace_store.segment.schema import SEALED_SUFFIX


class Read:
    """Iterate for the slices, or ``gather`` the pieces; then look at ``missing``. Close it (or use ``with``)."""

    def __init__(
        self,
        plan: ReadPlan,
        segments: dict[int, OpenSegment],
        spans: Sequence[TokenSpan],
        sites: Sequence[int],
        spares: Mapping[int, OpenSegment] | None = None,
        on_damage: Callable[[int], None] = lambda number: None,
    ) -> None:
        """``spares`` are other copies of segments, by number; ``on_damage`` hears which ones had to stand in."""
        self._plan, self._segments, self._spans, self._sites = plan, segments, spans, sites
        self._spares, self._on_damage = spares or {}, on_damage
        self.not_found = (*plan.absent, *plan.missing)
        """What the plan did not find, for ALL_SITES where it found nothing."""
        self.served = plan.served

    @cached_property
    def missing(self) -> list[Missing]:
        """What was not found or could not be served, a site each. May take a second for a million of them."""
        return [
            Missing(item.span, site, item.start, item.stop, item.reason)
            for item in self.not_found
            for site in (self._sites if item.site == ALL_SITES else (item.site,))
        ]

    def __iter__(self) -> Iterator[Slice]:
        lost = yield from _slices(self._plan, self._segments)
        rescue = self._rescue(self._plan, lost)
        while (attempt := rescue.next()) is not None:
            failed = yield from _slices(attempt.plan, attempt.sources)
            self._settle(rescue.settle(attempt, failed))
        self._miss(self._plan, rescue)

    def take_stored(self) -> tuple[dict[int, str], ReadPlan]:
        """Leave the pieces in sealed local segments to the caller: file names by number of segment, and those pieces.
        ``pieces`` and iteration then give the others."""
        names = {
            number: segment.name
            for number, segment in self._segments.items()
            if segment.source.descriptor >= 0 and segment.name.endswith(SEALED_SUFFIX)
        }
        stored = np.isin(self._plan.segment, list(names))
        taken = select(self._plan, np.flatnonzero(stored))
        self._plan = select(self._plan, np.flatnonzero(~stored))
        return names, taken

    def pieces(self) -> ReadPlan:
        """What will be served, in file order: for ``gather``, which takes it whole or in parts."""
        return file_order(self._plan, self._segments)

    def gather(self, pieces: ReadPlan, target: memoryview, places: Places) -> list[int]:
        """Serve pieces into memory (``trace_store.gather``); positions of those that went to ``missing`` instead."""
        rescue = self._rescue(pieces, gather(pieces, self._segments, target, places))
        while (attempt := rescue.next()) is not None:
            there = places.select(attempt.positions)
            self._settle(rescue.settle(attempt, gather(attempt.plan, attempt.sources, target, there)))
        return self._miss(pieces, rescue)

    def policy_versions(self, pieces: ReadPlan) -> npt.NDArray[np.uint64]:
        """Weights that produced each piece."""
        versions = np.zeros(len(pieces.row), np.uint64)
        for number in np.unique(pieces.segment):
            chosen = pieces.segment == number
            versions[chosen] = self._segments[int(number)].index.rows["policy_version"][pieces.row[chosen]]
        return versions

    def close(self) -> None:
        for segment in self._segments.values():
            segment.source.close()
        self._segments = {}

    def __enter__(self) -> Read:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _rescue(self, plan: ReadPlan, lost: Sequence[Undelivered]) -> Rescue:
        return Rescue(plan, lost, self._segments, self._spares)

    def _settle(self, stood_in: set[int]) -> None:
        for number in stood_in:
            self._on_damage(number)

    def _miss(self, plan: ReadPlan, rescue: Rescue) -> list[int]:
        """Enter what is lost for good; its positions."""
        for position, item in sorted(rescue.lost.items()):
            number = int(plan.span[position])
            span = self._spans[number]
            start = span.start + int(plan.dest_row[position]) - span.dest_row
            stop = start + int(plan.rows[position])
            self.missing.append(Missing(number, int(plan.site[position]), start, stop, item.reason))
        return sorted(rescue.lost)


def _slices(plan: ReadPlan, sources: Mapping[int, OpenSegment]) -> Generator[Slice, None, list[Undelivered]]:
    """Slices as they come; returns what could not be served."""
    lost: list[Undelivered] = []
    for item in fetch(plan, sources):
        if isinstance(item, Undelivered):
            lost.append(item)
        else:
            yield item
    return lost
