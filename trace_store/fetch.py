"""Execute a read plan: positioned reads, coalesced, every record verified before any of its bytes is handed out.

Records that one message appended lie next to each other in the file, so a microbatch becomes few large reads. Damage
or a failing read costs the rows of that record alone; they are reported as missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from trace_store.errors import DataLoss, StorageFailed
from trace_store.planner import MissingReason, ReadPlan
from trace_store.record import Site
from trace_store.segment.index import SegmentIndex
from trace_store.segment.scan import verify_row
from trace_store.segment.schema import SegmentHeader
from trace_store.storage.base import Range, SegmentGone, Source
from trace_store.storage.prefetch import Prefetched

RUN_BYTES_MAX = 4 << 20
"""Longest single read of one column."""

GAP_BYTES_MAX = 64 << 10
"""A hole up to this size is read over rather than seeked over."""

ROUND_TRIP_BYTES = 32 << 20
"""Payload asked of an object store at once; what one remote read holds in memory."""


@dataclass(frozen=True)
class OpenSegment:
    """A segment that stays readable while the lease lasts, even when it is sealed, moved or released meanwhile."""

    source: Source
    name: str
    header: SegmentHeader
    index: SegmentIndex


@dataclass(frozen=True)
class Slice:
    """Rows of one site that a read delivers: views of codes and scales, one float32 tensor scale a row."""

    site: int
    dest_row: int
    rows: int
    policy_version: int
    codes: memoryview
    scales: memoryview
    tensor_scales: memoryview


@dataclass(frozen=True)
class Undelivered:
    """Piece ``position`` of the plan could not be served."""

    position: int
    reason: MissingReason


def fetch(plan: ReadPlan, segments: Mapping[int, OpenSegment]) -> Iterator[Slice | Undelivered]:
    """Serve a plan in file order, one item for each piece.

    A slice's views stay valid after the next item is drawn.
    """
    for number in np.unique(plan.segment):
        positions = np.flatnonzero(plan.segment == number)
        segment = segments[int(number)]
        rows = segment.index.rows[plan.row[positions]]
        order = np.argsort(rows["codes_offset"], kind="stable")
        positions, rows = positions[order], rows[order]
        if not segment.source.shape.remote:
            yield from _fetch_segment(plan, segment, positions, rows)
            continue
        for low, high in _round_trips(rows):
            source = Prefetched(segment.source, byte_ranges(rows[low:high]))
            yield from _fetch_segment(plan, replace(segment, source=source), positions[low:high], rows[low:high])


def read_record(segment: OpenSegment, row: int) -> tuple[memoryview, memoryview, memoryview]:
    """Codes, uncompressed scales and tensor scales of one record, verified.

    Raises:
        DataLoss: the bytes do not match the checksum.
        StorageFailed: the disk failed.
    """
    rows = segment.index.rows[row : row + 1]
    return _verified(segment, rows[0], tuple(next(_read_column(segment, rows, prefix)) for prefix in _PREFIXES))


_PREFIXES = ("codes", "scales", "tensor")

_Parts = tuple["memoryview | StorageFailed", ...]


def _fetch_segment(
    plan: ReadPlan, segment: OpenSegment, positions: npt.NDArray[np.intp], rows: npt.NDArray[np.void]
) -> Iterator[Slice | Undelivered]:
    columns = [_read_column(segment, rows, prefix) for prefix in _PREFIXES]
    for position, row, *parts in zip(positions.tolist(), rows, *columns, strict=True):
        try:
            codes, scales, tensor = _verified(segment, row, tuple(parts))
        except DataLoss:
            yield Undelivered(position, MissingReason.DATA_LOSS)
            continue
        except SegmentGone:
            yield Undelivered(position, MissingReason.RELEASED)
            continue
        except StorageFailed:
            yield Undelivered(position, MissingReason.STORAGE_FAILED)
            continue
        site = segment.header.sites[int(plan.site[position])]
        yield _cut(plan, position, row, site, codes, scales, tensor)


def _verified(segment: OpenSegment, row: np.void, parts: _Parts) -> tuple[memoryview, memoryview, memoryview]:
    for part in parts:
        if isinstance(part, StorageFailed):
            raise part
    codes, scales, tensor = (part for part in parts if isinstance(part, memoryview))
    trajectory = segment.index.trajectories[int(row["trajectory"])]
    return codes, memoryview(verify_row(segment.header, row, trajectory, codes, scales, tensor)), tensor


def _cut(
    plan: ReadPlan,
    position: int,
    row: np.void,
    site: Site,
    codes: memoryview,
    scales: memoryview,
    tensor: memoryview,
) -> Slice:
    skip, count = int(plan.skip[position]), int(plan.rows[position])
    last = skip + count
    tensor = memoryview(bytes(tensor) * count) if tensor.nbytes == 4 else tensor[4 * skip : 4 * last]
    return Slice(
        site=int(plan.site[position]),
        dest_row=int(plan.dest_row[position]),
        rows=count,
        policy_version=int(row["policy_version"]),
        codes=codes[skip * site.code_bytes : last * site.code_bytes],
        scales=scales[skip * site.scale_bytes : last * site.scale_bytes],
        tensor_scales=tensor,
    )


def _read_column(segment: OpenSegment, rows: npt.NDArray[np.void], prefix: str) -> Iterator[memoryview | StorageFailed]:
    """The bytes of one column for each row, read in runs of up to RUN_BYTES_MAX."""
    offsets = rows[f"{prefix}_offset"].astype(np.int64)
    ends = offsets + rows[f"{prefix}_bytes"]
    for low, high in _runs(offsets, ends):
        start = int(offsets[low])
        run = memoryview(bytearray(int(ends[low:high].max()) - start))
        places = list(zip(offsets[low:high].tolist(), ends[low:high].tolist(), strict=True))
        try:
            segment.source.read_into(run, start)
        except StorageFailed:
            # A bad sector must cost its own record only: each one gets a read of its own.
            yield from (_read_one(segment, first, end) for first, end in places)
            continue
        yield from (run[first - start : end - start] for first, end in places)


def _read_one(segment: OpenSegment, first: int, end: int) -> memoryview | StorageFailed:
    part = memoryview(bytearray(end - first))
    try:
        segment.source.read_into(part, first)
    except StorageFailed as error:
        return error
    return part


def byte_ranges(rows: npt.NDArray[np.void]) -> list[Range]:
    """Byte ranges of all columns of some rows, for one round trip."""
    ranges: list[Range] = []
    for prefix in _PREFIXES:
        offsets = rows[f"{prefix}_offset"].astype(np.int64)
        ranges.extend(zip(offsets.tolist(), (offsets + rows[f"{prefix}_bytes"]).tolist(), strict=True))
    return ranges


def _round_trips(rows: npt.NDArray[np.void]) -> Iterator[Range]:
    """Half-open row ranges of about ROUND_TRIP_BYTES each."""
    sizes = sum(rows[f"{prefix}_bytes"].astype(np.int64) for prefix in _PREFIXES)
    trips = np.cumsum(sizes) // ROUND_TRIP_BYTES
    borders = [0, *(np.flatnonzero(np.diff(trips)) + 1).tolist(), len(rows)]
    yield from pairwise(borders)


def _runs(offsets: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Stretches of rows that one read serves, as half-open row ranges; rows are sorted by code offset."""
    low = 0
    for row in range(1, len(offsets) + 1):
        if (
            row == len(offsets)
            or offsets[row] < offsets[row - 1]
            or offsets[row] - ends[row - 1] > GAP_BYTES_MAX
            or ends[row] - offsets[low] > RUN_BYTES_MAX
        ):
            yield low, row
            low = row
