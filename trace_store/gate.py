"""The brake of the append path: asks the file system before each append, slows it under pressure, refuses at the end.

It never deletes anything; that is the keeper's work. So a full disk means typed refusals until something is released or
uploaded, and then appends go on by themselves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from trace_store.errors import StorageFull
from trace_store.retention import Limits, append_delay, pressure

DELAY_S_MAX = 0.5
"""Longest wait for one append: seals and releases wait behind it."""

STATES = ("ok", "slow", "full")


class DiskGate:
    """State of the disk as appends see it. ``admit`` runs on the writer's thread, ``observe`` on the keeper's."""

    def __init__(self, root: Path, limits: Limits, sleep: Callable[[float], None] = time.sleep) -> None:
        self._root, self._limits, self._sleep = root, limits, sleep
        self._used = self._since = 0
        self.on_pressure: Callable[[], None] = lambda: None
        """Called when an append is slowed or refused: whoever can make room should look."""
        self.slowed_s = 0.0
        self.refused = 0
        self.pressure = 0.0

    @property
    def state(self) -> str:
        """ok, slow or full."""
        return STATES[(self.pressure > 0) + (self.pressure >= 1)]

    def observe(self, used_bytes: int) -> None:
        """Bytes that the segments take on the disk now."""
        self._used, self._since = used_bytes, 0
        self.pressure = self._measure(0)

    def admit(self, payload_bytes: int) -> None:
        """Wait if the disk is nearly full.

        Raises:
            StorageFull: it is; nothing of the append may be written.
        """
        value = self.pressure = self._measure(payload_bytes)
        if value > 0:
            self.on_pressure()
        if value >= 1:
            self.refused += 1
            used = self._used + self._since
            raise StorageFull(
                "the disk is nearly full and writes are refused; release partitions or raise the limits,"
                f" used_bytes={used} disk_bytes_max={self._limits.disk_bytes_max} free_bytes={self._free()[0]}"
            )
        if value > 0:
            delay = min(append_delay(value, payload_bytes), DELAY_S_MAX)
            self.slowed_s += delay
            self._sleep(delay)
        self._since += payload_bytes

    def has_room(self, size: int) -> bool:
        """Whether the disk may take a cached file of this size: no more than eviction can make good."""
        cap = self._limits.disk_bytes_max
        return self._measure(size) <= 0 and (cap is None or size <= cap // 8)

    def _measure(self, payload_bytes: int) -> float:
        free, size = self._free()
        return pressure(self._limits, self._used + self._since + payload_bytes, free - payload_bytes, size)

    def _free(self) -> tuple[int, int]:
        try:
            found = os.statvfs(self._root)
        except OSError:
            return 1 << 62, 1 << 62  # a disk that cannot be asked says so at the write
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
