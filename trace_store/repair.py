"""Segments that a failing disk left behind in mid-run, and how they become whole again without a restart.

    doubtful    a sync failed, so the kernel may have dropped rows that the page cache still shows. Until its rows are
                copied to a new file and synced, nothing counts as durable and writes are refused; tried again with the
                next write, at most once a second.
    unsealed    a write failed, or its seal could not be written. Its rows stand and are durable once synced, writes go
                on in a new segment; it is copied and sealed once the disk has room, or at the next start.

The copy is what recovery does after a crash: good rows only, under the sealed name, then the source is removed.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable

from trace_store.catalog import Partition, Segment
from trace_store.errors import FormatError, StorageFailed, TraceStoreError
from trace_store.recovery import copy_rows, replace_source, set_aside
from trace_store.segment.scan import scan_segment
from trace_store.segment.schema import SEALED_SUFFIX
from trace_store.segment.writer import SegmentWriter
from trace_store.volume import Volume

log = logging.getLogger("trace_store.repair")

DOUBTFUL_RETRY_S = 1.0

UNSEALED_RETRY_S = 10.0
"""A copy of up to 256 MiB that fails again must not become the disk's main load."""

FREE_SHARE_MIN = 2
"""An unsealed segment is copied once this many times its size is free."""

Place = tuple[Partition, Segment]


class Repairs:
    """Their list. ``rewrite_*`` run on the writer's thread, the rest on any; ``copied(writer)`` hears of success."""

    def __init__(self, volume: Volume, clock: Callable[[], float], copied: Callable[[SegmentWriter], None]) -> None:
        self._volume, self._clock, self._copied = volume, clock, copied
        self._lock = threading.Lock()
        self._doubtful: dict[SegmentWriter, Place] = {}
        self._unsealed: dict[SegmentWriter, Place] = {}
        self._last_doubtful = self._last_unsealed = float("-inf")

    def add_doubtful(self, writer: SegmentWriter, place: Place, error: TraceStoreError) -> None:
        log.error("sync failed, writes are refused until its rows are copied, segment=%s: %s", writer.name, error)
        with self._lock:
            self._unsealed.pop(writer, None)
            self._doubtful[writer] = place

    def add_unsealed(self, writer: SegmentWriter, place: Place) -> None:
        with self._lock:
            if writer in self._doubtful or writer in self._unsealed:
                return
            self._unsealed[writer] = place
        log.warning("segment=%s takes no more rows, copied when the disk allows: %s", writer.name, writer.abandoned)

    def forget(self, partition: Partition) -> list[SegmentWriter]:
        """The partition was released: its segments need no repair. Returns them."""
        with self._lock:
            kept = {**self._doubtful, **self._unsealed}
            gone = [writer for writer, place in kept.items() if place[0] is partition]
            for writer in gone:
                self._doubtful.pop(writer, None)
                self._unsealed.pop(writer, None)
        return gone

    def take_all(self) -> list[SegmentWriter]:
        """Give up for this opening of the store; the next one copies what is left."""
        with self._lock:
            left = [*self._doubtful, *self._unsealed]
            self._doubtful.clear()
            self._unsealed.clear()
        return left

    @property
    def pending(self) -> bool:
        return bool(self._doubtful or self._unsealed)

    @property
    def refusal(self) -> str:
        """Why writes are refused now, or an empty string."""
        with self._lock:
            return next((str(writer.doubtful) for writer in self._doubtful), "")

    def doubt(self) -> TraceStoreError | None:
        """The error that writes and syncs get while rows may be lost, or None."""
        refusal = self.refusal
        return StorageFailed(f"rows await their copy after a failed sync: {refusal}") if refusal else None

    def rewrite_doubtful(self) -> None:
        """Copy what may be lost.

        Raises:
            StorageFailed, StorageFull: not tried yet, or the disk still fails; writes stay refused.
        """
        if not self._doubtful:
            return
        now = self._clock()
        if now - self._last_doubtful < DOUBTFUL_RETRY_S:
            raise self.doubt() or StorageFailed("rows await their copy after a failed sync")
        self._last_doubtful = now
        while (found := self._first(self._doubtful)) is not None:
            self._rewrite(*found)

    def rewrite_unsealed(self) -> None:
        """Copy what could not be sealed, if it is time and there is room. Never raises for the disk."""
        now = self._clock()
        if not self._unsealed or now - self._last_unsealed < UNSEALED_RETRY_S:
            return
        self._last_unsealed = now
        try:
            while (found := self._first(self._unsealed)) is not None:
                needed = FREE_SHARE_MIN * found[0].written_bytes
                if shutil.disk_usage(self._volume.root).free < needed:
                    return
                self._rewrite(*found)
        except (TraceStoreError, OSError) as error:
            log.warning("segments cannot be copied yet: %s", error)

    def _first(self, kept: dict[SegmentWriter, Place]) -> tuple[SegmentWriter, Place] | None:
        with self._lock:
            return next(iter(kept.items()), None)

    def _rewrite(self, writer: SegmentWriter, place: Place) -> None:
        partition, segment = place
        before = writer.index.rows["checksum"].tolist()
        try:
            copy = copy_rows(writer.path, scan_segment(writer.path))
        except FormatError as error:
            set_aside(writer.path, self._volume.root, str(error))
            left = []
            with self._volume.lock:
                partition.segments.pop(segment.number, None)
        else:
            left = copy.index.rows["checksum"].tolist()
            # Under the lock, since an index of one file must never be used on the other.
            with self._volume.lock:
                try:
                    replace_source(writer.path, copy)
                finally:
                    if copy.path.suffix == SEALED_SUFFIX:
                        writer.path = copy.path
                        segment.path, segment.index, segment.disk_bytes = copy.path, copy.index, copy.written_bytes
        if left != before:
            log.error("a failed sync lost rows, segment=%s rows=%d left=%d", writer.name, len(before), len(left))
            with self._volume.lock:
                partition.rebuild()
        with self._lock:
            self._doubtful.pop(writer, None)
            self._unsealed.pop(writer, None)
        log.warning("rows of segment=%s are copied and synced", writer.name)
        self._copied(writer)
