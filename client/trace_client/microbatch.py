"""What a read returns: rows of one microbatch by site, in the order and at the places the caller asked for.

Rows that are missing are said to be missing: ``valid`` is False there, the tensor scale is NaN, so that guidance used
by mistake gives NaN and not a plausible number, and codes and scales are whatever the reused buffer held before.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trace_client.arena import ATTACH_TIMEOUT_S, Arena, Arenas
from trace_store.arena import ARENA_BYTES_MAX
from trace_store.errors import DataLoss
from trace_store.record import Site, TokenSpan

ALIGNMENT = 64
"""Of every array: a cache line, and what device copies like."""

GROWTH_BYTES = 1 << 20

_IN_MEMORY = ("memory", "all_valid", "planes", "scales", "tensor_scales", "valid")

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


@dataclass(frozen=True)
class Layout:
    """Where the arrays of a microbatch lie in one flat memory.

    Attributes:
        rows: rows of every array.
        codes, scales, tensors: byte offsets, one a site.
        size: bytes in all.
        row_bytes: bytes of a row of codes, scales and tensor scales.
    """

    rows: int
    sites: tuple[Site, ...]
    codes: tuple[int, ...]
    scales: tuple[int, ...]
    tensors: tuple[int, ...]
    size: int
    row_bytes: tuple[tuple[int, int, int], ...]


@dataclass
class Microbatch:
    """Guidance of one microbatch. Arrays are views of the reader's buffers; with ``prefetch`` they hold until the next
    iteration. A copy (``copy.copy``) and one that was pickled have memory of their own, of the size of their rows.

    Attributes:
        rows: rows of every array, the largest destination row of the request plus one.
        planes: site -> uint8 [rows, b, W/8], or [rows, W/2] for form ``full``.
        scales: site -> uint8 [rows, W/block].
        tensor_scales: site -> float32 [rows], NaN where not valid.
        valid: site -> bool [rows].
        missing: what was asked for and not there.
        attempts: trajectory -> attempt that its rows are of; those without a visible attempt are left out.
    """

    rows: int
    planes: dict[Site, npt.NDArray[np.uint8]] = field(default_factory=dict)
    scales: dict[Site, npt.NDArray[np.uint8]] = field(default_factory=dict)
    tensor_scales: dict[Site, npt.NDArray[np.float32]] = field(default_factory=dict)
    valid: dict[Site, npt.NDArray[np.bool_]] = field(default_factory=dict)
    missing: list[MissingRows] = field(default_factory=list)
    attempts: dict[str, int] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict, repr=False)
    """trajectory -> which seal of that attempt, as servers number them; 0 for an open attempt."""
    layout: Layout = field(default=Layout(0, (), (), (), (), 0, ()), repr=False)
    memory: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8), repr=False)
    """Flat memory that the layout divides; planes, scales and tensor scales are views of it."""
    all_valid: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros((0, 0), np.bool_), repr=False)
    """Rows of ``valid`` under each other, bool [sites, rows]."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("memory", "all_valid")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        layout: Layout = state["layout"]
        own = view_microbatch(np.empty(layout.size, np.uint8), layout)
        for name in ("planes", "scales", "tensor_scales", "valid"):
            arrays: dict[Site, Any] = getattr(own, name)
            for site, array in state[name].items():
                target = arrays.get(site)
                if isinstance(array, np.ndarray) and target is not None and target.shape == array.shape:
                    target[...] = array
                else:  # a tensor, or what the caller put there
                    arrays[site] = array
        vars(self).update(state | {name: getattr(own, name) for name in _IN_MEMORY})


def plan_layout(sites: Sequence[Site], rows: int) -> Layout:
    """Codes of all sites, then all scales, then all tensor scales; every array starts at a multiple of 64."""
    offset = 0
    columns: list[list[int]] = []
    for row_bytes in ([s.code_bytes for s in sites], [s.scale_bytes for s in sites], [4] * len(sites)):
        columns.append([])
        for size in row_bytes:
            columns[-1].append(offset)
            offset += -(-size * rows // ALIGNMENT) * ALIGNMENT
    codes, scales, tensors = map(tuple, columns)
    each = tuple((site.code_bytes, site.scale_bytes, 4) for site in sites)
    return Layout(rows, tuple(sites), codes, scales, tensors, offset, each)


def view_microbatch(memory: npt.NDArray[np.uint8], layout: Layout) -> Microbatch:
    """A microbatch over ``memory`` (at least ``layout.size`` bytes) with every row invalid."""
    rows = layout.rows
    valid = np.zeros((len(layout.sites), rows), np.bool_)
    result = Microbatch(rows, layout=layout, memory=memory, all_valid=valid)
    for position, site in enumerate(layout.sites):
        code, scale, tensor = layout.codes[position], layout.scales[position], layout.tensors[position]
        codes = memory[code : code + rows * site.code_bytes]
        result.planes[site] = codes.reshape(rows, *site.code_form.row_shape(site.width))
        result.scales[site] = memory[scale : scale + rows * site.scale_bytes].reshape(rows, site.scale_bytes)
        result.tensor_scales[site] = memory[tensor : tensor + 4 * rows].view(np.float32)
        result.valid[site] = valid[position]
    if layout.sites:
        memory[layout.tensors[0] : layout.size].view(np.float32).fill(np.nan)
    return result


class Buffers:
    """Memory of one microbatch, kept from read to read and grown when a larger one comes.

    Reusing it matters: first-touch pages cost 0.7 GB/s against 10 GB/s for touched ones on a small virtual machine.
    On the same host the memory is an arena, which the server fills.
    """

    def __init__(self) -> None:
        self._memory: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._arena: Arena | None = None
        self._arenas: Arenas | None = None

    def microbatch(self, sites: Sequence[Site], rows: int) -> Microbatch:
        """A microbatch in process memory with every row invalid."""
        layout = plan_layout(sites, rows)
        return view_microbatch(self.memory(layout.size), layout)

    def memory(self, size: int) -> npt.NDArray[np.uint8]:
        """``size`` bytes of process memory or more, as a new array object."""
        if self._memory.size < size:
            self._memory = np.zeros(size, np.uint8)
        return np.frombuffer(self._memory.data, np.uint8)

    def arena(self, arenas: Arenas, size: int, timeout_s: float = ATTACH_TIMEOUT_S) -> Arena | None:
        """An arena of ``size`` bytes or more with the server of ``arenas``, None where there is none so large."""
        known = self._arena
        if known is not None and (self._arenas is not arenas or known.size < size or not known.alive):
            self.drop_arena()
        if self._arena is None:
            # A quarter more than asked for: microbatches differ in length, and growing means a new arena.
            wanted = -(-max(size + size // 4, 1) // GROWTH_BYTES) * GROWTH_BYTES
            if size > ARENA_BYTES_MAX:
                return None
            self._arenas = arenas
            self._arena = arenas.attach(min(wanted, ARENA_BYTES_MAX), timeout_s)
        return self._arena

    def drop_arena(self) -> None:
        """Use the arena no more: a read into it failed, and the server may still be writing there."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None


class SpareBuffers:
    """Buffers for reads that bring none. One comes back when the last array over its memory is gone."""

    KEPT_MAX = 2

    def __init__(self) -> None:
        self._spare: list[Buffers] = []

    def take(self) -> Buffers:
        try:
            return self._spare.pop()
        except IndexError:
            return Buffers()

    def give_back_after(self, memory: npt.NDArray[np.uint8], buffers: Buffers) -> None:
        """Take the buffers back once ``memory``, an array object of this read alone, and its views are gone."""
        weakref.finalize(memory, self.give_back, buffers).atexit = False

    def give_back(self, buffers: Buffers) -> None:
        if len(self._spare) < self.KEPT_MAX:
            self._spare.append(buffers)


def place(
    batch: Microbatch,
    positions: Sequence[int],
    dest_rows: Sequence[int],
    rows: Sequence[int],
    payload: memoryview,
) -> None:
    """Copy one frame's slices to their rows; ``positions`` are those of the sites in the layout.

    Raises:
        DataLoss: the frame does not fit the microbatch.
    """
    layout, memory, valid = batch.layout, batch.memory.data, batch.all_valid
    counts = list(zip(positions, dest_rows, rows, strict=True))
    if any(low + count > layout.rows for _, low, count in counts):
        raise DataLoss(f"a read message names rows beyond the request, rows={layout.rows}")
    sizes = [[layout.row_bytes[position][column] * count for position, _, count in counts] for column in range(3)]
    if sum(map(sum, sizes)) != payload.nbytes:
        raise DataLoss(f"a read message does not fit its header, bytes={payload.nbytes}")
    source = 0
    for starts, column in zip((layout.codes, layout.scales, layout.tensors), range(3), strict=True):
        for (position, low, _), size in zip(counts, sizes[column], strict=True):
            target = starts[position] + low * layout.row_bytes[position][column]
            memory[target : target + size] = payload[source : source + size]
            source += size
    for position, low, count in counts:
        valid[position, low : low + count] = True


def rows_of(spans: Sequence[TokenSpan]) -> int:
    """Rows that a request's buffers need."""
    return max((span.dest_row + span.tokens for span in spans), default=0)
