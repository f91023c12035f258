"""The shard: one writer thread that owns every open segment, and the order of all changes.

Commands run one after another in the order they were submitted. An append is checked, compared with the catalog,
written, and entered in the catalog; ``written`` is answered there, ``synced`` by the next group commit, ``memory`` was
answered when it entered the queue.

Failures. A write that fails leaves the segment as it was and ends it; the next append starts a new one, so writes work
again as soon as the disk does. A sync that fails may have lost rows that the page cache still shows: writes are refused
until those rows have been copied. ``repair`` makes both kinds of segment whole again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, TypeGuard

from trace_store.admission import Admission, admit
from trace_store.attempt import Segment
from trace_store.catalog import Partition
from trace_store.chunk import Chunk, check_chunk
from trace_store.commands import AppendCommand, AppendResult, Command, ReleaseCommand, RollCommand, SealCommand
from trace_store.errors import StorageFailed, TraceStoreError, Unavailable
from trace_store.gate import DiskGate
from trace_store.history import Known, known_rows, release_rows
from trace_store.mixture import refuse_mixture
from trace_store.repair import Place, Repairs
from trace_store.seal import seal_attempt
from trace_store.segment.writer import ControlRow, SegmentWriter
from trace_store.stored import StoredRecords
from trace_store.syncer import Syncer
from trace_store.volume import Volume

log = logging.getLogger("trace_store.shard")

QUEUE_BYTES_MAX = 64 << 20
"""Payload accepted and not yet written. ``submit`` blocks above it."""

COMPRESS_BYTES_PER_S = 16 << 20
"""Block scales that are compressed in a second, at most, and only while nothing else waits to be written; the rest is
stored raw. zstd takes 0.33 GB/s of scales a core: this is a twentieth of one, and all of a rollout at 50 MB/s. Without
the second condition it was a fifth of the writer's time in bursts of 256 MiB."""

COMPRESS_BURST_BYTES = 4 << 20


SEGMENT_BYTES_MAX = 256 << 20
"""A segment is rolled once it is this long: a rewrite after a crash takes about a second."""

ROLL_IDLE_S = 30.0
"""A segment that got no row for this long is rolled, so that it can be uploaded and opens without a scan."""

ROLL_SEALED_S = 2.0
"""With an object store, an open segment is rolled this long after a seal in it: so a sealed trajectory is in the bucket
a few seconds later, and a steady stream of seals makes one segment per partition in that time."""

UPLOAD_BYTES_MAX = 64 << 20
"""Length of a segment with an object store: an upload is one request and holds it in memory."""

REPAIR_TICK_S = 1.0

DEFERRED_ERRORS_MAX = 10_000
"""Errors kept per partition; trajectories beyond it see their lost rows as holes at their seal."""


@dataclass(eq=False)
class _Open:
    """The open segment of a partition."""

    partition: Partition
    segment: Segment
    writer: SegmentWriter
    told: set[str] = field(default_factory=set)
    """Segments of other epochs that KNOWN rows in it name."""
    last_write_s: float = 0.0
    roll_at_s: float | None = None


class Shard:
    """Writer thread over a volume. Thread-safe."""

    def __init__(
        self,
        volume: Volume,
        clock: Callable[[], float] = time.monotonic,
        gate: DiskGate | None = None,
        upload: bool = False,
    ) -> None:
        """``gate`` brakes appends on a nearly full disk; with ``upload`` segments are rolled early and kept small."""
        self._volume, self._clock, self._gate = volume, clock, gate
        self._roll_sealed_s = ROLL_SEALED_S if upload else None
        self._segment_bytes_max = UPLOAD_BYTES_MAX if upload else SEGMENT_BYTES_MAX
        self._queue: deque[Command] = deque()
        self._queued_bytes = self._arena_bytes = 0
        self._compress_bytes, self._compress_time = float(COMPRESS_BURST_BYTES), clock()
        self._changed = threading.Condition()
        self._closing = False
        self._open: dict[int, _Open] = {}
        """By ``id`` of the partition, which the value keeps alive. The writer's thread alone changes it."""
        self._places: dict[SegmentWriter, Place] = {}
        self._next_idle_look = clock() + ROLL_IDLE_S
        self._repairs = Repairs(volume, clock, self._copied)
        self._syncer = Syncer(self)
        self._thread = threading.Thread(target=self._run, name="trace-store-write", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        """Payload accepted and not yet written."""
        return self._queued_bytes

    @property
    def refusal(self) -> str:
        """Why writes are refused now, or an empty string."""
        return self._repairs.refusal

    @property
    def _own_bytes(self) -> int:
        """Queued payload that no arena holds."""
        return self._queued_bytes - self._arena_bytes

    def submit(self, command: Command, *, urgent: bool = False) -> None:
        """Queue a command; blocks while the queue is full, unless its bytes are in an arena. An ``urgent`` one goes in
        front and never blocks.

        Raises:
            Unavailable: the store is closing.
        """
        with self._changed:
            arena_bytes = _arena_bytes(command)
            while self._own_bytes > QUEUE_BYTES_MAX and not (self._closing or urgent or arena_bytes):
                self._changed.wait()
            if self._closing:
                raise Unavailable("the store is closing")
            # From here on a caller that gives up cannot cancel it: the threads that answer must not trip over that.
            command.future.set_running_or_notify_cancel()
            (self._queue.appendleft if urgent else self._queue.append)(command)
            self._queued_bytes += command.queue_bytes
            self._arena_bytes += arena_bytes
            self._changed.notify_all()
        if _answered_at_once(command):
            command.future.set_result(AppendResult(command.chunk.records, 0))

    def close(self) -> None:
        """Carry out what was submitted, seal all segments, stop both threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        for writer in self._repairs.take_all():
            self._syncer.discard(writer)
        self._syncer.close()

    def _run(self) -> None:
        while True:
            command = self._take()
            if command is None:
                self._roll_all()
                return
            try:
                self._execute(command)
            except TraceStoreError as error:
                self._fail(command, error)
            except Exception as error:
                log.exception("command failed: %s", type(command).__name__)
                self._fail(command, StorageFailed(f"internal error, cause={error!r}"))
            finally:
                self._leave_queue(command)
                del command  # while it waits for the next one, the thread must not hold a dropped arena's memory

    def _take(self) -> Command | None:
        """The next command, or None at the end. Looks after idle and broken segments between commands."""
        while True:
            self._look_after()
            with self._changed:
                if self._queue:
                    return self._queue.popleft()
                if self._closing:
                    return None
                idle = max(self._next_idle_look - self._clock(), 0.0)
                self._changed.wait(min(REPAIR_TICK_S, idle) if self._repairs.pending else idle)

    def _look_after(self) -> None:
        try:
            if self._repairs.pending:
                self._repairs.rewrite_unsealed()
            if self._clock() >= self._next_idle_look:
                self._roll_idle()
        except Exception:
            log.exception("looking after segments failed")

    def _leave_queue(self, command: Command) -> None:
        with self._changed:
            self._queued_bytes -= command.queue_bytes
            self._arena_bytes -= _arena_bytes(command)
            self._changed.notify_all()
        if isinstance(command, AppendCommand) and command.on_left_queue is not None:
            try:
                command.on_left_queue()
            except Exception:
                log.exception("on_left_queue failed")

    def _execute(self, command: Command) -> None:
        if isinstance(command, RollCommand):
            self._roll_all()
            self._answer_synced(command.future, None)
            return
        if not (isinstance(command, ReleaseCommand) and command.trajectories is None):
            self._repairs.rewrite_doubtful()
        if isinstance(command, AppendCommand):
            self._append(command)
        elif isinstance(command, SealCommand):
            self._seal(command)
        else:
            self._release(command)

    def _fail(self, command: Command, error: TraceStoreError) -> None:
        if not _answered_at_once(command):
            command.future.set_exception(error)
            return
        # The seal of the attempt says it, or an append that waits; a newer attempt has nothing to do with it.
        deferred = self._volume.live(command.partition).deferred
        for group in command.chunk.groups:
            if len(deferred) < DEFERRED_ERRORS_MAX:
                deferred.setdefault((group.trajectory, group.attempt), error)

    def _append(self, command: AppendCommand) -> None:
        partition = self._volume.live(command.partition)
        if command.durability != "memory":  # nobody would hear it there, and these rows may be good
            for group in command.chunk.groups:
                _raise_deferred(partition, group.trajectory, group.attempt)
        check_chunk(command.chunk, partition.run.name, partition.name, partition.run.sites)
        admission, changes, known = self._admit(partition, command.chunk)
        stored = 0
        if admission.chunk is not None:
            stored = admission.chunk.records
            compress = self._may_compress(admission.chunk.scales.nbytes)
            self._write_chunk(partition, admission.chunk, compress, changes, known)
        result = AppendResult(stored, admission.duplicates)
        if command.durability == "synced":
            self._answer_synced(command.future, result)
        elif command.durability == "written":
            command.future.set_result(result)

    def _admit(self, partition: Partition, chunk: Chunk) -> tuple[Admission, int, Known | None]:
        """What of a chunk is new; the state of the catalog that decided it; and what that knew, if rows are to replace
        others of a sealed attempt. Waits while the disk is nearly full."""
        waited = False
        with StoredRecords(self._volume, partition) as records:
            while True:
                changes = partition.changes
                admission = admit(partition, chunk, records)
                if admission.chunk is not None and self._gate is not None and not waited:
                    self._gate.admit(admission.chunk.payload_bytes)
                    waited = True
                with self._volume.lock:
                    # Rows must not be stored for a catalog that another thread has changed since, as by loading a seal.
                    if changes == partition.changes:
                        replaces = any(partition.is_sealed(group.trajectory, group.attempt) for group in chunk.groups)
                        return admission, changes, self._volume.known(partition) if replaces else None

    def _write_chunk(
        self, partition: Partition, chunk: Chunk, compress: bool, changes: int, known: Known | None
    ) -> None:
        tail = self._open_segment(partition)
        if known is None:
            write = methodcaller("append_chunk", chunk, compress)
            self._write(tail, write, lambda segment, row: partition.apply_groups(segment, row, chunk.groups, changes))
            return
        # The rows replace others of a sealed attempt: to count, they must be seen to know its seal.
        told, rows = known_rows(known.stems, tail.told)

        def write_both(writer: SegmentWriter) -> None:
            if rows:
                writer.append_controls(rows)
            writer.append_chunk(chunk, compress)

        self._write(tail, write_both, lambda segment, row: partition.apply(segment, row, changes))
        tail.told = told

    def _may_compress(self, size: int) -> bool:
        """Take ``size`` out of the second's allowance, if there is as much and no command waits meanwhile."""
        now = self._clock()
        allowed = self._compress_bytes + (now - self._compress_time) * COMPRESS_BYTES_PER_S
        self._compress_bytes, self._compress_time = min(allowed, float(COMPRESS_BURST_BYTES)), now
        if self._queue or size > self._compress_bytes:
            return False
        self._compress_bytes -= size
        return True

    def _seal(self, command: SealCommand) -> None:
        partition = self._volume.live(command.partition)
        _raise_deferred(partition, command.trajectory, command.attempt)
        compared_at = -1
        with StoredRecords(self._volume, partition) as records:
            while True:
                with self._volume.lock:
                    # What another thread has loaded meanwhile would be sealed without having been compared.
                    if compared_at == partition.changes:
                        receipt, row = seal_attempt(partition, command, self._volume.server, records)
                        known = self._volume.known(partition)
                        break
                    compared_at = partition.changes
                refuse_mixture(partition, command.trajectory, command.attempt, records)
        if row is not None:
            self._write_controls(partition, [row], known)

        def publish() -> None:
            with self._volume.lock:
                partition.publish(command.trajectory, command.attempt)

        self._answer_synced(command.future, receipt, publish)

    def _release(self, command: ReleaseCommand) -> None:
        partition = self._volume.live(command.partition)
        if command.trajectories is None:
            try:
                command.future.set_result(self._volume.release_partition(partition))
            finally:
                if self._volume.is_released(partition):
                    self._forget(partition)
            return
        with self._volume.lock:
            rows = self._volume.release_rows(partition, command.trajectories)
            known = self._volume.known(partition)
        if rows:
            self._write_controls(partition, rows, known)
        self._answer_synced(command.future, len(rows))

    def _write_controls(self, partition: Partition, controls: list[ControlRow], known: Known) -> None:
        """Write seals or releases, behind KNOWN rows for what their decision knew and the segment does not name yet."""
        tail = self._open_segment(partition)
        told, rows = known_rows(known.stems, tail.told)
        self._write(
            tail,
            methodcaller("append_controls", [*rows, *controls]),
            lambda segment, first_row: partition.apply(segment, first_row, known.changes),
        )
        tail.told = told
        self._roll_soon(partition)

    def _write(self, tail: _Open, write: Callable[[SegmentWriter], Any], enter: Callable[[Segment, int], None]) -> None:
        """Write rows to an open segment and enter those from a first row on in the catalog."""
        partition = tail.partition
        writer, first_row = tail.writer, len(tail.writer.index)
        try:
            write(writer)
        except TraceStoreError:
            self._end(partition)
            raise
        with self._volume.lock:
            tail.segment.disk_bytes = writer.written_bytes
            enter(tail.segment, first_row)
        self._syncer.wrote(writer)
        tail.last_write_s = self._clock()
        partition.written_at = self._volume.now()
        if writer.written_bytes >= self._segment_bytes_max:
            self._roll(partition)

    def _open_segment(self, partition: Partition) -> _Open:
        tail = self._open.get(id(partition))
        if tail is not None and tail.writer.abandoned is None:
            return tail
        if tail is not None:
            self._end(partition)
        segment, writer = self._volume.open_writer(partition)
        tail = self._open[id(partition)] = _Open(partition, segment, writer)
        self._places[writer] = (partition, segment)
        released = self._volume.released_segments(partition)
        if released:
            self._repeat_release(tail, released)
        return tail

    def _repeat_release(self, tail: _Open, stems: frozenset[str]) -> None:
        """Say in what is written anew what it does not go with: the deletion of the old segments may take for ever."""
        try:
            tail.writer.append_controls(release_rows(stems))
        except TraceStoreError:
            self._end(tail.partition)
            raise
        with self._volume.lock:
            tail.partition.apply(tail.segment, 0, tail.partition.changes)

    def _end(self, partition: Partition) -> None:
        """Stop adding to a segment whose write or sync failed. What it holds stays readable; ``repair`` copies it."""
        tail = self._open.pop(id(partition))
        if not len(tail.writer.index):
            self._places.pop(tail.writer, None)
            self._volume.drop_empty(partition, tail.segment, tail.writer)
            return
        self._syncer.wrote(tail.writer)
        self._repairs.add_unsealed(tail.writer, (partition, tail.segment))

    def _roll(self, partition: Partition) -> None:
        self._syncer.roll(self._open.pop(id(partition)).writer)

    def _roll_all(self) -> None:
        for tail in list(self._open.values()):
            self._roll(tail.partition)

    def _roll_soon(self, partition: Partition) -> None:
        """A seal or release waits in the open segment for its upload."""
        tail = self._open.get(id(partition))
        if self._roll_sealed_s is not None and tail is not None and tail.roll_at_s is None:
            tail.roll_at_s = self._clock() + self._roll_sealed_s
            self._next_idle_look = min(self._next_idle_look, tail.roll_at_s)

    def _roll_idle(self) -> None:
        now = self._clock()
        for tail in list(self._open.values()):
            if now - tail.last_write_s >= ROLL_IDLE_S or (tail.roll_at_s is not None and now >= tail.roll_at_s):
                self._roll(tail.partition)
        due = (tail.roll_at_s for tail in self._open.values() if tail.roll_at_s is not None)
        self._next_idle_look = min(due, default=now + ROLL_IDLE_S / 4)

    def _forget(self, partition: Partition) -> None:
        """Let go of every segment of a partition that is being released."""
        tail = self._open.pop(id(partition), None)
        gone = {writer for writer, place in list(self._places.items()) if place[0] is partition}
        for writer in gone.union(self._repairs.forget(partition), [tail.writer] if tail is not None else []):
            self._places.pop(writer, None)
            self._syncer.discard(writer)

    def _answer_synced(self, future: Future[Any], result: Any, before: Callable[[], None] | None = None) -> None:
        def done(error: TraceStoreError | None) -> None:
            if error is not None:
                future.set_exception(error)
                return
            if before is not None:
                before()
            future.set_result(result)

        self._syncer.when_synced(done)

    # -- outcomes, on the syncer's thread

    def sealed(self, writer: SegmentWriter) -> None:
        place = self._places.pop(writer, None)
        if place is not None:
            self._volume.stamp(writer.path)
            with self._volume.lock:
                place[1].path, place[1].disk_bytes = writer.path, writer.written_bytes
        writer.close()

    def unsealed(self, writer: SegmentWriter) -> None:
        place = self._places.get(writer)
        if place is not None:
            self._repairs.add_unsealed(writer, place)

    def sync_failed(self, writer: SegmentWriter, error: TraceStoreError) -> None:
        place = self._places.get(writer)
        if place is not None:
            with self._volume.lock:
                place[1].path = writer.path
            self._repairs.add_doubtful(writer, place, error)

    def doubt(self) -> TraceStoreError | None:
        return self._repairs.doubt()

    def _copied(self, writer: SegmentWriter) -> None:
        """Writer's thread: the rows live in another file now."""
        place = self._places.pop(writer, None)
        if place is not None:
            tail = self._open.get(id(place[0]))
            if tail is not None and tail.writer is writer:
                del self._open[id(place[0])]
        self._syncer.discard(writer)


def _arena_bytes(command: Command) -> int:
    return command.queue_bytes if isinstance(command, AppendCommand) and command.in_arena else 0


def _answered_at_once(command: Command) -> TypeGuard[AppendCommand]:
    return isinstance(command, AppendCommand) and command.durability == "memory"


def _raise_deferred(partition: Partition, trajectory: str, attempt: int) -> None:
    if partition.deferred and (trajectory, attempt) in partition.deferred:
        raise partition.deferred.pop((trajectory, attempt))
