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
    """The context of a call whose client reads nothing."""

    async def write(self, message: bytes) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    "call",
    [
        lambda context: sending.begin(context),
        lambda context: sending.send(context, b"x"),
        lambda context: sending.send_bounded(context, b"x"),
        lambda context: status.abort(context, NotFound("no such run")),
    ],
    ids=["begin", "send", "send_bounded", "abort"],
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
            await sending.send_bounded(Stuck(), b"x")
        assert isinstance(caught.value, ReaderStalled)

    asyncio.run(run())
