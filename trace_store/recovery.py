"""Start-up: turn a data directory, however it was left, into sealed segments and a list of what was set aside.

    NAME.arrow        opened by its index; scanned and rewritten if only the index is damaged
    NAME.open         left by a crash: good rows are rewritten as NAME.arrow, the rest is dropped with a reason
    NAME.recovering   a rewrite that a crash cut short: removed, its source is still there
    anything else     moved to ``set-aside/`` with a logged reason; nothing is deleted that we did not write

Rewriting is idempotent: a crash at any point leaves the source, the result, or both, and both means the result counts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from trace_store.errors import FormatError
from trace_store.segment.index import SegmentIndex
from trace_store.segment.reader import open_sealed
from trace_store.segment.scan import Scan, scan_segment
from trace_store.segment.schema import OPEN_SUFFIX, SEALED_SUFFIX, SegmentHeader
from trace_store.segment.writer import SegmentWriter, sync_directory

log = logging.getLogger("trace_store.recovery")

RECOVERING_SUFFIX = ".recovering"
SET_ASIDE = "set-aside"

OpenedSegment = tuple[Path, SegmentHeader, SegmentIndex]


def recover_directory(directory: Path, root: Path) -> Iterator[OpenedSegment]:
    """Sealed segments of one directory in write order, after repair.

    Raises:
        StorageFailed, StorageFull: the disk does not allow the repair; nothing was lost.
    """
    names = sorted(entry.name for entry in os.scandir(directory) if entry.is_file(follow_symlinks=False))
    for name in names:
        if name.endswith(RECOVERING_SUFFIX):
            (directory / name).unlink()
    opened = []
    for name in names:
        path = directory / name
        if name.endswith(RECOVERING_SUFFIX):
            continue
        if name.endswith(SEALED_SUFFIX):
            segment = _open_or_repair(path, root)
        elif name.endswith(OPEN_SUFFIX):
            if path.with_suffix(SEALED_SUFFIX).exists():
                path.unlink()
                continue
            segment = _rewrite_or_set_aside(path, root)
        else:
            set_aside(path, root, "no segment")
            continue
        if segment is not None:
            opened.append(segment)
    yield from sorted(opened, key=lambda segment: (segment[1].sequence, segment[0].name))


def _open_or_repair(path: Path, root: Path) -> OpenedSegment | None:
    try:
        header, index = open_sealed(path)
    except FormatError as error:
        log.error("segment=%s cannot be opened by its index, scanning it: %s", path.name, error)
        return _rewrite_or_set_aside(path, root)
    return path, header, index


def _rewrite_or_set_aside(path: Path, root: Path) -> OpenedSegment | None:
    try:
        scan = scan_segment(path)
    except FormatError as error:
        set_aside(path, root, str(error))
        return None
    for line in scan.damage:
        log.warning("segment=%s %s", path.name, line)
    if scan.torn_bytes:
        log.warning("segment=%s torn tail dropped, bytes=%d", path.name, scan.torn_bytes)
    if scan.damage:
        keep_copy(path, root, f"{len(scan.damage)} damaged parts")
    if not len(scan.index):
        path.unlink()
        return None
    sealed, index = rewrite(path, scan)
    return sealed, scan.header, index


def rewrite(path: Path, scan: Scan) -> tuple[Path, SegmentIndex]:
    """Write the good rows of a scan as the sealed segment of the same name and remove the source."""
    writer = SegmentWriter(path.parent, path.stem, scan.header, RECOVERING_SUFFIX)
    try:
        for batch in scan.batches:
            writer.append_batch(batch)
        sealed = writer.seal()
    finally:
        writer.close()
    if path != sealed:
        path.unlink()
        sync_directory(path.parent)
    log.info("segment=%s recovered records=%d", sealed.name, writer.index.records)
    return sealed, writer.index


def set_aside(path: Path, root: Path, reason: str) -> None:
    """Move a file out of the way, keeping it for a person to look at."""
    target = _free_name(path, root)
    log.error("file=%s set aside as %s: %s", path.name, target.name, reason)
    os.rename(path, target)
    sync_directory(path.parent)


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
