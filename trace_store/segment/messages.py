"""Find and read the record batches of a segment's bytes, whatever lies between them.

Messages start at multiples of 8. Every batch is read with the columns of the format and never with what the file's own
schema says: a bit of that may be bad, and one of its fields makes Arrow swap the bytes of all numbers.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from trace_store.segment.schema import FIELDS

MAGIC = b"ARROW1\0\0"

METADATA_BYTES_MAX = 64 << 10
"""Largest header of a record batch; twelve columns take about 1 KiB."""

_CONTINUATION = b"\xff\xff\xff\xff"
_END_OF_STREAM = _CONTINUATION + bytes(4)
_FOOTER_MAGIC = b"ARROW1"
_FOOTER_TAIL_BYTES = 4 + len(_FOOTER_MAGIC)

_SCHEMA = pa.schema(FIELDS)

Found = tuple[int, pa.RecordBatch, int]
"""Offset, record batch, bytes of its message."""


def read_batch(data: pa.Buffer, content: bytearray, offset: int) -> tuple[pa.RecordBatch | None, int]:
    """The record batch whose message starts at ``offset`` and its bytes; None if no whole one does."""
    metadata_bytes = header_bytes(content, offset)
    if content[offset : offset + 4] != _CONTINUATION or not 0 < metadata_bytes <= METADATA_BYTES_MAX:
        return None, 0
    try:
        message = pa.ipc.read_message(pa.BufferReader(data.slice(offset)))
        batch = pa.ipc.read_record_batch(message, _SCHEMA)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, EOFError, ValueError):
        return None, 0
    return batch, 8 + metadata_bytes + (message.body.size if message.body is not None else 0)


def header_bytes(content: bytearray, offset: int) -> int:
    """Length of a message's header, as the message says."""
    return int.from_bytes(content[offset + 4 : offset + 8], "little")


def next_batch(data: pa.Buffer, content: bytearray, offset: int, stop: int | None = None) -> Found | None:
    """The first readable batch behind ``offset`` (and before ``stop``), by its marker.

    Vectorised: codes of all ones look like a marker at every eighth byte.
    """
    begin, size = offset // 8 * 8 + 8, len(content)
    end = size if stop is None else min(stop + 8, size)
    words = np.frombuffer(content, "<u4", count=max(end - begin, 0) // 8 * 2, offset=min(begin, size))
    marks, sizes = words[0::2], words[1::2]
    likely = (marks == 0xFFFF_FFFF) & (sizes > 0) & (sizes <= METADATA_BYTES_MAX) & (sizes % 8 == 0)
    for position in (begin + 8 * np.flatnonzero(likely)).tolist():
        batch, length = read_batch(data, content, position)
        if batch is not None and (stop is None or position < stop):
            return position, batch, length
    return None


def is_end_of_stream(content: bytearray, offset: int) -> bool:
    """Whether the stream ends here: its mark, then a footer that fills the file.

    The mark alone proves nothing: a message whose length was zeroed looks the same and has good rows behind it.
    """
    if content[offset : offset + 8] != _END_OF_STREAM or not content.endswith(_FOOTER_MAGIC):
        return False
    footer_bytes = int.from_bytes(content[-_FOOTER_TAIL_BYTES : -len(_FOOTER_MAGIC)], "little")
    return offset + 8 + footer_bytes + _FOOTER_TAIL_BYTES == len(content)
