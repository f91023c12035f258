"""A data directory and the catalog over it: layout, lock, opening, registering, releasing.

    ROOT/LOCK                                      held by the one process that owns the directory
    ROOT/runs/RUN/manifest-EPOCH.arrow             a registration: a segment without records that holds the site table
    ROOT/runs/RUN/PARTITION/SEQUENCE-EPOCH.arrow   sealed segments (``.open`` while written)
    ROOT/runs/RUN/.released-*                      a released partition on its way out
    ROOT/set-aside/                                files that were no segments, or damaged
    ROOT/clock                                     how time goes on (``lifetime``)

RUN and PARTITION are ``naming.directory_name`` of the names. ``lock`` guards the catalog; methods take it themselves.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import xxhash

from trace_store.attempt import Segment
from trace_store.catalog import Partition, Run
from trace_store.checksum import RowKind
from trace_store.deleter import Deleter
from trace_store.errors import NotFound, SchemaMismatch, StorageFailed, TraceStoreError
from trace_store.fetch import OpenSegment
from trace_store.history import Known
from trace_store.naming import MANIFEST_PREFIX, RELEASED_OBJECTS, RELEASED_PREFIX, directory_name, segment_name
from trace_store.opening import find_run
from trace_store.record import Site
from trace_store.recovery import keep_copy, set_aside
from trace_store.segment.index import SegmentIndex
from trace_store.segment.schema import SEALED_SUFFIX, SegmentHeader
from trace_store.segment.writer import ControlRow, SegmentWriter, storage_error, sync_directory
from trace_store.storage.base import Source
from trace_store.storage.local import LocalSource
from trace_store.storage.objects import Objects, note_objects

log = logging.getLogger("trace_store.volume")

CLOCK_APART_S = 2.0
"""Difference from the machine's clock at which files get the store's time; file systems may round to whole seconds."""


class Volume:
    """The catalog of one data directory. ``epoch`` is unique to this opening and part of every segment name."""

    def __init__(self, root: Path, server: str, epoch: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.root, self.server, self.epoch = root, server, epoch
        self._clock = clock
        self._start = time.time() - clock()
        self.lock = threading.RLock()
        self.runs: dict[str, Run] = {}
        self.objects: Objects | None = None
        self.left_open: list[tuple[Partition, Segment]] = []
        """Segments that there was no room to seal at start."""
        self.deleter = Deleter(clock)
        self._next_segment = 0
        self._next_sequence: dict[Path, int] = {}
        self._epochs: dict[Path, str] = {}
        """Of partitions that were released since: what is written anew must not look as if it knew the old rows."""
        self._released: dict[Path, frozenset[str]] = {}
        try:
            _make_durable(root / "runs")
            self._lock_file = os.open(root / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageFailed(f"another process owns the data directory, path={root}") from None
        except OSError as error:
            raise StorageFailed(
                f"the data directory cannot be used, path={root} cause={os.strerror(error.errno or 0).lower()};"
                f" make it writable for uid {os.getuid()}"
            ) from error
        try:
            for entry in sorted((root / "runs").iterdir()):
                self._open_run(entry)
        except OSError as error:
            self.close()
            raise error if isinstance(error, TraceStoreError) else storage_error(error, root) from error
        except BaseException:
            self.close()
            raise

    def now(self) -> float:
        """Seconds since 1970 at start, plus what the clock has counted: a jump of the wall clock ages nothing."""
        return self._start + self._clock()

    def set_time(self, now: float) -> None:
        """Go on from this time (``lifetime``)."""
        self._start = now - self._clock()

    def newest_write(self) -> float:
        """When the newest segment was written, 0 if there is none."""
        with self.lock:
            partitions = (partition for run in self.runs.values() for partition in run.partitions.values())
            return max((partition.written_at for partition in partitions), default=0.0)

    def stamp(self, path: Path) -> None:
        """Give a sealed file the store's time where the machine's clock says another one: its age counts from there."""
        now = self.now()
        if abs(time.time() - now) > CLOCK_APART_S:
            with contextlib.suppress(OSError):
                os.utime(path, (now, now))

    def close(self) -> None:
        self.deleter.close()
        os.close(self._lock_file)

    # -- runs and partitions

    def register(self, name: str, sites: tuple[Site, ...]) -> bool:
        """Create a run durably; True if it is new.

        Raises:
            SchemaMismatch: it exists with another site table.
        """
        with self.lock:
            known = self.runs.get(name)
            if known is not None:
                _compare_tables(name, known.sites, sites)
                return False
            directory = self.root / "runs" / directory_name(name)
            try:
                directory.mkdir(exist_ok=True)
                sync_directory(directory.parent)
            except OSError as error:
                raise storage_error(error, directory) from error
            header = SegmentHeader(name, "", sites, self.server, 0)
            writer = SegmentWriter(directory, MANIFEST_PREFIX + self.epoch, header)
            try:
                writer.seal()
            except TraceStoreError:
                writer.remove()
                raise
            writer.close()
            self.runs[name] = Run(name, sites, directory)
            return True

    def adopt(self, name: str, sites: tuple[Site, ...]) -> Run:
        """A run that another server registered; its directory appears with its first segment here."""
        with self.lock:
            return self.runs.setdefault(name, Run(name, sites, self.root / "runs" / directory_name(name)))

    def run(self, name: str) -> Run:
        """A registered run.

        Raises:
            NotFound: no such run.
        """
        run = self.runs.get(name)
        if run is None:
            raise NotFound(f"unknown run, register it first, run={name!r}")
        return run

    def partition(self, run: Run, name: str) -> Partition:
        """A partition of a run, made in memory when new; its directory appears with its first segment."""
        with self.lock:
            found = run.partitions.get(name)
            if found is None:
                found = run.partitions[name] = Partition(run, name, run.directory / directory_name(name))
            return found

    def live(self, partition: Partition) -> Partition:
        """The partition of this name now: a release may have replaced the object a queued command holds."""
        return self.partition(partition.run, partition.name)

    # -- segments

    def open_writer(self, partition: Partition) -> tuple[Segment, SegmentWriter]:
        """Start the partition's next segment."""
        directory = partition.directory
        try:
            _make_durable(directory)
        except OSError as error:
            raise storage_error(error, directory) from error
        sequence = self._next_sequence.get(directory, 0)
        header = SegmentHeader(partition.run.name, partition.name, partition.run.sites, self.server, sequence)
        writer = SegmentWriter(directory, segment_name(sequence, self.epoch_of(partition)), header)
        self._next_sequence[directory] = sequence + 1
        with self.lock:
            segment = Segment(self._segment_number(), writer.path, writer.index, writer.written_bytes)
            partition.segments[segment.number] = segment
        return segment, writer

    def drop_empty(self, partition: Partition, segment: Segment, writer: SegmentWriter) -> None:
        """Remove a segment into which not one row could be written."""
        with self.lock:
            partition.segments.pop(segment.number, None)
        writer.remove()

    def lease(self, partition: Partition, number: int) -> OpenSegment:
        """A segment opened for reading; the caller closes it. Wants the lock held.

        Raises:
            StorageFailed: it cannot be opened.
        """
        segment = partition.segments[number]
        header = SegmentHeader(partition.run.name, partition.name, partition.run.sites, self.server, 0)
        return OpenSegment(self._source(partition, segment), segment.path.name, header, segment.index)

    def _source(self, partition: Partition, segment: Segment) -> Source:
        segment.read_at = self._clock()
        if segment.local:
            try:
                return LocalSource(segment.path, segment.path.name)
            except StorageFailed:
                if not segment.uploaded or self.objects is None:
                    raise
        if self.objects is None:
            raise StorageFailed(f"the segment is in an object store, segment={segment.path.name}")
        return self.objects.source(partition, segment)

    def spare(self, partition: Partition, number: int) -> OpenSegment | None:
        """The uploaded copy of a local segment, if there is one. Wants the lock held; makes no request."""
        segment = partition.segments[number]
        if self.objects is None or not (segment.local and segment.uploaded):
            return None
        header = SegmentHeader(partition.run.name, partition.name, partition.run.sites, self.server, 0)
        return OpenSegment(self.objects.source(partition, segment), segment.path.name, header, segment.index)

    def distrust(self, partition: Partition, number: int) -> None:
        """A local segment gave damaged rows and its uploaded copy stood in: serve that one from now on."""
        with self.lock:
            segment = partition.segments.get(number)
            if segment is None or self.objects is None or not (segment.local and segment.uploaded):
                return
            try:
                keep_copy(segment.path, self.root, "rows do not match their checksums; the uploaded copy is used")
            except OSError as error:
                log.error("a damaged segment cannot be kept, segment=%s cause=%s", segment.path.name, error.strerror)
            self.objects.drop_local(segment)

    def segment_names(self, run_directory: str, partition_directory: str) -> set[str]:
        """File names of the segments that the catalog has of a place. Wants the lock held."""
        directory = self.root / "runs" / run_directory / partition_directory
        for run in self.runs.values():
            if run.directory.name == run_directory:
                found = (p for p in run.partitions.values() if p.directory == directory)
                return {segment.path.name for partition in found for segment in partition.segments.values()}
        return set()

    def remote_segment(
        self, partition: Partition, name: str, header: SegmentHeader, index: SegmentIndex, size: int
    ) -> Segment:
        """A segment of the object store, to be loaded into the partition. Wants the lock held."""
        following = max(self._next_sequence.get(partition.directory, 0), header.sequence + 1)
        self._next_sequence[partition.directory] = following
        return Segment(
            self._segment_number(),
            partition.directory / name,
            index,
            local=False,
            uploaded=True,
            foreign=header.server != self.server,
            object_bytes=size,
            version=header.version,
        )

    def known(self, partition: Partition) -> Known:
        """What a seal or release that is decided now speaks of. Wants the lock held."""
        epoch = self.epoch_of(partition)
        others = tuple(s.path.stem for s in partition.segments.values() if s.epoch != epoch)
        return Known(others, partition.changes)

    def epoch_of(self, partition: Partition) -> str:
        """Epoch of what is written to a partition now: that of the opening, another one after each release."""
        return self._epochs.get(partition.directory, self.epoch)

    def note_released(self, directory: Path, names: Iterable[str]) -> None:
        """A partition's objects of these names are released and may be there for a while."""
        stems = {Path(name).stem for name in names}
        with self.lock:
            self._released[directory] = self._released.get(directory, frozenset()).union(stems)

    def released_segments(self, partition: Partition) -> frozenset[str]:
        """Names of released segments that other servers may still see in the object store."""
        return self._released.get(partition.directory, frozenset())

    def is_whole(self) -> bool:
        """Whether all its segments are known for sure, so that rows which a seal counts and nobody has are lost.

        Never so with an object store: an object that a listing left out would let other rows into a sealed attempt.
        """
        return self.objects is None

    # -- release

    def release_rows(self, partition: Partition, trajectories: Sequence[str]) -> list[ControlRow]:
        """Release rows to write for the trajectories that are there."""
        return [(RowKind.RELEASE, name, 0, 0, 0, 0) for name in trajectories if name in partition.trajectories]

    def release_partition(self, partition: Partition) -> int:
        """Forget a partition: rename its directory, which is atomic, then delete the files on a thread of their own.

        Returns:
            Trajectories that were there.

        Raises:
            StorageFailed: it stands, or (``is_released``) it is gone and a power cut might bring it back: repeat this.
        """
        with self.lock:
            unique = f"{self._segment_number()}-{self.epoch}"
            target = partition.run.directory / f"{RELEASED_PREFIX}{partition.directory.name}-{unique}"
            written = True
            keys = self.objects.keys(partition) if self.objects is not None else []
            if keys:
                note_objects(partition.directory, keys)
            try:
                os.rename(partition.directory, target)
            except FileNotFoundError:
                written = False
            except OSError as error:
                raise storage_error(error, partition.directory) from error
            partition.run.forget(partition.name)
            self._epochs[partition.directory] = xxhash.xxh3_64_hexdigest(unique.encode())
        try:
            # Also when nothing was written: this may repeat a release whose rename could not be made durable.
            if partition.run.directory.exists():
                sync_directory(partition.run.directory)
        except OSError as error:
            raise storage_error(error, partition.directory) from error
        finally:
            if self.objects is not None:
                self.objects.released(partition, target, keys)
            elif written:
                self._delete(target, partition.disk_bytes)
        return len(partition.trajectories)

    def _delete(self, directory: Path, size: int = 0) -> None:
        """Delete a released partition's files; one that names objects is left to the object tier."""

        def delete() -> None:
            if directory.exists() and not (directory / RELEASED_OBJECTS).exists():
                shutil.rmtree(directory)

        self.deleter.submit(directory.name, delete, size)

    def is_released(self, partition: Partition) -> bool:
        """Whether the catalog has another partition of this name, or none."""
        return partition.run.partitions.get(partition.name) is not partition

    # -- opening

    def _open_run(self, directory: Path) -> None:
        if not directory.is_dir():
            set_aside(directory, self.root, "no run")
            return
        found = find_run(directory, self.root, self._delete)
        if found is None:
            return
        run = self.runs[found.name] = Run(found.name, found.sites, directory)
        for name, (path, segments) in found.partitions.items():
            partition = self.partition(run, name)
            loaded: list[Segment] = []
            for segment_path, header, index in segments:
                found_file = segment_path.stat()
                number = self._segment_number()
                segment = Segment(number, segment_path, index, found_file.st_size, version=header.version)
                loaded.append(segment)
                if segment_path.suffix != SEALED_SUFFIX:
                    self.left_open.append((partition, segment))
                partition.written_at = max(partition.written_at, found_file.st_mtime)
                self._next_sequence[path] = header.sequence + 1
            partition.load(*loaded)

    def _segment_number(self) -> int:
        self._next_segment += 1
        return self._next_segment


def _make_durable(path: Path) -> None:
    """Create a directory and those above it; their entries survive a power cut."""
    missing = [path]
    while not missing[-1].exists():
        missing.append(missing[-1].parent)
    for directory in reversed(missing[:-1]):
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)
    sync_directory(path.parent)


def _compare_tables(run: str, known: tuple[Site, ...], offered: tuple[Site, ...]) -> None:
    if known == offered:
        return
    if len(known) != len(offered):
        difference = f"sites={len(offered)} registered={len(known)}"
    else:
        position = next(i for i, pair in enumerate(zip(known, offered, strict=True)) if pair[0] != pair[1])
        difference = f"site={offered[position]} registered={known[position]}"
    raise SchemaMismatch(f"the run has another site table, run={run!r} {difference}", argument="sites")
