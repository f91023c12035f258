"""Write guidance records of one partition: append, seal, receipt.

Appends are pipelined: ``append`` returns once its bytes are on their way and within the server's credit, or in the
arena, so it blocks when the server or its disk is slow (backpressure), and ``flush`` waits for every answer. An error
that the server found in a message is raised by the next ``append`` to the same trajectory, or by ``flush`` or ``seal``.

A server that goes away and comes back is not noticed: what it did not answer is sent again over a new stream, and what
it had stored all the same counts as a duplicate. Where it stays away, calls raise Unavailable and the writer keeps what
was not answered, within the credit and arena of a stream, until it can send it again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from trace_client.backlog import Backlog
from trace_client.channel import Channel
from trace_client.encode import Encoder, Outgoing
from trace_client.fork import OfOneProcess
from trace_client.stream import AppendStream
from trace_store import wire
from trace_store.errors import TraceStoreError, Unavailable
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

RESUME_TIMEOUT_S = 30.0
"""How long a writer looks for a server that went away: a restart with a million records took under 10 s."""

RESUME_PAUSE_S = 0.1

_Result = TypeVar("_Result")


class Writer(OfOneProcess):
    """Writer of one run and partition. Thread-safe; answers are taken on a thread of its own.

    Attributes:
        stored, duplicates: records that the server stored, and that it had already.
        sent_bytes: payload sent.
    """

    def __init__(
        self,
        channel: Channel,
        run: str,
        partition: str,
        durability: str,
        arena_bytes: int,
        resume_timeout_s: float | None = None,
        backlog: Backlog | None = None,
    ) -> None:
        self._channel, self._arena_bytes = channel, arena_bytes
        self._resume_timeout_s = RESUME_TIMEOUT_S if resume_timeout_s is None else resume_timeout_s
        self.run, self.partition = check_name(run, "run"), check_name(partition, "partition")
        self.durability = check_durability(durability)
        self.sites: tuple[Site, ...] = channel.table(run)
        self.stored = self.duplicates = self.sent_bytes = 0
        self._encoder = Encoder(self.run, self.partition, self.sites)
        self._lock = threading.Lock()
        self._stream: AppendStream | None = None
        self._backlog = backlog if backlog is not None else Backlog()
        self._left = False

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
            Unavailable: the server went away and did not come back within RESUME_TIMEOUT_S: repeat the call, known rows
                count as duplicates. What earlier calls appended is kept, and every call sends it again first.
            DeadlineExceeded: the server is there and answers nothing; likewise.
        """
        self._channel.check_usable()
        check_attempt(attempt, policy_version)
        with self._lock:
            self._check_usable()
            taken = self._encoder.take(trajectory, start, records)
            self._backlog.raise_error(trajectory)
            size = self._on_stream(lambda stream: stream.message_bytes)
            for outgoing in self._encoder.messages(taken, attempt, policy_version, size):
                self._on_stream(partial(_send, outgoing))
                self.sent_bytes += outgoing.size

    def flush(self) -> None:
        """Wait until everything appended has the writer's durability.

        Raises:
            Unavailable, DeadlineExceeded: as for append. Flush again: it returns once the server has answered all.
            TraceStoreError: the server refused rows, and has not stored them: the first error that was found, said
                once. Those of other trajectories are in its ``others``.
        """
        self._channel.check_usable()
        with self._lock:
            self._check_usable()
            self._flush()
            self._backlog.raise_error(None)

    def seal(
        self, trajectory: str, *, tokens: int, prompt_tokens: int, attempt: int = 0, allow_holes: bool = False
    ) -> Receipt:
        """Declare a trajectory complete; it is durable and readable when this returns.

        Args:
            tokens: length of the trajectory, prompt included; its last token needs no rows.
            prompt_tokens: length of the prompt; prompt tokens need rows at k and v sites only.

        Raises:
            Incomplete: rows are missing; ``holes`` names them. Append them, or pass ``allow_holes``.
            StorageFailed: rows may be in an object store that does not answer the server: seal again later, or append
                the trajectory again.
            Conflict: an append was refused, or the attempt is sealed with other counts.
            Unavailable, DeadlineExceeded: as for append.
        """
        self._channel.check_usable()
        check_name(trajectory, "trajectory")
        check_attempt(attempt)
        check_int(tokens, "tokens", 1, TOKENS_MAX)
        check_int(prompt_tokens, "prompt_tokens", 0, tokens)
        with self._lock:
            self._check_usable()
            self._flush()
            self._backlog.raise_error(trajectory)
        request = service_pb2.SealRequest(
            run=self.run,
            partition=self.partition,
            trajectory=trajectory,
            attempt=attempt,
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            allow_holes=allow_holes,
        )
        deadline = time.monotonic() + self._resume_timeout_s
        while True:
            try:
                return wire.receipt_from_wire(self._channel.call("Seal", request, self.sites).receipt, self.sites)
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
            time.sleep(RESUME_PAUSE_S)  # the same seal again is fine

    def close(self) -> None:
        """Flush and end the stream. Raises as ``flush``, and can then be called again; a client that was closed before
        matters only to appends that wait for their answers."""
        with self._lock:
            if self._stream is None and not self._backlog.kept:
                return
            self._channel.check_process()
            try:
                if self._backlog.kept or (self._stream is not None and self._stream.unanswered()):
                    self._channel.check_usable()
                    self._flush()
                if self._stream is not None:
                    self._count(self._stream)
                self._backlog.raise_error(None)
            finally:
                self._end()

    def leave(self) -> None:
        """End the stream without waiting, for another writer that goes on with the same backlog."""
        with self._lock:
            self._left = True
            self._end()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._stream is not None:
            self._stream.end()

    def _end(self) -> None:
        if self._stream is not None:
            self._set_aside(self._stream)
            self._stream = None

    def _flush(self) -> None:
        """Wait for all answers, also to what earlier calls left unanswered."""
        if self._stream is None and not self._backlog.kept:
            return
        try:
            self._on_stream(lambda stream: stream.drain())
        finally:
            if self._stream is not None:
                self._count(self._stream)

    def _on_stream(self, action: Callable[[AppendStream], _Result]) -> _Result:
        """Run ``action`` on the stream, and once more on a new one whenever it broke.

        Raises:
            TraceStoreError: the server stays away, or answers nothing on any stream, for the time that the writer looks
                for it. What it did not answer is kept, and the text says so.
        """
        lost_at: float | None = None
        try:
            while True:
                if self._stream is None:
                    self._stream = self._channel.reconnecting(self._connect)
                stream = self._stream
                try:
                    if stream.broken is None:
                        return action(stream)
                except TraceStoreError:
                    if stream.broken is None:
                        raise
                self._set_aside(stream)
                self._stream = None
                fruitless = lost_at is not None and not stream.answered
                if lost_at is None or stream.answered:
                    lost_at = time.monotonic()
                broken = stream.broken or Unavailable("the append stream ended")
                self._resume(broken, lost_at + self._resume_timeout_s, pause=fruitless)
        except TraceStoreError as error:
            self._backlog.name_in(error)
            raise

    def _resume(self, error: TraceStoreError, deadline: float, *, pause: bool) -> None:
        """Open a stream that carries what a broken one left unanswered.

        Raises:
            Unavailable: the server stays away until ``deadline``.
        """
        if self._backlog.kept and type(error) is not Unavailable:
            raise error
        while True:
            if pause:
                if type(error) is not Unavailable or time.monotonic() > deadline:
                    raise error
                time.sleep(RESUME_PAUSE_S)
            pause = True
            try:
                self._stream = self._connect()
                return
            except TraceStoreError as failed:
                error = failed

    def _connect(self) -> AppendStream:
        """A new stream, on which everything unanswered was sent again."""
        kept = self._backlog.kept
        stream = self._open()
        try:
            while kept:
                stream.send_again(*kept[0])
                kept.popleft()
        except BaseException:
            self._set_aside(stream)
            raise
        return stream

    def _set_aside(self, stream: AppendStream) -> None:
        """End a stream and keep what it left unanswered, in front of what was sent later."""
        stream.end()
        self._count(stream)
        self._backlog.kept.extendleft((sent, stream) for sent in reversed(stream.unanswered()))

    def _check_usable(self) -> None:
        """Raises Unavailable once another writer has taken over the backlog."""
        if self._left:
            raise Unavailable("the writer went on with another server, retrying is safe")

    def _open(self) -> AppendStream:
        return AppendStream(
            self._channel,
            self.run,
            self.partition,
            self.durability,
            self.sites,
            self._backlog.errors,
            self._arena_bytes,
        )

    def _count(self, stream: AppendStream) -> None:
        self.stored += stream.take_count("stored")
        self.duplicates += stream.take_count("duplicates")


def _send(outgoing: Outgoing, stream: AppendStream) -> None:
    stream.send(outgoing)
