"""Read back what is stored, for comparison with what is sent again: a damaged record must not count as a duplicate.

A retry is rare and its rows were written moments ago, so a local record is read and verified each time; its segment is
opened once a message. A record in the object store alone is verified only after a read has found it damaged: a client
that sends a whole trajectory again must not make the writer wait for a round trip a record.
"""

from __future__ import annotations

import threading
from types import TracebackType

from trace_store.catalog import Partition
from trace_store.errors import DataLoss, StorageFailed
from trace_store.fetch import OpenSegment, read_record
from trace_store.segment.schema import SEALED_SUFFIX
from trace_store.volume import Volume

SUSPECTS_MAX = 100_000
"""Damaged rows remembered, 10 MB; a store with more of them has lost a disk, and reads find them again."""

StoredRecord = tuple[memoryview, memoryview, memoryview]
"""Codes, uncompressed scales, tensor scales."""


class Suspects:
    """Rows that reads found damaged, by segment number and index row. Thread-safe."""

    def __init__(self) -> None:
        self._rows: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    def note(self, number: int, row: int) -> None:
        with self._lock:
            if len(self._rows) < SUSPECTS_MAX:
                self._rows.add((number, row))

    def __contains__(self, place: tuple[int, int]) -> bool:
        return place in self._rows


class StoredRecords:
    """Records of one partition for the time of one append. Use ``with``; the writer's thread only."""

    def __init__(self, volume: Volume, partition: Partition, suspects: Suspects) -> None:
        self._volume, self._partition, self._suspects = volume, partition, suspects
        self._open: dict[int, OpenSegment] = {}

    def __enter__(self) -> StoredRecords:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for segment in self._open.values():
            segment.source.close()
        self._open.clear()

    def needs_look(self, number: int, row: int) -> bool:
        """Whether a record counts as stored only after its bytes were verified."""
        return self._partition.segments[number].local or (number, row) in self._suspects

    def is_whole(self) -> bool:
        """Whether all segments of the partition are known."""
        return self._volume.is_whole(self._partition)

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
