"""Tasks inside the server that are cancelled: the client gets a status at once, never silence."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import trace_client
from trace_server.app import Listen, Server
from trace_store import wire
from trace_store.engine import Engine
from trace_store.v1 import record_pb2
from trace_store.v1 import trace_store_service_pb2 as service_pb2

DEADLINE_S = 30.0


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

    def settled(self) -> bool:
        """Whether a stream's handler waits for something to answer, its opening sent."""

        async def run() -> bool:
            await asyncio.sleep(0.02)
            return any("AppendStream._read" in name(task) for task in asyncio.all_tasks())

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(30)

    def cancel(self, which: str) -> int:
        """Cancel the tasks of calls in progress whose coroutine's name holds ``which``; how many."""

        async def run() -> int:
            tasks = [task for task in asyncio.all_tasks() if task not in self.own and which in name(task)]
            for task in tasks:
                task.cancel()
            return len(tasks)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(30)


def name(task: asyncio.Task[Any]) -> str:
    return getattr(task.get_coro(), "__qualname__", "")


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[InProcess]:
    with InProcess(tmp_path) as running:
        yield running


@pytest.mark.parametrize("which", ["AppendStream._read", "_handle_exceptions"])
def test_a_cancelled_task_of_a_stream_is_a_status_at_once(inside: InProcess, sites: Any, which: str) -> None:
    address = f"127.0.0.1:{inside.server.port}"
    with trace_client.connect(address) as client:
        client.register("r", sites)
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    requests.put(wire.append_open_frame("r", "p", "synced"))
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(f"/{wire.SERVICE}/Append")(iter(requests.get, None), timeout=DEADLINE_S)
        assert service_pb2.AppendResponse.FromString(next(call)).credit_bytes > 0
        wait_until(lambda: inside.settled())
        assert inside.cancel(which) == 1
        started = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        requests.put(None)
    assert time.monotonic() - started < DEADLINE_S / 2, "at once: not when the client has lost its patience"
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    detail = dict(caught.value.trailing_metadata())[wire.ERROR_METADATA_KEY]
    assert record_pb2.ErrorDetail.FromString(detail).type == "Unavailable"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
