"""The object tier of one server: uploads what it seals, shows what the bucket holds, follows what others release.

    local segment, not uploaded     queued for upload, in order within its partition
    local segment, uploaded         served from the disk; may be evicted (its file mode 0440 says so after a restart)
    segment of the bucket only      served by ranged reads; its index is loaded at the first read of its partition
    uploaded and vanished           released by another server: asked for by name, then dropped here too

The bucket's identity is kept in ROOT/bucket. With another or a new bucket nothing counts as uploaded or vanished.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trace_store.catalog import Partition, Run, Segment
from trace_store.errors import StorageFailed, TraceStoreError
from trace_store.naming import MANIFEST_PREFIX, RELEASED_OBJECTS, RELEASED_PREFIX, directory_name
from trace_store.segment.schema import SEALED_SUFFIX
from trace_store.storage.s3 import CredentialsRefused, ObjectInfo, ObjectSource, ObjectStore
from trace_store.storage.selfcheck import Capabilities, bucket_identity, check_backend
from trace_store.tier.bucket import BucketView
from trace_store.tier.layout import Place, object_key, place_of, place_prefix
from trace_store.tier.loading import Loader, load_segment
from trace_store.tier.uploader import Upload, Uploader
from trace_store.volume import Volume

log = logging.getLogger("trace_store.tier")

REFRESH_S = 30.0
"""How often the whole bucket is listed: new segments of loaded partitions appear, released ones vanish, at most this
late. 1,000 names a request, so 10,000 segments are 10 requests."""

RELIST_S = 2.0
"""A read that misses lists its partition again at most this often."""

START_WAIT_S = 30.0
"""Longest wait for an object store that does not answer at start; then the server gives up and says why."""

CLOSE_UPLOAD_S = 20.0
"""Longest wait at a clean stop for what is not uploaded yet."""

UPLOADED_MODE = 0o440


@dataclass(frozen=True)
class TierStatus:
    """State of the object tier. Times in seconds, sizes in bytes; counts are since the start."""

    url: str = ""
    uploaded: int = 0
    uploaded_bytes: int = 0
    upload_failures: int = 0
    upload_unknown: int = 0
    upload_conflicts: int = 0
    waiting: int = 0
    waiting_bytes: int = 0
    lag_s: float = 0.0
    stuck: int = 0
    error: str = ""
    remote_segments: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    vanished: int = 0


@dataclass(frozen=True)
class Loaded:
    """Segments that a look into the bucket brought, and why it failed, if it did."""

    segments: int
    failure: str


class ObjectTier:
    """See the module. The engine's keeper calls ``tick``; listing the bucket has a thread of its own."""

    def __init__(self, volume: Volume, store: ObjectStore, clock: Callable[[], float] = time.monotonic) -> None:
        """Check the backend, list it, compare it with the disk and start uploading.

        Raises:
            Unsupported: the backend lacks what is needed.
            StorageFailed: it cannot be reached.
        """
        self._volume, self._store, self._clock = volume, store, clock
        self.capabilities: Capabilities = _reach(store)
        same_bucket = self._remember(bucket_identity(store))
        self.view = BucketView(store, clock)
        self.view.refresh()
        self.loader = Loader(volume, self.view)
        self._uploader = Uploader(store, self.capabilities.create_once, clock)
        self._lock = threading.Lock()
        self._queued: set[Path] = set()
        self._evicted = self._evicted_bytes = self._vanished = 0
        self._unreachable = ""
        self._stop = threading.Event()
        volume.objects = self
        self._compare(same_bucket)
        self._resume_releases()
        self.tick()
        self._follower = threading.Thread(target=self._follow, name="trace-store-follow", daemon=True)
        self._follower.start()
        log.info(
            "object store %s: ranges yes, create once %s, runs=%d partitions=%d",
            store.url,
            "yes" if self.capabilities.create_once else "no (names are asked for first)",
            len(self.view.run_places()),
            len(self.view.places()),
        )

    def close(self) -> None:
        """Give what waits CLOSE_UPLOAD_S, then stop."""
        self._stop.set()
        self.tick()
        if not self._uploader.drain(CLOSE_UPLOAD_S):
            log.warning("stopped with segments not uploaded, count=%d", self._uploader.counts().waiting)
        self._uploader.close()
        self.loader.close()

    def status(self) -> TierStatus:
        """State now."""
        counts = self._uploader.counts()
        with self._volume.lock:
            remote = sum(not s.local for run in self._volume.runs.values() for s in segments_of(run))
        return TierStatus(
            url=self._store.url,
            uploaded=counts.uploaded,
            uploaded_bytes=counts.uploaded_bytes,
            upload_failures=counts.failures,
            upload_unknown=counts.unknown_outcomes,
            upload_conflicts=counts.conflicts,
            waiting=counts.waiting,
            waiting_bytes=counts.waiting_bytes,
            lag_s=max(self._clock() - counts.oldest_sealed_at, 0.0) if counts.waiting else 0.0,
            stuck=counts.stuck,
            error=counts.last_error or self._unreachable,
            remote_segments=remote,
            evicted=self._evicted,
            evicted_bytes=self._evicted_bytes,
            vanished=self._vanished,
        )

    # -- what the volume asks (trace_store.volume.Objects)

    def source(self, partition: Partition, segment: Segment) -> ObjectSource:
        key = object_key(_place(partition), segment.path.name)
        return ObjectSource(self._store, key, segment.path.name, segment.object_bytes or segment.disk_bytes)

    def keys(self, partition: Partition) -> list[str]:
        place = _place(partition)
        names = {segment.path.stem + SEALED_SUFFIX for segment in partition.segments.values()}
        return [object_key(place, name) for name in sorted(names.union(self.view.objects(place)))]

    def released(self, partition: Partition, directory: Path, keys: list[str]) -> None:
        self._release(_place(partition), directory, keys)

    # -- uploads

    def tick(self) -> None:
        """Queue what was sealed since the last call."""
        with self._volume.lock:
            for run in self._volume.runs.values():
                self._queue_manifests(run)
                for partition in run.partitions.values():
                    self._queue_partition(partition)

    def _queue_partition(self, partition: Partition) -> None:
        for segment in partition.segments.values():
            if segment.uploaded:
                continue
            if segment.path.suffix != SEALED_SUFFIX:
                return  # a later one must not pass it
            if segment.path not in self._queued:
                self._queue(_place(partition), segment.path, segment.disk_bytes, self._uploaded(segment))

    def _queue_manifests(self, run: Run) -> None:
        place = (run.directory.name, "")
        if self.view.objects(place) or not run.directory.is_dir():
            return
        for path in run.directory.glob(f"{MANIFEST_PREFIX}*{SEALED_SUFFIX}"):
            if path not in self._queued:
                self._queue(place, path, path.stat().st_size, lambda upload: None)

    def _queue(self, place: Place, path: Path, size: int, done: Callable[[Upload], None]) -> None:
        self._queued.add(path)

        def arrived(upload: Upload) -> None:
            self.view.add(place, path.name, upload.size, time.time())
            done(upload)
            self._queued.discard(path)

        self._uploader.add(Upload(place, object_key(place, path.name), path, self._clock(), arrived, size))

    def _uploaded(self, segment: Segment) -> Callable[[Upload], None]:
        def done(upload: Upload) -> None:
            with self._volume.lock:
                segment.uploaded, segment.object_bytes = True, upload.size
            _mark(segment.path)

        return done

    # -- reads

    def run(self, name: str) -> Run | None:
        """A run of the catalog or the bucket. Raises StorageFailed."""
        run = self.loader.run(name)
        if run is None and self.view.refresh_place((directory_name(name), ""), RELIST_S):
            run = self.loader.run(name)
        return run

    def ensure(self, run: Run, partition: str) -> Loaded:
        """Load what the bucket is known to hold of a partition and the catalog lacks."""
        return self._load(run, place_of(run.name, partition), relist=False)

    def look_again(self, run: Run, partition: str) -> Loaded:
        """The same after listing the partition anew, for a read that missed; at most every RELIST_S."""
        return self._load(run, place_of(run.name, partition), relist=True)

    def ensure_all(self, run: Run) -> None:
        """Load every partition of a run, for a listing. Raises StorageFailed."""
        self.loader.load_run(run)

    def _load(self, run: Run, place: Place, *, relist: bool) -> Loaded:
        try:
            if relist:
                self.view.refresh_place(place, RELIST_S)
            return Loaded(self.loader.load(run, place) if self.loader.missing(place) else 0, "")
        except StorageFailed as error:
            self._unreachable = str(error)
            return Loaded(0, str(error))

    def find_runs(self) -> None:
        """Enter every run of the bucket in the catalog. Raises StorageFailed."""
        with self._volume.lock:
            known = {run.directory.name for run in self._volume.runs.values()}
        for directory in self.view.run_places():
            if directory not in known:
                self.loader.run_at(directory)

    # -- others' changes

    def _follow(self) -> None:
        while not self._stop.wait(REFRESH_S):
            try:
                self.follow()
            except Exception:
                log.exception("following the bucket failed, tried again")

    def follow(self) -> None:
        """List the bucket, load news of loaded partitions, drop what others released."""
        try:
            self.view.refresh()
            self._unreachable = ""
            with self._volume.lock:
                partitions = [p for run in self._volume.runs.values() for p in run.partitions.values()]
            for partition in partitions:
                if partition.segments:
                    self._load(partition.run, _place(partition), relist=False)
                self._drop_vanished(partition)
        except StorageFailed as error:
            self._unreachable = str(error)
            log.warning("the object store cannot be listed: %s", error)

    def _drop_vanished(self, partition: Partition) -> None:
        """Forget uploaded segments that are no longer there, once the store says so for each by name."""
        place = _place(partition)
        listed = self.view.objects(place)
        with self._volume.lock:
            doubtful = [s for s in partition.segments.values() if s.uploaded and s.path.name not in listed]
        if not doubtful or not self._same_bucket():
            return
        gone = [s for s in doubtful if self._store.head(object_key(place, s.path.name)) is None]
        if not gone:
            return
        log.info("released by another server, partition=%r segments=%d", partition.name, len(gone))
        with self._volume.lock:
            self._vanished += len(gone)
            partition.drop({segment.number for segment in gone})
        for segment in gone:
            if segment.local:
                segment.path.unlink(missing_ok=True)

    # -- eviction

    def evict(self, segment: Segment) -> int:
        """Remove the local file of an uploaded segment. Returns the bytes freed; 0 if it may not be evicted now."""
        with self._volume.lock:
            if not (segment.local and segment.uploaded):
                return 0
            freed, segment.local, segment.object_bytes = segment.disk_bytes, False, segment.disk_bytes
            segment.disk_bytes = 0
            self._evicted += 1
            self._evicted_bytes += freed
        self._volume.deleter.submit(segment.path.name, lambda: segment.path.unlink(missing_ok=True))
        return freed

    # -- releases

    def release_place(self, place: Place) -> None:
        """Delete a partition that is only in the bucket and not in the catalog."""
        keys = [object_key(place, name) for name in self.view.objects(place)]
        directory = self._volume.root / "runs" / place[0] / f"{RELEASED_PREFIX}{place[1]}-{self._volume.epoch}"
        self._release(place, directory, keys)

    def _release(self, place: Place, directory: Path, keys: list[str]) -> None:
        self._uploader.forget(place)
        self.view.remove(place, [key.rpartition("/")[2] for key in keys])

        def delete() -> None:
            self._delete_objects(place, keys)
            if directory.exists():
                shutil.rmtree(directory)

        self._volume.deleter.submit(directory.name, delete)

    def _delete_objects(self, place: Place, keys: list[str]) -> None:
        """Delete a released partition's objects, and those that another server added to it; not those of a new one."""
        with self._volume.lock:
            alive = self._volume.segment_names(*place)
        listed = [info.key for info in self._store.listing(place_prefix(place))]
        doomed = sorted({key for key in (*keys, *listed) if key.rpartition("/")[2] not in alive})
        self._store.delete(doomed)
        self.view.remove(place, [key.rpartition("/")[2] for key in doomed])

    def _resume_releases(self) -> None:
        for note in self._volume.root.glob(f"runs/*/{RELEASED_PREFIX}*/{RELEASED_OBJECTS}"):
            keys = note.read_text(encoding="utf-8").split()
            if keys:
                run, partition = keys[0].split("/")[1:3]
                self._release((run, partition), note.parent, keys)

    # -- start

    def _remember(self, identity: str) -> bool:
        """Whether the data directory was used with this bucket before; it is from now on."""
        self._identity = identity
        path = self._volume.root / "bucket"
        known = path.read_text(encoding="utf-8").strip() if path.exists() else ""
        if known != identity:
            path.write_text(f"{identity}\n", encoding="utf-8")
            if known:
                log.warning("the data directory was used with another bucket, everything is uploaded to this one")
        return known == identity

    def _same_bucket(self) -> bool:
        try:
            return bucket_identity(self._store) == self._identity
        except TraceStoreError as error:
            log.warning("the bucket cannot be identified: %s", error)
            return False

    def _take_from_bucket(self, partition: Partition, segment: Segment, info: ObjectInfo) -> None:
        """The local copy of an uploaded segment is another one: recovery made it from a damaged file."""
        try:
            loaded = load_segment(self._store, segment.path.name, info)
        except TraceStoreError as error:
            log.error("segment=%s differs from its object, which cannot be read: %s", segment.path.name, error)
            return
        if loaded.index.records < segment.index.records:
            return  # the upload will say that there is a conflict
        log.warning("segment=%s is taken from the bucket, the local copy was damaged", segment.path.name)
        with self._volume.lock:
            segment.index, segment.local, segment.uploaded = loaded.index, False, True
            segment.disk_bytes, segment.object_bytes = 0, info.size
            partition.rebuild()
        segment.path.unlink(missing_ok=True)

    def _compare(self, same_bucket: bool) -> None:
        """At start: which local segments the bucket has already, and which of them it no longer has."""
        with self._volume.lock:
            partitions = [p for run in self._volume.runs.values() for p in run.partitions.values()]
        for partition in partitions:
            listed = self.view.objects(_place(partition))
            for segment in partition.segments.values():
                info = listed.get(segment.path.name)
                if info is not None and info.size == segment.disk_bytes:
                    segment.uploaded, segment.object_bytes = True, info.size
                    _mark(segment.path)
                elif info is not None:
                    self._take_from_bucket(partition, segment, info)
                elif info is None and same_bucket and _is_marked(segment.path):
                    segment.uploaded = True  # and gone since: asked for by name below
            self._drop_vanished(partition)


def _reach(store: ObjectStore) -> Capabilities:
    """Check the backend; one that is still starting gets START_WAIT_S."""
    limit = time.monotonic() + START_WAIT_S
    while True:
        try:
            return check_backend(store)
        except CredentialsRefused:
            raise
        except StorageFailed as error:
            if time.monotonic() >= limit:
                raise
            log.warning("waiting for the object store: %s", error)
            time.sleep(1.0)


def segments_of(run: Run) -> list[Segment]:
    """Segments of all partitions of a run. Wants the lock held."""
    return [segment for partition in run.partitions.values() for segment in partition.segments.values()]


def _place(partition: Partition) -> Place:
    return partition.run.directory.name, partition.directory.name


def _mark(path: Path) -> None:
    try:
        os.chmod(path, UPLOADED_MODE)
    except OSError as error:
        log.debug("cannot mark a segment as uploaded, segment=%s cause=%s", path.name, error)


def _is_marked(path: Path) -> bool:
    try:
        return path.stat().st_mode & 0o777 == UPLOADED_MODE
    except OSError:
        return False
