"""Bring segments of the bucket into the catalog: their indexes only, when somebody asks for their partition.

Opening a bucket costs its listing; a partition costs one ranged read of 256 KiB a segment, LOADERS at once, at its
first read. Records stay where they are until a read wants them.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from trace_store.attempt import Segment
from trace_store.catalog import Partition, Run
from trace_store.errors import FormatError, StorageFailed
from trace_store.naming import directory_name, parse_segment_name
from trace_store.segment.index import SegmentIndex
from trace_store.segment.reader import open_source
from trace_store.segment.scan import scan_content
from trace_store.segment.schema import SegmentHeader
from trace_store.storage.base import SegmentGone
from trace_store.storage.s3 import ObjectInfo, ObjectSource, ObjectStore
from trace_store.tier.bucket import BucketView
from trace_store.tier.layout import Place, place_of
from trace_store.volume import Volume

log = logging.getLogger("trace_store.tier")

LOADERS = 16
"""Indexes read at once: at 10 ms a request, a thousand segments take less than a second."""


@dataclass(frozen=True)
class LoadedSegment:
    """A segment of the bucket, opened."""

    name: str
    info: ObjectInfo
    header: SegmentHeader
    index: SegmentIndex


def load_segment(store: ObjectStore, name: str, info: ObjectInfo) -> LoadedSegment:
    """Open a segment by its index; a damaged index costs a read of the whole object.

    Raises:
        FormatError: it is no segment.
        StorageFailed, SegmentGone: it cannot be read.
    """
    try:
        header, index = open_source(ObjectSource(store, info.key, name, info.size))
    except FormatError as error:
        log.error("object=%s cannot be opened by its index, scanning it: %s", info.key, error)
        scan = scan_content(bytearray(store.read(info.key, 0, info.size)), name, [])
        for line in scan.damage:
            log.error("object=%s %s", info.key, line)
        header, index = scan.header, scan.index
    return LoadedSegment(name, info, header, index)


class Loader:
    """Loads runs and partitions into a volume's catalog. Thread-safe."""

    def __init__(self, volume: Volume, view: BucketView) -> None:
        self._volume, self._view = volume, view
        self._pool = ThreadPoolExecutor(LOADERS, thread_name_prefix="trace-store-load")
        self._lock = threading.Lock()
        self._place_locks: dict[Place, threading.Lock] = {}
        self._complete: dict[Place, int] = {}
        self._refused: set[str] = set()
        """Keys of objects that are no segments of their place: logged once, not tried again."""

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def run(self, name: str) -> Run | None:
        """A run, from the catalog or from a manifest or segment in the bucket. Raises StorageFailed."""
        run = self._volume.runs.get(name)
        if run is not None:
            return run
        return self.run_at(directory_name(name))

    def run_at(self, directory: str) -> Run | None:
        """The run of a directory of the bucket, None if nothing there says which. Raises StorageFailed."""
        places = [(directory, ""), *(place for place in self._view.places() if place[0] == directory)]
        for place in places:
            for name, info in sorted(self._view.objects(place).items()):
                loaded = self._load_one(name, info)
                if loaded is not None and directory_name(loaded.header.run) == directory:
                    return self._volume.adopt(loaded.header.run, loaded.header.sites)
        return None

    def missing(self, place: Place) -> dict[str, ObjectInfo]:
        """Objects of a place that the catalog does not know. Cheap when nothing has changed since there were none."""
        version = self._view.version(place)
        if self._complete.get(place) == version:
            return {}
        objects = self._view.objects(place)
        with self._volume.lock:
            known = self._volume.segment_names(*place)
        missing = {n: info for n, info in objects.items() if n not in known and info.key not in self._refused}
        if not missing:
            self._complete[place] = version
        return missing

    def load(self, run: Run, place: Place) -> int:
        """Load what the catalog lacks of a partition; number of segments loaded.

        Raises:
            StorageFailed: some could not be read; those that could are loaded.
        """
        with self._lock:
            place_lock = self._place_locks.setdefault(place, threading.Lock())
        with place_lock:
            wanted = self.missing(place)
            failures: list[StorageFailed] = []

            def attempt(item: tuple[str, ObjectInfo]) -> LoadedSegment | None:
                try:
                    return self._load_one(*item)
                except StorageFailed as error:
                    failures.append(error)
                    return None

            loaded = [found for found in self._pool.map(attempt, sorted(wanted.items())) if found is not None]
            entered = self._enter(run, place, loaded)
        if failures:
            raise failures[0]
        return entered

    def load_run(self, run: Run) -> None:
        """Load every partition of a run. Raises StorageFailed."""
        directory = directory_name(run.name)
        for place in self._view.places():
            if place[0] == directory:
                self.load(run, place)

    def _load_one(self, name: str, info: ObjectInfo) -> LoadedSegment | None:
        try:
            return load_segment(self._view.store, name, info)
        except SegmentGone:
            return None
        except FormatError as error:
            self._refuse(info, str(error))
            return None

    def _refuse(self, info: ObjectInfo, reason: str) -> None:
        self._refused.add(info.key)
        log.error("object=%s is ignored: %s", info.key, reason)

    def _enter(self, run: Run, place: Place, loaded: list[LoadedSegment]) -> int:
        entered: list[Segment] = []
        partition: Partition | None = None
        with self._volume.lock:
            known = self._volume.segment_names(*place)
            for item in sorted(loaded, key=lambda item: item.name):
                header = item.header
                belongs = place_of(header.run, header.partition) == place
                if (header.run, header.sites) != (run.name, run.sites) or not belongs:
                    self._refuse(item.info, "it belongs to another run, site table or partition")
                elif parse_segment_name(item.name)[0] != header.sequence:
                    self._refuse(item.info, "it has another segment's name")
                elif item.name not in known:
                    partition = self._volume.partition(run, header.partition)
                    segment = self._volume.remote_segment(partition, item.name, header, item.index, item.info.size)
                    entered.append(segment)
            if partition is not None:
                partition.load(*entered)
        return len(entered)
