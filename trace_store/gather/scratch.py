"""Memory of one step of a gather, cut from a buffer that its thread keeps: fresh pages cost more than the read."""

from __future__ import annotations

import threading

KEPT_BYTES = 4 << 20
"""Least size of the buffer: two steps of a gather."""


class Scratch:
    """``size`` bytes to cut parts from, until the thread makes the next one."""

    _kept = threading.local()

    def __init__(self, size: int) -> None:
        buffer: memoryview = getattr(self._kept, "buffer", memoryview(b""))
        if len(buffer) < size:
            buffer = self._kept.buffer = memoryview(bytearray(max(KEPT_BYTES, size)))
        self._buffer, self._used = buffer, 0

    def take(self, size: int) -> memoryview:
        """The next ``size`` bytes."""
        part = self._buffer[self._used : self._used + size]
        self._used += size
        return part
