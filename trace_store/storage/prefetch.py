"""Ranges of a remote source, fetched together, then read as often as needed.

A record's codes, scales and tensor scales lie within one record batch of the segment, so near ranges are joined and a
microbatch costs one round trip of few requests instead of three requests a record.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from trace_store.errors import StorageFailed
from trace_store.storage.base import Range, ReadShape, Source


def join_ranges(ranges: Sequence[Range], shape: ReadShape) -> list[Range]:
    """Cover non-empty ranges by few: sorted, joined over gaps, none longer than a run unless one range is."""
    joined: list[Range] = []
    for start, stop in sorted(ranges):
        if start == stop:
            continue
        if joined:
            low, high = joined[-1]
            if start <= high + shape.gap_bytes_max and max(stop, high) - low <= shape.run_bytes_max:
                joined[-1] = (low, max(high, stop))
                continue
        joined.append((start, stop))
    return joined


class Prefetched:
    """A source over ranges of another one. A failed fetch is raised by every read; asking again would wait again."""

    descriptor = -1

    def __init__(self, source: Source, ranges: Sequence[Range]) -> None:
        self.name, self.shape = source.name, source.shape
        self._source = source
        joined = join_ranges(ranges, source.shape)
        self._starts = [start for start, _ in joined]
        self._parts: list[memoryview] = []
        self.failure: StorageFailed | None = None
        try:
            self._parts = source.read_ranges(joined)
        except StorageFailed as error:
            self.failure = error

    def size(self) -> int:
        return self._source.size()

    def read_into(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < buffer.nbytes:
            part, place = self._find(offset + done)
            count = min(buffer.nbytes - done, part.nbytes - place)
            buffer[done : done + count] = part[place : place + count]
            done += count

    def read_ranges(self, ranges: Sequence[Range]) -> list[memoryview]:
        buffers = [memoryview(bytearray(stop - start)) for start, stop in ranges]
        for buffer, (start, _) in zip(buffers, ranges, strict=True):
            self.read_into(buffer, start)
        return buffers

    def close(self) -> None:
        self._parts = []

    def _find(self, offset: int) -> tuple[memoryview, int]:
        if self.failure is not None:
            raise self.failure
        position = bisect_right(self._starts, offset) - 1
        if position >= 0:
            place = offset - self._starts[position]
            if place < self._parts[position].nbytes:
                return self._parts[position], place
        raise StorageFailed(f"a range was not fetched, segment={self.name} offset={offset}")
