"""Write one segment: Arrow record batches straight to a file descriptor, the index row and the footer at the end.

pyarrow writes into a sink of ours that collects buffers and notes where each one lands; one ``writev`` per record
batch then moves them, without a copy of codes. A write that fails part way is undone by truncation, so the file always
ends after a whole record batch, or, after a crash, with one torn batch that recovery drops.

States, each left for good:

    open        ``NAME.open``, a recoverable stream
    sealed      ``NAME.arrow``, immutable
    abandoned   a write failed: no row is added, the rows before it stand and can still be synced
    doubtful    a sync failed: the kernel may have dropped rows that the page cache still shows; they must be copied
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import zstandard

from trace_store.checksum import NO_SITE, RowKind, record_checksum, trajectory_seed
from trace_store.chunk import Chunk, iterate_records, shape_of
from trace_store.errors import StorageFailed, StorageFull, TraceStoreError
from trace_store.segment.align import lead_bytes, padding
from trace_store.segment.columns import BatchTemplate
from trace_store.segment.heading import COPY_AGAIN_BYTES, make_copy
from trace_store.segment.index import ROW, SegmentIndex
from trace_store.segment.reserve import Reservation
from trace_store.segment.schema import (
    COLUMNS,
    ENCODING_RAW,
    ENCODING_ZSTD,
    OPEN_SUFFIX,
    SEALED_SUFFIX,
    SegmentHeader,
    make_schema,
)

SCALES_COMPRESS_BYTES_MIN = 256
"""Shorter scale columns stay raw: a zstd frame costs 10 to 20 bytes and 3 microseconds."""

TEMPLATES_MAX = 64
"""Shapes of chunks that a writer keeps a batch for, about 6 KiB each at 20 sites."""

_IOV_MAX = 1000


def storage_error(error: OSError, path: Path) -> TraceStoreError:
    """The typed error of a failed file operation."""
    reason = f"{os.strerror(error.errno or 0).lower()}, path={path.name}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StorageFull(f"no room on the data disk: {reason}")
    return StorageFailed(f"the data disk failed: {reason}")


def sync_directory(directory: Path) -> None:
    """Make directory entries durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


ControlRow = tuple[RowKind, str, int, int, int, int]
"""Kind, trajectory, attempt, start, stop, rows. Of a seal: prompt tokens, tokens, token rows over all sites; of a known
row: epoch, 0, first sequence, last sequence + 1, 0."""


class _Sink:
    """File object for pyarrow that keeps every written buffer and its position instead of writing it."""

    closed = False

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.places: dict[int, int] = {}
        self.content: Mapping[int, Any] = {}
        """What stands for buffers at some addresses."""
        self.position = 0

    def write(self, part: Any) -> int:
        size = len(part)
        if isinstance(part, pa.Buffer):
            address = part.address
            self.places[address] = self.position
            part = self.content.get(address, part)
        self.parts.append(part)
        self.position += size
        return size

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def take(self) -> list[Any]:
        parts, self.parts, self.places, self.content = self.parts, [], {}, {}
        return parts


class SegmentWriter:
    """The one writer of a segment. Not thread-safe, except that ``sync`` may run beside ``append``."""

    def __init__(self, directory: Path, name: str, header: SegmentHeader, suffix: str = OPEN_SUFFIX) -> None:
        self.header = header
        self.name = name
        self.directory = directory
        self.path = directory / (name + suffix)
        self.index = SegmentIndex()
        self.written_bytes = self.synced_bytes = 0
        self.abandoned: TraceStoreError | None = None
        self.doubtful: TraceStoreError | None = None
        self.discarded = False
        """Set when the partition is released: what then fails on its removed files is no failure."""
        self._schema = make_schema(header)
        self._copies_due = [0, COPY_AGAIN_BYTES]
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._sink = _Sink()
        self._reservation = Reservation()
        self._templates: dict[tuple[int, ...], BatchTemplate] = {}
        try:
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise storage_error(error, self.path) from error
        self._arrow = pa.ipc.new_file(pa.PythonFile(self._sink, "w"), self._schema)
        try:
            self._flush()
            sync_directory(directory)
        except (TraceStoreError, OSError) as error:
            self.remove()
            raise error if isinstance(error, TraceStoreError) else storage_error(error, self.path) from error

    def append_chunk(self, chunk: Chunk, compress: bool = True) -> npt.NDArray[np.void]:
        """Write a checked chunk as one record batch and return its index rows. ``compress``: try zstd on scales.

        Raises:
            StorageFull, StorageFailed: nothing of the chunk is in the file.
        """
        if self.abandoned is not None:
            raise self.abandoned
        template, scales = self._template(chunk, compress)
        rows = template.fill(chunk.groups, self.index)
        content = (chunk.codes, scales, chunk.tensor_scales)
        places = self._write_batch(
            template.batch, template.lead_bytes, dict(zip(template.blanks, content, strict=True))
        )
        template.place(rows, places)
        self.index.extend(rows)
        return rows

    def _template(self, chunk: Chunk, compress: bool) -> tuple[BatchTemplate, Any]:
        """Template for a chunk, and its scales as they are stored."""
        shapes = [shape_of(group, self.header.sites) for group in chunk.groups]
        name_bytes = [len(group.trajectory.encode()) for group in chunk.groups]
        if compress:
            encoded = [self._encode_scales(record.scales) for record in iterate_records(chunk, self.header.sites)]
            ends = np.cumsum([0, *(len(stored) for _, stored in encoded)])
            scales = ([encoding for encoding, _ in encoded], ends)
            return BatchTemplate(shapes, name_bytes, self._schema, scales), b"".join([part for _, part in encoded])
        key = (*name_bytes, *map(id, shapes))  # the template keeps the shapes, so that their ids stay theirs
        found = self._templates.get(key)
        if found is None:
            if len(self._templates) >= TEMPLATES_MAX:
                self._templates.clear()
            found = self._templates[key] = BatchTemplate(shapes, name_bytes, self._schema)
        return found, chunk.scales

    def append_controls(self, controls: Sequence[ControlRow]) -> npt.NDArray[np.void]:
        """Write seals or releases as one record batch, so that a crash leaves all of them or none."""
        rows = [
            self._single_row(kind, trajectory, attempt, start, stop, b"", held)
            for kind, trajectory, attempt, start, stop, held in controls
        ]
        return self.append_batch(pa.Table.from_batches(rows).combine_chunks().to_batches()[0])

    def append_batch(self, batch: pa.RecordBatch) -> npt.NDArray[np.void]:
        """Write a record batch with the segment's columns and return its index rows."""
        if self.abandoned is not None:
            raise self.abandoned
        places = self._write_batch(batch, lead_bytes(batch))
        rows = index_rows(batch, lambda buffer: places[buffer.address], self.index)
        self.index.extend(rows)
        return rows

    def _write_batch(
        self, batch: pa.RecordBatch, lead: int, content: Mapping[int, Any] | None = None
    ) -> dict[int, int]:
        """Write a batch, with ``content`` in place of its buffers at some addresses; file positions by address.
        ``lead``: its ``lead_bytes``."""
        self._sink.content = content or {}
        self._encode_batch(batch, lead)
        places = self._sink.places
        self._flush()
        return places

    def _encode_batch(self, batch: pa.RecordBatch, lead: int) -> None:
        """Give a batch to the sink; aligned, or with a copy of the schema's metadata where one is due."""
        copy: dict[bytes, bytes] = {}
        if self._copies_due and self._sink.position >= self._copies_due[0]:
            del self._copies_due[0]
            copy = make_copy(self._schema)
        self._arrow.write_batch(batch, custom_metadata=copy or padding(self._sink.position, lead))

    def sync(self) -> None:
        """Make everything written so far survive a power cut.

        A failed sync makes the segment doubtful for good: the kernel may have dropped the dirty pages, so a second
        attempt on the same file could succeed without the bytes.
        """
        if self.doubtful is not None:
            raise self.doubtful
        written = self.written_bytes
        try:
            os.fdatasync(self.descriptor)
        except OSError as error:
            raise self.doubt(storage_error(error, self.path)) from error
        self.synced_bytes = written

    def seal(self) -> Path:
        """Write index row and footer, sync, rename to the sealed name, sync the directory."""
        self.finish()
        return self.publish()

    def finish(self) -> None:
        """Write index row and footer, and sync."""
        blob = self.index.to_bytes()
        if self.abandoned is not None:
            raise self.abandoned
        index = self._single_row(RowKind.INDEX, "", 0, 0, 0, blob)
        self._encode_batch(index, lead_bytes(index))
        self._arrow.close()
        self._flush()
        with contextlib.suppress(OSError):  # then the blocks stay with the file, unused
            self._reservation.give_back(self.descriptor, self.written_bytes)
        self.sync()
        self.index.seal()

    def publish(self) -> Path:
        """Give a finished segment its sealed name, durably."""
        sealed = self.directory / (self.name + SEALED_SUFFIX)
        try:
            os.rename(self.path, sealed)
        except OSError as error:
            self.abandoned = storage_error(error, self.path)
            raise self.abandoned from error
        self.path = sealed
        try:
            sync_directory(self.directory)
        except OSError as error:
            raise self.doubt(storage_error(error, self.path)) from error
        return sealed

    def doubt(self, error: TraceStoreError) -> TraceStoreError:
        """Make the segment doubtful: nothing is added, and its rows await their copy."""
        self.doubtful = error
        self.abandoned = self.abandoned or error
        return error

    def remove(self) -> None:
        """Close and delete a file whose rows nobody needs; one that cannot be deleted is dropped at the next start."""
        self.close()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the descriptor; an open segment stays recoverable."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _single_row(
        self, kind: RowKind, trajectory: str, attempt: int, start: int, stop: int, codes: bytes, rows: int = 0
    ) -> pa.RecordBatch:
        seed = trajectory_seed(self.header.run, self.header.partition, trajectory)
        checksum = record_checksum(seed, attempt, rows, NO_SITE, start, stop, codes, b"", b"", kind)
        values = [kind, trajectory, attempt, rows, NO_SITE, start, stop, codes, b"", ENCODING_RAW, b"", checksum]
        arrays = [pa.array([value], type_) for value, (_, type_) in zip(values, COLUMNS, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _encode_scales(self, scales: memoryview) -> tuple[int, Any]:
        if scales.nbytes >= SCALES_COMPRESS_BYTES_MIN:
            packed = self._compressor.compress(scales)
            if len(packed) < scales.nbytes:
                return ENCODING_ZSTD, packed
        return ENCODING_RAW, scales

    def _flush(self) -> None:
        """Move the sink's buffers to the file, or leave the file as it was and abandon the segment."""
        parts = [memoryview(part) for part in self._sink.take()]
        self._reservation.extend(self.descriptor, self.written_bytes, sum([part.nbytes for part in parts]))
        try:
            size = _write_all(self.descriptor, parts)
        except OSError as error:
            # pyarrow counts the batch as written; its footer would point at bytes that are not there.
            self.abandoned = storage_error(error, self.path)
            # If even that fails, a torn tail stays behind the last index row, and recovery drops it.
            with contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, self.written_bytes)
            raise self.abandoned from error
        self.written_bytes += size


def _write_all(descriptor: int, parts: list[memoryview]) -> int:
    total = 0
    while parts:
        written = os.writev(descriptor, parts[:_IOV_MAX])
        total += written
        while parts and written >= parts[0].nbytes:
            written -= parts[0].nbytes
            parts.pop(0)
        if written:
            parts[0] = parts[0][written:]
    return total


def index_rows(batch: pa.RecordBatch, place: Any, index: SegmentIndex) -> npt.NDArray[np.void]:
    """Index rows of a record batch; ``place(buffer)`` is the file position of one of its value buffers."""
    rows = np.zeros(batch.num_rows, ROW)
    for name in ("kind", "scales_encoding", "attempt", "policy_version", "site", "start", "stop", "checksum"):
        rows[name] = batch.column(name).to_numpy(zero_copy_only=False)
    rows["trajectory"] = [index.trajectory_number(name) for name in batch.column("trajectory").to_pylist()]
    for column, prefix in (("codes", "codes"), ("scales", "scales"), ("tensor_scales", "tensor")):
        array = batch.column(column)
        _, offset_buffer, values = array.buffers()
        offsets = np.frombuffer(offset_buffer, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
        rows[f"{prefix}_bytes"] = np.diff(offsets)
        # A column whose values are all empty has no buffer in the file.
        if values is not None and offsets[-1] > offsets[0]:
            rows[f"{prefix}_offset"] = place(values) + offsets[:-1]
    return rows
