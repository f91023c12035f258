"""The byte budget bounds what is held, and a cancelled wait leaves the engine's future alone."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

from trace_server.flow import ByteBudget
from trace_server.futures import wait_for
from trace_store.errors import StorageFailed


def test_a_taker_waits_until_enough_is_given_back() -> None:
    async def scenario() -> list[str]:
        budget, order = ByteBudget(100), []
        await budget.take(80)

        async def second() -> None:
            await budget.take(50)
            order.append("taken")

        waiting = asyncio.create_task(second())
        await asyncio.sleep(0)
        budget.give_back(10)
        for _ in range(5):
            await asyncio.sleep(0)
        order.append("still waiting")
        await asyncio.to_thread(budget.give_back, 20)
        await asyncio.wait_for(waiting, 5)
        return order

    assert asyncio.run(scenario()) == ["still waiting", "taken"]


def test_a_message_larger_than_the_budget_waits_for_an_idle_queue() -> None:
    async def scenario() -> None:
        budget = ByteBudget(100)
        await budget.take(1)
        large = asyncio.create_task(budget.take(1000))
        await asyncio.sleep(0)
        assert not large.done()
        budget.give_back(1)
        await asyncio.wait_for(large, 5)
        budget.give_back(1000)
        await asyncio.wait_for(budget.take(100), 5)

    asyncio.run(scenario())


def test_a_cancelled_wait_does_not_cancel_the_engine() -> None:
    async def scenario() -> None:
        future: Future[int] = Future()

        async def call() -> int:
            return await wait_for(future)

        handler = asyncio.create_task(call())
        await asyncio.sleep(0)
        handler.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handler
        assert not future.cancelled(), "the thread that completes it would fail"
        future.set_result(1)

    asyncio.run(scenario())


def test_an_error_nobody_waits_for_is_no_log_line() -> None:
    seen: list[Any] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: seen.append(context))
        future: Future[int] = Future()
        dropped = wait_for(future)
        future.set_exception(StorageFailed("disk"))
        await asyncio.sleep(0)
        with pytest.raises(StorageFailed):
            await wait_for(future)
        del dropped

    asyncio.run(scenario())
    assert seen == []
