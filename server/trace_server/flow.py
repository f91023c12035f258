"""Byte budget of the append path: what all streams together may hold in memory before the disk has it.

A stream's own bound is its credit, which the client keeps. The budget is the server's: a handler waits here before it
takes the next message, so that gRPC's flow control stops the sender.
"""

from __future__ import annotations

import asyncio
from collections import deque

from trace_store.shard import QUEUE_BYTES_MAX

CREDIT_BYTES = 32 << 20
"""Payload that one stream may have unanswered: 80 ms of disk at 0.4 GB/s, enough to keep group commit busy."""


class ByteBudget:
    """Counting budget for one event loop. ``give_back`` may be called from any thread."""

    def __init__(self, bytes_max: int = QUEUE_BYTES_MAX) -> None:
        self._free = self._bytes_max = bytes_max
        self._room = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._returned: deque[int] = deque()
        self._waking = False

    async def take(self, count: int) -> None:
        """Wait until ``count`` bytes are free; a single message larger than all of it waits for an idle queue."""
        while self._free < min(count, self._bytes_max):
            self._room.clear()
            await self._room.wait()
        self._free -= count

    def give_back(self, count: int) -> None:
        self._returned.append(count)
        # What is there before the flag is looked at is taken by the call that it stands for.
        if not self._waking:
            self._waking = True
            self._loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        self._waking = False
        while self._returned:
            self._free += self._returned.popleft()
        self._room.set()
