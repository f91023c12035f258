"""The Read stream: rows packed into frames of about 1 MiB, or gathered into the client's arena.

Disk reads, checksums and decompression run on worker threads, one frame or part at a time; the next frame is made while
gRPC sends the last one and not before, so a slow reader holds three frames of server memory and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from trace_store import frame, wire
from trace_store.errors import InvalidRequest
from trace_store.gather import Places, select
from trace_store.limits import FRAME_BYTES, FRAME_BYTES_MAX
from trace_store.planner import Missing, ReadPlan
from trace_store.read import Read
from trace_store.record import Site, TokenSpan
from trace_store.v1 import trace_store_service_pb2 as service_pb2

MISSING_PER_FRAME_MAX = 10_000

STORED_PER_FRAME_MAX = 100_000
"""About 2 MB of message."""

PART_BYTES = 16 << 20
"""Payload that one worker thread gathers into an arena before it looks whether the call was cancelled."""

PARTS_AT_ONCE = 2
"""Worker threads of one arena read; reads and checksums leave the GIL alone for about half of their time."""

_Result = TypeVar("_Result")


def frames(read: Read, table: Sequence[Site]) -> Iterator[tuple[bytes, int, int]]:
    """Encoded ReadResponse messages with their payload bytes and rows; the last ones name what is missing."""
    plan = read.pieces()
    code_bytes, scale_bytes = _row_bytes(plan, table)
    plan = _split_long(plan, code_bytes + scale_bytes + 4)
    code_bytes, scale_bytes = _row_bytes(plan, table)
    buffer = bytearray()
    for low, high in _frame_borders(plan.rows * (code_bytes + scale_bytes + 4)):
        part = select(plan, slice(low, high))
        codes, scales = part.rows * code_bytes[low:high], part.rows * scale_bytes[low:high]
        starts = _starts(np.concatenate([codes, scales, 4 * part.rows]))
        count = high - low
        size = int(codes.sum() + scales.sum() + 4 * part.rows.sum())
        shift = -int(codes.sum() + scales.sum()) % 4  # tensor scales are gathered at multiples of 4
        if len(buffer) < size + shift:
            buffer = bytearray(size + shift)
        view = memoryview(buffer)[: size + shift]
        places = Places(*(starts[i * count : (i + 1) * count] + shift for i in range(3)))
        missed = read.gather(part, view, places)
        if missed:
            yield _thinned_frame(read, part, view, places, codes, scales, missed)
        else:
            yield _data_frame(read, part, [view[shift:]]), size, int(part.rows.sum())
    for message in missing_frames(read):
        yield message, 0, 0


def missing_frames(read: Read) -> Iterator[bytes]:
    """The last messages: what is missing and which attempts were read; all there is if the rows went into an arena."""
    for low in range(0, max(len(read.missing), 1), MISSING_PER_FRAME_MAX):
        header: Any = _missing_header(read.missing[low : low + MISSING_PER_FRAME_MAX])
        if low == 0:
            header.attempts.extend([0 if served is None else 1 + served[0] for served in read.served])
            header.versions.extend([0 if served is None else served[1] for served in read.served])
        yield frame.encode(header.SerializeToString(), ())


def stored_frames(read: Read, table: Sequence[Site]) -> tuple[list[bytes], int, int]:
    """Messages that name the pieces in sealed local segments, which the read then serves no more; their payload bytes
    and rows."""
    names, plan = read.take_stored()
    code_bytes, scale_bytes = _row_bytes(plan, table)
    messages = []
    for low in range(0, len(plan.row), STORED_PER_FRAME_MAX):
        part = select(plan, slice(low, low + STORED_PER_FRAME_MAX))
        numbers, segment = np.unique(part.segment, return_inverse=True)
        columns = {
            "segment": segment.reshape(-1),
            "index_rows": part.row,
            "sites": part.site,
            "skip": part.skip,
            "rows": part.rows,
            "dest_rows": part.dest_row,
            "spans": part.span,
        }
        stored = service_pb2.StoredPieces(
            segments=[names[number] for number in numbers.tolist()],
            **{name: column.tolist() for name, column in columns.items()},
        )
        messages.append(frame.encode(service_pb2.ReadHeader(stored=stored).SerializeToString(), ()))
    return messages, int((plan.rows * (code_bytes + scale_bytes + 4)).sum()), int(plan.rows.sum())


async def fill_arena(read: Read, request: Any, table: Sequence[Site], arena: memoryview) -> tuple[int, int]:
    """Gather a read into its request's ReadTarget; returns payload bytes and rows.

    Raises:
        InvalidRequest: a row would land outside the arena.
    """
    # On a thread: 65,536 spans at 4 sites take the event loop's time for longer than a health check may.
    plan, places, sizes = await on_thread(_place_pieces, read, request, table, arena)
    borders = (np.flatnonzero(np.diff(np.cumsum(sizes) // PART_BYTES)) + 1).tolist()
    parts = list(pairwise([0, *borders, len(sizes)])) if len(sizes) else []

    def gather_part(low: int, high: int) -> None:
        wanted = slice(low, high)
        read.gather(
            select(plan, wanted), arena, Places(places.codes[wanted], places.scales[wanted], places.tensor[wanted])
        )

    waiting = iter(parts)

    async def work() -> None:
        for low, high in waiting:
            await on_thread(gather_part, low, high)

    await asyncio.gather(*(work() for _ in range(min(PARTS_AT_ONCE, len(parts)))))
    return int(sizes.sum()), int(plan.rows.sum())


def _place_pieces(
    read: Read, request: Any, table: Sequence[Site], arena: memoryview
) -> tuple[ReadPlan, Places, npt.NDArray[np.int64]]:
    """Pieces in file order, where each lands, and its payload bytes. Raises InvalidRequest."""
    spans = [wire.span_from_wire(span) for span in request.spans]
    bases = _check_target(spans, list(request.sites), table, arena, request.target)
    plan = read.pieces()
    code_bytes, scale_bytes = _row_bytes(plan, table)
    places = Places(
        bases[0][plan.site] + plan.dest_row * code_bytes,
        bases[1][plan.site] + plan.dest_row * scale_bytes,
        bases[2][plan.site] + plan.dest_row * 4,
    )
    return plan, places, plan.rows * (code_bytes + scale_bytes + 4)


async def on_thread(function: Callable[..., _Result], *arguments: Any) -> _Result:
    """``asyncio.to_thread`` that a cancelled call waits for: the thread uses what the call gives back when it ends."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _check_target(
    spans: Sequence[TokenSpan], sites: Sequence[int], table: Sequence[Site], arena: memoryview, target: Any
) -> list[npt.NDArray[np.int64]]:
    """Offsets of codes, scales and tensor scales by site number, all proven to lie in the arena."""
    rows = target.rows
    if any(span.dest_row + span.tokens > rows for span in spans):
        raise InvalidRequest(f"a span lands beyond the target, rows={rows}", argument="target.rows")
    bases = []
    for name, offsets, row_bytes in (
        ("codes_offsets", target.codes_offsets, [table[number].code_bytes for number in sites]),
        ("scales_offsets", target.scales_offsets, [table[number].scale_bytes for number in sites]),
        ("tensor_scales_offsets", target.tensor_scales_offsets, [4] * len(sites)),
    ):
        fits = len(offsets) == len(sites) and all(
            offset + rows * size <= arena.nbytes for offset, size in zip(offsets, row_bytes, strict=True)
        )
        if not fits or (name == "tensor_scales_offsets" and any(offset % 4 for offset in offsets)):
            raise InvalidRequest(
                f"{name} must hold one offset a site with room for the rows, rows={rows} arena_bytes={arena.nbytes}",
                argument=f"target.{name}",
            )
        base = np.zeros(len(table), np.int64)
        base[list(sites)] = list(offsets)
        bases.append(base)
    return bases


def _row_bytes(plan: ReadPlan, table: Sequence[Site]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    codes = np.array([site.code_bytes for site in table], np.int64)
    scales = np.array([site.scale_bytes for site in table], np.int64)
    return codes[plan.site], scales[plan.site]


def _split_long(plan: ReadPlan, row_bytes: npt.NDArray[np.int64]) -> ReadPlan:
    """Cut pieces that no message could hold: a record may itself be as long as the longest message."""
    rows_max = np.maximum(FRAME_BYTES_MAX // 2 // row_bytes, 1)
    pieces = -(-plan.rows // rows_max)
    if not len(pieces) or pieces.max() == 1:
        return plan
    source = np.repeat(np.arange(len(pieces)), pieces)
    turn = np.arange(len(source)) - np.repeat(_starts(pieces), pieces)
    cut = select(plan, source)
    moved = turn * rows_max[source]
    rows = np.minimum(cut.rows - moved, rows_max[source])
    return replace(cut, skip=cut.skip + moved, rows=rows, dest_row=cut.dest_row + moved)


def _frame_borders(sizes: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ranges of pieces whose payload is about FRAME_BYTES, one piece at least."""
    ends = np.cumsum(sizes)
    low = 0
    while low < len(sizes):
        before = int(ends[low - 1]) if low else 0
        high = max(low + 1, int(np.searchsorted(ends, before + FRAME_BYTES, side="right")))
        yield low, high
        low = high


def _starts(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.cumsum(sizes) - sizes


def _data_frame(read: Read, part: ReadPlan, payload: Sequence[frame.Buffer]) -> bytes:
    header: Any = service_pb2.ReadHeader(
        sites=part.site.tolist(),
        dest_rows=part.dest_row.tolist(),
        rows=part.rows.tolist(),
        policy_versions=read.policy_versions(part),
    )
    return frame.encode(header.SerializeToString(), payload)


def _thinned_frame(
    read: Read,
    part: ReadPlan,
    view: memoryview,
    places: Places,
    codes: npt.NDArray[np.int64],
    scales: npt.NDArray[np.int64],
    missed: Sequence[int],
) -> tuple[bytes, int, int]:
    """A frame without the pieces that could not be served."""
    kept = np.setdiff1d(np.arange(len(part.rows)), np.array(missed, np.int64))
    payload = [
        view[int(start) : int(start + size)]
        for column, sizes in ((places.codes, codes), (places.scales, scales), (places.tensor, 4 * part.rows))
        for start, size in zip(column[kept], sizes[kept], strict=True)
    ]
    left = select(part, kept)
    return _data_frame(read, left, payload), sum(map(len, payload)), int(left.rows.sum())


def _missing_header(missing: Sequence[Missing]) -> Any:
    return service_pb2.ReadHeader(
        missing=[
            service_pb2.MissingRows(span=m.span, site=m.site, start=m.start, stop=m.stop, reason=int(m.reason))  # type: ignore[arg-type]
            for m in missing
        ]
    )
