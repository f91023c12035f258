"""Delete the objects of released partitions, whatever happens meanwhile.

The partition is gone from the catalog and its directory is renamed before this begins; the directory names the objects
and is deleted after them, so that a restart finds what is left to do. A release speaks of what is known when it is
given: what another server writes or uploads later under the same name stays, and no clock is asked which that is.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from trace_store.naming import RELEASED_OBJECTS, RELEASED_PREFIX
from trace_store.storage.s3 import ObjectStore
from trace_store.tier.bucket import BucketView
from trace_store.tier.layout import Place, object_key
from trace_store.tier.uploader import Uploader
from trace_store.volume import Volume


class Releases:
    """Carries out releases on the volume's deleter. Thread-safe."""

    def __init__(self, volume: Volume, store: ObjectStore, view: BucketView, uploader: Uploader) -> None:
        self._volume, self._store, self._view, self._uploader = volume, store, view, uploader

    def start(self, place: Place, directory: Path, keys: list[str], size: int = 0) -> None:
        """Delete objects, then the directory with its ``size`` bytes."""
        self._uploader.forget(place)
        names = [_name(key) for key in keys]
        self._view.hide(place, names)
        self._volume.note_released(self._volume.root / "runs" / place[0] / place[1], names)

        def delete() -> None:
            # The newest first: seals go before the rows that they count, and no reader takes a half of it for damage.
            self._store.delete(sorted(keys, reverse=True))
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


def _name(key: str) -> str:
    return key.rpartition("/")[2]
