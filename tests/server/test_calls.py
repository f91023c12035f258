"""What a call leaves to others: its threads' end, its arena's memory, the event loop's time."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from trace_server import append
from trace_server.append import GROUPS_ON_LOOP_MAX, AppendStream
from trace_server.arena import Arenas
from trace_server.flow import ByteBudget
from trace_server.metrics import Metrics
from trace_server.read import fill_arena
from trace_server.service import TraceStoreService
from trace_store import Site, TokenSpan, wire
from trace_store.engine import Engine
from trace_store.testing.records import make_chunk
from trace_store.v1 import record_pb2
from trace_store.v1 import trace_store_service_pb2 as service_pb2

TABLE = (Site(0, "moe_in", 2048, form="full"),)
TOKENS = 200


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    made = Engine(tmp_path)
    made.register("r", TABLE)
    yield made
    made.close()


def test_a_cancelled_arena_read_ends_after_both_of_its_threads(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its files are closed under one of them, and the numbers of their descriptors given to others."""
    for start in (0, 100):
        engine.append("r", "p", make_chunk("r", "p", TABLE, "t", start, start + 100)).result(30)
    request = service_pb2.ReadRequest(run="r", partition="p", sites=[0])
    request.spans.append(record_pb2.TokenSpan(trajectory="t", start=0, stop=TOKENS))
    codes, scales = TABLE[0].code_bytes, TABLE[0].scale_bytes
    request.target.rows = TOKENS
    request.target.codes_offsets.append(0)
    request.target.scales_offsets.append(TOKENS * codes)
    request.target.tensor_scales_offsets.append(TOKENS * (codes + scales))
    memory = memoryview(bytearray(TOKENS * (codes + scales + 4)))
    gates = [threading.Event(), threading.Event()]
    inside: list[str] = []
    both = threading.Event()
    read = os.preadv

    def gated(*arguments: Any) -> int:
        name = threading.current_thread().name
        if name not in inside:
            inside.append(name)
            if len(inside) == 2:
                both.set()
        gates[inside.index(name)].wait(30)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", gated)
    opened = engine.read("r", "p", [TokenSpan("t", 0, TOKENS)], [0], include_open=True)

    async def run() -> None:
        call = asyncio.ensure_future(fill_arena(opened, request, TABLE, memory))
        await asyncio.to_thread(both.wait, 30)
        call.cancel()
        gates[0].set()
        await asyncio.wait([call], timeout=0.2)
        assert not call.done(), "the other thread still reads"
        gates[1].set()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(run())
    opened.close()


def test_an_arena_that_ends_stays_mapped_for_a_read_into_it(tmp_path: Path) -> None:
    arenas = Arenas(tmp_path, 1 << 20)
    arena = arenas.offer(4096)
    arenas.attach(arena, arena.secret)
    view = arenas.whole(arena.id)
    arenas.drop(arena)
    for thread in threading.enumerate():
        if thread.name == "trace-store-unmap":
            thread.join(30)
    view[100:103] = b"abc"
    assert bytes(view[100:103]) == b"abc"


def test_a_message_of_many_requests_leaves_the_loop_time_for_others(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,024 requests of 512 groups each would hold up a health check for nine seconds."""
    run_of_groups, longest = [0], [0]
    cut = wire.chunk_from_wire

    def counted(header: Any, *arguments: Any) -> Any:
        run_of_groups[0] += len(header.groups)
        longest[0] = max(longest[0], run_of_groups[0])
        return cut(header, *arguments)

    monkeypatch.setattr(append.wire, "chunk_from_wire", counted)
    requests = []
    for number in range(200):
        chunks = [make_chunk("r", "p", TABLE, "t", t, t + 1) for t in range(8 * number, 8 * number + 8)]
        groups = [chunk.groups[0] for chunk in chunks]
        columns = ([c.codes for c in chunks], [c.scales for c in chunks], [c.tensor_scales for c in chunks])
        requests.append(wire.append_frame(number + 1, groups, [part for column in columns for part in column]))

    async def messages() -> AsyncIterator[bytes]:
        yield wire.append_open_frame("r", "p", "written")
        yield b"".join(requests)

    async def run() -> int:
        stream = AppendStream(engine, ByteBudget(), Metrics(engine), Arenas(None))
        done = False

        async def others() -> None:
            while not done:
                run_of_groups[0] = 0
                await asyncio.sleep(0)

        waiting = asyncio.ensure_future(others())
        stored = 0
        async for encoded in stream.answers(messages()):
            answer = service_pb2.AppendResponse.FromString(encoded)
            stored += sum(item.stored for item in (answer, *answer.further))
        done = True
        await waiting
        return stored

    assert asyncio.run(run()) == 200 * 8
    assert longest[0] <= 2 * GROUPS_ON_LOOP_MAX


def test_an_arena_that_is_made_for_a_client_which_is_gone_is_dropped(engine: Engine, tmp_path: Path) -> None:
    """Its file, descriptor and share of the memory would be taken until the server ends."""
    directory = tmp_path / "shared"
    directory.mkdir()
    arenas = Arenas(directory, 1 << 20)
    asked, go, made = threading.Event(), threading.Event(), threading.Event()
    offer = arenas.offer

    def gated(size: int) -> Any:
        asked.set()
        go.wait(30)
        try:
            return offer(size)
        finally:
            made.set()

    arenas.offer = gated  # type: ignore[method-assign]

    async def requests() -> AsyncIterator[bytes]:
        yield service_pb2.AttachArenaRequest(size_bytes=4096).SerializeToString()

    async def run() -> None:
        service = TraceStoreService(engine, Metrics(engine), arenas)
        call = asyncio.ensure_future(service.attach_arena(requests(), None))
        await asyncio.to_thread(asked.wait, 30)
        call.cancel()
        await asyncio.wait([call])
        go.set()
        await asyncio.to_thread(made.wait, 30)
        limit = asyncio.get_running_loop().time() + 30
        while arenas.shared_bytes or any(directory.iterdir()):
            assert asyncio.get_running_loop().time() < limit
            await asyncio.sleep(0.01)

    asyncio.run(run())
