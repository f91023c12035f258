"""TraceStoreService: decode, call the engine, encode. Bulk methods carry raw frames (``trace_store.frame``)."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from trace_server import frames, listing, read
from trace_server.append import AppendStream
from trace_server.arena import ATTACH_TIMEOUT_S, Arena, Arenas
from trace_server.flow import ByteBudget
from trace_server.futures import wait_for
from trace_server.metrics import Metrics
from trace_server.sending import BoundedSender, ReaderStalled, send
from trace_server.status import abort
from trace_store import wire
from trace_store.engine import Engine
from trace_store.errors import (
    DeadlineExceeded,
    InvalidRequest,
    StorageFailed,
    TraceStoreError,
    Unavailable,
    public_class,
)
from trace_store.read import Read
from trace_store.record import check_name
from trace_store.storage.local import directory_identity
from trace_store.v1 import trace_store_service_pb2 as service_pb2
from trace_store.version import VERSION


class TraceStoreService:
    """Handlers of one server; ``generic_handler`` registers them."""

    def __init__(self, engine: Engine, metrics: Metrics, arenas: Arenas) -> None:
        self._engine, self._metrics, self._arenas = engine, metrics, arenas
        self._budget = ByteBudget()
        self._streams: set[AppendStream] = set()
        self._stopping = asyncio.Event()

    def generic_handler(self) -> grpc.GenericRpcHandler:
        """All methods. Append and Read get no (de)serializer for their bulk direction."""
        unary: dict[str, tuple[Callable[[Any], Awaitable[Any]], Any]] = {
            "Register": (self.register, service_pb2.RegisterRequest),
            "DescribeRun": (self.describe_run, service_pb2.DescribeRunRequest),
            "Seal": (self.seal, service_pb2.SealRequest),
            "Release": (self.release, service_pb2.ReleaseRequest),
            "List": (self.list, service_pb2.ListRequest),
            "Status": (self.status, service_pb2.StatusRequest),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._typed(method, request), None, lambda response: response.SerializeToString()
            )
            for name, (method, request) in unary.items()
        }
        handlers["Append"] = grpc.stream_stream_rpc_method_handler(self.append)
        handlers["AttachArena"] = grpc.stream_stream_rpc_method_handler(self.attach_arena)
        handlers["Read"] = grpc.unary_stream_rpc_method_handler(self.read)
        return grpc.method_handlers_generic_handler(wire.SERVICE, handlers)

    def _typed(self, method: Callable[[Any], Awaitable[Any]], kind: Any) -> Callable[[bytes, Any], Awaitable[Any]]:
        async def call(message: bytes, context: Any) -> Any:
            run = ""
            try:
                request = _parse(kind, message)
                run = getattr(request, "run", "")
                return await method(request)
            except TraceStoreError as error:
                await self._refuse(context, error, run)
            except asyncio.CancelledError:
                await self._interrupt(context)

        return call

    async def _interrupt(self, context: Any) -> None:
        """A task of the handler was cancelled. gRPC sends no status then, unless it was the client that cancelled (in
        which case this raises CancelledError again), and the client would wait for ever."""
        error = Unavailable("the call was interrupted inside the server; repeat it")
        try:
            await abort(context, error)
        except grpc.aio.AbortError:
            # Only a status that was sent counts: an alert must not fire for a client that went away.
            self._metrics.errors.labels(type(error).__name__).inc()
            raise

    async def _refuse(self, context: Any, error: TraceStoreError, run: str = "") -> None:
        self._metrics.errors.labels(public_class(error).__name__).inc()
        try:
            table = self._engine.sites(run)
        except TraceStoreError:
            table = ()
        await abort(context, error, table)

    async def register(self, request: Any) -> Any:
        sites = [wire.site_from_wire(site) for site in request.sites]
        created = await asyncio.to_thread(self._engine.register, request.run, sites)
        return service_pb2.RegisterResponse(created=created)

    async def describe_run(self, request: Any) -> Any:
        sites = await asyncio.to_thread(self._engine.find, check_name(request.run, "run"))
        return service_pb2.DescribeRunResponse(sites=[wire.site_to_wire(site) for site in sites])

    async def append(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """No generator: gRPC would write outside of it, where an interruption could not be turned into a status."""
        stream = AppendStream(self._engine, self._budget, self._metrics, self._arenas)
        self._streams.add(stream)
        try:
            async with aclosing(stream.answers(requests)) as answers:
                async for answer in answers:
                    await send(context, answer)
        except TraceStoreError as error:
            await self._refuse(context, error)
        except asyncio.CancelledError:
            await self._interrupt(context)
        finally:
            self._streams.discard(stream)

    def stop_streams(self) -> None:
        """End append streams and arenas, which else stay as long as their clients do."""
        self._stopping.set()
        for stream in list(self._streams):
            stream.stop()

    async def seal(self, request: Any) -> Any:
        started = time.perf_counter()
        future = self._engine.seal(
            check_name(request.run, "run"),
            request.partition,
            request.trajectory,
            tokens=request.tokens,
            prompt_tokens=request.prompt_tokens,
            attempt=request.attempt,
            allow_holes=request.allow_holes,
        )
        receipt = await wait_for(future)
        self._metrics.seals.inc()
        self._metrics.seal_seconds.observe(time.perf_counter() - started)
        return service_pb2.SealResponse(receipt=wire.receipt_to_wire(receipt, self._engine.sites(request.run)))

    async def read(self, message: bytes, context: Any) -> None:
        """No generator, like ``append``. A refusal waits until the client reads it, with the files given back."""
        try:
            refused = await self._read(message, context)
            if refused is not None:
                await self._refuse(context, *refused)
        except asyncio.CancelledError:
            await self._interrupt(context)

    async def _read(self, message: bytes, context: Any) -> tuple[TraceStoreError, str] | None:
        """Serve one read; why not, and its run, where it could not be done."""
        started = time.perf_counter()
        run = ""
        try:
            request = _parse(service_pb2.ReadRequest, message)
            run = request.run
            opened = await self._open_read(request)
            with opened:
                in_arena = request.HasField("target")
                if request.name_stored or not in_arena:
                    async with BoundedSender(context) as sender:
                        if request.name_stored:
                            await self._name_stored(opened, run, sender)
                        if not in_arena:
                            await self._send_frames(opened, run, sender)
                if in_arena:
                    async for encoded in self._read_into_arena(opened, request):
                        await send(context, encoded)
        except TraceStoreError as error:
            if isinstance(error, ReaderStalled):
                self._metrics.stalled_readers.inc()
            error.__context__ = None
            return error.with_traceback(None), run  # a traceback would keep the frames of the read
        for reason, rows in (await read.on_thread(read.missing_rows, opened)).items():
            self._metrics.missing_rows.labels(reason.name.lower()).inc(rows)
        self._metrics.read_seconds.observe(time.perf_counter() - started)
        return None

    async def _send_frames(self, opened: Read, run: str, sender: BoundedSender) -> None:
        made = frames.frames(opened, self._engine.sites(run))
        following = asyncio.ensure_future(read.on_thread(next, made, None))
        try:
            while (frame := await following) is not None:
                following = asyncio.ensure_future(read.on_thread(next, made, None))  # while gRPC sends this one
                await self._send(frame, sender)
        finally:
            await read.ended(following)  # it reads from files that the caller closes next

    async def _name_stored(self, opened: Read, run: str, sender: BoundedSender) -> None:
        await self._send(await read.on_thread(read.stored_frames, opened, self._engine.sites(run)), sender)

    async def _send(self, made: frames.Frames, sender: BoundedSender) -> None:
        self._metrics.read_bytes.inc(made.size)
        self._metrics.read_rows.inc(made.rows)
        for encoded in made.messages:
            await sender.send(encoded)

    async def _read_into_arena(self, opened: Read, request: Any) -> AsyncGenerator[bytes, None]:
        arena = self._arenas.whole(request.target.arena)
        size, rows = await read.fill_arena(opened, request, self._engine.sites(request.run), arena)
        self._metrics.read_bytes.inc(size)
        self._metrics.read_rows.inc(rows)
        encoded = frames.missing_frames(opened)
        while (message := await read.on_thread(next, encoded, None)) is not None:
            yield message

    async def attach_arena(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """One arena for as long as the call lasts; it ends when the client ends it or dies."""
        messages = aiter(requests)
        arena = None
        try:
            asked = await anext(messages, None)
            if asked is None:
                return
            size = _parse(service_pb2.AttachArenaRequest, asked).size_bytes
            arena = await self._offer(size)
            offer = service_pb2.AttachArenaResponse(name=arena.path.name, size_bytes=arena.size, owner_uid=os.getuid())
            await send(context, offer.SerializeToString())
            try:
                proof = await asyncio.wait_for(anext(messages, None), ATTACH_TIMEOUT_S)
            except asyncio.TimeoutError:
                raise DeadlineExceeded(f"no secret within {ATTACH_TIMEOUT_S:g} s") from None
            if proof is None:
                return  # the client cannot open the file: another host or user
            secret = _parse(service_pb2.AttachArenaRequest, proof).secret
            await read.on_thread(self._arenas.attach, arena, secret)
            await send(context, service_pb2.AttachArenaResponse(arena=arena.id).SerializeToString())
            await self._until_ended(messages)
        except TraceStoreError as error:
            await self._refuse(context, error)
        except asyncio.CancelledError:
            await self._interrupt(context)
        finally:
            if arena is not None:
                self._arenas.drop(arena)

    async def _offer(self, size: int) -> Arena:
        """A new arena; one whose client goes away meanwhile is dropped when it is there."""
        offering = asyncio.ensure_future(asyncio.to_thread(self._arenas.offer, size))
        try:
            return await asyncio.shield(offering)
        except asyncio.CancelledError:
            offering.add_done_callback(self._drop_unused)
            raise

    def _drop_unused(self, offering: asyncio.Future[Arena]) -> None:
        if not offering.cancelled() and offering.exception() is None:
            self._arenas.drop(offering.result())

    async def _until_ended(self, messages: AsyncIterator[bytes]) -> None:
        """Wait until the client ends its call, its connection drops, or the server stops."""
        ended = asyncio.ensure_future(anext(messages, None))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([ended, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            stopping.cancel()

    async def _open_read(self, request: Any) -> Read:
        """Start a read on a thread; one whose client goes away meanwhile gives its files back when it has them."""
        opening = asyncio.ensure_future(asyncio.to_thread(self._start_read, request))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unused)
            raise

    def _start_read(self, request: Any) -> Read:
        return self._engine.read(
            check_name(request.run, "run"),
            request.partition,
            [wire.span_from_wire(span) for span in request.spans],
            list(request.sites),
            include_open=request.include_open,
            policy_version_min=request.policy_version_min,
        )

    async def release(self, request: Any) -> Any:
        names = list(request.trajectories) or None
        check_name(request.run, "run")
        future = await asyncio.to_thread(self._engine.release, request.run, request.partition, names)
        released = await wait_for(future)
        self._metrics.releases.inc(released)
        return service_pb2.ReleaseResponse(released=released)

    async def list(self, request: Any) -> Any:
        await asyncio.to_thread(self._engine.load_listing, request.run)
        return await asyncio.to_thread(listing.list_entries, self._engine, request)

    async def status(self, request: Any) -> Any:
        del request
        try:
            usage = await asyncio.to_thread(self._engine.usage)
            identity = await asyncio.to_thread(directory_identity, self._engine.root)
        except OSError as error:
            raise StorageFailed(f"the data disk cannot be asked, cause={error.strerror}") from error
        return service_pb2.StatusResponse(
            server=self._engine.server,
            version=VERSION,
            runs=usage.runs,
            partitions=usage.partitions,
            trajectories=usage.trajectories,
            records=usage.records,
            disk_bytes=usage.disk_bytes,
            disk_free_bytes=usage.disk_free_bytes,
            queued_bytes=usage.queued_bytes,
            write_refusal=usage.write_refusal,
            disk_state=usage.disk_state,
            object_store=usage.tier.url,
            upload_queue_segments=usage.tier.waiting,
            upload_queue_bytes=usage.tier.waiting_bytes,
            upload_lag_seconds=round(usage.tier.lag_s, 3),
            object_store_error=usage.tier.error,
            remote_segments=usage.tier.remote_segments,
            data_directory=identity,
        )


def _parse(kind: Any, message: bytes) -> Any:
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise InvalidRequest(f"malformed request, cause={error}", argument="message") from None


def _close_unused(opening: asyncio.Future[Read]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
