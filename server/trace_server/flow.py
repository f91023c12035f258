"""Byte budget of the append path: what all streams together may hold in memory before the disk has it.

A stream's own bound is its credit, which the client keeps. The budget is the server's: a handler waits here before it
takes the next message, so that gRPC's flow control stops the sender.
"""

from __future__ import annotations

import asyncio

from trace_store.shard import QUEUE_BYTES_MAX

CREDIT_BYTES = 32 << 20
"""Payload that one stream may have unanswered: 80 ms of disk at 0.4 GB/s, enough to keep group commit busy."""


class ByteBudget:
    """Counting budget for one event loop. ``give_back`` may be called from any thread."""

    def __init__(self, bytes_max: int = QUEUE_BYTES_MAX) -> None:
        self._free = self._bytes_max = bytes_max
        self._changed = asyncio.Condition()
        self._loop = asyncio.get_running_loop()

    async def take(self, count: int) -> None:
        """Wait until ``count`` bytes are free; a single message larger than all of it waits for an idle queue."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._free >= min(count, self._bytes_max))
            self._free -= count

    def give_back(self, count: int) -> None:
        self._loop.call_soon_threadsafe(self._return, count)

    def _return(self, count: int) -> None:
        self._free += count
        self._loop.create_task(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
