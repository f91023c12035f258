"""Send messages of a call by hand, and know why one could not be sent: the client is gone, or takes nothing.

gRPC's flow control holds a message back while the client does not read. A generator handler would wait in gRPC for as
long as the client likes, with its files and buffers, so handlers that stream write through here.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from trace_store.errors import DeadlineExceeded

STALLED_READER_S = 60.0
"""A reader whose next message waits this long for room in gRPC's window, a few MiB, is cut off. A trainer that is alive
takes them in less than a second; one that hangs must not keep segments on the disk that were released."""


class ReaderStalled(DeadlineExceeded):
    """The client took nothing for STALLED_READER_S. Clients see DeadlineExceeded."""


async def send(context: Any, message: bytes) -> None:
    """Write a message.

    Raises:
        asyncio.CancelledError: the client is gone. gRPC reports that as a failed batch when the write fails before it
            hears of the cancelled call, and logs a traceback for what is no error of the server.
    """
    try:
        await context.write(message)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


async def begin(context: Any) -> None:
    """Send the initial metadata, once, before a bounded write: one that is given up leaves open whether it took them
    along, and a status could then not be sent. Raises CancelledError as ``send``."""
    try:
        await context.send_initial_metadata(())
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


class BoundedSender:
    """Sends messages of a call, and gives up on a client that reads nothing. Use ``async with``, in the call's task.

    One timer watches all messages: ``wait_for`` made a task and a timer for each, 50 us a message.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._waits_since: float | None = None
        self._stalled = False

    async def __aenter__(self) -> BoundedSender:
        await begin(self._context)
        self._task: Any = asyncio.current_task()
        self._timer = self._loop.call_later(STALLED_READER_S, self._look)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._timer.cancel()

    async def send(self, message: bytes) -> None:
        """Write a message.

        Raises:
            ReaderStalled: says what to do.
            asyncio.CancelledError: as the function ``send``.
        """
        self._waits_since = self._loop.time()
        try:
            await send(self._context, message)
        except asyncio.CancelledError:
            if not self._stalled:
                raise
            if hasattr(self._task, "uncancel"):  # Python 3.11 counts cancellations
                self._task.uncancel()
            raise ReaderStalled(
                f"the reader took nothing for {STALLED_READER_S:g} s and was cut off;"
                " repeat the read, with fewer spans if it cannot take them as fast as they come"
            ) from None
        finally:
            self._waits_since = None

    def _look(self) -> None:
        left = STALLED_READER_S
        if self._waits_since is not None:
            left += self._waits_since - self._loop.time()
        if left <= 0:
            self._stalled = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(left, self._look)
