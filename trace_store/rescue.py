"""Second tries for pieces of a read that could not be served: other copies of the same rows, best first.

    the segment's uploaded copy      where there is one
    doubles of the plan              rows that were stored again, each from its segment and then from that one's copy

Pure bookkeeping; the caller does the reading, one ``Attempt`` after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trace_store.fetch import OpenSegment, Undelivered
from trace_store.gather.places import select
from trace_store.planner import MissingReason, ReadPlan

_REASONS = (MissingReason.DATA_LOSS, MissingReason.STORAGE_FAILED)


@dataclass(frozen=True)
class Attempt:
    """Pieces to try from ``sources``, in file order; ``positions`` are those of the pieces that they stand in for."""

    plan: ReadPlan
    sources: Mapping[int, OpenSegment]
    positions: npt.NDArray[np.intp]


@dataclass(frozen=True)
class _Copy:
    """Where another copy of a piece is."""

    sources: Mapping[int, OpenSegment]
    segment: int
    row: int
    skip: int


class Rescue:
    """What of ``plan`` was not served, and what is left to try."""

    def __init__(
        self,
        plan: ReadPlan,
        lost: Sequence[Undelivered],
        segments: Mapping[int, OpenSegment],
        spares: Mapping[int, OpenSegment],
    ) -> None:
        self._plan, self._segments, self._spares = plan, segments, spares
        self.lost = {item.position: item for item in lost}
        self._copies = {item.position: self._find(item.position) for item in lost if item.reason in _REASONS}

    def next(self) -> Attempt | None:
        """What to try now, None when nothing is left."""
        chosen: list[tuple[int, _Copy]] = []
        for position in sorted(self.lost):
            copies = self._copies.get(position)
            if copies and (not chosen or copies[0].sources is chosen[0][1].sources):
                chosen.append((position, copies.pop(0)))
        if not chosen:
            return None
        positions = np.array([position for position, _ in chosen], np.intp)
        plan = select(self._plan, positions)
        plan.segment[:], plan.row[:], plan.skip[:] = zip(*((c.segment, c.row, c.skip) for _, c in chosen), strict=True)
        order = np.lexsort((plan.skip, plan.row, plan.segment))
        return Attempt(select(plan, order), chosen[0][1].sources, positions[order])

    def settle(self, attempt: Attempt, failed: Sequence[Undelivered]) -> set[int]:
        """Note the outcome of an attempt; the segments whose uploaded copy stood in."""
        left = {int(attempt.positions[item.position]): item.reason for item in failed}
        for position, reason in left.items():
            # Trying again may help where any copy could not be read, so that reason stays.
            if self.lost[position].reason != MissingReason.STORAGE_FAILED:
                self.lost[position] = Undelivered(position, reason)
        served = [place for place, position in enumerate(attempt.positions.tolist()) if position not in left]
        for position in attempt.positions[served].tolist():
            del self.lost[position]
        return set(attempt.plan.segment[served].tolist()) if attempt.sources is self._spares else set()

    def _find(self, position: int) -> list[_Copy]:
        plan, doubles = self._plan, self._plan.doubles
        segment, row, skip = int(plan.segment[position]), int(plan.row[position]), int(plan.skip[position])
        copies = [_Copy(self._spares, segment, row, skip)] if segment in self._spares else []
        if doubles is None:
            return copies
        first = int(plan.dest_row[position])
        fits = (doubles.site == plan.site[position]) & (doubles.span == plan.span[position])
        fits &= (doubles.dest_row <= first) & (first + plan.rows[position] <= doubles.dest_row + doubles.rows)
        for place in np.flatnonzero(fits).tolist():
            skip = int(doubles.skip[place]) + first - int(doubles.dest_row[place])
            segment, row = int(doubles.segment[place]), int(doubles.row[place])
            known = (sources for sources in (self._segments, self._spares) if segment in sources)
            copies += [_Copy(sources, segment, row, skip) for sources in known]
        return copies
