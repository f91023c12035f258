"""Group commit: one thread that syncs what the writer wrote, and answers everybody who waited for it.

While one round syncs, the writer goes on writing; the next round covers all of that with one fdatasync per segment.
So the group grows with the load by itself: 3 ms for a lone append, 4 to 16 MiB a sync under a stream, and no timer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from trace_store.errors import StorageFailed, TraceStoreError
from trace_store.segment.writer import SegmentWriter

Done = Callable[[TraceStoreError | None], None]
"""Called once with None (durable) or the error; runs on the syncer's thread and must not block."""


@dataclass
class _Round:
    waiting: list[Done] = field(default_factory=list)
    dirty: set[SegmentWriter] = field(default_factory=set)
    rolling: list[SegmentWriter] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.waiting or self.rolling)


class Syncer:
    """Owns the sync thread. ``on_rolled(writer)`` and ``on_failed(writer, error)`` report what became of a segment."""

    def __init__(
        self,
        on_rolled: Callable[[SegmentWriter], None],
        on_failed: Callable[[SegmentWriter, TraceStoreError], None],
    ) -> None:
        self._on_rolled, self._on_failed = on_rolled, on_failed
        self._wake = threading.Condition()
        self._next = _Round()
        self._closing = False
        self._suspect: StorageFailed | None = None
        self._thread = threading.Thread(target=self._run, name="trace-store-sync", daemon=True)
        self._thread.start()

    def wrote(self, writer: SegmentWriter) -> None:
        """The segment has bytes that the next round must sync."""
        with self._wake:
            self._next.dirty.add(writer)

    def when_synced(self, done: Done) -> None:
        """Call ``done`` when everything written so far is durable."""
        with self._wake:
            self._next.waiting.append(done)
            self._wake.notify()

    def roll(self, writer: SegmentWriter) -> None:
        """Seal a segment that gets no more rows."""
        with self._wake:
            self._next.rolling.append(writer)
            self._wake.notify()

    def forget(self, writer: SegmentWriter) -> None:
        """The segment was released: it need not be synced."""
        with self._wake:
            self._next.dirty.discard(writer)

    def suspect(self, error: StorageFailed | None) -> None:
        """While set, nothing counts as durable: rows that a failed sync may have lost await their rewrite."""
        with self._wake:
            self._suspect = error

    def close(self) -> None:
        """Finish the rounds that were asked for, then stop."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._next and not self._closing:
                    self._wake.wait()
                if not self._next:
                    return
                current, self._next = self._next, _Round()
            error = self._commit(current)
            for done in current.waiting:
                done(error)

    def _commit(self, current: _Round) -> TraceStoreError | None:
        failure: TraceStoreError | None = None
        for writer in current.dirty.difference(current.rolling):
            try:
                writer.sync()
            except TraceStoreError as error:
                failure = error
                self._on_failed(writer, error)
        for writer in current.rolling:
            try:
                writer.seal()
            except TraceStoreError as error:
                failure = error
                self._on_failed(writer, error)
            else:
                self._on_rolled(writer)
        return failure or self._suspect
