"""Rebuild a segment's index from its record batches: for unfinished segments, and sealed ones whose index is damaged.

An unfinished segment is an Arrow stream behind 8 bytes of magic. A crash leaves at most a torn tail; a power cut may
also leave zeros or old blocks in it. The scan walks messages from the front, keeps every row whose checksum matches,
and after anything unreadable looks for the next message marker, so that damage in the middle costs only its own rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import zstandard

from trace_store.checksum import RowKind, record_checksum, trajectory_seed
from trace_store.errors import DataLoss, FormatError, StorageFailed
from trace_store.segment.index import SegmentIndex
from trace_store.segment.schema import ENCODING_RAW, ENCODING_ZSTD, SegmentHeader, read_header
from trace_store.segment.writer import index_rows

MAGIC = b"ARROW1\0\0"
_CONTINUATION = b"\xff\xff\xff\xff"
_METADATA_BYTES_MAX = 64 << 20

_DECOMPRESSOR_ERRORS = (zstandard.ZstdError, MemoryError)


@dataclass
class Scan:
    """Result of a scan. ``batches`` are the record batches with only their good rows, over the bytes read."""

    header: SegmentHeader
    index: SegmentIndex
    batches: list[pa.RecordBatch] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    """One line for each thing that was dropped, for the log and ``trace-store verify``."""
    torn_bytes: int = 0
    """Unreadable bytes at the very end: what a crash leaves of a write that nobody was told had succeeded."""


def decode_scales(encoding: int, stored: bytes | memoryview, expected_bytes: int) -> bytes | memoryview:
    """Block scales of a record as they were appended.

    Raises:
        DataLoss: unknown encoding, or the decoded size is not ``expected_bytes``.
    """
    if encoding == ENCODING_RAW:
        decoded: bytes | memoryview = stored
    elif encoding == ENCODING_ZSTD:
        try:
            decoded = zstandard.ZstdDecompressor().decompress(stored, max_output_size=max(expected_bytes, 1))
        except _DECOMPRESSOR_ERRORS as error:
            raise DataLoss(f"scales cannot be decompressed, cause={error}") from error
    else:
        raise DataLoss(f"scales have an unknown encoding, encoding={encoding}")
    if len(decoded) != expected_bytes:
        raise DataLoss(f"scales have another size than their record, bytes={len(decoded)} expected={expected_bytes}")
    return decoded


def verify_row(
    header: SegmentHeader, row: np.void, trajectory: str, codes: memoryview, scales: memoryview, tensor: memoryview
) -> bytes | memoryview:
    """Check that a row's bytes fit its key, site and checksum; return its uncompressed scales.

    ``row`` has the fields of ``index.ROW`` that a checksum covers.

    Raises:
        DataLoss: they do not.
    """
    kind, site = int(row["kind"]), int(row["site"])
    start, stop = int(row["start"]), int(row["stop"])
    raw_scales: bytes | memoryview = scales
    fits = True
    if kind == RowKind.RECORD:
        fits = site < len(header.sites) and stop > start
        if fits:
            tokens = stop - start
            fits = len(codes) == tokens * header.sites[site].code_bytes and len(tensor) in (4, 4 * tokens)
            expected = tokens * header.sites[site].scale_bytes
            raw_scales = decode_scales(int(row["scales_encoding"]), scales, expected)
    if fits:
        seed = trajectory_seed(header.run, header.partition, trajectory)
        attempt, version = int(row["attempt"]), int(row["policy_version"])
        checksum = record_checksum(seed, attempt, version, site, start, stop, codes, raw_scales, tensor, kind)
        if checksum == int(row["checksum"]):
            return raw_scales
    raise DataLoss(f"a row does not match its checksum, trajectory={trajectory!r} site={site} tokens=[{start}, {stop})")


def scan_segment(path: Path) -> Scan:
    """Scan a segment file, sealed or not. The returned batches share the one buffer that the file was read into.

    Raises:
        FormatError: not even the schema is readable; nothing can be kept.
        StorageFailed: the disk failed. The file is read, not mapped, so that this is an error and no signal.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StorageFailed(f"a segment cannot be read, segment={path.name} cause={error.strerror}") from error
    data, view = pa.py_buffer(content), memoryview(content)
    if len(content) < len(MAGIC) + 8 or content[: len(MAGIC)] != MAGIC:
        raise FormatError(f"segment has no Arrow magic, segment={path.name} bytes={content[:8]!r}")
    try:
        message = pa.ipc.read_message(pa.BufferReader(data.slice(len(MAGIC))))
        schema = pa.ipc.read_schema(message)
    except (pa.ArrowException, OSError, EOFError) as error:
        raise FormatError(f"segment schema is unreadable, segment={path.name} cause={error}") from error
    scan = Scan(read_header(schema, path.name), SegmentIndex())
    first = len(MAGIC) + _message_bytes(view, len(MAGIC))
    for batch in _batches(data, content, first, schema, scan):
        _keep_good_rows(batch, data.address, scan)
    return scan


def _batches(data: pa.Buffer, content: bytes, offset: int, schema: pa.Schema, scan: Scan) -> Iterator[pa.RecordBatch]:
    view = memoryview(content)
    size = len(view)
    while offset + 8 <= size:
        metadata_bytes = int.from_bytes(view[offset + 4 : offset + 8], "little")
        if bytes(view[offset : offset + 4]) == _CONTINUATION and metadata_bytes == 0:
            return  # end of stream: the footer follows
        batch, length = _read_batch(data, view, offset, schema)
        if batch is not None:
            yield batch
            offset += length
            continue
        following = _next_marker(content, offset + 8)
        if following == size:
            scan.torn_bytes = size - offset
            return
        scan.damage.append(f"unreadable bytes dropped, offset={offset} bytes={following - offset}")
        offset = following


def _read_batch(data: pa.Buffer, view: memoryview, offset: int, schema: pa.Schema) -> tuple[pa.RecordBatch | None, int]:
    metadata_bytes = int.from_bytes(view[offset + 4 : offset + 8], "little")
    if bytes(view[offset : offset + 4]) != _CONTINUATION or not 0 < metadata_bytes <= _METADATA_BYTES_MAX:
        return None, 0
    try:
        message = pa.ipc.read_message(pa.BufferReader(data.slice(offset)))
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, EOFError, ValueError):
        return None, 0
    return batch, 8 + metadata_bytes + (message.body.size if message.body is not None else 0)


def _next_marker(content: bytes, offset: int) -> int:
    """Position of the next possible message, 8-byte aligned, or the end of the file."""
    position = (offset + 7) // 8 * 8
    while True:
        found = content.find(_CONTINUATION, position)
        if found < 0:
            return len(content)
        if found % 8 == 0:
            return found
        position = found + 1


def _message_bytes(view: memoryview, offset: int) -> int:
    return 8 + int.from_bytes(view[offset + 4 : offset + 8], "little")


def _keep_good_rows(batch: pa.RecordBatch, base: int, scan: Scan) -> None:
    try:
        rows = index_rows(batch, lambda buffer: buffer.address - base, scan.index)
        columns = [batch.column(name) for name in ("codes", "scales", "tensor_scales")]
    except (pa.ArrowException, ValueError, KeyError, UnicodeDecodeError) as error:
        scan.damage.append(f"record batch dropped, cause={error!r}")
        return
    good = np.ones(len(rows), bool)
    for position, row in enumerate(rows):
        if row["kind"] == RowKind.INDEX:
            good[position] = False
            continue
        trajectory = scan.index.trajectories[int(row["trajectory"])]
        codes, scales, tensor = (memoryview(column[position].as_buffer()) for column in columns)
        try:
            verify_row(scan.header, row, trajectory, codes, scales, tensor)
        except DataLoss as error:
            good[position] = False
            scan.damage.append(f"row dropped: {error}")
    if good.any():
        scan.index.extend(rows[good])
        scan.batches.append(batch if good.all() else batch.filter(pa.array(good)))
