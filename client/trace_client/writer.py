"""Write guidance records of one partition: append, seal, receipt.

Appends are pipelined: ``append`` returns once its frames are on their way and within the server's credit, so it blocks
when the server or its disk is slow (backpressure), and ``flush`` waits for every answer. An error that the server found
in a frame is raised by the next ``append`` to the same trajectory, or by ``flush`` or ``seal``.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import grpc

from trace_client.channel import Channel
from trace_client.encode import Encoder, build_records
from trace_store import wire
from trace_store.errors import DeadlineExceeded, TraceStoreError, Unavailable
from trace_store.limits import TOKENS_MAX
from trace_store.record import (
    Receipt,
    Site,
    check_attempt,
    check_durability,
    check_int,
    check_name,
)
from trace_store.v1 import trace_store_service_pb2 as service_pb2

ANSWER_TIMEOUT_S = 60.0
"""Longest wait for credit, or for the answers of a flush; then DeadlineExceeded."""


class Writer:
    """Writer of one run and partition. Thread-safe; answers are taken on a thread of its own.

    Attributes:
        stored, duplicates: records that the server stored, and that it had already.
        sent_bytes: payload sent.
    """

    def __init__(self, channel: Channel, run: str, partition: str, durability: str) -> None:
        self._channel = channel
        self.run, self.partition = check_name(run, "run"), check_name(partition, "partition")
        self.durability = check_durability(durability)
        self.sites: tuple[Site, ...] = channel.table(run)
        self.stored = self.duplicates = self.sent_bytes = 0
        self._encoder = Encoder(self.run, self.partition)
        self._lock = threading.Lock()
        self._stream: _Stream | None = None
        self._errors: dict[str, TraceStoreError] = {}

    def append(
        self,
        trajectory: str,
        start: int,
        records: Mapping[Site, tuple[Any, Any, Any]],
        *,
        attempt: int = 0,
        policy_version: int = 0,
    ) -> None:
        """Send records of tokens [start, start + T) of a trajectory.

        Args:
            records: site -> (planes uint8 [T, b, W/8], or [T, W/2] for form ``full``; scales uint8 [T, W/block];
                tensor_scale float32, one value or [T], the decode scale).
            attempt: a newer attempt replaces an older one as a whole.
            policy_version: weights that produced the rows.

        Raises:
            InvalidRequest: nothing was sent; names the argument.
            Conflict, StaleAttempt, Sealed: an earlier append to this trajectory was refused.
            Unavailable: the server went away; repeat what was appended since the last flush, known rows count as
                duplicates. Said once; the next call connects again.
        """
        self._channel.check_usable()
        check_attempt(attempt, policy_version)
        built = build_records(self.sites, trajectory, start, records)
        with self._lock, self._stream_in_use() as stream:
            self._raise_error(trajectory)
            for message, size in self._encoder.frames(built, trajectory, attempt, policy_version, stream.number):
                stream.send(message, size, trajectory)
                self.sent_bytes += size

    def flush(self) -> None:
        """Wait until everything appended has the writer's durability. Raises the first error that was found."""
        self._channel.check_usable()
        with self._lock:
            self._drain()
            self._raise_error(None)

    def seal(
        self, trajectory: str, *, tokens: int, prompt_tokens: int, attempt: int = 0, allow_holes: bool = False
    ) -> Receipt:
        """Declare a trajectory complete; it is durable and readable when this returns.

        Args:
            tokens: length of the trajectory, prompt included; its last token needs no rows.
            prompt_tokens: length of the prompt; prompt tokens need rows at k and v sites only.

        Raises:
            Incomplete: rows are missing; ``holes`` names them. Append them, or pass ``allow_holes``.
            Conflict: an append was refused, or the attempt is sealed with other counts.
            Unavailable: as for append.
        """
        self._channel.check_usable()
        check_name(trajectory, "trajectory")
        check_attempt(attempt)
        check_int(tokens, "tokens", 1, TOKENS_MAX)
        check_int(prompt_tokens, "prompt_tokens", 0, tokens)
        with self._lock:
            self._drain()
            self._raise_error(trajectory)
        request = service_pb2.SealRequest(
            run=self.run,
            partition=self.partition,
            trajectory=trajectory,
            attempt=attempt,
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            allow_holes=allow_holes,
        )
        return wire.receipt_from_wire(self._channel.call("Seal", request, self.sites).receipt, self.sites)

    def close(self) -> None:
        """Flush and end the stream."""
        with self._lock:
            stream = self._stream
            try:
                self._drain()
                self._raise_error(None)
            finally:
                self._stream = None
                if stream is not None:
                    stream.end()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._stream is not None:
            self._stream.end()

    @contextmanager
    def _stream_in_use(self) -> Iterator[_Stream]:
        """The stream, opened when there is none. One that broke is dropped: its error is raised once, and not at all if
        every frame had its answer, as after a restart of the server between two appends."""
        if self._stream is not None and self._stream.broken is not None:
            self._drain()
        if self._stream is None:
            self._stream = _Stream(self._channel, self.run, self.partition, self.durability, self.sites, self._errors)
        stream = self._stream
        try:
            yield stream
        except TraceStoreError:
            if stream.broken is not None:
                self._stream = None
            raise

    def _drain(self) -> None:
        """Wait for all answers and count them. Raises when the stream broke before they were there."""
        stream = self._stream
        if stream is None:
            return
        try:
            stream.drain()
        finally:
            self.stored += stream.take_count("stored")
            self.duplicates += stream.take_count("duplicates")
            if stream.broken is not None:
                self._stream = None

    def _raise_error(self, trajectory: str | None) -> None:
        """Raise what the server found wrong with a trajectory's frames (None: any), once."""
        key = trajectory if trajectory is not None else next(iter(self._errors), None)
        error = self._errors.pop(key, None) if key is not None else None
        if error is not None:
            raise error


class _Stream:
    """One Append call: credit, answers in order. ``errors`` collects the first error of each trajectory."""

    def __init__(
        self,
        channel: Channel,
        run: str,
        partition: str,
        durability: str,
        table: tuple[Site, ...],
        errors: dict[str, TraceStoreError],
    ) -> None:
        self._channel, self._table, self._errors = channel, table, errors
        self.broken: TraceStoreError | None = None
        self._changed = threading.Condition()
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._unanswered: dict[int, tuple[int, str]] = {}
        self._unanswered_bytes = 0
        self._counts = {"stored": 0, "duplicates": 0}
        self._sequence = 0
        self._credit: int | None = None
        self._requests.put(wire.append_open_frame(run, partition, durability))
        self._call = channel.append_stream(self._outgoing())
        self._thread = threading.Thread(target=self._receive, name="trace-client-answers", daemon=True)
        self._thread.start()
        with self._changed:
            self._wait(lambda: self._credit is not None)

    def number(self) -> int:
        self._sequence += 1
        return self._sequence

    def send(self, message: bytes, size: int, trajectory: str) -> None:
        """Queue a frame once the credit allows it."""
        with self._changed:
            self._wait(lambda: not self._unanswered or self._unanswered_bytes + size <= (self._credit or 0))
            self._unanswered[self._sequence] = (size, trajectory)
            self._unanswered_bytes += size
        self._requests.put(message)

    def drain(self) -> None:
        """Wait until every frame is answered."""
        with self._changed:
            if self._unanswered:
                self._wait(lambda: not self._unanswered)

    def take_count(self, name: str) -> int:
        with self._changed:
            count, self._counts[name] = self._counts[name], 0
        return count

    def end(self) -> None:
        self._requests.put(None)
        self._thread.join(timeout=5)
        self._call.cancel()

    def _outgoing(self) -> Iterator[bytes]:
        while (message := self._requests.get()) is not None:
            yield message

    def _wait(self, condition: Any) -> None:
        """Wait on ``_changed`` (held) for ``condition``; raise when the stream broke or nothing moves for too long."""
        if not self._changed.wait_for(lambda: self.broken is not None or condition(), ANSWER_TIMEOUT_S):
            self.broken = DeadlineExceeded(
                f"no answer from the server within {ANSWER_TIMEOUT_S:g} s, unanswered={len(self._unanswered)}"
            )
            self._call.cancel()
        if self.broken is not None:
            raise self.broken

    def _receive(self) -> None:
        try:
            for encoded in self._call:
                self._take_answer(service_pb2.AppendResponse.FromString(encoded))
            self._break(Unavailable("the server ended the append stream; repeat what was not flushed"))
        except grpc.RpcError as error:
            self._break(self._channel.error(error, self._table))
        except Exception as error:  # an answer that makes no sense must not leave the writer waiting
            self._break(TraceStoreError(f"the append stream failed, cause={error!r}"))

    def _take_answer(self, answer: Any) -> None:
        with self._changed:
            if answer.sequence == 0:
                self._credit = answer.credit_bytes
            else:
                size, trajectory = self._unanswered.pop(answer.sequence)
                self._unanswered_bytes -= size
                self._counts["stored"] += answer.stored
                self._counts["duplicates"] += answer.duplicates
                if answer.HasField("error"):
                    self._errors.setdefault(trajectory, wire.error_from_wire(answer.error, self._table))
            self._changed.notify_all()

    def _break(self, error: TraceStoreError) -> None:
        with self._changed:
            self.broken = self.broken or error
            self._changed.notify_all()
        # The request iterator must end too, or gRPC's sender thread would wait on it for ever.
        self._requests.put(None)
