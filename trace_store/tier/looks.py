"""Whether the last look into each place of the bucket went through: what it holds is not known where it did not.

A look that is held back because one was made a moment ago knows no more than that one did; and one that has been under
way for long is no answer either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from trace_store.tier.layout import Place

LOOK_SLOW_S = 1.0
"""A listing of one place takes 10 ms; one that takes longer than this counts as not answered until it is."""


class Looks:
    """Thread-safe. Holds only places whose look failed or is under way."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way: dict[Place, list[float]] = {}
        """When each look began that has not ended; the oldest first."""
        self._failed: dict[Place, tuple[float, str]] = {}

    def begin(self, place: Place) -> float:
        """Returns when that was, for ``end``."""
        with self._lock:
            began = self._clock()
            self._under_way.setdefault(place, []).append(began)
            return began

    def end(self, place: Place, began: float, failure: str, listed: bool = True) -> None:
        """``listed``: whether the bucket was asked what the place holds."""
        with self._lock:
            under_way = self._under_way[place]
            under_way.remove(began)
            if not under_way:
                del self._under_way[place]
            if failure:
                self._failed[place] = (self._clock(), failure)
            elif listed:
                self._failed.pop(place, None)

    def listed_all(self, since: float) -> None:
        """Every place was listed and loaded, by a look that began at ``since``."""
        with self._lock:
            self._failed = {place: item for place, item in self._failed.items() if item[0] > since}

    def doubt(self, place: Place) -> str:
        """Why what the bucket holds of a place may not be known, or an empty string."""
        with self._lock:
            under_way = self._under_way.get(place)
            if under_way and self._clock() - under_way[0] > LOOK_SLOW_S:
                return "the object store has not answered yet"
            return self._failed.get(place, (0.0, ""))[1]
