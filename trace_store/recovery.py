"""Start-up: turn a partition's directory, however it was left, into sealed segments, and set aside what is none.

    NAME.arrow        opened by its index; scanned and rewritten if only the index is damaged
    NAME.open         left by a crash: good rows are rewritten as NAME.arrow, the rest is dropped with a reason
    NAME.recovering   a rewrite that a crash cut short: removed, its source is still there
    no room           the file is served as it is; ``repair`` rewrites it once there is room
    another version   left alone with a logged error: a library that knows it will read it
    anything else     moved to ``set-aside/`` with a logged reason; nothing is deleted that we did not write

Rewriting is idempotent: a crash at any point leaves the source, the result, or both, and both means the result counts.
What is dropped as a torn tail was never acknowledged as synced; of a file with any other damage a copy is kept. A copy
is as old as its source: the file's time says when its rows were written, on the store's clock (``lifetime``).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from trace_store.errors import FormatError, StorageFull, TraceStoreError
from trace_store.lifetime import last_sign
from trace_store.segment.index import SegmentIndex
from trace_store.segment.reader import open_sealed
from trace_store.segment.scan import Scan, scan_segment
from trace_store.segment.schema import OPEN_SUFFIX, SEALED_SUFFIX, SegmentHeader, UnknownVersion
from trace_store.segment.writer import SegmentWriter, storage_error, sync_directory

log = logging.getLogger("trace_store.recovery")

RECOVERING_SUFFIX = ".recovering"
SET_ASIDE = "set-aside"

OpenedSegment = tuple[Path, SegmentHeader, SegmentIndex]


def recover_directory(directory: Path, root: Path) -> Iterator[OpenedSegment]:
    """Sealed segments of one directory in write order, after repair.

    Raises:
        StorageFailed: the disk does not allow the repair; nothing was lost.
    """
    names = sorted(entry.name for entry in os.scandir(directory) if entry.is_file(follow_symlinks=False))
    opened: dict[str, OpenedSegment] = {}
    for name in names:
        path = directory / name
        if name.endswith(RECOVERING_SUFFIX):
            path.unlink()
        elif name.endswith(SEALED_SUFFIX):
            segment = _open_or_repair(path, root)
            if segment is not None:
                opened[path.stem] = segment
        elif not name.endswith(OPEN_SUFFIX):
            set_aside(path, root, "no segment")
    for name in names:
        path = directory / name
        if name.endswith(OPEN_SUFFIX):
            if path.stem in opened:
                path.unlink()  # a crash between the two last steps of a rewrite
                continue
            segment = _recover_open(path, root)
            if segment is not None:
                opened[path.stem] = segment
    yield from sorted(opened.values(), key=lambda segment: (segment[1].sequence, segment[0].name))


def _open_or_repair(path: Path, root: Path) -> OpenedSegment | None:
    try:
        try:
            header, index = open_sealed(path)
            return path, header, index
        except UnknownVersion:
            raise
        except FormatError as error:
            log.error("segment=%s cannot be opened by its index, scanning it: %s", path.name, error)
            scan = scan_segment(path)
    except UnknownVersion as error:
        log.error("segment=%s left alone: %s", path.name, error)
        return None
    except FormatError as error:
        set_aside(path, root, str(error))
        return None
    if scan.torn_bytes:
        # A sealed segment was synced as a whole, so its end is as precious as the rest.
        scan.damage.append(f"unreadable bytes at the end dropped, bytes={scan.torn_bytes}")
    if not len(scan.index):
        set_aside(path, root, "no row of it is readable")
        return None
    return _rewrite_logged(path, root, scan)


def _recover_open(path: Path, root: Path) -> OpenedSegment | None:
    try:
        scan = scan_segment(path)
    except UnknownVersion as error:
        log.error("segment=%s left alone: %s", path.name, error)
        return None
    except FormatError as error:
        if path.stat().st_size == 0:
            path.unlink()  # a crash right after it was created
        else:
            set_aside(path, root, str(error))
        return None
    if scan.torn_bytes:
        log.warning("segment=%s torn tail dropped, bytes=%d", path.name, scan.torn_bytes)
    if not len(scan.index) and not scan.damage:
        path.unlink()
        return None
    return _rewrite_logged(path, root, scan)


def _rewrite_logged(path: Path, root: Path, scan: Scan) -> OpenedSegment:
    for line in scan.damage:
        log.warning("segment=%s %s", path.name, line)
    if scan.damage:
        try:
            keep_copy(path, root, f"{len(scan.damage)} damaged parts")
        except OSError as error:
            log.error("segment=%s no copy of it is kept: %s", path.name, error.strerror)
    written = _written_at(path, root)
    try:
        sealed, index = rewrite(path, scan)
    except StorageFull as error:
        log.error("segment=%s stays as it is until the disk has room: %s", path.name, error)
        _sync_file(path)
        sealed, index = path, scan.index
    with contextlib.suppress(OSError):
        os.utime(sealed, (written, written))
    return sealed, scan.header, index


def _written_at(path: Path, root: Path) -> float:
    """When a segment got its last row. An open one was written until the end, and its file may have the time of a wrong
    clock, as only sealed ones are given the store's."""
    noted = last_sign(root) if path.suffix == OPEN_SUFFIX else None
    return noted if noted is not None else path.stat().st_mtime


def _sync_file(path: Path) -> None:
    """What is served after a start must not be lost by a power cut, and a killed process leaves it unsynced."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise storage_error(error, path) from error


def rewrite(path: Path, scan: Scan) -> tuple[Path, SegmentIndex]:
    """Write the good rows of a scan as the sealed segment of the same name and remove the source.

    Raises:
        StorageFailed, StorageFull: the source stands as it was.
    """
    writer = copy_rows(path, scan)
    return replace_source(path, writer), writer.index


def copy_rows(path: Path, scan: Scan) -> SegmentWriter:
    """Write the good rows of a scan to a finished, synced file beside the source, not yet under the sealed name.

    Raises:
        StorageFailed, StorageFull: the source stands as it was.
    """
    left_over = path.with_suffix(RECOVERING_SUFFIX)
    try:
        left_over.unlink(missing_ok=True)  # of an attempt that failed and could not even remove it
    except OSError as error:
        raise storage_error(error, left_over) from error
    writer = SegmentWriter(path.parent, path.stem, scan.header, RECOVERING_SUFFIX)
    try:
        for batch in scan.batches:
            writer.append_batch(batch)
        writer.finish()
    except TraceStoreError:
        writer.remove()
        raise
    return writer


def replace_source(path: Path, writer: SegmentWriter) -> Path:
    """Give a copy the sealed name and remove its source.

    Raises:
        StorageFailed, StorageFull: source, copy or both are there; both are whole, and the copy counts.
    """
    try:
        sealed = writer.publish()
        if path != sealed:
            path.unlink(missing_ok=True)
            sync_directory(path.parent)
    except OSError as error:
        raise error if isinstance(error, TraceStoreError) else storage_error(error, path) from error
    finally:
        writer.close()
    log.info("segment=%s recovered records=%d", sealed.name, writer.index.records)
    return sealed


def set_aside(path: Path, root: Path, reason: str) -> None:
    """Move a file out of the way, for a person to look at. Where the disk refuses that, it stays and is ignored."""
    try:
        target = _free_name(path, root)
        os.rename(path, target)
        sync_directory(target.parent)
        sync_directory(path.parent)
    except OSError as error:
        log.error("file=%s ignored: %s; it cannot be set aside: %s", path.name, reason, error.strerror)
        return
    log.error("file=%s set aside as %s: %s", path.name, target.name, reason)


def keep_copy(path: Path, root: Path, reason: str) -> None:
    """Hard-link a damaged segment under ``set-aside/`` before its good rows are rewritten."""
    target = _free_name(path, root)
    log.error("segment=%s damaged, original kept as %s: %s", path.name, target.name, reason)
    os.link(path, target)


def _free_name(path: Path, root: Path) -> Path:
    directory = root / SET_ASIDE
    directory.mkdir(exist_ok=True)
    for attempt in range(1_000_000):
        target = directory / f"{path.parent.name}-{path.name}.{attempt}"
        if not target.exists():
            return target
    raise FormatError(f"too many files were set aside, directory={directory.name}")
