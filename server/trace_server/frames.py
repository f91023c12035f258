"""Rows of a read packed into frames of about 1 MiB, for clients that are elsewhere.

A worker thread makes a batch of frames at a time: its rows are gathered into the thread's buffer, frame after frame,
and each is joined with its header from there, while the cache holds it. What a visit to a thread and a gather cost
besides their bytes, 0.5 ms, was half of the server's time when each frame had its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trace_store import frame
from trace_store.gather.places import Places, select
from trace_store.limits import FRAME_BYTES, FRAME_BYTES_MAX
from trace_store.planner import Missing, ReadPlan
from trace_store.read import Read
from trace_store.record import Site
from trace_store.segment.align import ALIGN_BYTES
from trace_store.v1 import trace_store_service_pb2 as service_pb2

BATCH_BYTES = 2 << 20
"""Payload of a batch, or else one frame. A reader has two: one that is made, and what is left to send of another."""

MISSING_PER_FRAME_MAX = 10_000

Column = npt.NDArray[np.int64]


class Batch(NamedTuple):
    """Encoded ReadResponse messages, their payload bytes and rows."""

    messages: list[bytes]
    size: int
    rows: int


@dataclass(frozen=True)
class _Sizes:
    """Payload bytes of pieces by column."""

    codes: Column
    scales: Column
    tensors: Column

    @property
    def total(self) -> Column:
        return self.codes + self.scales + self.tensors

    def select(self, pieces: npt.NDArray[np.intp] | slice) -> _Sizes:
        return _Sizes(self.codes[pieces], self.scales[pieces], self.tensors[pieces])


def batches(read: Read, table: Sequence[Site]) -> Iterator[Batch]:
    """The messages of a read; the last ones name what is missing."""
    plan = _split_long(read.pieces(), table)
    code_bytes, scale_bytes = row_bytes(plan, table)
    sizes = _Sizes(plan.rows * code_bytes, plan.rows * scale_bytes, 4 * plan.rows)
    frames = list(_borders(sizes.total, FRAME_BYTES))
    frame_bytes = np.array([sizes.total[low:high].sum() for low, high in frames], np.int64)
    for low, high in _borders(frame_bytes, BATCH_BYTES):
        wanted = slice(frames[low][0], frames[high - 1][1])
        pieces = [slice(first - wanted.start, last - wanted.start) for first, last in frames[low:high]]
        buffer = _buffer(int(frame_bytes[low:high].sum()) + 2 * ALIGN_BYTES * len(pieces))
        yield _batch(read, select(plan, wanted), sizes.select(wanted), pieces, buffer)
    for message in missing_frames(read):
        yield Batch([message], 0, 0)


_kept = threading.local()


def _buffer(size: int) -> memoryview:
    """Memory for a batch that its thread keeps: a reader that waits for its client needs none."""
    buffer: memoryview = getattr(_kept, "buffer", memoryview(b""))
    if len(buffer) < size:
        buffer = _kept.buffer = memoryview(bytearray(size))
    return buffer


def _batch(read: Read, plan: ReadPlan, sizes: _Sizes, frames: Sequence[slice], buffer: memoryview) -> Batch:
    """Gather the pieces of some frames into the buffer and make their messages."""
    places, spans = _place_frames(sizes, frames)
    missed = read.gather(plan, buffer, places)
    versions = read.policy_versions(plan)
    messages, size, rows = [], 0, 0
    for pieces, span in zip(frames, spans, strict=True):
        kept: Any = pieces
        payload = [buffer[span]]
        if missed:
            kept = np.setdiff1d(np.arange(pieces.start, pieces.stop), missed)
            payload = _payload(buffer, places.select(kept), sizes.select(kept))
        header: Any = service_pb2.ReadHeader(
            sites=plan.site[kept].tolist(),
            dest_rows=plan.dest_row[kept].tolist(),
            rows=plan.rows[kept].tolist(),
            policy_versions=versions[kept].tolist(),
        )
        messages.append(frame.encode(header.SerializeToString(), payload))
        size += sum(map(len, payload))
        rows += int(plan.rows[kept].sum())
    return Batch(messages, size, rows)


def _place_frames(sizes: _Sizes, frames: Sequence[slice]) -> tuple[Places, list[slice]]:
    """Where the pieces of each frame land in the buffer, and each frame's bytes there: codes, scales, tensor scales.
    Codes start at a multiple of 64, as in the file, unless tensor scales would then miss a multiple of 4."""
    places = Places(*(np.empty_like(sizes.codes) for _ in range(3)))
    spans, position = [], 0
    for pieces in frames:
        columns = [column[pieces] for column in (sizes.codes, sizes.scales, sizes.tensors)]
        position += -position % ALIGN_BYTES
        position += -int(columns[0].sum() + columns[1].sum()) % 4
        start = position
        for place, column in zip((places.codes, places.scales, places.tensor), columns, strict=True):
            ends = np.cumsum(column)
            place[pieces] = position + ends - column
            position += int(ends[-1])
        spans.append(slice(start, position))
    return places, spans


def _payload(buffer: memoryview, places: Places, sizes: _Sizes) -> list[memoryview]:
    """Payload of a frame from which pieces were taken out."""
    columns = ((places.codes, sizes.codes), (places.scales, sizes.scales), (places.tensor, sizes.tensors))
    return [
        buffer[start : start + size]
        for starts, lengths in columns
        for start, size in zip(starts.tolist(), lengths.tolist(), strict=True)
    ]


def row_bytes(plan: ReadPlan, table: Sequence[Site]) -> tuple[Column, Column]:
    """Bytes of codes and of scales of one token, of each piece."""
    codes = np.array([site.code_bytes for site in table], np.int64)
    scales = np.array([site.scale_bytes for site in table], np.int64)
    return codes[plan.site], scales[plan.site]


def _split_long(plan: ReadPlan, table: Sequence[Site]) -> ReadPlan:
    """Cut pieces that no message could hold: a record may itself be as long as the longest message."""
    rows_max = np.maximum(FRAME_BYTES_MAX // 2 // (sum(row_bytes(plan, table)) + 4), 1)
    pieces = -(-plan.rows // rows_max)
    if not len(pieces) or pieces.max() == 1:
        return plan
    source = np.repeat(np.arange(len(pieces)), pieces)
    turn = np.arange(len(source)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    cut = select(plan, source)
    moved = turn * rows_max[source]
    rows = np.minimum(cut.rows - moved, rows_max[source])
    return replace(cut, skip=cut.skip + moved, rows=rows, dest_row=cut.dest_row + moved)


def _borders(sizes: Column, limit: int) -> Iterator[tuple[int, int]]:
    """Ranges of items of up to ``limit`` bytes together, one item at least."""
    ends = np.cumsum(sizes)
    low = 0
    while low < len(sizes):
        before = int(ends[low - 1]) if low else 0
        high = max(low + 1, int(np.searchsorted(ends, before + limit, side="right")))
        yield low, high
        low = high


def missing_frames(read: Read) -> Iterator[bytes]:
    """The last messages: what is missing and which attempts were read; all there is if the rows went into an arena."""
    for low in range(0, max(len(read.missing), 1), MISSING_PER_FRAME_MAX):
        header: Any = _missing_header(read.missing[low : low + MISSING_PER_FRAME_MAX])
        if low == 0:
            header.attempts.extend([0 if served is None else 1 + served[0] for served in read.served])
            header.versions.extend([0 if served is None else served[1] for served in read.served])
        yield frame.encode(header.SerializeToString(), ())


def _missing_header(missing: Sequence[Missing]) -> Any:
    return service_pb2.ReadHeader(
        missing=[
            service_pb2.MissingRows(span=m.span, site=m.site, start=m.start, stop=m.stop, reason=int(m.reason))  # type: ignore[arg-type]
            for m in missing
        ]
    )
