"""Rebuild a segment's index from its record batches: for unfinished segments, and sealed ones whose index is damaged.

An unfinished segment is an Arrow stream behind 8 bytes of magic. A crash leaves at most a torn tail; a power cut may
also leave zeros or old blocks in it. The scan walks messages from the front, keeps every row whose checksum matches,
and after anything unreadable looks for the next readable batch, so that damage in the middle costs only its own rows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import zstandard

from trace_store.checksum import RowKind, record_checksum, trajectory_seed
from trace_store.errors import DataLoss, StorageFailed
from trace_store.segment.heading import read_heading
from trace_store.segment.index import SegmentIndex
from trace_store.segment.messages import is_end_of_stream, next_batch, read_batch
from trace_store.segment.schema import ENCODING_RAW, ENCODING_ZSTD, SegmentHeader
from trace_store.segment.writer import index_rows

_READ_BYTES = 64 << 10
"""One bad sector costs this much of a segment, or the records that touch it."""

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


_kept = threading.local()


def _decompressor() -> zstandard.ZstdDecompressor:
    """One a thread: making it cost as much as decoding 10 KiB of scales."""
    if not hasattr(_kept, "decompressor"):
        _kept.decompressor = zstandard.ZstdDecompressor()
    found: zstandard.ZstdDecompressor = _kept.decompressor
    return found


def decode_scales(encoding: int, stored: bytes | memoryview, expected_bytes: int) -> bytes | memoryview:
    """Block scales of a record as they were appended.

    Raises:
        DataLoss: unknown encoding, or the decoded size is not ``expected_bytes``.
    """
    if encoding == ENCODING_RAW:
        decoded: bytes | memoryview = stored
    elif encoding == ENCODING_ZSTD:
        try:
            # Exactly one frame that says its size: a second frame, or one without a size, would be cut without a word.
            if zstandard.get_frame_parameters(stored).content_size != expected_bytes:
                raise DataLoss(f"scales have another size than their record, expected={expected_bytes}")
            decoded = _decompressor().decompress(stored, allow_extra_data=False)
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
        UnknownVersion: written by another version; leave it alone.
        FormatError: neither the front nor the footer nor a record batch says what it is; nothing can be kept.
        StorageFailed: the file cannot be opened. Parts that the disk cannot read count as damage.
    """
    content, damage = _read_content(path)
    return scan_content(content, path.name, damage)


def scan_content(content: bytearray, name: str, damage: list[str]) -> Scan:
    """The same for a file's bytes, with the lines of damage that reading them gave."""
    data = pa.py_buffer(content)
    header, first = read_heading(data, content, name, damage)
    scan = Scan(header, SegmentIndex(), damage=damage)
    for batch in _batches(data, content, first, scan):
        _keep_good_rows(batch, data, scan)
    return scan


def _read_content(path: Path) -> tuple[bytearray, list[str]]:
    """The file's bytes, zeros where the disk cannot read them, and a line for each such part.

    Read and not mapped: a bad sector under a mapping kills the process with SIGBUS.
    """
    damage: list[str] = []
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageFailed(f"a segment cannot be read, segment={path.name} cause={error.strerror}") from error
    try:
        content = bytearray(os.fstat(descriptor).st_size)
        view, offset = memoryview(content), 0
        while offset < len(content):
            part = view[offset : offset + _READ_BYTES]
            try:
                count = os.preadv(descriptor, [part], offset)
            except OSError as error:
                damage.append(f"unreadable on disk, offset={offset} bytes={len(part)} cause={error.strerror}")
                count = len(part)
            if count == 0:
                break
            offset += count
    finally:
        os.close(descriptor)
    return content, damage


def _batches(data: pa.Buffer, content: bytearray, offset: int, scan: Scan) -> Iterator[pa.RecordBatch]:
    size = len(content)
    while offset < size:
        if is_end_of_stream(content, offset):
            return
        batch, length = read_batch(data, content, offset)
        if batch is None:
            found = next_batch(data, content, offset)
            if found is None:
                scan.torn_bytes = size - offset
                return
            following, batch, length = found
            scan.damage.append(f"unreadable bytes dropped, offset={offset} bytes={following - offset}")
            offset = following
        yield batch
        offset += length


def _keep_good_rows(batch: pa.RecordBatch, data: pa.Buffer, scan: Scan) -> None:
    def place(buffer: pa.Buffer) -> int:
        position = int(buffer.address) - int(data.address)
        if not 0 <= position <= data.size - buffer.size:
            raise ValueError("values do not lie in the file, as in a compressed batch")
        return position

    if not batch.num_rows or any(column.null_count for column in batch.columns):
        scan.damage.append("record batch dropped, it holds nulls or no rows")
        return
    try:
        rows = index_rows(batch, place, scan.index)
        columns = [batch.column(name) for name in ("codes", "scales", "tensor_scales")]
    except (pa.ArrowException, ValueError, KeyError, IndexError, TypeError) as error:
        scan.damage.append(f"record batch dropped, cause={error!r}")
        return
    good = np.ones(len(rows), bool)
    for position, row in enumerate(rows):
        trajectory = scan.index.trajectories[int(row["trajectory"])]
        codes, scales, tensor = (memoryview(column[position].as_buffer()) for column in columns)
        try:
            verify_row(scan.header, row, trajectory, codes, scales, tensor)
        except DataLoss as error:
            good[position] = False
            scan.damage.append(f"row dropped: {error}")
        if row["kind"] == RowKind.INDEX:
            good[position] = False
    if good.any():
        scan.index.extend(rows[good])
        scan.batches.append(batch if good.all() else batch.filter(pa.array(good)))
