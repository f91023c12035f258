"""Bounded read-ahead: one thread reads microbatches into a ring of reused buffers while the trainer computes.

The thread holds no reference to the iterator, so a loop that is left early drops the iterator and thereby stops it.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from trace_client import fork
from trace_client.microbatch import Buffers, Microbatch
from trace_store.errors import InvalidRequest
from trace_store.record import check_int

DEPTH_MAX = 64

ReadMicrobatch = Callable[[Any, Buffers], Microbatch]


class Prefetch(Iterator[Microbatch]):
    """Iterator over microbatches, at most ``depth`` read ahead. Exhaustion, an error or ``close`` stops the thread, and
    so does dropping the iterator.

    Args:
        read: (spans, buffers) -> microbatch over those buffers.
        microbatches: what to read, drawn on the reading thread.
    """

    def __init__(self, read: ReadMicrobatch, microbatches: Iterable[Any], depth: int, device: str) -> None:
        check_int(depth, "depth", 1, DEPTH_MAX)
        if not isinstance(device, str) or not device:
            raise InvalidRequest(f"device must be a string such as 'cpu' or 'cuda', got={device!r}", argument="device")
        self._to_device: Callable[[Microbatch], Microbatch] | None = None
        if device != "cpu":
            from trace_client.device import DeviceCopy  # torch is an optional dependency

            self._to_device = DeviceCopy(device)
        self._ring = ring = _Ring(depth + 1)
        self._lent: Buffers | None = None
        self._done = False
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
            raise StopIteration
        item = self._ring.ready.get()
        if isinstance(item, tuple):
            batch, self._lent = item
            return self._to_device(batch) if self._to_device is not None else batch
        self._done = True
        if item is not None:
            raise item
        raise StopIteration

    def __reduce__(self) -> NoReturn:
        fork.refuse_pickling("reading ahead")

    def close(self) -> None:
        """Stop reading ahead; waits for the read that is under way."""
        self._done = True
        self._stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()


class _Ring:
    """What the iterator and its thread share. None in ``free`` wakes the thread to stop."""

    def __init__(self, buffers: int) -> None:
        self.free: queue.SimpleQueue[Buffers | None] = queue.SimpleQueue()
        self.ready: queue.SimpleQueue[tuple[Microbatch, Buffers] | BaseException | None] = queue.SimpleQueue()
        self.stopped = False
        for _ in range(buffers):
            self.free.put(Buffers())

    def stop(self) -> None:
        self.stopped = True
        self.free.put(None)
        self.ready.put(None)  # a loop that waits on another thread ends too


def _read_ahead(ring: _Ring, read: ReadMicrobatch, microbatches: Iterable[Any]) -> None:
    try:
        for spans in microbatches:
            buffers = ring.free.get()
            if buffers is None or ring.stopped:
                return
            ring.ready.put((read(spans, buffers), buffers))
        ring.ready.put(None)
    except BaseException as error:  # the caller's iterator may raise anything; the loop over the prefetch raises it
        ring.ready.put(error)
