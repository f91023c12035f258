"""Read a segment: open it by its index, then serve verified records by positioned reads.

Nothing here maps the file: a failing disk under a mapping kills the process with SIGBUS, a failing ``pread`` is an
error that only costs the rows it was for.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trace_store.checksum import RowKind
from trace_store.errors import DataLoss, FormatError, StorageFailed
from trace_store.segment.index import SegmentIndex
from trace_store.segment.scan import verify_row
from trace_store.segment.schema import SegmentHeader, read_header
from trace_store.storage.base import Source

TAIL_BYTES = 256 << 10
"""What is read first of a remote segment: footer and index of 10,000 records fit (10 to 20 bytes a row, compressed)."""


def open_sealed(path: Path) -> tuple[SegmentHeader, SegmentIndex]:
    """Header and index of a sealed segment in three reads: footer, schema, last record batch.

    Raises:
        FormatError: no Arrow file, another version, or the index row is damaged; ``scan_segment`` may still help.
    """
    try:
        with pa.OSFile(os.fspath(path), "rb") as file:
            return _open(file, path.name, file.size())
    except OSError as error:
        raise FormatError(f"segment cannot be opened, segment={path.name} cause={error}") from error


def open_content(content: bytes | bytearray, name: str) -> tuple[SegmentHeader, SegmentIndex]:
    """The same for the bytes of a segment. Raises FormatError."""
    return _open(pa.BufferReader(content), name, len(content))


def open_source(source: Source) -> tuple[SegmentHeader, SegmentIndex]:
    """The same for a source that costs a round trip a read: one read of the tail, a second one for a long index.

    Raises:
        FormatError: as ``open_sealed``.
        StorageFailed, SegmentGone: the source cannot be read.
    """
    file = _TailFile(source)
    try:
        return _open(pa.PythonFile(file, "r"), source.name, source.size())
    except FormatError:
        if file.failure is not None:
            raise file.failure from None
        raise


def _open(file: Any, name: str, size: int) -> tuple[SegmentHeader, SegmentIndex]:
    try:
        reader = pa.ipc.open_file(file)
        header = read_header(reader.schema, name)
        if reader.num_record_batches == 0:
            raise FormatError(f"segment has no index row, segment={name}")
        last = reader.get_batch(reader.num_record_batches - 1)
        last.validate(full=True)
        return header, _read_index(header, last, name, size)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"segment cannot be opened, segment={name} cause={error}") from error


class _TailFile(io.RawIOBase):
    """File object over a source that keeps the last TAIL_BYTES, where footer and index are."""

    def __init__(self, source: Source) -> None:
        self._source, self._size = source, source.size()
        self._low = max(self._size - TAIL_BYTES, 0)
        self._tail = memoryview(bytearray(self._size - self._low))
        source.read_into(self._tail, self._low)
        self._position = 0
        self.failure: StorageFailed | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def read(self, count: int = -1) -> bytes:
        stop = self._size if count < 0 else min(self._position + count, self._size)
        start, self._position = self._position, stop
        if start >= self._low:
            return bytes(self._tail[start - self._low : stop - self._low])
        part = memoryview(bytearray(stop - start))
        try:
            self._source.read_into(part, start)
        except StorageFailed as error:
            self.failure = error
            raise
        return bytes(part)


def _read_index(header: SegmentHeader, batch: pa.RecordBatch, name: str, size: int) -> SegmentIndex:
    row = np.zeros(1, [("kind", "u1"), ("scales_encoding", "u1")] + [(n, "u8") for n in _INDEX_KEYS])[0]
    if batch.num_rows != 1 or any(c.null_count for c in batch.columns) or batch["kind"][0].as_py() != RowKind.INDEX:
        raise FormatError(f"last row is no index, segment={name}")
    row["kind"] = RowKind.INDEX
    for key in _INDEX_KEYS:
        row[key] = batch.column(key)[0].as_py()
    blob = memoryview(batch.column("codes")[0].as_buffer())
    try:
        verify_row(header, row, "", blob, memoryview(b""), memoryview(b""))
    except DataLoss as error:
        raise FormatError(f"index does not match its checksum, segment={name}") from error
    return SegmentIndex.from_bytes(blob, name, size)


_INDEX_KEYS = ("attempt", "policy_version", "site", "start", "stop", "checksum")


def record_rows(index: SegmentIndex) -> npt.NDArray[np.intp]:
    """Positions of the index rows that are records."""
    return np.flatnonzero(index.rows["kind"] == RowKind.RECORD)
