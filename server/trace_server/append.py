"""The Append stream: frames in, answers out, in order, with the credit announced at open.

One task reads messages and hands their chunks to the engine; the call's own task answers them in order as the engine
completes them. All that is due is answered in one message, and threads of the engine wake the event loop once for what
they completed meanwhile: waking it for each request cost more than the request. At most MESSAGES_UNANSWERED_MAX of them
wait for their answer, and their bytes come out of the server's budget.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from trace_server.arena import Arenas
from trace_server.flow import CREDIT_BYTES, ByteBudget
from trace_server.metrics import Metrics
from trace_store import wire
from trace_store.commands import AppendResult
from trace_store.engine import Engine
from trace_store.errors import InvalidRequest, StorageFailed, TraceStoreError, Unavailable, public_class
from trace_store.record import Site, check_name
from trace_store.v1 import trace_store_service_pb2 as service_pb2

log = logging.getLogger("trace_server.append")

REQUEST_BYTES = 4 << 10
"""What a request costs in the queue beside its payload, 3.3 KB measured: with ``memory`` they are answered as they
enter it, and small ones behind a stalled disk would fill the server's memory long before their payload does."""

MESSAGES_UNANSWERED_MAX = 256

PACE_S = 0.004
"""Least time between two answers to a client that takes several at once, while more of its requests are in work. One
costs both ends 200 us; credit and arena bridge four times as long at 2 GB/s."""

RELEASE_BYTES = 4 << 20
"""Of an arena, told to its client at once: a slab of it. What is left is told when nothing else is in work."""

GROUPS_ON_LOOP_MAX = 64
"""Record groups that the event loop takes apart before it does something else, 17 us each. A thread does it for longer
requests: 10,000 groups of one token and 16 elements, a third of a MiB, would hold up health checks for 0.18 s."""

PREPARE_S = 2.0
"""Longest wait of a new stream for what other servers have uploaded of its partition."""


class _Pending(NamedTuple):
    """A request without an answer."""

    sequence: int
    arrived: float
    outcome: Future[AppendResult] | TraceStoreError

    @property
    def done(self) -> bool:
        return isinstance(self.outcome, TraceStoreError) or self.outcome.done()


class AppendStream:
    """One open stream. ``answers`` yields the encoded answers."""

    def __init__(self, engine: Engine, budget: ByteBudget, metrics: Metrics, arenas: Arenas) -> None:
        self._engine, self._budget, self._metrics, self._arenas = engine, budget, metrics, arenas
        self._loop = asyncio.get_running_loop()
        self._pending: deque[_Pending] = deque()
        self._progress, self._room = asyncio.Event(), asyncio.Event()
        self._waking = False
        self._end: TraceStoreError | None = None
        self._ended = self._stopped = False
        self._reader: asyncio.Task[None] | None = None
        self._answered_at = 0.0
        self._taken = self._released_through = self._released_told = self._released_bytes = 0
        self._run = self._partition = self._durability = ""
        self._batched = False
        self._table: tuple[Site, ...] = ()

    async def answers(self, requests: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Answers in the order of the requests; raises TraceStoreError when the stream cannot go on."""
        first = await anext(aiter(requests), None)
        if first is None:
            return
        self._open(first)
        await self._prepare()
        yield service_pb2.AppendResponse(credit_bytes=CREDIT_BYTES, batched=True).SerializeToString()
        self._metrics.streams.inc()
        self._reader = reader = asyncio.create_task(self._read(requests))
        reader.add_done_callback(self._end_unstarted)
        if self._stopped:
            reader.cancel()
        try:
            while True:
                await self._progress.wait()
                await self._pace()
                self._progress.clear()
                for answer in self._due():
                    yield answer.SerializeToString()
                if self._ended and not self._pending:
                    if self._end is not None:
                        raise self._end
                    return
        finally:
            self._metrics.streams.dec()
            if not reader.done():
                reader.cancel()

    def _open(self, message: bytes) -> None:
        (header, payload), *others = wire.parse_append(message)
        if not header.HasField("open") or header.groups or payload.nbytes or others:
            raise InvalidRequest("the first message of an append stream opens it and holds no records", argument="open")
        self._run = check_name(header.open.run, "run")
        self._partition = check_name(header.open.partition, "partition")
        self._durability = wire.durability_from_wire(header.open.durability)
        self._batched = header.open.batched

    async def _prepare(self) -> None:
        look = asyncio.to_thread(self._engine.prepare, self._run, self._partition)
        with suppress(asyncio.TimeoutError, StorageFailed):  # a rollout does not wait for an object store that hangs
            await asyncio.wait_for(look, PREPARE_S)
        self._table = self._engine.sites(self._run)

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        end: TraceStoreError | None = None
        try:
            expected = groups = 0
            async for message in requests:
                for request in self._requests(message):
                    groups += 0 if isinstance(request, TraceStoreError) else len(request[0].groups)
                    if groups > GROUPS_ON_LOOP_MAX:
                        groups = 0
                        await asyncio.sleep(0)
                    while len(self._pending) >= MESSAGES_UNANSWERED_MAX:
                        self._room.clear()
                        await self._room.wait()
                    expected += 1
                    await self._accept(request, expected)
        except TraceStoreError as error:
            end = error
        except asyncio.CancelledError:
            end = _stopping()
        except Exception as error:  # without an end the client would wait for ever
            log.exception("append stream failed")
            end = TraceStoreError(f"the append stream failed, cause={error!r}")
        self._finish(end)

    def _finish(self, end: TraceStoreError | None) -> None:
        """No request comes any more; ``end`` is said once all are answered."""
        self._ended, self._end = True, end
        self._progress.set()

    def _end_unstarted(self, reader: asyncio.Task[None]) -> None:
        """A task that is cancelled before its first step runs none of its code, and says no end."""
        if reader.cancelled():
            self._finish(_stopping())

    def stop(self) -> None:
        """Take no more messages; what was taken is still answered, then the stream ends with Unavailable."""
        self._stopped = True
        if self._reader is not None:
            self._reader.cancel()

    def _requests(self, message: bytes) -> Iterator[tuple[Any, memoryview] | TraceStoreError]:
        """Requests of a message, parsed one by one; one that is malformed counts as one, and so does a message."""
        try:
            frames = wire.cut_append(message)
        except TraceStoreError as error:
            yield error
            return
        for encoded, payload in frames:
            try:
                yield wire.append_header(encoded), payload
            except TraceStoreError as error:
                yield error

    async def _accept(self, request: tuple[Any, memoryview] | TraceStoreError, expected: int) -> None:
        arrived = time.perf_counter()
        try:
            if isinstance(request, TraceStoreError):
                raise request
            header, payload = request
            _check_sequence(header, expected)
            in_arena = header.HasField("arena")
            if in_arena:
                payload = self._arena_payload(header.arena, payload)
            if len(header.groups) <= GROUPS_ON_LOOP_MAX:
                chunk = wire.chunk_from_wire(header, payload, self._table)
            else:
                chunk = await asyncio.to_thread(wire.chunk_from_wire, header, payload, self._table)
            size = payload.nbytes
            cost = REQUEST_BYTES + (0 if in_arena else size)
            await self._budget.take(cost)
            left_queue = partial(self._left_queue, expected, size if in_arena else 0, cost)
            self._taken = expected
            try:
                outcome = self._engine.append(self._run, self._partition, chunk, self._durability, left_queue, in_arena)
            except TraceStoreError:
                self._budget.give_back(cost)  # an error answers for its own arena range alone
                raise
        except _OutOfOrder:
            raise
        except TraceStoreError as error:
            self._pending.append(_Pending(expected, arrived, error))
            self._progress.set()
            return
        self._metrics.append_bytes.inc(size)
        self._pending.append(_Pending(expected, arrived, outcome))
        if outcome.done():
            self._progress.set()
        else:
            outcome.add_done_callback(self._wake)

    def _arena_payload(self, named: Any, payload: memoryview) -> memoryview:
        if payload.nbytes:
            raise InvalidRequest("a message has its payload in the arena or in itself, not both", argument="arena")
        return self._arenas.range(named)

    def _left_queue(self, sequence: int, arena_bytes: int, cost: int) -> None:
        """The shard's thread: the bytes of request ``sequence``, and of all before it, are read for the last time."""
        self._budget.give_back(cost)
        if arena_bytes:
            self._left_arena(sequence, arena_bytes)

    def _left_arena(self, sequence: int, size: int) -> None:
        self._released_through = max(self._released_through, sequence)
        self._released_bytes += size
        # At durability written and synced the answer itself is enough.
        if self._durability == "memory" and (self._released_bytes >= RELEASE_BYTES or sequence >= self._taken):
            self._released_bytes = 0
            self._wake()

    def _wake(self, future: Future[AppendResult] | None = None) -> None:
        """Any thread: look for answers that are due. What is done before the flag is looked at is seen by the look that
        it stands for, so one call into the loop serves all that comes before it runs."""
        del future
        if not self._waking:
            self._waking = True
            with suppress(RuntimeError):  # the loop is closed: nobody waits for an answer
                self._loop.call_soon_threadsafe(self._woken)

    def _woken(self) -> None:
        self._waking = False
        self._progress.set()

    async def _pace(self) -> None:
        """Answer a stream once in PACE_S, unless this is the last answer that is due for now."""
        left = self._answered_at + PACE_S - self._loop.time()
        if self._batched and left > 0 and self._pending and not self._pending[-1].done:
            self._waking = True  # no thread need wake the loop meanwhile
            await asyncio.sleep(left)
            self._waking = False
        self._answered_at = self._loop.time()

    def _due(self) -> list[Any]:
        """Answers of all requests at the front that are done, in one message where the client takes that."""
        answers: list[Any] = []
        pending, counts = self._pending, [0, 0]
        while pending and pending[0].done:
            answers.append(self._answer(pending.popleft(), counts))
        released = self._released_through
        if answers:
            self._metrics.append_records.labels("stored").inc(counts[0])
            self._metrics.append_records.labels("duplicate").inc(counts[1])
            self._room.set()
        elif self._durability == "memory" and released > self._released_told:
            answers.append(service_pb2.AppendResponse())
        if not answers:
            return answers
        answers[-1].released_through = self._released_told = released
        if self._batched and len(answers) > 1:
            answers[0].further.extend(answers[1:])
            return answers[:1]
        return answers

    def _answer(self, pending: _Pending, counts: list[int]) -> Any:
        outcome = pending.outcome
        try:
            if isinstance(outcome, TraceStoreError):
                raise outcome
            result = outcome.result()
        except TraceStoreError as error:
            self._metrics.errors.labels(public_class(error).__name__).inc()
            return service_pb2.AppendResponse(sequence=pending.sequence, error=wire.error_to_wire(error, self._table))
        self._metrics.append_seconds.labels(self._durability).observe(time.perf_counter() - pending.arrived)
        counts[0] += result.stored
        counts[1] += result.duplicates
        return service_pb2.AppendResponse(sequence=pending.sequence, stored=result.stored, duplicates=result.duplicates)


class _OutOfOrder(InvalidRequest):
    """The stream cannot go on: which request is which is lost."""


def _check_sequence(header: Any, expected: int) -> None:
    if header.sequence != expected or header.HasField("open"):
        raise _OutOfOrder(
            f"append messages are numbered from 1 on, sequence={header.sequence} expected={expected}",
            argument="sequence",
        )


def _stopping() -> Unavailable:
    return Unavailable("the server is stopping; repeat what was not answered")
