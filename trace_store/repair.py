"""Segments that a failing disk left behind in mid-run, and how they become whole again without a restart.

    doubtful    a sync failed, so the kernel may have dropped rows that the page cache still shows. Until its rows are
                copied to a new file and synced, nothing counts as durable and writes are refused; tried again with the
                next write, at most once a second.
    unsealed    a write failed, its seal could not be written, or start-up had no room for its copy. Its rows stand and
                are durable once synced, writes go on in a new segment; it is copied and sealed once the disk has room,
                or at the next start.

The copy is what recovery does after a crash: good rows only, under the sealed name, then the source is removed.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass

from trace_store.attempt import Segment
from trace_store.catalog import Partition
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


@dataclass(eq=False)
class _Broken:
    """A segment that needs its copy; ``writer`` is None if it was left by an earlier opening of the store."""

    partition: Partition
    segment: Segment
    writer: SegmentWriter | None = None


class Repairs:
    """Their list. ``rewrite_*`` run on the writer's thread, the rest on any; ``copied(writer)`` hears of success."""

    def __init__(self, volume: Volume, clock: Callable[[], float], copied: Callable[[SegmentWriter], None]) -> None:
        self._volume, self._clock, self._copied = volume, clock, copied
        self._lock = threading.Lock()
        self._doubtful: dict[int, _Broken] = {}
        self._unsealed = {segment.number: _Broken(partition, segment) for partition, segment in volume.left_open}
        self._last_doubtful = self._last_unsealed = float("-inf")

    def add_doubtful(self, writer: SegmentWriter, place: Place, error: TraceStoreError) -> None:
        log.error("sync failed, writes are refused until its rows are copied, segment=%s: %s", writer.name, error)
        with self._lock:
            self._unsealed.pop(place[1].number, None)
            self._doubtful[place[1].number] = _Broken(*place, writer)

    def add_unsealed(self, writer: SegmentWriter, place: Place) -> None:
        number = place[1].number
        with self._lock:
            if number in self._doubtful or number in self._unsealed:
                return
            self._unsealed[number] = _Broken(*place, writer)
        log.warning("segment=%s takes no more rows, copied when the disk allows: %s", writer.name, writer.abandoned)

    def forget(self, partition: Partition) -> list[SegmentWriter]:
        """The partition was released: its segments need no repair. Returns their writers."""
        with self._lock:
            kept = {**self._doubtful, **self._unsealed}
            gone = {number: broken for number, broken in kept.items() if broken.partition is partition}
            for number in gone:
                self._doubtful.pop(number, None)
                self._unsealed.pop(number, None)
        return [broken.writer for broken in gone.values() if broken.writer is not None]

    def take_all(self) -> list[SegmentWriter]:
        """Give up for this opening of the store; the next one copies what is left. Returns the writers."""
        with self._lock:
            left = [*self._doubtful.values(), *self._unsealed.values()]
            self._doubtful.clear()
            self._unsealed.clear()
        return [broken.writer for broken in left if broken.writer is not None]

    @property
    def pending(self) -> bool:
        return bool(self._doubtful or self._unsealed)

    @property
    def refusal(self) -> str:
        """Why writes are refused now, or an empty string."""
        with self._lock:
            writers = [broken.writer for broken in self._doubtful.values()]
        return next((str(writer.doubtful) for writer in writers if writer is not None), "")

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
        while (broken := self._first(self._doubtful)) is not None:
            self._rewrite(broken)

    def rewrite_unsealed(self) -> None:
        """Copy what could not be sealed, if it is time and there is room. Never raises for the disk."""
        now = self._clock()
        if not self._unsealed or now - self._last_unsealed < UNSEALED_RETRY_S:
            return
        self._last_unsealed = now
        try:
            while (broken := self._first(self._unsealed)) is not None:
                needed = FREE_SHARE_MIN * broken.segment.disk_bytes
                if shutil.disk_usage(self._volume.root).free < needed:
                    return
                self._rewrite(broken)
        except (TraceStoreError, OSError) as error:
            log.warning("segments cannot be copied yet: %s", error)

    def _first(self, kept: dict[int, _Broken]) -> _Broken | None:
        with self._lock:
            return next(iter(kept.values()), None)

    def _rewrite(self, broken: _Broken) -> None:
        partition, segment = broken.partition, broken.segment
        try:
            copy = copy_rows(segment.path, scan_segment(segment.path))
        except FormatError as error:
            set_aside(segment.path, self._volume.root, str(error))
            with self._volume.lock:
                partition.segments.pop(segment.number, None)
                partition.rebuild()
        else:
            self._swap(broken, copy)
        with self._lock:
            self._doubtful.pop(segment.number, None)
            self._unsealed.pop(segment.number, None)
        log.warning("rows of segment=%s are copied and synced", segment.path.stem)
        if broken.writer is not None:
            self._copied(broken.writer)

    def _swap(self, broken: _Broken, copy: SegmentWriter) -> None:
        """Give the copy its name and enter it. One step under the lock: an index must never meet the other's file."""
        partition, segment = broken.partition, broken.segment
        before, left = (index.rows["checksum"].tolist() for index in (segment.index, copy.index))
        with self._volume.lock:
            try:
                replace_source(segment.path, copy)
            finally:
                if copy.path.suffix == SEALED_SUFFIX:
                    segment.replace_index(copy.index)
                    segment.path, segment.disk_bytes = copy.path, copy.written_bytes
                    if broken.writer is not None:
                        broken.writer.path = copy.path
                    self._volume.stamp(copy.path)
                    if left != before:
                        partition.rebuild()
        if left != before:
            log.error("a failed sync lost rows, segment=%s rows=%d left=%d", copy.name, len(before), len(left))
