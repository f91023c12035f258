"""What a read returns: rows of one microbatch by site, in the order and at the places the caller asked for.

Rows that are missing are said to be missing: ``valid`` is False there, the tensor scale is NaN, so that guidance used
by mistake gives NaN and not a plausible number, and codes and scales are whatever the reused buffer held before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trace_store.errors import DataLoss
from trace_store.record import Site, TokenSpan

REASONS = {
    1: "unknown trajectory",
    2: "not sealed",
    3: "not recorded",
    4: "data loss",
    5: "stale policy version",
    6: "released",
    7: "storage failed",
    8: "not uploaded",
}
"""Texts of MissingReason on the wire."""


@dataclass(frozen=True)
class MissingRows:
    """Tokens [start, stop) of a trajectory at a site that the store does not have, and why."""

    trajectory: str
    site: Site
    start: int
    stop: int
    reason: str


@dataclass
class Microbatch:
    """Guidance of one microbatch. Arrays are views of the reader's buffers; with ``prefetch`` they hold until the next
    iteration.

    Attributes:
        rows: rows of every array, the largest destination row of the request plus one.
        planes: site -> uint8 [rows, b, W/8], or [rows, W/2] for form ``full``.
        scales: site -> uint8 [rows, W/block].
        tensor_scales: site -> float32 [rows], NaN where not valid.
        valid: site -> bool [rows].
        missing: what was asked for and not there.
    """

    rows: int
    planes: dict[Site, npt.NDArray[np.uint8]] = field(default_factory=dict)
    scales: dict[Site, npt.NDArray[np.uint8]] = field(default_factory=dict)
    tensor_scales: dict[Site, npt.NDArray[np.float32]] = field(default_factory=dict)
    valid: dict[Site, npt.NDArray[np.bool_]] = field(default_factory=dict)
    missing: list[MissingRows] = field(default_factory=list)


class Buffers:
    """Memory of one microbatch, kept from read to read and grown when a larger one comes.

    Reusing it matters: first-touch pages cost 0.7 GB/s against 10 GB/s for touched ones on a small virtual machine.
    """

    def __init__(self) -> None:
        self._arrays: dict[tuple[Site, str], npt.NDArray[np.uint8]] = {}

    def microbatch(self, sites: Sequence[Site], rows: int) -> Microbatch:
        """A microbatch over the buffers with every row invalid."""
        result = Microbatch(rows)
        for site in sites:
            codes = self._array(site, "codes", rows * site.code_bytes)
            result.planes[site] = codes.reshape(rows, *site.code_form.row_shape(site.width))
            result.scales[site] = self._array(site, "scales", rows * site.scale_bytes).reshape(rows, site.scale_bytes)
            result.tensor_scales[site] = self._array(site, "tensor", 4 * rows).view(np.float32)
            result.tensor_scales[site].fill(np.nan)
            result.valid[site] = self._array(site, "valid", rows).view(np.bool_)
            result.valid[site].fill(False)
        return result

    def _array(self, site: Site, name: str, size: int) -> npt.NDArray[np.uint8]:
        array = self._arrays.get((site, name))
        if array is None or array.size < size:
            array = self._arrays[(site, name)] = np.zeros(size, np.uint8)
        return array[:size]


def place(
    batch: Microbatch,
    sites: Sequence[Site],
    dest_rows: Sequence[int],
    rows: Sequence[int],
    payload: memoryview,
) -> None:
    """Copy one frame's slices to their rows.

    Raises:
        DataLoss: the frame does not fit the microbatch.
    """
    data = np.frombuffer(payload, np.uint8)
    counts = list(zip(sites, dest_rows, rows, strict=True))
    code = 0
    scale = sum(site.code_bytes * count for site, _, count in counts)
    tensor = scale + sum(site.scale_bytes * count for site, _, count in counts)
    if tensor + 4 * sum(rows) != data.size:
        raise DataLoss(f"a read message does not fit its header, bytes={data.size}")
    for site, low, count in counts:
        high = low + count
        if high > batch.rows:
            raise DataLoss(f"a read message names rows beyond the request, row={high} rows={batch.rows}")
        code_end, scale_end, tensor_end = (
            code + site.code_bytes * count,
            scale + site.scale_bytes * count,
            tensor + 4 * count,
        )
        batch.planes[site][low:high].reshape(-1)[:] = data[code:code_end]
        batch.scales[site][low:high].reshape(-1)[:] = data[scale:scale_end]
        batch.tensor_scales[site][low:high].view(np.uint8)[:] = data[tensor:tensor_end]
        batch.valid[site][low:high] = True
        code, scale, tensor = code_end, scale_end, tensor_end


def rows_of(spans: Sequence[TokenSpan]) -> int:
    """Rows that a request's buffers need."""
    return max((span.dest_row + span.tokens for span in spans), default=0)
