"""Group commit: one thread that syncs what the writer wrote, and answers everybody who waited for it.

While one round syncs, the writer goes on writing; the next round covers all of that with one fdatasync per segment.
So the group grows with the load by itself: 3 ms for a lone append, 4 to 16 MiB a sync under a stream.

All work on a segment's descriptor after its last write happens here, closing it included, so that no other thread can
close a descriptor under a running fdatasync.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from trace_store.errors import StorageFailed, TraceStoreError
from trace_store.segment.writer import SegmentWriter

ROUND_S = 0.01
ROUND_BYTES_MIN, ROUND_BYTES_MAX = 1 << 20, 16 << 20
"""A round with this much to sync starts 10 ms after the last one at the earliest, so that a stream is synced in groups
of 4 to 16 MiB. Less than that, a lone append or a seal, never waits; more than that need not either."""

log = logging.getLogger("trace_store.syncer")

Done = Callable[[TraceStoreError | None], None]
"""Called once with None (durable) or the error; runs on the syncer's thread and must not block."""


class Outcomes(Protocol):
    """Who hears what became of a segment; called on the syncer's thread."""

    def sealed(self, writer: SegmentWriter) -> None:
        """The segment is immutable and durable."""

    def unsealed(self, writer: SegmentWriter) -> None:
        """It could not be sealed, but its rows are durable."""

    def sync_failed(self, writer: SegmentWriter, error: TraceStoreError) -> None:
        """Its rows may be lost."""

    def doubt(self) -> TraceStoreError | None:
        """While rows of some segment may be lost: why nothing counts as durable."""


@dataclass
class _Round:
    waiting: list[Done] = field(default_factory=list)
    dirty: set[SegmentWriter] = field(default_factory=set)
    rolling: list[SegmentWriter] = field(default_factory=list)
    closing: list[SegmentWriter] = field(default_factory=list)

    @property
    def unsynced_bytes(self) -> int:
        return sum(writer.written_bytes - writer.synced_bytes for writer in self.dirty)

    def __bool__(self) -> bool:
        return bool(self.waiting or self.rolling or self.closing)


class Syncer:
    """Owns the sync thread. Thread-safe."""

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self._wake = threading.Condition()
        self._next = _Round()
        self._closing = False
        self._round_started = -ROUND_S
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

    def discard(self, writer: SegmentWriter) -> None:
        """Close a segment that nobody needs any more: it was released, or its rows were copied."""
        with self._wake:
            writer.discarded = True
            self._next.closing.append(writer)
            self._wake.notify()

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
                self._gather_round()
                current, self._next = self._next, _Round()
            error: TraceStoreError | None
            try:
                error = self._commit(current)
            except Exception as cause:  # a dead thread would leave every caller waiting
                log.exception("a sync round failed")
                error = StorageFailed(f"internal error, cause={cause!r}")
                self._distrust(current, error)
            for done in current.waiting:
                done(error)

    def _gather_round(self) -> None:
        """Under a stream, let a round grow: a sync of few bytes costs the CPU of one of many (``_wake`` is held)."""
        limit = self._round_started + ROUND_S
        while not self._closing and ROUND_BYTES_MIN <= self._next.unsynced_bytes < ROUND_BYTES_MAX:
            left = limit - time.monotonic()
            if left <= 0:
                break
            self._wake.wait(left)
        self._round_started = time.monotonic()

    def _commit(self, current: _Round) -> TraceStoreError | None:
        failures = [self._sync(writer) for writer in current.dirty.difference(current.rolling)]
        failures += [self._seal(writer) for writer in current.rolling]
        for writer in current.closing:
            writer.close()
        return next((failure for failure in failures if failure is not None), None) or self._outcomes.doubt()

    def _distrust(self, current: _Round, error: TraceStoreError) -> None:
        for writer in current.dirty.union(current.rolling):
            if not writer.discarded and writer.descriptor >= 0:
                writer.doubt(error)
                self._outcomes.sync_failed(writer, error)

    def _sync(self, writer: SegmentWriter) -> TraceStoreError | None:
        if writer.discarded:
            return None
        try:
            writer.sync()
        except TraceStoreError as error:
            if writer.discarded:
                return None
            self._outcomes.sync_failed(writer, error)
            return error
        return None

    def _seal(self, writer: SegmentWriter) -> TraceStoreError | None:
        if writer.discarded:
            return None
        try:
            writer.seal()
        except TraceStoreError:
            failure = self._sync(writer)
            if failure is None and not writer.discarded:
                self._outcomes.unsealed(writer)
            return failure
        self._outcomes.sealed(writer)
        return None
