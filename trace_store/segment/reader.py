"""Read a segment: open it by its index, then serve verified records by positioned reads.

Nothing here maps the file: a failing disk under a mapping kills the process with SIGBUS, a failing ``pread`` is an
error that only costs the rows it was for.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trace_store.checksum import RowKind
from trace_store.errors import DataLoss, FormatError
from trace_store.segment.index import SegmentIndex
from trace_store.segment.scan import verify_row
from trace_store.segment.schema import SegmentHeader, read_header


def open_sealed(path: Path) -> tuple[SegmentHeader, SegmentIndex]:
    """Header and index of a sealed segment in three reads: footer, schema, last record batch.

    Raises:
        FormatError: no Arrow file, another version, or the index row is damaged; ``scan_segment`` may still help.
    """
    try:
        with pa.OSFile(os.fspath(path), "rb") as source:
            file = pa.ipc.open_file(source)
            header = read_header(file.schema, path.name)
            if file.num_record_batches == 0:
                raise FormatError(f"segment has no index row, segment={path.name}")
            last = file.get_batch(file.num_record_batches - 1)
            last.validate(full=True)
            return header, _read_index(header, last, path.name)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"segment cannot be opened, segment={path.name} cause={error}") from error


def _read_index(header: SegmentHeader, batch: pa.RecordBatch, name: str) -> SegmentIndex:
    row = np.zeros(1, [("kind", "u1"), ("scales_encoding", "u1")] + [(n, "u8") for n in _INDEX_KEYS])[0]
    if batch.num_rows != 1 or batch.column("kind")[0].as_py() != RowKind.INDEX:
        raise FormatError(f"last row is no index, segment={name}")
    row["kind"] = RowKind.INDEX
    for key in _INDEX_KEYS:
        row[key] = batch.column(key)[0].as_py()
    blob = memoryview(batch.column("codes")[0].as_buffer())
    try:
        verify_row(header, row, "", blob, memoryview(b""), memoryview(b""))
    except DataLoss as error:
        raise FormatError(f"index does not match its checksum, segment={name}") from error
    return SegmentIndex.from_bytes(blob, name)


_INDEX_KEYS = ("attempt", "policy_version", "site", "start", "stop", "checksum")


def record_rows(index: SegmentIndex) -> npt.NDArray[np.intp]:
    """Positions of the index rows that are records."""
    return np.flatnonzero(index.rows["kind"] == RowKind.RECORD)
