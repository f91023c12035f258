"""What a handler hears when a message cannot be sent."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from trace_server import sending, status
from trace_server.sending import ReaderStalled
from trace_store.errors import DeadlineExceeded, NotFound


class Gone:
    """The context of a call whose client is gone, before gRPC has heard of it: every batch fails."""

    async def fail(self, *arguments: Any) -> None:
        raise grpc.aio.InternalError("Failed execute_batch")

    write = abort = send_initial_metadata = fail


class Stuck:
    """The context of a call whose client reads nothing after the metadata."""

    async def send_initial_metadata(self, metadata: Any) -> None:
        pass

    async def write(self, message: bytes) -> None:
        await asyncio.Event().wait()


async def send_bounded(context: Any) -> None:
    async with sending.BoundedSender(context) as sender:
        await sender.send(b"x")


@pytest.mark.parametrize(
    "call",
    [
        lambda context: sending.begin(context),
        lambda context: sending.send(context, b"x"),
        lambda context: send_bounded(context),
        lambda context: status.abort(context, NotFound("no such run")),
    ],
    ids=["begin", "send", "bounded send", "abort"],
)
def test_a_client_that_is_gone_cancels_the_handler(call: Any) -> None:
    """gRPC takes a cancelled handler quietly and logs a traceback for any other exception."""

    async def run() -> None:
        with pytest.raises(asyncio.CancelledError):
            await call(Gone())

    asyncio.run(run())


def test_a_client_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "STALLED_READER_S", 0.01)

    async def run() -> None:
        with pytest.raises(DeadlineExceeded, match="repeat the read") as caught:
            await send_bounded(Stuck())
        assert isinstance(caught.value, ReaderStalled)
        await asyncio.sleep(0)  # the handler goes on, to send the status: it is not cancelled any more

    asyncio.run(run())


def test_a_reader_that_takes_each_message_late_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is on one message, not on the read."""
    monkeypatch.setattr(sending, "STALLED_READER_S", 0.2)
    sent: list[bytes] = []

    class Slow(Stuck):
        async def write(self, message: bytes) -> None:
            await asyncio.sleep(0.05)
            sent.append(message)

    async def run() -> None:
        async with sending.BoundedSender(Slow()) as sender:
            for _ in range(8):
                await sender.send(b"x")

    asyncio.run(run())
    assert len(sent) == 8


def test_a_pause_between_messages_is_not_the_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes its time for the next message must not cut off a client that took the last one at once."""
    monkeypatch.setattr(sending, "STALLED_READER_S", 0.05)
    sent: list[bytes] = []

    class Prompt(Stuck):
        async def write(self, message: bytes) -> None:
            sent.append(message)

    async def run() -> None:
        async with sending.BoundedSender(Prompt()) as sender:
            for _ in range(2):
                await sender.send(b"x")
                await asyncio.sleep(0.2)

    asyncio.run(run())
    assert len(sent) == 2
