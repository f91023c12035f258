"""A call that is cancelled, once or twice, waits for the thread that works for it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from trace_server.read import ended, on_thread


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_cancelled_call_ends_after_its_thread(times: int) -> None:
    """Else the call's files were closed, and its arena given back, under a thread that reads and writes there."""
    started, released = threading.Event(), threading.Event()
    order: list[str] = []

    def work() -> None:
        started.set()
        released.wait(30)
        order.append("thread")

    async def call() -> None:
        try:
            await on_thread(work)
        finally:
            order.append("call")

    async def run() -> None:
        task = asyncio.ensure_future(call())
        await asyncio.to_thread(started.wait, 30)
        for _ in range(times):
            task.cancel()
            for _ in range(5):  # rounds of the loop, in which a call that does not wait ends
                await asyncio.sleep(0)
        assert not task.done()
        released.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert order == ["thread", "call"]


def test_an_error_that_nobody_waits_for_any_more_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        await ended(asyncio.ensure_future(on_thread(int, "no number")))

    asyncio.run(run())
    assert not caplog.records
