"""Compare catalog and bucket: at start what the directory has, later what other servers add and release.

object of the same name and size      uploaded
object of another size                the local copy is damaged and was rewritten: the object counts
marked, or uploaded before, no object released by another server, once the store says so by name
neither                               to be uploaded
the bucket itself is another one      nothing is released: all that it lacks is to be uploaded
"""

from __future__ import annotations

import logging
from pathlib import Path

from trace_store.attempt import Segment
from trace_store.catalog import Partition
from trace_store.errors import StorageFailed, TraceStoreError
from trace_store.storage.s3 import ObjectInfo
from trace_store.tier.bucket import BucketView
from trace_store.tier.layout import object_key, partition_place
from trace_store.tier.loading import Loader, load_segment
from trace_store.tier.marks import BucketIdentity, is_marked, mark_uploaded
from trace_store.volume import Volume

log = logging.getLogger("trace_store.tier")


class Follower:
    """Makes the catalog follow the bucket. One caller at a time."""

    def __init__(self, volume: Volume, view: BucketView, loader: Loader, identity: BucketIdentity) -> None:
        self._volume, self._view, self._loader, self._identity = volume, view, loader, identity
        self.vanished = 0
        self._replaced = False
        self._again: set[int] = set()

    def compare(self) -> None:
        """At start, after the bucket was listed."""
        for partition in self._partitions():
            listed = self._view.objects(partition_place(partition))
            for segment in list(partition.segments.values()):
                info = listed.get(segment.path.name)
                if info is not None and info.size == segment.disk_bytes:
                    segment.uploaded, segment.object_bytes = True, info.size
                    mark_uploaded(segment.path)
                elif info is not None:
                    self._take_from_bucket(partition, segment, info)
                elif is_marked(segment.path):
                    segment.uploaded = True  # and gone since: asked for by name below
            self.drop_vanished(partition)

    def follow(self) -> str:
        """List the bucket, load news of partitions that are in use, drop what others released. Why that failed."""
        try:
            self._view.refresh()
            for partition in self._partitions():
                place = partition_place(partition)
                if partition.segments and self._loader.missing(place):
                    self._loader.load(partition.run, place)
                self.drop_vanished(partition)
            if self._replaced:
                self._settle()
        except StorageFailed as error:
            log.warning("the object store cannot be followed: %s", error)
            return str(error)
        return ""

    def _partitions(self) -> list[Partition]:
        with self._volume.lock:
            return [p for run in self._volume.runs.values() for p in run.partitions.values()]

    def drop_vanished(self, partition: Partition) -> None:
        """Drop what the bucket was seen to have and has no more. On any thread. Raises StorageFailed."""
        place = partition_place(partition)
        listed = self._view.objects(place)
        with self._volume.lock:
            doubtful = [s for s in partition.segments.values() if s.uploaded and s.path.name not in listed]
        gone = [s for s in doubtful if self._view.store.head(object_key(place, s.path.name)) is None]
        if not gone:
            return
        # Asked after the objects: a bucket that was emptied before they were asked for has lost its name by now.
        if not self._identity.is_same():
            self._upload_again(gone)
            return
        log.info("released by another server, partition=%r segments=%d", partition.name, len(gone))
        with self._volume.lock:
            self.vanished += len(gone)
            partition.drop({segment.number for segment in gone})
        for segment in gone:
            if segment.local:
                _remove(segment.path)

    def _upload_again(self, gone: list[Segment]) -> None:
        """The bucket was emptied or replaced under us: nothing counts as released, what the disk has is uploaded."""
        if not self._replaced:
            log.error("the bucket was emptied or is another one now: what this disk holds of it is uploaded again")
        self._replaced = True
        with self._volume.lock:
            for segment in gone:
                if segment.local:
                    segment.uploaded, segment.object_bytes = False, 0
                    self._again.add(segment.number)

    def _settle(self) -> None:
        """Take the new bucket for ours once it has all that this disk holds: only then may a lack be a release."""
        everything = [(p, s) for p in self._partitions() for s in list(p.segments.values())]
        if any(segment.number in self._again and not segment.uploaded for _, segment in everything):
            return
        self._identity.adopt()
        self._replaced = False
        self._again.clear()
        for partition, segment in everything:
            if segment.path.name in self._view.objects(partition_place(partition)):
                if segment.local:
                    mark_uploaded(segment.path)
            elif segment.uploaded and not segment.local:
                log.error("a segment is lost with the bucket that alone held it, segment=%s", segment.path.name)
                with self._volume.lock:
                    partition.segments.pop(segment.number, None)
                    partition.rebuild()

    def _take_from_bucket(self, partition: Partition, segment: Segment, info: ObjectInfo) -> None:
        try:
            loaded = load_segment(self._view.store, segment.path.name, info)
        except TraceStoreError as error:
            log.error("segment=%s differs from its object, which cannot be read: %s", segment.path.name, error)
            return
        if loaded.index.records < segment.index.records:
            return  # the upload will say that there is a conflict
        log.warning("segment=%s is taken from the bucket, the local copy was damaged", segment.path.name)
        with self._volume.lock:
            segment.replace_index(loaded.index)
            segment.local, segment.uploaded = False, True
            segment.disk_bytes, segment.object_bytes = 0, info.size
            partition.rebuild()
        _remove(segment.path)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.error("a segment cannot be removed, segment=%s cause=%s", path.name, error.strerror)
