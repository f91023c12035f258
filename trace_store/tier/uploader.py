"""Upload sealed segments in the background: in order within a partition, so that what is in the bucket is a prefix.

A trajectory's seal is written after its records. Because a later segment never passes an earlier one of its partition,
a server that sees the seal in the bucket sees every record that was there before it.

The queue holds names, not bytes; the backlog is on the disk and bounded by it. A put without a clear answer is neither
success nor failure: the next try first asks for the object and compares it. A file that somebody has removed fails for
good and must not hold up those behind it: it is reported as lost and the next one is uploaded.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trace_store.errors import Conflict, StorageFailed, TraceStoreError
from trace_store.storage.s3 import ObjectExists, ObjectStore, OutcomeUnknown
from trace_store.tier.layout import Place

log = logging.getLogger("trace_store.upload")

WORKERS = 4
"""Uploads at once; each holds one segment in memory, 64 MiB."""

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0

TRIES_MAX = 8
"""Tries in a row, 90 s, after which a segment counts as failed; it is then tried once in BACKOFF_MAX_S for ever, since
giving up would leave it on one disk."""

COMPARE_BYTES = 256 << 10
"""Tail that is compared with an object of unclear origin: it holds the index, with the checksum of every record."""


class SegmentVanished(StorageFailed):
    """The file is not in its directory any more; trying again does not help."""


@dataclass(eq=False)
class Upload:
    """One segment on its way. A worker's thread calls ``on_done`` once the object is there, ``on_lost`` if the file is
    gone."""

    place: Place
    key: str
    path: Path
    sealed_at: float
    on_done: Callable[[Upload], None]
    on_lost: Callable[[Upload], None] = lambda upload: None
    size: int = 0
    tries: int = 0
    unsure: bool = False
    cancelled: bool = False


@dataclass
class UploadCounts:
    """Totals since the start, and what is waiting."""

    uploaded: int = 0
    uploaded_bytes: int = 0
    failures: int = 0
    unknown_outcomes: int = 0
    conflicts: int = 0
    waiting: int = 0
    waiting_bytes: int = 0
    oldest_sealed_at: float = 0.0
    stuck: int = 0
    last_error: str = ""


@dataclass(order=True)
class _Due:
    at: float
    place: Place = field(compare=False)


class Uploader:
    """Worker threads over queues by place. Thread-safe.

    Attributes:
        create_once: whether the store refuses a second object of a name; without it every upload asks first.
    """

    def __init__(
        self, store: ObjectStore, create_once: bool, clock: Callable[[], float] = time.monotonic, workers: int = WORKERS
    ) -> None:
        self._store, self.create_once, self._clock = store, create_once, clock
        self._queues: dict[Place, deque[Upload]] = {}
        self._due: list[_Due] = []
        self._wake = threading.Condition()
        self._closing = False
        self._counts = UploadCounts()
        self._threads = [
            threading.Thread(target=self._work, name=f"trace-store-upload-{number}", daemon=True)
            for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, upload: Upload) -> None:
        """Queue a segment behind the earlier ones of its place."""
        with self._wake:
            queue = self._queues.get(upload.place)
            if queue is None:
                queue = self._queues[upload.place] = deque()
                heapq.heappush(self._due, _Due(self._clock(), upload.place))
            queue.append(upload)
            self._wake.notify()

    def forget(self, place: Place) -> None:
        """The partition was released: what waits is dropped, and what is under way is deleted when it arrives."""
        with self._wake:
            for upload in self._queues.get(place, ()):
                upload.cancelled = True

    def counts(self) -> UploadCounts:
        """Totals now."""
        with self._wake:
            waiting = [upload for queue in self._queues.values() for upload in queue if not upload.cancelled]
            counts = UploadCounts(**vars(self._counts))
            counts.waiting, counts.waiting_bytes = len(waiting), sum(upload.size for upload in waiting)
            counts.oldest_sealed_at = min((upload.sealed_at for upload in waiting), default=0.0)
            counts.stuck = sum(upload.tries >= TRIES_MAX for upload in waiting)
            if not waiting:
                counts.last_error = ""
            return counts

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing waits; False when that takes longer or uploads fail."""
        limit = self._clock() + timeout_s
        with self._wake:
            while any(not upload.cancelled for queue in self._queues.values() for upload in queue):
                left = limit - self._clock()
                failing = any(upload.tries > 1 for queue in self._queues.values() for upload in queue)
                if left <= 0 or failing:
                    return False
                self._wake.wait(left)
        return True

    def close(self) -> None:
        """Stop after the uploads under way; the rest is found on the disk at the next start."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (upload := self._take()) is not None:
            error: TraceStoreError | None = None
            try:
                if not upload.cancelled:
                    self._upload(upload)
            except TraceStoreError as failure:
                error = failure
            except Exception as failure:
                log.exception("upload failed, segment=%s", upload.path.name)
                error = StorageFailed(f"internal error, cause={failure!r}")
            if error is None and not upload.cancelled:
                upload.on_done(upload)
            if isinstance(error, SegmentVanished) and not upload.cancelled:
                upload.on_lost(upload)
            self._finish(upload, error)

    def _take(self) -> Upload | None:
        with self._wake:
            while True:
                if self._closing:
                    return None
                now = self._clock()
                if self._due and self._due[0].at <= now:
                    return self._queues[heapq.heappop(self._due).place][0]
                self._wake.wait(self._due[0].at - now if self._due else None)

    def _finish(self, upload: Upload, error: TraceStoreError | None) -> None:
        with self._wake:
            queue = self._queues[upload.place]
            delay = 0.0
            final = upload.cancelled or isinstance(error, (Conflict, SegmentVanished))
            if error is not None and not final:
                upload.tries += 1
                self._counts.failures += 1
                self._counts.unknown_outcomes += isinstance(error, OutcomeUnknown)
                self._counts.last_error = str(error)
                delay = min(BACKOFF_FIRST_S * 2 ** (upload.tries - 1), BACKOFF_MAX_S)
                level = logging.ERROR if upload.tries == TRIES_MAX else logging.WARNING
                log.log(level, "segment=%s not uploaded, tries=%d: %s", upload.path.name, upload.tries, error)
            else:
                queue.popleft()
                if isinstance(error, SegmentVanished):
                    self._counts.failures += 1
                    log.error("segment=%s is lost: %s", upload.path.name, error)
                elif error is not None:
                    self._counts.conflicts += 1
                    log.error("segment=%s stays on this disk only: %s", upload.path.name, error)
                elif not upload.cancelled:
                    self._counts.uploaded += 1
                    self._counts.uploaded_bytes += upload.size
            if queue:
                heapq.heappush(self._due, _Due(self._clock() + delay, upload.place))
            else:
                del self._queues[upload.place]
            self._wake.notify_all()

    def _upload(self, upload: Upload) -> None:
        try:
            content = upload.path.read_bytes()
        except OSError as error:
            if upload.cancelled:
                return
            if isinstance(error, FileNotFoundError) and upload.path.parent.is_dir():
                raise SegmentVanished(
                    f"it was removed from the directory before its upload, segment={upload.path.name}"
                ) from error
            raise StorageFailed(
                f"a segment cannot be read, segment={upload.path.name} cause={error.strerror}"
            ) from error
        upload.size = len(content)
        if (upload.unsure or not self.create_once) and self._is_there(upload, content):
            return
        try:
            self._store.put(upload.key, content)
        except ObjectExists:
            if not self._is_there(upload, content):
                raise
        except OutcomeUnknown:
            upload.unsure = True
            raise
        if upload.cancelled:
            self._store.delete([upload.key])

    def _is_there(self, upload: Upload, content: bytes) -> bool:
        """Whether the object is there and ours.

        Raises:
            Conflict: it is there and another one.
        """
        found = self._store.head(upload.key)
        if found is None:
            return False
        low = max(len(content) - COMPARE_BYTES, 0)
        if found.size != len(content) or bytes(self._store.read(upload.key, low, len(content))) != content[low:]:
            raise Conflict(f"the bucket holds another object of this name, object={upload.key}")
        return True
