"""The shard: one writer thread that owns every open segment, and the order of all changes.

Commands run one after another in the order they were submitted. An append is checked, compared with the catalog,
written, and entered in the catalog; ``written`` is answered there, ``synced`` by the next group commit, ``memory`` was
answered when it entered the queue.

Failures. A write that fails leaves the segment as it was and retires it; the next append starts a new one, so writes
work again as soon as the disk does. A sync that fails may have lost rows that the page cache still shows: writes are
refused until those rows have been copied to a new segment and synced (tried at most once a second).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from operator import methodcaller
from typing import Any

from trace_store.admission import admit
from trace_store.catalog import Partition, Segment
from trace_store.chunk import check_chunk
from trace_store.commands import AppendCommand, AppendResult, Command, ReleaseCommand, RollCommand, SealCommand
from trace_store.errors import StorageFailed, TraceStoreError, Unavailable
from trace_store.recovery import rewrite
from trace_store.seal import seal_attempt
from trace_store.segment.scan import scan_segment
from trace_store.segment.writer import SegmentWriter
from trace_store.syncer import Syncer
from trace_store.volume import Volume

log = logging.getLogger("trace_store.shard")

QUEUE_BYTES_MAX = 64 << 20
"""Payload accepted and not yet written. ``submit`` blocks above it."""

SEGMENT_BYTES_MAX = 256 << 20
"""A segment is rolled once it is this long: a rewrite after a crash takes about a second."""

ROLL_IDLE_S = 30.0
"""A segment that got no row for this long is rolled, so that it can be uploaded and opens without a scan."""

REWRITE_RETRY_S = 1.0

DEFERRED_ERRORS_MAX = 10_000
"""Errors kept per partition; trajectories beyond it see their lost rows as holes at their seal."""


class Shard:
    """Writer thread over a volume. Thread-safe."""

    def __init__(self, volume: Volume, clock: Callable[[], float] = time.monotonic) -> None:
        self._volume, self._clock = volume, clock
        self._queue: deque[Command] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._writers: dict[int, tuple[Partition, Segment, SegmentWriter]] = {}
        self._last_write: dict[int, float] = {}
        self._suspects: list[SegmentWriter] = []
        self._last_rewrite = -REWRITE_RETRY_S
        self._places: dict[SegmentWriter, tuple[Partition, Segment]] = {}
        self._syncer = Syncer(self._rolled, self._sync_failed)
        self._thread = threading.Thread(target=self._run, name="trace-store-write", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        """Payload accepted and not yet written."""
        return self._queued_bytes

    @property
    def refusal(self) -> str:
        """Why writes are refused now, or an empty string."""
        suspects = self._suspects
        return str(suspects[0].abandoned) if suspects else ""

    def submit(self, command: Command) -> None:
        """Queue a command; blocks while the queue is full.

        Raises:
            Unavailable: the store is closing.
        """
        with self._changed:
            while self._queued_bytes > QUEUE_BYTES_MAX and not self._closing:
                self._changed.wait()
            if self._closing:
                raise Unavailable("the store is closing")
            self._queue.append(command)
            self._queued_bytes += command.queue_bytes
            self._changed.notify_all()
        if isinstance(command, AppendCommand) and command.durability == "memory":
            command.future.set_result(AppendResult(command.chunk.records, 0))

    def close(self) -> None:
        """Carry out what was submitted, seal all segments, stop both threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
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

    def _take(self) -> Command | None:
        with self._changed:
            while not self._queue:
                if self._closing:
                    return None
                if not self._changed.wait(timeout=ROLL_IDLE_S):
                    self._roll_idle()
            return self._queue.popleft()

    def _leave_queue(self, command: Command) -> None:
        with self._changed:
            self._queued_bytes -= command.queue_bytes
            self._changed.notify_all()
        if isinstance(command, AppendCommand) and command.on_left_queue is not None:
            command.on_left_queue()

    def _execute(self, command: Command) -> None:
        if isinstance(command, RollCommand):
            self._roll_all()
            self._answer_synced(command.future, None)
            return
        if self._suspects and not (isinstance(command, ReleaseCommand) and command.trajectories is None):
            self._rewrite_suspects()
        if isinstance(command, AppendCommand):
            self._append(command)
        elif isinstance(command, SealCommand):
            self._seal(command)
        else:
            self._release(command)

    def _fail(self, command: Command, error: TraceStoreError) -> None:
        if not command.future.done():
            command.future.set_exception(error)
        elif isinstance(command, AppendCommand):
            # Answered from memory: the trajectory's next append or seal says it.
            deferred = self._volume.live(command.partition).deferred
            for group in command.chunk.groups:
                if len(deferred) < DEFERRED_ERRORS_MAX:
                    deferred.setdefault(group.trajectory, error)

    def _append(self, command: AppendCommand) -> None:
        partition = self._volume.live(command.partition)
        for group in command.chunk.groups:
            _raise_deferred(partition, group.trajectory)
        check_chunk(command.chunk, partition.run.name, partition.name, partition.run.sites)
        admission = admit(partition, command.chunk, partial(self._volume.read_record, partition))
        stored = 0
        if admission.chunk is not None:
            stored = admission.chunk.records
            self._write(partition, methodcaller("append_chunk", admission.chunk))
        result = AppendResult(stored, admission.duplicates)
        if command.durability == "synced":
            self._answer_synced(command.future, result)
        elif command.durability == "written":
            command.future.set_result(result)

    def _seal(self, command: SealCommand) -> None:
        partition = self._volume.live(command.partition)
        _raise_deferred(partition, command.trajectory)
        receipt, row = seal_attempt(partition, command, self._volume.server)
        if row is not None:
            self._write(partition, methodcaller("append_control", *row))
            with self._volume.lock:
                partition.mark_sealed(command.trajectory, command.attempt, command.tokens, command.prompt_tokens)

        def publish() -> None:
            with self._volume.lock:
                partition.publish(command.trajectory, command.attempt)

        self._answer_synced(command.future, receipt, publish)

    def _release(self, command: ReleaseCommand) -> None:
        if command.trajectories is None:
            entry = self._writers.pop(id(command.partition), None)
            if entry is not None:
                self._syncer.forget(entry[2])
                self._places.pop(entry[2], None)
                entry[2].close()
            self._suspects = [w for w in self._suspects if self._places.get(w, (None,))[0] is not command.partition]
            self._syncer.suspect(self._suspect_error())
            command.future.set_result(self._volume.release_partition(command.partition))
            return
        partition = self._volume.live(command.partition)
        rows = self._volume.release_rows(partition, command.trajectories)
        for row in rows:
            self._write(partition, methodcaller("append_control", *row))
        self._answer_synced(command.future, len(rows))

    def _write(self, partition: Partition, write: Callable[[SegmentWriter], Any]) -> None:
        """Write rows to the partition's open segment and enter them in the catalog."""
        segment, writer = self._open_writer(partition)
        first_row = len(writer.index)
        try:
            write(writer)
        except TraceStoreError:
            self._retire(partition)
            raise
        with self._volume.lock:
            segment.disk_bytes = writer.written_bytes
            partition.apply(segment, first_row)
        self._syncer.wrote(writer)
        self._last_write[id(partition)] = self._clock()
        if writer.written_bytes >= SEGMENT_BYTES_MAX:
            self._roll(partition)

    def _open_writer(self, partition: Partition) -> tuple[Segment, SegmentWriter]:
        entry = self._writers.get(id(partition))
        if entry is not None and entry[2].abandoned is None:
            return entry[1], entry[2]
        if entry is not None:
            self._retire(partition)
        segment, writer = self._volume.open_writer(partition)
        self._writers[id(partition)] = (partition, segment, writer)
        self._places[writer] = (partition, segment)
        return segment, writer

    def _retire(self, partition: Partition) -> None:
        """Stop adding to a segment whose write failed. What it holds stays readable and is rewritten at next start."""
        _, segment, writer = self._writers.pop(id(partition))
        if len(writer.index):
            self._syncer.wrote(writer)
            return
        self._places.pop(writer, None)
        self._volume.drop_empty(partition, segment, writer)

    def _roll(self, partition: Partition) -> None:
        _, _, writer = self._writers.pop(id(partition))
        self._last_write.pop(id(partition), None)
        self._syncer.roll(writer)

    def _roll_all(self) -> None:
        for partition, _, _ in list(self._writers.values()):
            self._roll(partition)

    def _roll_idle(self) -> None:
        now = self._clock()
        for key, (partition, _, _) in list(self._writers.items()):
            if now - self._last_write.get(key, now) >= ROLL_IDLE_S:
                self._roll(partition)

    def _answer_synced(self, future: Future[Any], result: Any, before: Callable[[], None] | None = None) -> None:
        def done(error: TraceStoreError | None) -> None:
            if error is not None:
                future.set_exception(error)
                return
            if before is not None:
                before()
            future.set_result(result)

        self._syncer.when_synced(done)

    def _rolled(self, writer: SegmentWriter) -> None:
        """Syncer's thread: a segment is sealed."""
        _, segment = self._places.pop(writer)
        with self._volume.lock:
            segment.path, segment.disk_bytes = writer.path, writer.written_bytes
        writer.close()

    def _sync_failed(self, writer: SegmentWriter, error: TraceStoreError) -> None:
        """Syncer's thread: rows of this segment may be lost."""
        log.error("sync failed, writes are refused until its rows are rewritten, segment=%s: %s", writer.name, error)
        self._suspects.append(writer)
        self._syncer.suspect(self._suspect_error())

    def _suspect_error(self) -> StorageFailed | None:
        if not self._suspects:
            return None
        return StorageFailed(f"rows await a rewrite after a failed sync: {self.refusal}")

    def _rewrite_suspects(self) -> None:
        """Copy segments whose sync failed to new, synced ones.

        Raises:
            StorageFailed, StorageFull: the disk still fails; writes stay refused.
        """
        if self._clock() - self._last_rewrite < REWRITE_RETRY_S:
            raise self._suspect_error() or StorageFailed("writes are refused")
        self._last_rewrite = self._clock()
        for writer in list(self._suspects):
            partition, segment = self._places[writer]
            self._writers = {k: v for k, v in self._writers.items() if v[2] is not writer}
            scan = scan_segment(writer.path)
            path, index = rewrite(writer.path, scan)
            with self._volume.lock:
                segment.path, segment.index, segment.disk_bytes = path, index, path.stat().st_size
                if scan.damage or len(index) != len(writer.index):
                    partition.rebuild()
            writer.close()
            self._places.pop(writer)
            self._suspects.remove(writer)
            log.warning("rows of segment=%s rewritten and synced, writes are accepted again", writer.name)
        self._syncer.suspect(None)


def _raise_deferred(partition: Partition, trajectory: str) -> None:
    if partition.deferred and trajectory in partition.deferred:
        raise partition.deferred.pop(trajectory)
