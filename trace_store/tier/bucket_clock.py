"""How old the objects of a bucket are, by the object store's clock alone: no server's clock has a part in it.

    ROOT/bucket-clock     its time a minute ago at most, this directory's time at that moment, pauses between the runs

At the join the store says what time it gave to an object that was just written; from there the monotonic clock counts.
So a server whose own clock is wrong neither takes a young object for an old one nor its own rows for the oldest. Rows
that are not in the bucket yet are dated by the same scale: those of this run exactly, those of an earlier one by the
two times that it noted together. A pause counts as in ``lifetime``: the store's clock may jump as well.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable

from trace_store.lifetime import PAUSE_S_MIN, PAUSES_MAX, Pause, age
from trace_store.tier.layout import Place, partition_place
from trace_store.tier.marks import BUCKET_CLOCK_FILE
from trace_store.volume import Volume

log = logging.getLogger("trace_store.tier")


class BucketClock:
    """Seconds since 1970 as the object store counts them; 0 and a little until ``learn``."""

    def __init__(self, volume: Volume, clock: Callable[[], float] = time.monotonic) -> None:
        """Made at the start, before anything is written: what is in the catalog now was written by an earlier run."""
        self._volume, self._clock = volume, clock
        self._path = volume.root / BUCKET_CLOCK_FILE
        self._offset = -clock()
        self._started = 0.0
        self._earlier: float | None = None
        self._known = False
        self._pauses: list[Pause] = []
        with volume.lock:
            partitions = [p for run in volume.runs.values() for p in run.partitions.values()]
            self._found = {partition_place(partition): partition.written_at for partition in partitions}

    def learn(self, written: float) -> None:
        """``written``: what time the store gave to an object that was written a moment ago."""
        self._offset, self._started, self._known = written - self._clock(), written, True
        try:
            saved = json.loads(self._path.read_text(encoding="utf-8"))
            last, pauses = float(saved["time"]), [(float(low), float(high)) for low, high in saved["pauses"]]
            self._earlier = last - float(saved["directory"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the file of the object store's clock is not readable: %s", error)
            return
        if written - last > PAUSE_S_MIN:
            pauses.append((last, written))
        self._pauses = pauses[-PAUSES_MAX:]

    def now(self) -> float:
        return self._offset + self._clock()

    def age(self, written: float, age_s_max: float) -> float:
        """Seconds since a time of this clock, of each pause no more than a share of the limit."""
        return age(written, self.now(), self._pauses, age_s_max)

    def of_local(self, place: Place, written_at: float) -> float | None:
        """When a partition was written that is not all in the bucket; None if nobody can tell.

        Args:
            written_at: on the volume's clock.
        """
        if self._found.get(place) != written_at:
            return written_at + self.now() - self._volume.now()
        return None if self._earlier is None else min(written_at + self._earlier, self._started)

    def save(self) -> None:
        """Note the time, once it is known. A disk that refuses it makes the next pause look longer."""
        if not self._known:
            return
        noted = {"time": self.now(), "directory": self._volume.now(), "pauses": self._pauses}
        unfinished = self._path.with_suffix(".partial")
        with contextlib.suppress(OSError):
            unfinished.write_text(json.dumps(noted), encoding="utf-8")
            os.replace(unfinished, self._path)
