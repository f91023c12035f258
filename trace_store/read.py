"""A read in progress: its plan, the segments it holds, and a second source for what the first one damaged.

A segment that was uploaded has a good copy in the object store. Where the local one fails or does not match its
checksums, the rows come from there, and the owner is told to stop trusting the local file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType

import numpy as np

from trace_store.fetch import OpenSegment, Slice, Undelivered, fetch
from trace_store.gather import Places, file_order, gather, select
from trace_store.planner import Missing, MissingReason, ReadPlan
from trace_store.record import TokenSpan

_SECOND_TRY = (MissingReason.DATA_LOSS, MissingReason.STORAGE_FAILED)


class Read:
    """Iterate for the slices, or ``gather`` the pieces; then look at ``missing``. Close it (or use ``with``)."""

    def __init__(
        self,
        plan: ReadPlan,
        segments: dict[int, OpenSegment],
        spans: Sequence[TokenSpan],
        spares: Mapping[int, OpenSegment] | None = None,
        on_damage: Callable[[int], None] = lambda number: None,
    ) -> None:
        """``spares`` are other copies of segments, by number; ``on_damage`` hears which ones had to stand in."""
        self._plan, self._segments, self._spans = plan, segments, spans
        self._spares, self._on_damage = spares or {}, on_damage
        self.missing: list[Missing] = list(plan.missing)

    def __iter__(self) -> Iterator[Slice]:
        again: list[int] = []
        for item in fetch(self._plan, self._segments):
            if not isinstance(item, Undelivered):
                yield item
            elif self._has_spare(self._plan, item):
                again.append(item.position)
            else:
                self._miss(self._plan, item.position, item.reason)
        if not again:
            return
        plan = select(self._plan, np.array(again, np.intp))
        failed = set()
        for item in fetch(plan, self._spares):
            if isinstance(item, Undelivered):
                self._miss(plan, item.position, item.reason)
                failed.add(item.position)
            else:
                yield item
        self._report(plan, failed)

    def pieces(self) -> ReadPlan:
        """What will be served, in file order: for ``gather``, which takes it whole or in parts."""
        return file_order(self._plan, self._segments)

    def gather(self, pieces: ReadPlan, target: memoryview, places: Places) -> list[int]:
        """Serve pieces into memory (``trace_store.gather``); positions of those that went to ``missing`` instead."""
        undelivered = gather(pieces, self._segments, target, places)
        again = [item.position for item in undelivered if self._has_spare(pieces, item)]
        lost = [item for item in undelivered if not self._has_spare(pieces, item)]
        if again:
            chosen = np.array(again, np.intp)
            plan = select(pieces, chosen)
            there = Places(places.codes[chosen], places.scales[chosen], places.tensor[chosen])
            failed = gather(plan, self._spares, target, there)
            lost += [Undelivered(again[item.position], item.reason) for item in failed]
            self._report(plan, {item.position for item in failed})
        for item in lost:
            self._miss(pieces, item.position, item.reason)
        return [item.position for item in lost]

    def policy_versions(self, pieces: ReadPlan) -> list[int]:
        """Weights that produced each piece."""
        versions = np.zeros(len(pieces.row), np.uint64)
        for number in np.unique(pieces.segment):
            chosen = pieces.segment == number
            versions[chosen] = self._segments[int(number)].index.rows["policy_version"][pieces.row[chosen]]
        found: list[int] = versions.tolist()
        return found

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

    def _has_spare(self, plan: ReadPlan, item: Undelivered) -> bool:
        return item.reason in _SECOND_TRY and int(plan.segment[item.position]) in self._spares

    def _report(self, plan: ReadPlan, failed: set[int]) -> None:
        """Tell which segments a spare stood in for."""
        for number in {number for place, number in enumerate(plan.segment.tolist()) if place not in failed}:
            self._on_damage(number)

    def _miss(self, plan: ReadPlan, position: int, reason: MissingReason) -> None:
        number = int(plan.span[position])
        span = self._spans[number]
        start = span.start + int(plan.dest_row[position]) - span.dest_row
        stop = start + int(plan.rows[position])
        self.missing.append(Missing(number, int(plan.site[position]), start, stop, reason))
