"""The object tier of one server: uploads what it seals, shows what the bucket holds, follows what others release.

    local segment, not uploaded     queued for upload, in order within its partition
    local segment, uploaded         served from the disk; may be evicted
    segment of the bucket only      served by ranged reads, fetched once they add up to its size
    uploaded and vanished           released by another server: asked for by name, then dropped here too

The index of a remote segment is loaded at the first read of its partition.

A directory that was used with the bucket before is served while the bucket does not answer at start: what is on the
disk can be read and written, nothing is uploaded or evicted, and rows that may be in the bucket are missing because of
the store and not for good. ``joining`` tries until it answers. A directory that never saw its bucket gives up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trace_store.attempt import Segment
from trace_store.catalog import Partition, Run
from trace_store.errors import StorageFailed
from trace_store.naming import MANIFEST_PREFIX, RELEASED_OBJECTS, directory_name
from trace_store.segment.schema import SEALED_SUFFIX
from trace_store.storage.s3 import ObjectSource, ObjectStore
from trace_store.storage.selfcheck import Capabilities, check_backend
from trace_store.tier.bucket import BucketView
from trace_store.tier.bucket_clock import BucketClock
from trace_store.tier.cache import LocalCache
from trace_store.tier.eviction import Evictor
from trace_store.tier.follower import Follower
from trace_store.tier.joining import Joining
from trace_store.tier.layout import Place, object_key, partition_place, place_of
from trace_store.tier.loading import Loader
from trace_store.tier.looks import Looks
from trace_store.tier.marks import IDENTITY_FILE, BucketIdentity, mark_uploaded
from trace_store.tier.releases import Releases
from trace_store.tier.uploader import Upload, Uploader
from trace_store.volume import Volume

log = logging.getLogger("trace_store.tier")

REFRESH_S = 30.0
"""How often the whole bucket is listed: new segments of loaded partitions appear, released ones vanish, at most this
late. 1,000 names a request, so 10,000 segments are 10 requests."""

JOIN_RETRY_S = 5.0

READ_THREADS = 16
"""Round trips of all reads at once, of up to 8 MiB each."""

RELIST_S = 2.0
"""A read that misses lists its partition again at most this often."""

CLOSE_UPLOAD_S = 10.0
"""Longest wait at a clean stop for what is not uploaded yet."""


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
    cached: int = 0
    cached_bytes: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    vanished: int = 0
    joined: bool = False


@dataclass(frozen=True)
class Loaded:
    """Segments that a look into the bucket brought, and why it failed, if it did.

    ``listed``: whether the bucket has said now what it holds of the partition, be it readable or not.
    """

    segments: int
    failure: str
    listed: bool = False


class ObjectTier:
    """See the module. The engine's keeper calls ``tick``; listing the bucket has a thread of its own."""

    def __init__(self, volume: Volume, store: ObjectStore, clock: Callable[[], float] = time.monotonic) -> None:
        """Check the backend, list it, compare it with the disk and start uploading; later, if it does not answer now.

        Raises:
            Unsupported: the backend lacks what is needed.
            StorageFailed: it refuses the credentials, or cannot be reached and the directory never saw it.
        """
        self._volume, self._store, self._clock = volume, store, clock
        self.capabilities = Capabilities(create_once=False)
        self.bucket_clock = BucketClock(volume, clock)
        self.view = BucketView(store, self.bucket_clock, clock)
        self.loader = Loader(volume, self.view)
        self.cache = LocalCache(volume, store)
        self.evictor = Evictor(volume, store)
        self._looks = Looks(clock)
        self.read_pool = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="trace-store-ahead")
        self._uploader = Uploader(store, self.capabilities.create_once, clock)
        self._releases = Releases(volume, store, self.view, self._uploader)
        self._follower: Follower | None = None
        self._queued: set[Path] = set()
        self._released_meanwhile: list[tuple[Place, Path, list[str], int]] = []
        self._unreachable = ""
        self._stop = threading.Event()
        volume.objects = self
        self._joining = Joining(self._ask, self._enter)
        try:
            self._joining.begin(known=(volume.root / IDENTITY_FILE).exists())
        except BaseException:
            self._shut_down()
            raise
        threading.Thread(target=self._follow, name="trace-store-follow", daemon=True).start()

    @property
    def joined(self) -> bool:
        """Whether the bucket has answered since the start."""
        return self._joining.done

    def _ask(self) -> Capabilities:
        """Whether the backend answers and does what is needed. Raises StorageFailed, Unsupported."""
        return check_backend(self._store)

    def _enter(self, capabilities: Capabilities) -> None:
        """Compare bucket and disk, which may be in use already. Raises StorageFailed."""
        identity = BucketIdentity(self._volume.root, self._store)
        self.bucket_clock.learn(capabilities.time)
        self.view.refresh()
        self.capabilities = capabilities
        self._uploader.create_once = capabilities.create_once
        follower = Follower(self._volume, self.view, self.loader, identity)
        follower.compare()
        self._follower = follower
        for place, directory, keys, size in self._released_meanwhile:
            if not (directory / RELEASED_OBJECTS).exists():
                self._releases.start(place, directory, keys, size)
        self._releases.resume()
        log.info(
            "object store %s: ranges yes, create once %s, runs=%d partitions=%d",
            self._store.url,
            "yes" if capabilities.create_once else "no (names are asked for first)",
            len(self.view.run_places()),
            len(self.view.places()),
        )

    def close(self) -> None:
        """Give what waits CLOSE_UPLOAD_S, then stop."""
        self._stop.set()
        self._joining.close()
        self.tick()
        if not self._uploader.drain(CLOSE_UPLOAD_S):
            log.warning("stopped with segments not uploaded, count=%d", self._uploader.counts().waiting)
        self._shut_down()

    def _shut_down(self) -> None:
        self._uploader.close()
        self.loader.close()
        self.evictor.close()
        self.cache.close()
        self.read_pool.shutdown(wait=True, cancel_futures=True)

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
            error=counts.last_error or self._not_joined or self._unreachable,
            remote_segments=remote,
            cached=self.cache.fetched,
            cached_bytes=self.cache.fetched_bytes,
            evicted=self.evictor.evicted,
            evicted_bytes=self.evictor.evicted_bytes,
            vanished=self._follower.vanished if self._follower is not None else 0,
            joined=self.joined,
        )

    # -- what the volume asks (trace_store.volume.Objects)

    def source(self, partition: Partition, segment: Segment) -> ObjectSource:
        return self.cache.source(partition, segment)

    def keys(self, partition: Partition) -> list[str]:
        place = partition_place(partition)
        names = {segment.path.stem + SEALED_SUFFIX for segment in partition.segments.values()}
        return [object_key(place, name) for name in sorted(names.union(self.view.objects(place)))]

    def released(self, partition: Partition, directory: Path, keys: list[str]) -> None:
        place, size = partition_place(partition), partition.disk_bytes
        if self.joined:
            self._releases.start(place, directory, keys, size)
            return
        # The directory and the note in it stay until the objects are gone; its segments need not fill the disk.
        self._released_meanwhile.append((place, directory, keys, 0))
        self._volume.deleter.submit(f"{directory.name} segments", lambda: _strip(directory), size)

    def release_place(self, place: Place) -> None:
        """Release a partition that is only in the bucket and not in the catalog."""
        self._releases.start_remote(place)

    # -- uploads

    def tick(self) -> None:
        """Queue what was sealed since the last call."""
        if not self.joined:
            return
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
                size, lost = segment.disk_bytes, self._lost(partition, segment)
                self._queue(partition_place(partition), segment.path, size, self._uploaded(segment), lost)

    def _queue_manifests(self, run: Run) -> None:
        place = (run.directory.name, "")
        if self.view.objects(place) or not run.directory.is_dir():
            return
        for path in run.directory.glob(f"{MANIFEST_PREFIX}*{SEALED_SUFFIX}"):
            if path not in self._queued:
                self._queue(place, path, path.stat().st_size, lambda upload: None, lambda upload: None)

    def _queue(
        self, place: Place, path: Path, size: int, done: Callable[[Upload], None], lost: Callable[[Upload], None]
    ) -> None:
        self._queued.add(path)

        def arrived(upload: Upload) -> None:
            self.view.add(place, path.name, upload.size)
            done(upload)
            self._queued.discard(path)

        def vanished(upload: Upload) -> None:
            lost(upload)
            self._queued.discard(path)

        self._uploader.add(Upload(place, object_key(place, path.name), path, self._clock(), arrived, vanished, size))

    def _uploaded(self, segment: Segment) -> Callable[[Upload], None]:
        def done(upload: Upload) -> None:
            mark_uploaded(segment.path)
            with self._volume.lock:
                segment.uploaded, segment.object_bytes = True, upload.size

        return done

    def _lost(self, partition: Partition, segment: Segment) -> Callable[[Upload], None]:
        """Take a segment whose file somebody removed out of the catalog: its rows are lost, as after a restart."""

        def lost(upload: Upload) -> None:
            with self._volume.lock:
                if self._volume.is_released(partition) or segment.path != upload.path or upload.path.exists():
                    return
                if partition.segments.pop(segment.number, None) is not None:
                    partition.rebuild()

        return lost

    # -- reads

    def run(self, name: str) -> Run | None:
        """A run of the catalog or the bucket. Raises StorageFailed."""
        run = self.loader.run(name)
        if run is None:
            self._check_joined()
        if run is None and self.view.refresh_place((directory_name(name), ""), RELIST_S):
            run = self.loader.run(name)
        return run

    def ensure(self, run: Run, partition: str) -> Loaded:
        """Load what the bucket is known to hold of a partition and the catalog lacks."""
        return self._load(run, place_of(run.name, partition))

    def look_again(self, run: Run, partition: str) -> Loaded:
        """The same after listing the partition anew, for a read that missed; at most every RELIST_S."""
        return self._load(run, place_of(run.name, partition), relist_s=RELIST_S)

    def catch_up(self, run: Run, partition: Partition) -> None:
        """Before writes: take over what others have uploaded, and drop what they have released."""
        self.look_again(run, partition.name)
        if self._follower is not None:
            try:
                self._follower.drop_vanished(partition)
            except StorageFailed as error:
                self._unreachable = str(error)

    def ensure_all(self, run: Run) -> None:
        """Load every partition of a run, for a listing. Raises StorageFailed."""
        self._check_joined()
        self.loader.load_run(run)

    def look_now(self, run: Run, partition: str) -> Loaded:
        """The same without that limit, for a release: it speaks of what is known here."""
        return self._load(run, place_of(run.name, partition), relist_s=0.0)

    def _load(self, run: Run, place: Place, relist_s: float | None = None) -> Loaded:
        began = self._looks.begin(place)
        listed, failure, loaded = False, "", 0
        try:
            self._check_joined()
            listed = relist_s is not None and self.view.refresh_place(place, relist_s)
            loaded = self.loader.load(run, place) if self.loader.missing(place) else 0
        except StorageFailed as error:
            failure = str(error)
            if self.joined:
                self._unreachable = failure
        finally:
            self._looks.end(place, began, failure, listed)
        # A look that was held back knows no more than the one before it did.
        return Loaded(loaded, failure or (self._looks.doubt(place) if relist_s is not None else ""), listed)

    def doubt(self, partition: Partition) -> str:
        place = partition_place(partition)
        if not self.joined:
            return self._not_joined
        return self._looks.doubt(place) or ("segments of it are being loaded" if self.loader.missing(place) else "")

    def find_runs(self) -> None:
        """Enter every run of the bucket in the catalog. Raises StorageFailed."""
        self._check_joined()
        with self._volume.lock:
            known = {run.directory.name for run in self._volume.runs.values()}
        for directory in self.view.run_places():
            if directory not in known:
                self.loader.run_at(directory)

    # -- others' changes

    @property
    def _not_joined(self) -> str:
        return "" if self.joined else f"the object store has not answered since the start: {self._joining.failure}"

    def _check_joined(self) -> None:
        if not self.joined:
            raise StorageFailed(self._not_joined)

    def _follow(self) -> None:
        while not self._stop.wait(REFRESH_S if self.joined else JOIN_RETRY_S):
            try:
                self.follow()
            except Exception:
                log.exception("following the bucket failed, tried again")

    def follow(self) -> None:
        """Follow what other servers do, now; join the bucket, if it did not answer at the start."""
        if not self.joined:
            self._joining.try_again()
        if self._follower is not None and self.joined:
            began = self._clock()
            self._unreachable = self._follower.follow()
            if not self._unreachable:
                self._looks.listed_all(began)
                self.evictor.reconsider()

    # -- eviction

    def evict(self, segment: Segment) -> int:
        """Remove the local file of a segment that the bucket says it holds. Returns the bytes freed; 0 if it stays."""
        return self.evictor.evict(segment) if self.joined else 0

    def drop_local(self, segment: Segment) -> int:
        return self.evictor.drop_local(segment) if self.joined else 0


def _strip(directory: Path) -> None:
    """Delete the segments of a released partition and leave the note of its objects."""
    for path in directory.iterdir() if directory.exists() else ():
        if path.name != RELEASED_OBJECTS:
            path.unlink()


def segments_of(run: Run) -> list[Segment]:
    """Segments of all partitions of a run. Wants the lock held."""
    return [segment for partition in run.partitions.values() for segment in partition.segments.values()]
