"""Bring segments of the bucket to the local disk once reads have asked for as many bytes as they have.

Until then ranged reads are cheaper: a reader that wants a tenth of a segment costs a tenth of it. From there on every
further read is local, until the segment is evicted again, least recently read first. Only free room is used: the disk's
marks and the cap hold for cached segments as for all.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from trace_store.attempt import Segment
from trace_store.catalog import Partition
from trace_store.errors import TraceStoreError
from trace_store.recovery import RECOVERING_SUFFIX
from trace_store.segment.reader import open_content
from trace_store.storage.s3 import ObjectSource, ObjectStore
from trace_store.tier.layout import object_key, partition_place
from trace_store.tier.marks import mark_uploaded
from trace_store.volume import Volume

log = logging.getLogger("trace_store.tier")

FETCHERS = 2
"""Segments fetched at once; each is held in memory, 64 MiB."""


class LocalCache:
    """Counts what reads take from the bucket and fetches segments. Thread-safe.

    Attributes:
        has_room: whether the disk may take this many bytes more; nothing is fetched until the owner sets it.
    """

    def __init__(self, volume: Volume, store: ObjectStore) -> None:
        self._volume, self._store = volume, store
        self.has_room: Callable[[int], bool] = lambda size: False
        self.fetched = self.fetched_bytes = 0
        self._lock = threading.Lock()
        self._read: dict[int, int] = {}
        self._pool = ThreadPoolExecutor(FETCHERS, thread_name_prefix="trace-store-fetch")
        self._closed = False

    def source(self, partition: Partition, segment: Segment) -> ObjectSource:
        """A segment of the bucket, opened, whose reads are counted."""
        key = object_key(partition_place(partition), segment.path.name)
        size = segment.object_bytes or segment.disk_bytes
        return ObjectSource(self._store, key, segment.path.name, size, partial(self._count, partition, segment))

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _count(self, partition: Partition, segment: Segment, count: int) -> None:
        with self._lock:
            read = self._read.get(segment.number, 0) + count
            if read < segment.object_bytes or self._closed or segment.local:
                self._read[segment.number] = read
                return
            self._read.pop(segment.number, None)
            self._pool.submit(self._fetch, partition, segment)

    def _fetch(self, partition: Partition, segment: Segment) -> None:
        size = segment.object_bytes
        if segment.local or not self.has_room(size):
            return
        unfinished = segment.path.with_suffix(RECOVERING_SUFFIX)
        try:
            content = self._store.read(object_key(partition_place(partition), segment.path.name), 0, size)
            open_content(bytes(content), segment.path.name)
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(content)
            # Before it has its name: after a kill in between it would count as never uploaded.
            mark_uploaded(unfinished)
            with self._volume.lock:
                if segment.number not in partition.segments or self._volume.is_released(partition):
                    unfinished.unlink()
                    return
                os.replace(unfinished, segment.path)
                segment.local, segment.disk_bytes = True, size
            self.fetched += 1
            self.fetched_bytes += size
        except (TraceStoreError, OSError) as error:
            log.warning("segment=%s is not cached: %s", segment.path.name, error)
            unfinished.unlink(missing_ok=True)
