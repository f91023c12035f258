"""Rows of a read packed into frames, for clients that are elsewhere.

A worker thread makes one frame at a time: its rows are gathered straight into the message that gRPC sends. The next one
is made meanwhile and not before, so a slow reader holds two frames of server memory, and gRPC's copy of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trace_store import frame
from trace_store.fresh import fresh_bytes
from trace_store.gather.places import Places, select
from trace_store.limits import FRAME_BYTES_MAX
from trace_store.planner import Missing, ReadPlan
from trace_store.read import Read
from trace_store.record import Site
from trace_store.v1 import trace_store_service_pb2 as service_pb2

READ_FRAME_BYTES = 2 << 20
"""Payload of a frame, or else one piece. A bare stream is at its best with 1 MiB; but a frame costs the server 0.5 ms
and the client 0.3 ms besides its bytes, so that reads took 2.0 CPU s/GiB at 2 MiB, 2.4 at 1 and 2.2 at 4."""

MISSING_PER_FRAME_MAX = 10_000

Column = npt.NDArray[np.int64]


class Frames(NamedTuple):
    """Encoded ReadResponse messages, their payload bytes and rows."""

    messages: list[bytes]
    size: int
    rows: int


def frames(read: Read, table: Sequence[Site]) -> Iterator[Frames]:
    """The messages of a read, one at a time; the last ones name what is missing."""
    plan = _split_long(read.pieces(), table)
    for low, high in _borders(plan.rows * (sum(row_bytes(plan, table)) + 4)):
        yield _frame(read, select(plan, slice(low, high)), table)
    for message in missing_frames(read):
        yield Frames([message], 0, 0)


def _frame(read: Read, plan: ReadPlan, table: Sequence[Site]) -> Frames:
    """Gather pieces into their message."""
    code_bytes, scale_bytes = row_bytes(plan, table)
    sizes = np.concatenate([plan.rows * code_bytes, plan.rows * scale_bytes, 4 * plan.rows])
    versions = read.policy_versions(plan)
    size = int(sizes.sum())
    prefix = frame.prefix(_header(plan, versions), size)
    message, view = fresh_bytes(len(prefix) + size)
    view[: len(prefix)] = prefix
    ends = len(prefix) + np.cumsum(sizes)
    shift = int(ends[-1]) % 4  # tensor scales are gathered at multiples of 4
    target, starts = view[shift:], ends - sizes - shift
    missed = read.gather(plan, target, Places(*np.split(starts, 3)))
    if missed:
        kept = np.setdiff1d(np.arange(len(plan.row)), missed)
        chosen = np.concatenate([kept + column * len(plan.row) for column in range(3)])
        parts = [target[a : a + n] for a, n in zip(starts[chosen].tolist(), sizes[chosen].tolist(), strict=True)]
        plan, size = select(plan, kept), int(sizes[chosen].sum())
        message = frame.encode(_header(plan, versions[kept]), parts)
    return Frames([message], size, int(plan.rows.sum()))


def _header(plan: ReadPlan, versions: npt.NDArray[np.uint64]) -> bytes:
    header: Any = service_pb2.ReadHeader(
        sites=plan.site.tolist(),
        dest_rows=plan.dest_row.tolist(),
        rows=plan.rows.tolist(),
        policy_versions=versions.tolist(),
    )
    encoded: bytes = header.SerializeToString()
    return encoded


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


def _borders(sizes: Column) -> Iterator[tuple[int, int]]:
    """Ranges of pieces of up to READ_FRAME_BYTES together, one piece at least."""
    ends = np.cumsum(sizes)
    low = 0
    while low < len(sizes):
        before = int(ends[low - 1]) if low else 0
        high = max(low + 1, int(np.searchsorted(ends, before + READ_FRAME_BYTES, side="right")))
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
