"""Tasks inside the server that are cancelled: the client gets a status at once, never silence."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trace_client
from trace_server.app import Listen, Server
from trace_store.engine import Engine


class InProcess:
    """A server on a thread of this process, so that a test can reach its event loop."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self.own: set[asyncio.Task[Any]] = set()

    async def _main(self) -> None:
        self.server = Server(Engine(self._directory), Listen("127.0.0.1:0"))
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await self.server.start()
        self.own = asyncio.all_tasks(self.loop)
        self._ready.set()
        await self._stop.wait()
        await self.server.stop()

    def __enter__(self) -> InProcess:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *exception: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()

    def cancel(self, which: str) -> int:
        """Cancel the tasks of calls in progress whose coroutine's name holds ``which``; how many."""

        async def run() -> int:
            tasks = [
                task
                for task in asyncio.all_tasks()
                if task not in self.own and which in getattr(task.get_coro(), "__qualname__", "")
            ]
            for task in tasks:
                task.cancel()
            return len(tasks)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[InProcess]:
    with InProcess(tmp_path) as running:
        yield running


@pytest.mark.parametrize("which", ["AppendStream._read", "_handle_exceptions"])
def test_a_cancelled_task_of_a_stream_is_a_status_at_once(
    inside: InProcess, sites: Any, records: Any, which: str
) -> None:
    with trace_client.connect(f"127.0.0.1:{inside.server.port}") as client:
        client.register("r", sites)
        writer = client.writer("r", "p")
        writer.append("t", 0, records(4))
        writer.flush()
        stream = writer._stream
        assert inside.cancel(which) >= 1
        started = time.monotonic()
        append_until_broken(writer, stream, records)
        assert time.monotonic() - started < 1.0
        assert stream.broken.retryable
        receipt = writer.seal("t", tokens=4_001, prompt_tokens=0, allow_holes=True)
        assert not [hole for hole in receipt.holes if hole[1] < 8], "the writer sent again what had no answer"


def append_until_broken(writer: Any, stream: Any, records: Any) -> None:
    for start in range(4, 4_000, 4):
        writer.append("t", start, records(4, seed=start))
        writer.flush()
        if stream.broken is not None:
            return
    pytest.fail("the stream goes on as if nothing had happened")
