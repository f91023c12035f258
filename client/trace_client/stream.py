"""One Append call as a client sees it: credit, arena ranges, answers in order, and what is still unanswered.

A message keeps its bytes (in the message, or in the arena's range) until it is answered, so that a writer can send
what a broken stream left unanswered again over a new one. ``broken`` says why a stream is no more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from trace_client.arena import Arena, Slabs
from trace_client.channel import Channel
from trace_client.encode import Outgoing
from trace_store import wire
from trace_store.chunk import RecordGroup
from trace_store.errors import DeadlineExceeded, TraceStoreError, Unavailable
from trace_store.fresh import fresh_bytes
from trace_store.limits import FRAME_BYTES, FRAMES_MAX
from trace_store.record import Site
from trace_store.v1 import trace_store_service_pb2 as service_pb2

UNANSWERED_MAX = 16_384
"""Requests that one stream may have unanswered: small ones cost 0.7 KB each here beside their payload."""

BATCH_BYTES_MAX = 4 << 20
"""Requests that go in one message. Those that name an arena have 0.2 to 4 KiB. Those of 1 MiB cost both ends 1 ms each
besides their bytes: joining four, a pass over memory more, took 2.3 instead of 3.3 CPU s/GiB."""

SHORT_BYTES = 8 << 10

PACE_S = 0.001
"""Least time between two messages of short requests that nobody waits for."""

ANSWER_TIMEOUT_S = 60.0
"""Longest wait for credit or for the answers of a flush, before DeadlineExceeded would be of no more use to anyone."""


@dataclass
class Sent:
    """A message without an answer. ``message`` holds the payload, or else the arena's range at ``offset`` does."""

    trajectory: str
    groups: Sequence[RecordGroup]
    size: int
    message: bytes = b""
    offset: int = -1


class _Requests:
    """Messages for gRPC's sender thread, which asks for the next one when the last is on its way.

    Short ones that wait meanwhile go together where the server takes that (``batched``), and one message leaves each
    PACE_S unless somebody waits: a message costs both ends 100 us and more, whatever it holds.
    """

    def __init__(self) -> None:
        self._waiting: deque[bytes | None] = deque()
        self._changed = threading.Condition()
        self._pacing = self._hurried = False
        self._sent_at = 0.0
        self.batched = False

    def put(self, message: bytes | None) -> None:
        """Queue a message; None ends the iteration."""
        with self._changed:
            self._waiting.append(message)
            if not self._pacing or not _is_short(message):
                self._changed.notify()

    def hurry(self) -> None:
        """Somebody waits for an answer: send what is there."""
        with self._changed:
            self._hurried = True
            self._changed.notify()

    def __iter__(self) -> Iterator[bytes]:
        while (together := self._take()) is not None:
            yield together[0] if len(together) == 1 else b"".join(together)

    def _take(self) -> list[bytes] | None:
        with self._changed:
            while not self._waiting:
                self._hurried = False
                self._changed.wait()
            self._pace()
            self._sent_at = time.monotonic()
            message = self._waiting.popleft()
            if message is None:
                return None
            together, size = [message], len(message)
            while (
                self.batched
                and len(together) < FRAMES_MAX
                and self._waiting
                and (following := self._waiting[0]) is not None
            ):
                size += len(following)
                if size > BATCH_BYTES_MAX:
                    break
                together.append(following)
                self._waiting.popleft()
            return together

    def _pace(self) -> None:
        """Wait until the next message is due (``_changed`` is held)."""
        self._pacing = self.batched
        while self._pacing and not self._hurried and all(map(_is_short, self._waiting)):
            left = self._sent_at + PACE_S - time.monotonic()
            if left <= 0:
                break
            self._changed.wait(left)
        self._pacing = False


def _is_short(message: bytes | None) -> bool:
    """Whether a message may wait for others."""
    return message is not None and len(message) < SHORT_BYTES


class AppendStream:
    """An open Append call.

    Args:
        errors: collects the first error of each trajectory.
        arena_bytes: size of the arena to try for, 0 for none.

    Raises:
        Unavailable, DeadlineExceeded: no stream could be opened.
    """

    def __init__(
        self,
        channel: Channel,
        run: str,
        partition: str,
        durability: str,
        table: tuple[Site, ...],
        errors: dict[str, TraceStoreError],
        arena_bytes: int = 0,
    ) -> None:
        self._channel, self._table, self._errors = channel, table, errors
        self._held_until_released = durability == "memory"
        self.broken: TraceStoreError | None = None
        self._changed = threading.Condition()
        self._requests = _Requests()
        self._unanswered: dict[int, Sent] = {}
        self._unreleased: dict[int, int] = {}
        self._unanswered_bytes = 0
        self._counts = {"stored": 0, "duplicates": 0}
        self._sequence = 0
        self._heard = False
        """Whether something came from the server since a wait last looked."""
        self._credit: int | None = None
        self._arena: Arena | None = channel.arenas.attach(arena_bytes) if arena_bytes else None
        self._memory = self._arena.array() if self._arena is not None else np.zeros(0, np.uint8)
        self._slabs = Slabs(self._memory.size)
        self._requests.put(wire.append_open_frame(run, partition, durability))
        self._call = channel.append_stream(iter(self._requests))
        self._thread = threading.Thread(target=self._receive, name="trace-client-answers", daemon=True)
        self._thread.start()
        with self._changed:
            self._wait(lambda: self._credit is not None)

    @property
    def message_bytes(self) -> int:
        """Payload that a message should have."""
        return Slabs.SLAB_BYTES if self._arena is not None else FRAME_BYTES

    def send(self, outgoing: Outgoing) -> None:
        """Send a message once credit or arena allow it.

        Raises:
            InvalidRequest: a block scale is NaN; nothing was sent.
            Unavailable and others: the stream broke; nothing was sent, unless ``unanswered`` holds it.
        """
        size = outgoing.size
        if self._arena is None or size > Slabs.SLAB_BYTES:
            groups, message = self._encode(outgoing)
            self._put(Sent(outgoing.trajectory, groups, size, message), message)
            return
        offset = self._reserve(size)
        try:
            groups = outgoing.fill(self._memory[offset : offset + size])
        except BaseException:
            with self._changed:
                self._slabs.give_back(offset)
            raise
        descriptor = wire.append_arena_frame(self._sequence + 1, groups, self._arena.id, offset, size)
        self._put(Sent(outgoing.trajectory, groups, size, offset=offset), descriptor)

    def _encode(self, outgoing: Outgoing) -> tuple[Sequence[RecordGroup], bytes]:
        """A message with its payload, which is written once, to where gRPC takes it from."""
        number, size = self._sequence + 1, outgoing.size
        start = len(wire.append_prefix(number, outgoing.blank(), size))
        message, view = fresh_bytes(start + size)
        groups = outgoing.fill(np.frombuffer(view[start:], np.uint8))
        view[:start] = wire.append_prefix(number, groups, size)
        return groups, message

    def send_again(self, sent: Sent, origin: AppendStream) -> None:
        """Send what another stream left unanswered."""
        if sent.message:
            message = wire.renumber_append(sent.message, self._sequence + 1)
        else:
            # Out of the old arena by value: it goes away with its stream.
            payload = origin._memory.data[sent.offset : sent.offset + sent.size]
            message = wire.append_frame(self._sequence + 1, sent.groups, (payload,))
        self._put(Sent(sent.trajectory, sent.groups, sent.size, message), message)

    def unanswered(self) -> list[Sent]:
        """Messages without an answer, in order."""
        with self._changed:
            return [self._unanswered[sequence] for sequence in sorted(self._unanswered)]

    @property
    def answered(self) -> int:
        """Messages that were answered."""
        with self._changed:
            return self._sequence - len(self._unanswered)

    def drain(self) -> None:
        """Wait until every message is answered."""
        with self._changed:
            if self._unanswered:
                self._wait(lambda: not self._unanswered)

    def take_count(self, name: str) -> int:
        with self._changed:
            count, self._counts[name] = self._counts[name], 0
        return count

    def end(self) -> None:
        """Close the call. The server goes on reading arena ranges that it took: it has them mapped itself."""
        self._requests.put(None)
        self._thread.join(timeout=5)
        self._call.cancel()
        if self._arena is not None:
            self._arena.close()

    def _put(self, sent: Sent, message: bytes) -> None:
        in_arena = sent.offset >= 0
        with self._changed:
            self._wait(
                lambda: (
                    len(self._unanswered) < UNANSWERED_MAX
                    and (
                        in_arena
                        or not self._unanswered_bytes
                        or self._unanswered_bytes + sent.size <= (self._credit or 0)
                    )
                )
            )
            self._sequence += 1
            self._unanswered[self._sequence] = sent
            if in_arena:
                self._unreleased[self._sequence] = sent.offset
            else:
                self._unanswered_bytes += sent.size
        self._requests.put(message)

    def _reserve(self, size: int) -> int:
        """Offset of a free range of the arena; waits for one."""
        with self._changed:
            taken: list[int] = []

            def take() -> bool:
                offset = self._slabs.take(size)
                if offset is not None:
                    taken.append(offset)
                return bool(taken)

            self._wait(take)
            return taken[0]

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Wait on ``_changed`` (held) for ``condition``; raise when the stream broke or nothing moves for too long."""

        def moved() -> bool:
            if self.broken is not None or condition():
                return True
            self._requests.hurry()
            return False

        done, self._heard = False, True
        while not done and self._heard:  # a slow disk answers late and one by one
            self._heard = False
            done = self._changed.wait_for(moved, ANSWER_TIMEOUT_S)
        if not done:
            self.broken = DeadlineExceeded(
                f"no answer from the server within {ANSWER_TIMEOUT_S:g} s, unanswered={len(self._unanswered)}"
            )
            self._call.cancel()
        if self.broken is not None:
            raise self.broken

    def _receive(self) -> None:
        try:
            for encoded in self._call:
                answer = service_pb2.AppendResponse.FromString(encoded)
                with self._changed:
                    self._heard = True
                    self._take_answer(answer)
                    for further in answer.further:
                        self._take_answer(further)
                    self._changed.notify_all()
            self._break(Unavailable("the server ended the append stream; repeat what was not flushed"))
        except grpc.RpcError as error:
            self._break(self._channel.error(error, self._table))
        except Exception as error:  # an answer that makes no sense must not leave the writer waiting
            self._break(TraceStoreError(f"the append stream failed, cause={error!r}"))

    def _take_answer(self, answer: Any) -> None:
        """Wants ``_changed`` held."""
        if answer.credit_bytes:
            self._credit, self._requests.batched = answer.credit_bytes, answer.batched
        elif answer.sequence:
            sent = self._unanswered.pop(answer.sequence)
            if sent.offset < 0:
                self._unanswered_bytes -= sent.size
            elif not self._held_until_released or answer.HasField("error"):
                self._slabs.give_back(self._unreleased.pop(answer.sequence))
            self._counts["stored"] += answer.stored
            self._counts["duplicates"] += answer.duplicates
            if answer.HasField("error"):
                self._errors.setdefault(sent.trajectory, wire.error_from_wire(answer.error, self._table))
        if self._held_until_released:
            self._take_releases(answer.released_through)

    def _take_releases(self, through: int) -> None:
        # Insertion order is the order of sequences, so the first one above ends the search.
        while self._unreleased and (sequence := next(iter(self._unreleased))) <= through:
            if sequence in self._unanswered:
                break
            self._slabs.give_back(self._unreleased.pop(sequence))

    def _break(self, error: TraceStoreError) -> None:
        with self._changed:
            self.broken = self.broken or error
            self._changed.notify_all()
        # The request iterator must end too, or gRPC's sender thread would wait on it for ever.
        self._requests.put(None)
