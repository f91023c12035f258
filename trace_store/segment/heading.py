"""What a segment says of itself, wherever that is still readable: the schema in front, the footer, a copy of it.

An unfinished segment has no footer, and one bad bit in front would cost all of its rows. So the writer puts a copy of
the schema's metadata into the header of the first record batch, where stock Arrow keeps it as custom metadata and looks
at it no further, and another one into the first batch behind COPY_AGAIN_BYTES, for a sector that takes the whole front
with it. Columns need no copy, the format fixes them. The metadata's own checksum says whether a copy is whole.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping

import pyarrow as pa
import zstandard

from trace_store.errors import FormatError
from trace_store.segment.messages import MAGIC, header_bytes, next_batch, read_batch
from trace_store.segment.schema import FIELDS, SegmentHeader, UnknownVersion, read_header

MAGIC_DAMAGE_MAX = 2
"""Bytes of the magic that may differ: one bad bit in it must not cost a segment of whole rows."""

COPY_KEY = b"trace_store.copy"

COPY_AGAIN_BYTES = 64 << 10
"""The scan reads parts of this size; a part that the disk cannot read is lost as a whole."""

COPY_BYTES_MAX = 32 << 10
"""No longer copy is written. 60 sites take 0.5 KiB, 4,096 sites that differ in layer and kind 9 KiB."""

METADATA_JSON_BYTES_MAX = 8 << 20
"""4,096 sites with the longest names take 4 MiB."""

_COPY_ERRORS = (ValueError, TypeError, binascii.Error, zstandard.ZstdError, MemoryError, pa.ArrowException, OSError)


def make_copy(schema: pa.Schema) -> dict[bytes, bytes]:
    """Custom metadata for a record batch: the schema's metadata as base64 of a zstd frame of a JSON object.

    Empty where that is too long for the header of a record batch.
    """
    metadata = {key.decode(): value.decode() for key, value in schema.metadata.items()}
    packed = zstandard.ZstdCompressor(level=3).compress(json.dumps(metadata).encode())
    encoded = base64.b64encode(packed)
    return {COPY_KEY: encoded} if len(encoded) <= COPY_BYTES_MAX else {}


def read_copy(custom: Mapping[bytes, bytes], name: str) -> SegmentHeader:
    """What a copy says. Raises UnknownVersion; FormatError: it is none, or not whole."""
    try:
        packed = base64.b64decode(custom[COPY_KEY], validate=True)
        if zstandard.get_frame_parameters(packed).content_size > METADATA_JSON_BYTES_MAX:
            raise ValueError("longer than any site table")
        metadata = json.loads(zstandard.ZstdDecompressor().decompress(packed))
        schema = pa.schema(FIELDS, metadata=metadata)
    except (*_COPY_ERRORS, KeyError) as error:
        raise FormatError(f"copy of the metadata is unreadable, segment={name} cause={error!r}") from error
    return read_header(schema, name)


def read_heading(data: pa.Buffer, content: bytearray, name: str, damage: list[str]) -> tuple[SegmentHeader, int]:
    """Header of a segment, and where to look for its first record batch. Adds to ``damage`` what was wrong.

    Raises:
        UnknownVersion: written by another version.
        FormatError: says why the front is unreadable; no other place says it either.
    """
    try:
        return _in_front(data, content, name, damage)
    except UnknownVersion:
        raise
    except FormatError as error:
        front = error
    elsewhere: tuple[tuple[str, Callable[[], SegmentHeader]], ...] = (
        ("footer", lambda: _in_footer(data, name)),
        ("copy in a record batch", lambda: _in_batches(data, content, name)),
    )
    for place, find in elsewhere:
        try:
            header = find()
        except UnknownVersion:
            raise
        except FormatError:
            continue
        damage.append(f"the front is damaged, its {place} is used: {front}")
        return header, len(MAGIC)
    raise front


def _in_front(data: pa.Buffer, content: bytearray, name: str, damage: list[str]) -> tuple[SegmentHeader, int]:
    differing = sum(
        found != wanted for found, wanted in zip(content[: len(MAGIC)].ljust(len(MAGIC)), MAGIC, strict=True)
    )
    if differing > MAGIC_DAMAGE_MAX:
        raise FormatError(f"segment has no Arrow magic, segment={name} bytes={content[:8]!r}")
    try:
        schema = pa.ipc.read_schema(pa.ipc.read_message(pa.BufferReader(data.slice(len(MAGIC)))))
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        raise FormatError(f"segment schema is unreadable, segment={name} cause={error}") from error
    header = read_header(schema, name)
    if differing:
        damage.append("the magic in front is damaged")  # the schema behind it has a checksum and says what this is
    first = len(MAGIC) + 8 + header_bytes(content, len(MAGIC))
    # A bad bit may have made the schema longer, with the first rows in it.
    earlier = next_batch(data, content, len(MAGIC), min(first, len(content)))
    if earlier is not None:
        damage.append(f"the schema's length is damaged, bytes={first} rows_at={earlier[0]}")
        first = earlier[0]
    return header, first


def _in_footer(data: pa.Buffer, name: str) -> SegmentHeader:
    try:
        return read_header(pa.ipc.open_file(pa.BufferReader(data)).schema, name)
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        raise FormatError(f"segment has no footer, segment={name} cause={error}") from error


def _in_batches(data: pa.Buffer, content: bytearray, name: str) -> SegmentHeader:
    offset = 0
    while (found := next_batch(data, content, offset)) is not None:
        offset, batch, length = found
        while batch is not None:
            header_end = offset + 8 + header_bytes(content, offset)
            if content.find(COPY_KEY, offset, header_end) >= 0:
                try:
                    return read_copy(_custom_metadata(data.slice(offset, length)), name)
                except UnknownVersion:
                    raise
                except FormatError:
                    pass  # there may be another one further on
            offset += length
            batch, length = read_batch(data, content, offset)
        offset -= 8
    raise FormatError(f"no record batch has a copy of the metadata, segment={name}")


def _custom_metadata(message: pa.Buffer) -> Mapping[bytes, bytes]:
    try:
        stream = pa.ipc.open_stream(pa.py_buffer(bytes(pa.schema(FIELDS).serialize()) + bytes(message)))
        custom = stream.read_next_batch_with_custom_metadata().custom_metadata
    except _COPY_ERRORS as error:
        raise FormatError(f"a record batch is unreadable, cause={error!r}") from error
    return dict(custom.items()) if custom is not None else {}
