"""Bounded read-ahead: one thread reads microbatches into a ring of reused buffers while the trainer computes.

The thread holds no reference to the iterator, so a loop that is left early drops the iterator and thereby stops it.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from trace_client import fork
from trace_client.microbatch import Buffers, Microbatch
from trace_store.errors import InvalidRequest, TraceStoreError
from trace_store.record import check_int

DEPTH_MAX = 64

ReadMicrobatch = Callable[[Any, Buffers], Microbatch]


class Prefetch(Iterator[Microbatch]):
    """Iterator over microbatches, at most ``depth`` read ahead. Exhaustion or ``close`` stops the thread, and so does
    dropping the iterator.

    After a read that failed with a retryable error, such as Unavailable, ``next`` reads that microbatch again. Any
    other error ends the iteration, and every further ``next`` raises it again.

    Args:
        read: (spans, buffers) -> microbatch over those buffers.
        microbatches: what to read, drawn on the reading thread.
    """

    def __init__(self, read: ReadMicrobatch, microbatches: Iterable[Any], depth: int, device: str) -> None:
        check_int(depth, "depth", 1, DEPTH_MAX)
        if not isinstance(microbatches, Iterable):
            raise InvalidRequest(
                f"microbatches must be an iterable of lists of spans, got={microbatches!r}", argument="microbatches"
            )
        if not isinstance(device, str) or not device:
            raise InvalidRequest(f"device must be a string such as 'cpu' or 'cuda', got={device!r}", argument="device")
        self._to_device: Callable[[Microbatch], Microbatch] | None = None
        if device != "cpu":
            from trace_client.device import DeviceCopy  # torch is an optional dependency

            self._to_device = DeviceCopy(device)
        self._ring = ring = _Ring(depth + 1)
        self._lent: Buffers | None = None
        self._done = self._failed = False
        self._error: BaseException | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(
            target=_read_ahead, args=(ring, read, microbatches), name="trace-client-prefetch", daemon=True
        )
        self._stop = weakref.finalize(self, ring.stop)
        self._thread.start()

    def __next__(self) -> Microbatch:
        fork.check_same_process(self._process)  # the reading thread is not there
        if self._lent is not None:
            self._ring.free.put(self._lent)
            self._lent = None
        if self._done:
            raise self._error or StopIteration
        if self._failed:
            self._failed = False
            self._ring.again.put(True)
        item = self._ring.ready.get()
        if isinstance(item, tuple):
            batch, self._lent = item
            return self._to_device(batch) if self._to_device is not None else batch
        if isinstance(item, _Repeatable):
            self._failed = True
            raise item.error
        self._done, self._error = True, item
        raise item or StopIteration

    def __reduce__(self) -> NoReturn:
        fork.refuse_pickling("reading ahead")

    def close(self) -> None:
        """Stop reading ahead; waits for the read that is under way."""
        self._done, self._error = True, None
        self._stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()


@dataclass(frozen=True)
class _Repeatable:
    """A read failed and may be repeated; its thread waits to be asked."""

    error: TraceStoreError


class _Ring:
    """What the iterator and its thread share. None in ``free`` wakes the thread to stop, and so does False in
    ``again``, where True asks it to repeat the read that failed."""

    def __init__(self, buffers: int) -> None:
        self.free: queue.SimpleQueue[Buffers | None] = queue.SimpleQueue()
        self.ready: queue.SimpleQueue[tuple[Microbatch, Buffers] | _Repeatable | BaseException | None] = (
            queue.SimpleQueue()
        )
        self.again: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.stopped = False
        for _ in range(buffers):
            self.free.put(Buffers())

    def stop(self) -> None:
        self.stopped = True
        self.free.put(None)
        self.again.put(False)
        self.ready.put(None)  # a loop that waits on another thread ends too


def _read_ahead(ring: _Ring, read: ReadMicrobatch, microbatches: Iterable[Any]) -> None:
    try:
        for spans in microbatches:
            buffers = ring.free.get()
            if buffers is None or ring.stopped:
                return
            while (batch := _read_once(ring, read, spans, buffers)) is None:
                if not ring.again.get():
                    return
            ring.ready.put((batch, buffers))
        ring.ready.put(None)
    except BaseException as error:  # the caller's iterator may raise anything; the loop over the prefetch raises it
        ring.ready.put(error)


def _read_once(ring: _Ring, read: ReadMicrobatch, spans: Any, buffers: Buffers) -> Microbatch | None:
    """The microbatch; None where the loop was told an error after which the read may be repeated."""
    try:
        return read(spans, buffers)
    except TraceStoreError as error:
        if not error.retryable:
            raise
        ring.ready.put(_Repeatable(error))
        return None
