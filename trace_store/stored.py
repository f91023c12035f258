"""Read back what is stored, for comparison with what is sent again: a damaged record must not count as a duplicate.

A retry is rare and its rows were written moments ago, so a record is read and verified each time; its segment is opened
once a message. What was offered to an object store is no duplicate anyway (``is_safe``), so that a client which sends a
whole trajectory again does not make the writer wait for a round trip a record.
"""

from __future__ import annotations

from types import TracebackType

from trace_store.catalog import Partition
from trace_store.errors import DataLoss, StorageFailed
from trace_store.fetch import OpenSegment, read_record
from trace_store.segment.schema import SEALED_SUFFIX
from trace_store.volume import Volume

StoredRecord = tuple[memoryview, memoryview, memoryview]
"""Codes, uncompressed scales, tensor scales."""


class StoredRecords:
    """Records of one partition for the time of one append. Use ``with``; the writer's thread only."""

    def __init__(self, volume: Volume, partition: Partition) -> None:
        self._volume, self._partition = volume, partition
        self._open: dict[int, OpenSegment] = {}

    def __enter__(self) -> StoredRecords:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for segment in self._open.values():
            segment.source.close()
        self._open.clear()

    def is_safe(self, number: int) -> bool:
        """Whether a segment was never offered to an object store, where another server may have released it."""
        return self._volume.objects is None or self._partition.segments[number].path.suffix != SEALED_SUFFIX

    def is_whole(self) -> bool:
        """Whether all segments of the partition are known."""
        return self._volume.is_whole()

    def doubt(self) -> str:
        """Why segments of the partition may be in an object store and not known here, or an empty string."""
        return self._volume.objects.doubt(self._partition) if self._volume.objects is not None else ""

    def read(self, number: int, row: int) -> StoredRecord:
        """One record, verified; from the uploaded copy where the local one is damaged.

        Raises:
            DataLoss: no copy matches the checksum, or the disk cannot read it any more.
            StorageFailed: it cannot be looked at now.
        """
        segment = self._open.get(number)
        if segment is None:
            segment = self._open[number] = self._lease(number)
        try:
            return read_record(segment, row)
        except StorageFailed as error:
            if segment.source.shape.remote:
                raise
            loss = DataLoss(f"a stored record cannot be read: {error}")
        except DataLoss as error:
            loss = error
        return self._read_spare(number, row, loss)

    def _lease(self, number: int) -> OpenSegment:
        with self._volume.lock:
            try:
                return self._volume.lease(self._partition, number)
            except StorageFailed as error:
                path = self._partition.segments[number].path
                if path.exists() or path.with_suffix(SEALED_SUFFIX).exists():
                    raise
                raise DataLoss(f"a segment was removed from the directory: {error}") from error

    def _read_spare(self, number: int, row: int, loss: DataLoss) -> StoredRecord:
        with self._volume.lock:
            spare = self._volume.spare(self._partition, number)
        if spare is None:
            raise loss
        try:
            record = read_record(spare, row)
        except (DataLoss, StorageFailed):
            raise loss from None
        self._volume.distrust(self._partition, number)
        return record
