"""The Append stream: frames in, answers out, in order, with the credit announced at open.

One task reads frames and hands chunks to the engine; a second one answers them in order as their futures complete.
At most MESSAGES_UNANSWERED_MAX frames wait for their answer, and their bytes come out of the server's budget.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Any

from trace_server.arena import Arenas
from trace_server.flow import CREDIT_BYTES, ByteBudget
from trace_server.futures import wait_for
from trace_server.metrics import Metrics
from trace_store import wire
from trace_store.commands import AppendResult
from trace_store.engine import Engine
from trace_store.errors import InvalidRequest, StorageFailed, TraceStoreError, Unavailable, public_class
from trace_store.record import Site, check_name
from trace_store.v1 import trace_store_service_pb2 as service_pb2

log = logging.getLogger("trace_server.append")

MESSAGES_UNANSWERED_MAX = 256

PREPARE_S = 2.0
"""Longest wait of a new stream for what other servers have uploaded of its partition."""

_Pending = tuple[int, float, "asyncio.Future[AppendResult] | TraceStoreError"]

_RELEASED: tuple[()] = ()
"""In place of a pending answer: tell the client which ranges of its arena are free."""


class AppendStream:
    """One open stream. ``answers`` yields the encoded answers."""

    def __init__(self, engine: Engine, budget: ByteBudget, metrics: Metrics, arenas: Arenas) -> None:
        self._engine, self._budget, self._metrics, self._arenas = engine, budget, metrics, arenas
        self._released_through = 0
        self._loop = asyncio.get_running_loop()
        self._pending: asyncio.Queue[_Pending | tuple[()] | TraceStoreError | None] = asyncio.Queue(
            MESSAGES_UNANSWERED_MAX
        )
        self._reader: asyncio.Task[None] | None = None
        self._stopped = False
        self._run = self._partition = self._durability = ""
        self._table: tuple[Site, ...] = ()

    async def answers(self, requests: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Answers in the order of the requests; raises TraceStoreError when the stream cannot go on."""
        first = await anext(aiter(requests), None)
        if first is None:
            return
        self._open(first)
        await self._prepare()
        yield service_pb2.AppendResponse(credit_bytes=CREDIT_BYTES).SerializeToString()
        self._metrics.streams.inc()
        self._reader = reader = asyncio.create_task(self._read(requests))
        reader.add_done_callback(self._end_unstarted)
        if self._stopped:
            reader.cancel()
        try:
            while (pending := await self._pending.get()) is not None:
                if isinstance(pending, TraceStoreError):
                    raise pending
                answer = await self._answer(*pending) if pending else service_pb2.AppendResponse()
                answer.released_through = self._released_through
                yield answer.SerializeToString()
        finally:
            self._metrics.streams.dec()
            if not reader.done():
                self._pending = asyncio.Queue()  # nobody reads it any more; the reader must not wait for room
                reader.cancel()

    def _open(self, message: bytes) -> None:
        header, payload = wire.parse_append(message)
        if not header.HasField("open") or header.groups or payload.nbytes:
            raise InvalidRequest("the first message of an append stream opens it and holds no records", argument="open")
        self._run = check_name(header.open.run, "run")
        self._partition = check_name(header.open.partition, "partition")
        self._durability = wire.durability_from_wire(header.open.durability)

    async def _prepare(self) -> None:
        look = asyncio.to_thread(self._engine.prepare, self._run, self._partition)
        with suppress(asyncio.TimeoutError, StorageFailed):  # a rollout does not wait for an object store that hangs
            await asyncio.wait_for(look, PREPARE_S)
        self._table = self._engine.sites(self._run)

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        expected = 0
        try:
            async for message in requests:
                expected += 1
                await self._pending.put(await self._accept(message, expected))
            await self._pending.put(None)
        except TraceStoreError as error:
            await self._pending.put(error)
        except asyncio.CancelledError:
            await self._pending.put(_stopping())
        except Exception as error:  # without an end the client would wait for ever
            log.exception("append stream failed")
            await self._pending.put(TraceStoreError(f"the append stream failed, cause={error!r}"))

    def _end_unstarted(self, reader: asyncio.Task[None]) -> None:
        """A task that is cancelled before its first step runs none of its code, and puts no end."""
        if reader.cancelled():
            with suppress(asyncio.QueueFull):
                self._pending.put_nowait(_stopping())

    def stop(self) -> None:
        """Take no more messages; what was taken is still answered, then the stream ends with Unavailable."""
        self._stopped = True
        if self._reader is not None:
            self._reader.cancel()

    async def _accept(self, message: bytes, expected: int) -> _Pending:
        arrived = time.perf_counter()
        try:
            header, payload = wire.parse_append(message)
        except TraceStoreError as error:
            return expected, arrived, error
        if header.sequence != expected or header.HasField("open"):
            raise InvalidRequest(
                f"append messages are numbered from 1 on, sequence={header.sequence} expected={expected}",
                argument="sequence",
            )
        in_arena = header.HasField("arena")
        try:
            if in_arena:
                payload = self._arena_payload(header.arena, payload)
            chunk = wire.chunk_from_wire(header, payload, self._table)
        except TraceStoreError as error:
            return expected, arrived, error
        size = payload.nbytes
        if not in_arena:
            await self._budget.take(size)
        left_queue = partial(self._left_arena, expected) if in_arena else partial(self._budget.give_back, size)
        try:
            future = self._engine.append(self._run, self._partition, chunk, self._durability, left_queue, in_arena)
        except TraceStoreError as error:
            if not in_arena:  # an error answers for its own range alone
                left_queue()
            return expected, arrived, error
        self._metrics.append_bytes.inc(size)
        return expected, arrived, wait_for(future)

    def _arena_payload(self, named: Any, payload: memoryview) -> memoryview:
        if payload.nbytes:
            raise InvalidRequest("a message has its payload in the arena or in itself, not both", argument="arena")
        return self._arenas.range(named)

    def _left_arena(self, sequence: int) -> None:
        """The shard's thread: the bytes of request ``sequence``, and of all before it, are read for the last time."""
        self._loop.call_soon_threadsafe(self._release, sequence)

    def _release(self, sequence: int) -> None:
        self._released_through = max(self._released_through, sequence)
        # An answer that waits its turn says it too; at durability written and synced the answer itself is enough.
        if self._durability == "memory" and self._pending.empty():
            self._pending.put_nowait(_RELEASED)

    async def _answer(
        self, sequence: int, arrived: float, outcome: asyncio.Future[AppendResult] | TraceStoreError
    ) -> Any:
        try:
            if isinstance(outcome, TraceStoreError):
                raise outcome
            result = await outcome
        except TraceStoreError as error:
            self._metrics.errors.labels(public_class(error).__name__).inc()
            return service_pb2.AppendResponse(sequence=sequence, error=wire.error_to_wire(error, self._table))
        self._metrics.append_seconds.labels(self._durability).observe(time.perf_counter() - arrived)
        self._metrics.append_records.labels("stored").inc(result.stored)
        self._metrics.append_records.labels("duplicate").inc(result.duplicates)
        return service_pb2.AppendResponse(sequence=sequence, stored=result.stored, duplicates=result.duplicates)


def _stopping() -> Unavailable:
    return Unavailable("the server is stopping; repeat what was not answered")
