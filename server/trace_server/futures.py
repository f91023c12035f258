"""Wait in the event loop for what a thread of the engine completes."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def wait_for(future: Future[T]) -> asyncio.Future[T]:
    """An awaitable over an engine's future that outlives its waiter.

    A call that its client cancelled must not cancel the engine's future: the write goes on, and the thread that
    completes it would meet a cancelled future. Nor is an error that nobody waits for any more worth a log line.
    """
    outer = asyncio.shield(asyncio.wrap_future(future))
    outer.add_done_callback(_mark_seen)
    return outer


def _mark_seen(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
