"""Read ahead of a plan over a remote source: what a read will want next is on its way while it handles what it has.

A read is served in frames of about 1 MiB, one after another; a round trip for each would leave the network idle most of
the time. The plan is known beforehand, so its ranges are cut into trips of TRIP_BYTES, and the trips behind the present
one are asked for on other threads.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor, Future

from trace_store.errors import StorageFailed
from trace_store.storage.base import Range, Source
from trace_store.storage.prefetch import Prefetched, join_ranges

TRIP_BYTES = 8 << 20
AHEAD = 2
"""Trips asked for beyond the present one: 16 MiB, 100 ms of a 160 MB/s store."""

KEPT = 6
"""Trips in memory, 48 MiB a read: two threads may gather parts of one read that lie 16 MiB apart."""


class ReadAhead:
    """A source over the ranges of a plan. Thread-safe; a failed trip is raised by every read of it."""

    descriptor = -1

    def __init__(self, source: Source, ranges: Sequence[Range], pool: Executor) -> None:
        self.name, self.shape = source.name, source.shape
        self._source, self._pool = source, pool
        self._lock = threading.Lock()
        self._trips: list[list[Range]] = []
        self._starts: list[int] = []
        self._windows: OrderedDict[int, Future[Prefetched]] = OrderedDict()
        size = TRIP_BYTES
        for start, stop in join_ranges(ranges, source.shape):
            if size >= TRIP_BYTES:
                self._trips.append([])
                self._starts.append(start)
                size = 0
            self._trips[-1].append((start, stop))
            size += stop - start

    def size(self) -> int:
        return self._source.size()

    def read_into(self, buffer: memoryview, offset: int) -> None:
        trip = bisect_right(self._starts, offset) - 1
        window = self._window(trip).result() if trip >= 0 else None
        try:
            if window is not None:
                window.read_into(buffer, offset)
                return
        except StorageFailed:
            if window is not None and window.failure is not None:
                raise
        self._source.read_into(buffer, offset)  # across the border of two trips, or not in the plan

    def read_ranges(self, ranges: Sequence[Range]) -> list[memoryview]:
        buffers = [memoryview(bytearray(stop - start)) for start, stop in ranges]
        for buffer, (start, _) in zip(buffers, ranges, strict=True):
            self.read_into(buffer, start)
        return buffers

    def close(self) -> None:
        """Wants no read under way."""
        with self._lock:
            for window in self._windows.values():
                window.cancel()
            self._windows.clear()
        self._source.close()

    def _window(self, trip: int) -> Future[Prefetched]:
        with self._lock:
            for number in range(trip, min(trip + AHEAD + 1, len(self._trips))):
                if number not in self._windows:
                    self._windows[number] = self._pool.submit(Prefetched, self._source, self._trips[number])
            self._windows.move_to_end(trip)
            window = self._windows[trip]
            while len(self._windows) > KEPT:
                self._windows.popitem(last=False)  # not cancelled: another thread may be waiting for it
            return window
