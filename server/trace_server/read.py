"""Reads whose rows do not travel: gathered into the client's arena, or named to a client that reads the disk itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from trace_server.frames import Frames, row_bytes
from trace_store import frame, wire
from trace_store.errors import InvalidRequest
from trace_store.gather.places import Places, select
from trace_store.planner import MissingReason, ReadPlan
from trace_store.read import Read
from trace_store.record import Site, TokenSpan
from trace_store.v1 import trace_store_service_pb2 as service_pb2

STORED_PER_FRAME_MAX = 100_000
"""About 2 MB of message."""

PARTS_AT_ONCE = 2
"""Worker threads of one arena read; reads and checksums leave the GIL alone for about half of their time."""

PART_BYTES_MAX = 32 << 20
"""Payload that one worker thread gathers into an arena before it looks whether the call was cancelled: 10 to 30 ms."""

_Result = TypeVar("_Result")


def stored_frames(read: Read, table: Sequence[Site]) -> Frames:
    """Messages that name the pieces in sealed local segments, which the read then serves no more."""
    names, plan = read.take_stored()
    code_bytes, scale_bytes = row_bytes(plan, table)
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
    return Frames(messages, int((plan.rows * (code_bytes + scale_bytes + 4)).sum()), int(plan.rows.sum()))


def missing_rows(read: Read) -> dict[MissingReason, int]:
    """Token rows that a read did not find, over all sites. On a thread: there may be a million entries."""
    rows: dict[MissingReason, int] = {}
    for item in read.missing:
        rows[item.reason] = rows.get(item.reason, 0) + item.stop - item.start
    return rows


async def fill_arena(read: Read, request: Any, table: Sequence[Site], arena: memoryview) -> tuple[int, int]:
    """Gather a read into its request's ReadTarget; returns payload bytes and rows.

    Raises:
        InvalidRequest: a row would land outside the arena.
    """
    # On a thread: 65,536 spans at 4 sites take the event loop's time for longer than a health check may.
    plan, places, sizes = await on_thread(_place_pieces, read, request, table, arena)
    size = int(sizes.sum())
    # As many parts as threads, or a multiple: each costs 0.3 ms beside its bytes, and a last one leaves a thread idle.
    part_bytes = -(-size // (PARTS_AT_ONCE * -(-size // (PARTS_AT_ONCE * PART_BYTES_MAX)))) if size else 1
    borders = (np.flatnonzero(np.diff((np.cumsum(sizes) - 1) // part_bytes)) + 1).tolist()
    parts = list(pairwise([0, *borders, len(sizes)])) if len(sizes) else []

    def gather_part(low: int, high: int) -> None:
        wanted = slice(low, high)
        read.gather(select(plan, wanted), arena, places.select(wanted))

    waiting = iter(parts)

    async def work() -> None:
        for low, high in waiting:
            await on_thread(gather_part, low, high)

    workers = [asyncio.ensure_future(work()) for _ in range(min(PARTS_AT_ONCE, len(parts)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:  # ``gather`` waits for the first one that fails or is cancelled, and for no other
            worker.cancel()
        await ended(*workers)
    return size, int(plan.rows.sum())


def _place_pieces(
    read: Read, request: Any, table: Sequence[Site], arena: memoryview
) -> tuple[ReadPlan, Places, npt.NDArray[np.int64]]:
    """Pieces in file order, where each lands, and its payload bytes. Raises InvalidRequest."""
    spans = [wire.span_from_wire(span) for span in request.spans]
    bases = _check_target(spans, list(request.sites), table, arena, request.target)
    plan = read.pieces()
    code_bytes, scale_bytes = row_bytes(plan, table)
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
        await ended(task)
        raise


async def ended(*tasks: asyncio.Future[Any]) -> None:
    """Wait for the end of tasks, whatever it is, also when the call is cancelled once more: gRPC reports that a client
    is gone by a failed write, and then again."""
    cancelled = None
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # nobody else asks for it, and asyncio would log that
    if cancelled is not None:
        raise cancelled


def _check_target(
    spans: Sequence[TokenSpan], sites: Sequence[int], table: Sequence[Site], arena: memoryview, target: Any
) -> list[npt.NDArray[np.int64]]:
    """Offsets of codes, scales and tensor scales by site number, all proven to lie in the arena."""
    rows = target.rows
    if any(span.dest_row + span.tokens > rows for span in spans):
        raise InvalidRequest(f"a span lands beyond the target, rows={rows}", argument="target.rows")
    bases = []
    for name, offsets, token_bytes in (
        ("codes_offsets", target.codes_offsets, [table[number].code_bytes for number in sites]),
        ("scales_offsets", target.scales_offsets, [table[number].scale_bytes for number in sites]),
        ("tensor_scales_offsets", target.tensor_scales_offsets, [4] * len(sites)),
    ):
        fits = len(offsets) == len(sites) and all(
            offset + rows * size <= arena.nbytes for offset, size in zip(offsets, token_bytes, strict=True)
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
