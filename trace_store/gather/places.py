"""Where the pieces of a plan land, and in which order they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trace_store.fetch import OpenSegment
from trace_store.planner import Column, ReadPlan

_PLAN_COLUMNS = ("segment", "row", "site", "skip", "rows", "dest_row", "span")


@dataclass(frozen=True)
class Places:
    """Byte offsets in the target where each piece of a plan lands: codes, scales, and float32 tensor scales.

    ``tensor`` offsets are multiples of 4.
    """

    codes: Column
    scales: Column
    tensor: Column

    def select(self, pieces: npt.NDArray[np.intp] | slice) -> Places:
        """The places of some of the pieces."""
        return Places(self.codes[pieces], self.scales[pieces], self.tensor[pieces])


def file_order(plan: ReadPlan, segments: Mapping[int, OpenSegment]) -> ReadPlan:
    """The plan with its pieces in the order of their bytes on disk."""
    offsets = np.zeros(len(plan.row), np.int64)
    for number in np.unique(plan.segment):
        chosen = plan.segment == number
        offsets[chosen] = segments[int(number)].index.rows["codes_offset"][plan.row[chosen]]
    return select(plan, np.lexsort((plan.skip, plan.row, offsets, plan.segment)))


def select(plan: ReadPlan, pieces: npt.NDArray[np.intp] | slice) -> ReadPlan:
    """The plan of some of its pieces."""
    return replace(plan, **{name: getattr(plan, name)[pieces] for name in _PLAN_COLUMNS})
