"""The Read stream: slices of the engine packed into frames of about 1 MiB.

Disk reads, checksums and decompression run on worker threads, one batch of slices at a time; the next frame is made
only after gRPC took the last one, so a slow reader holds two frames of server memory and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trace_store import frame
from trace_store.fetch import Slice
from trace_store.limits import FRAME_BYTES
from trace_store.planner import Missing
from trace_store.read import Read
from trace_store.v1 import trace_store_service_pb2 as service_pb2

MISSING_PER_FRAME_MAX = 10_000


def frames(read: Read) -> Iterator[tuple[bytes, int, int]]:
    """Encoded ReadResponse messages with their payload bytes and rows; the last ones name what is missing."""
    slices: list[Slice] = []
    size = 0
    for piece in read:
        piece_bytes = piece.codes.nbytes + piece.scales.nbytes + piece.tensor_scales.nbytes
        if slices and size + piece_bytes > FRAME_BYTES:
            yield _data_frame(slices), size, sum(s.rows for s in slices)
            slices, size = [], 0
        slices.append(piece)
        size += piece_bytes
    if slices:
        yield _data_frame(slices), size, sum(s.rows for s in slices)
    for low in range(0, max(len(read.missing), 1), MISSING_PER_FRAME_MAX):
        yield _missing_frame(read.missing[low : low + MISSING_PER_FRAME_MAX]), 0, 0


def _data_frame(slices: Sequence[Slice]) -> bytes:
    header: Any = service_pb2.ReadHeader(
        sites=[s.site for s in slices],
        dest_rows=[s.dest_row for s in slices],
        rows=[s.rows for s in slices],
        policy_versions=[s.policy_version for s in slices],
    )
    parts = [s.codes for s in slices] + [s.scales for s in slices] + [s.tensor_scales for s in slices]
    return frame.encode(header.SerializeToString(), parts)


def _missing_frame(missing: Sequence[Missing]) -> bytes:
    header: Any = service_pb2.ReadHeader(
        missing=[
            service_pb2.MissingRows(span=m.span, site=m.site, start=m.start, stop=m.stop, reason=int(m.reason))  # type: ignore[arg-type]
            for m in missing
        ]
    )
    return frame.encode(header.SerializeToString(), ())
