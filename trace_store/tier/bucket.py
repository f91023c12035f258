"""What is in the bucket, as far as this server knows: names and sizes by place, renewed by listing.

A listing is a hint, not the truth: objects appear and vanish meanwhile. What it newly shows is loaded; what it no
longer shows is asked for by name before anything is dropped. What was released is hidden for good, however long its
deletion takes: names are never used twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from trace_store.storage.s3 import ObjectInfo, ObjectStore
from trace_store.tier.bucket_clock import BucketClock
from trace_store.tier.layout import RUNS, Place, object_key, parse_key, place_prefix


class BucketView:
    """Known objects of a store. Thread-safe; no method but the refreshing ones makes requests."""

    def __init__(
        self, store: ObjectStore, bucket_clock: BucketClock, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.store = store
        self._bucket_clock, self._clock = bucket_clock, clock
        self._listed_all_at = 0.0
        self._lock = threading.Lock()
        self._objects: dict[Place, dict[str, ObjectInfo]] = {}
        self._hidden: dict[Place, set[str]] = {}
        self._added_at: dict[tuple[Place, str], float] = {}
        self._listed_at: dict[Place, float] = {}
        self._written_at: dict[Place, float] = {}
        self._versions: dict[Place, int] = {}

    def refresh(self) -> None:
        """List everything. Raises StorageFailed; the view is unchanged then."""
        started, began = self._clock(), self._bucket_clock.now()
        self._replace(None, self.store.listing(RUNS), started)
        self._listed_all_at = began

    def refresh_place(self, place: Place, younger_s: float) -> bool:
        """List one place, unless that was done less than ``younger_s`` ago. Whether it was. Raises StorageFailed."""
        started = self._clock()
        if started - self._listed_at.get(place, -younger_s) < younger_s:
            return False
        self._listed_at[place] = started
        self._replace(place, self.store.listing(place_prefix(place)), started)
        return True

    def _replace(self, only: Place | None, listing: Iterable[ObjectInfo], started: float) -> None:
        found: dict[Place, dict[str, ObjectInfo]] = {}
        for info in listing:
            parsed = parse_key(info.key)
            if parsed is not None and (only is None or parsed[0] == only):
                found.setdefault(parsed[0], {})[parsed[1]] = info
        with self._lock:
            for place, names in self._hidden.items():
                for name in names.intersection(found.get(place, {})):
                    del found[place][name]
            for place, objects in found.items():
                self._date(objects, self._objects.get(place, {}))
            found = {place: objects for place, objects in found.items() if objects}
            # What was uploaded while the listing ran may not be in it.
            for (place, name), added in self._added_at.items():
                if added >= started and name in self._objects.get(place, {}):
                    found.setdefault(place, {}).setdefault(name, self._objects[place][name])
            self._added_at = {key: added for key, added in self._added_at.items() if added >= started}
            for place, objects in found.items():
                self._written_at[place] = max(info.modified for info in objects.values())
            for place in found.keys() | (self._objects.keys() if only is None else {only}):
                if found.get(place, {}).keys() != self._objects.get(place, {}).keys():
                    self._changed(place)
            if only is None:
                self._objects = found
            elif only in found:
                self._objects[only] = found[only]
            else:
                self._objects.pop(only, None)

    def _date(self, objects: dict[str, ObjectInfo], known: dict[str, ObjectInfo]) -> None:
        """What is new was written after the listing before and is not from the future, whatever the store's clock did
        meanwhile: a clock that was set back must not make it old."""
        now = self._bucket_clock.now()
        for name, info in objects.items():
            old = known.get(name)
            modified = old.modified if old is not None else min(max(info.modified, self._listed_all_at), now)
            if modified != info.modified:
                objects[name] = replace(info, modified=modified)

    def add(self, place: Place, name: str, size: int) -> None:
        """An object was uploaded."""
        modified = self._bucket_clock.now()
        with self._lock:
            if name in self._hidden.get(place, ()):
                return  # its upload was under way when it was released
            self._objects.setdefault(place, {})[name] = ObjectInfo(object_key(place, name), size, modified)
            self._added_at[(place, name)] = self._clock()
            self._changed(place)
            self._written_at[place] = max(modified, self._written_at.get(place, 0.0))

    def hide(self, place: Place, names: Iterable[str]) -> None:
        """Objects are released: from now on they do not exist, deleted or not."""
        with self._lock:
            hidden = self._hidden.setdefault(place, set())
            hidden.update(names)
            known = self._objects.get(place, {})
            for name in hidden.intersection(known):
                del known[name]
            self._changed(place)
            if not known:
                self._objects.pop(place, None)

    def _changed(self, place: Place) -> None:
        self._versions[place] = self._versions.get(place, 0) + 1

    def version(self, place: Place) -> int:
        """A number that changes with the names of a place."""
        return self._versions.get(place, 0)

    def objects(self, place: Place) -> dict[str, ObjectInfo]:
        """Objects of a place by file name; a copy."""
        with self._lock:
            return dict(self._objects.get(place, {}))

    def written_at(self) -> dict[Place, float]:
        """Places that hold segments and when they last got one, by ``BucketClock``."""
        with self._lock:
            return {place: self._written_at[place] for place in self._objects if place[1]}

    def places(self) -> list[Place]:
        """Places that hold segments, sorted."""
        with self._lock:
            return sorted(place for place in self._objects if place[1])

    def run_places(self) -> list[str]:
        """Directory names of the runs, sorted."""
        with self._lock:
            return sorted({place[0] for place in self._objects})
