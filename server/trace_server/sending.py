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
    """Send the initial metadata, once, before ``send_bounded``: a write that is given up leaves open whether it took
    them along, and a status could then not be sent. Raises CancelledError as ``send``."""
    try:
        await context.send_initial_metadata(())
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


async def send_bounded(context: Any, message: bytes) -> None:
    """``send`` that gives up on a client that reads nothing.

    Raises:
        ReaderStalled: says what to do.
        asyncio.CancelledError: as ``send``.
    """
    try:
        await asyncio.wait_for(send(context, message), STALLED_READER_S)
    except asyncio.TimeoutError:
        raise ReaderStalled(
            f"the reader took nothing for {STALLED_READER_S:g} s and was cut off;"
            " repeat the read, with fewer spans if it cannot take them as fast as they come"
        ) from None
