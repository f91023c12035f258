"""Delete the objects of released partitions, whatever happens meanwhile.

The partition is gone from the catalog and its directory is renamed before this begins; the directory names the objects
and is deleted after them, so that a restart finds what is left to do. A release speaks of what was listed for it. Where
the store could not be listed then, what is older than the release goes too, by a margin: clocks differ, and what
another server wrote anew under the same name must stay.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from trace_store.naming import RELEASED_OBJECTS, RELEASED_PREFIX
from trace_store.storage.s3 import ObjectStore
from trace_store.tier.bucket import BucketView
from trace_store.tier.layout import Place, object_key, place_prefix
from trace_store.tier.uploader import Uploader
from trace_store.volume import Volume

CLOCK_MARGIN_S = 60.0
"""Objects count as older than a release by the store's clock, which has seconds and may be behind ours."""


class Releases:
    """Carries out releases on the volume's deleter. Thread-safe."""

    def __init__(self, volume: Volume, store: ObjectStore, view: BucketView, uploader: Uploader) -> None:
        self._volume, self._store, self._view, self._uploader = volume, store, view, uploader

    def start(self, place: Place, directory: Path, keys: list[str], size: int = 0) -> None:
        """Delete objects, then the directory with its ``size`` bytes."""
        self._uploader.forget(place)
        self._view.remove(place, map(_name, keys))
        note = directory / RELEASED_OBJECTS
        released_at = note.stat().st_mtime if note.exists() else time.time()

        def delete() -> None:
            self._delete_objects(place, keys, released_at)
            if directory.exists():
                shutil.rmtree(directory)

        self._volume.deleter.submit(directory.name, delete, size)

    def start_remote(self, place: Place) -> None:
        """Release a partition that is only in the bucket and not in the catalog."""
        keys = [object_key(place, name) for name in self._view.objects(place)]
        directory = self._volume.root / "runs" / place[0] / f"{RELEASED_PREFIX}{place[1]}-{self._volume.epoch}"
        self.start(place, directory, keys)

    def resume(self) -> None:
        """At start: go on with what an earlier process left."""
        for note in self._volume.root.glob(f"runs/*/{RELEASED_PREFIX}*/{RELEASED_OBJECTS}"):
            keys = note.read_text(encoding="utf-8").split()
            if keys:
                run, partition = keys[0].split("/")[1:3]
                self.start((run, partition), note.parent, keys)

    def _delete_objects(self, place: Place, keys: list[str], released_at: float) -> None:
        """Also those that were surely there before, though nobody here had seen them."""
        with self._volume.lock:
            alive = self._volume.segment_names(*place)
        surely = released_at - CLOCK_MARGIN_S
        listed = [info.key for info in self._store.listing(place_prefix(place)) if info.modified <= surely]
        doomed = sorted({key for key in (*keys, *listed) if _name(key) not in alive})
        self._store.delete(doomed)
        self._view.remove(place, map(_name, doomed))


def _name(key: str) -> str:
    return key.rpartition("/")[2]
