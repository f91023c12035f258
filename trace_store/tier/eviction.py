"""Take local copies of uploaded segments off the disk, each only after the bucket has said that it holds the object.

That an upload once succeeded is not enough: a bucket may have been emptied or replaced since, and then the local copy
is the only one. Requests are made on threads of their own, so that a store that hangs holds up neither retention nor
the writer; a segment whose object is not there stays until the follower has found out why.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from trace_store.attempt import Segment
from trace_store.errors import StorageFailed
from trace_store.storage.s3 import ObjectStore
from trace_store.tier.layout import object_key
from trace_store.volume import Volume

log = logging.getLogger("trace_store.tier")

EVICTORS = 4
"""Objects asked for at once: at 10 ms a request 400 segments of 64 MiB a second, more than any disk is filled with."""


class Evictor:
    """Thread-safe. ``evicted`` and ``evicted_bytes`` count since the start."""

    def __init__(self, volume: Volume, store: ObjectStore) -> None:
        self._volume, self._store = volume, store
        self.evicted = self.evicted_bytes = 0
        self._unanswered = False
        self._asked: set[int] = set()
        self._doubtful: set[int] = set()
        self._pool = ThreadPoolExecutor(EVICTORS, thread_name_prefix="trace-store-evict")

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def may_go(self, segment: Segment) -> bool:
        """Whether nothing speaks against it so far. Wants the lock held."""
        return segment.local and segment.uploaded and segment.number not in self._doubtful

    def evict_soon(self, segment: Segment) -> None:
        """``evict`` on another thread; does nothing if that is under way."""
        with self._volume.lock:
            if segment.number in self._asked:
                return
            self._asked.add(segment.number)
        self._pool.submit(self._evict_asked, segment)

    def _evict_asked(self, segment: Segment) -> None:
        try:
            self.evict(segment)
        except Exception:
            log.exception("eviction failed, segment=%s", segment.path.name)
        finally:
            with self._volume.lock:
                self._asked.discard(segment.number)

    def evict(self, segment: Segment) -> int:
        """Ask the bucket, then remove the local file. Returns the bytes freed; 0 if it stays. The lock is not held."""
        path, size = segment.path, segment.disk_bytes
        with self._volume.lock:
            if not self.may_go(segment):
                return 0
        try:
            found = self._store.head(object_key((path.parent.parent.name, path.parent.name), path.name))
        except StorageFailed as error:
            if not self._unanswered:  # an outage may last for hours, with tries twice a second
                log.warning("nothing is evicted while the object store cannot be asked: %s", error)
            self._unanswered = True
            return 0
        self._unanswered = False
        if found is not None and found.size == size:
            return self.drop_local(segment)
        log.error(
            "not evicted, the bucket does not hold it as it should, segment=%s bytes=%d object_bytes=%s",
            path.name,
            size,
            found.size if found is not None else "none",
        )
        with self._volume.lock:
            if found is None:
                self._doubtful.add(segment.number)
            else:
                segment.uploaded = False  # its upload will say that there is a conflict
        return 0

    def reconsider(self) -> None:
        """The bucket was followed: what was in doubt is gone, is to be uploaded again, or is there after all."""
        with self._volume.lock:
            self._doubtful.clear()

    def drop_local(self, segment: Segment) -> int:
        """Serve it from the bucket, which was seen to hold it, and remove the local file. Returns the bytes freed."""
        with self._volume.lock:
            if not (segment.local and segment.uploaded):
                return 0
            freed, segment.local, segment.object_bytes = segment.disk_bytes, False, segment.disk_bytes
            segment.disk_bytes = 0
            self.evicted += 1
            self.evicted_bytes += freed
        self._volume.deleter.submit(segment.path.name, lambda: segment.path.unlink(missing_ok=True), freed)
        return freed
