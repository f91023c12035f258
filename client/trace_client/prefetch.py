"""Bounded read-ahead: one thread reads microbatches into a ring of reused buffers while the trainer computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from trace_client.microbatch import Buffers, Microbatch
from trace_store.errors import InvalidRequest
from trace_store.record import check_int

DEPTH_MAX = 64

_POLL_S = 0.1


class Prefetch(Iterator[Microbatch]):
    """Iterator over microbatches, at most ``depth`` read ahead. ``close`` (or exhaustion) stops the thread.

    Args:
        read: (spans, buffers) -> microbatch over those buffers.
        microbatches: what to read, drawn on the reading thread.
    """

    def __init__(
        self,
        read: Callable[[Any, Buffers], Microbatch],
        microbatches: Iterable[Any],
        depth: int,
        device: str,
    ) -> None:
        check_int(depth, "depth", 1, DEPTH_MAX)
        if not isinstance(device, str) or not device:
            raise InvalidRequest(f"device must be a string such as 'cpu' or 'cuda', got={device!r}", argument="device")
        self._read, self._microbatches = read, microbatches
        self._to_device: Callable[[Microbatch], Microbatch] | None = None
        if device != "cpu":
            from trace_client.device import DeviceCopy  # torch is an optional dependency

            self._to_device = DeviceCopy(device)
        self._ready: queue.Queue[Microbatch | BaseException | None] = queue.Queue()
        self._free: queue.Queue[Buffers] = queue.Queue()
        for _ in range(depth + 1):
            self._free.put(Buffers())
        self._lent: Buffers | None = None
        self._owners: dict[int, Buffers] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trace-client-prefetch", daemon=True)
        self._thread.start()

    def __next__(self) -> Microbatch:
        if self._lent is not None:
            self._free.put(self._lent)
            self._lent = None
        if self._closed.is_set():
            raise StopIteration
        item = self._ready.get()
        if item is None:
            self._closed.set()
            raise StopIteration
        if isinstance(item, BaseException):
            self.close()
            raise item
        self._lent = self._owners.pop(id(item))
        return self._to_device(item) if self._to_device is not None else item

    def close(self) -> None:
        """Stop reading ahead."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __del__(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        try:
            for spans in self._microbatches:
                buffers = self._take_buffers()
                if buffers is None:
                    return
                batch = self._read(spans, buffers)
                self._owners[id(batch)] = buffers
                self._ready.put(batch)
            self._ready.put(None)
        except BaseException as error:
            self._ready.put(error)

    def _take_buffers(self) -> Buffers | None:
        while not self._closed.is_set():
            try:
                return self._free.get(timeout=_POLL_S)
            except queue.Empty:
                continue
        return None
