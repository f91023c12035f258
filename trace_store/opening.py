"""Read a run's directory at start-up: its site table and its segments by partition, after repair.

    manifest-EPOCH.arrow      says the site table; scanned if its index is damaged, set aside if nothing is readable
    manifest-EPOCH.open       a registration that was never acknowledged: removed
    .released-*               a released partition on its way out: deleted
    PARTITION/                see ``recovery``
    anything else             set aside

Every header is checksummed, so the first one that names this directory's run tells the site table for all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trace_store.errors import FormatError
from trace_store.naming import MANIFEST_PREFIX, RELEASED_PREFIX, directory_name, parse_segment_name
from trace_store.record import Site
from trace_store.recovery import OpenedSegment, recover_directory, set_aside
from trace_store.segment.reader import open_sealed
from trace_store.segment.scan import scan_segment
from trace_store.segment.schema import OPEN_SUFFIX, SEALED_SUFFIX, SegmentHeader, UnknownVersion

log = logging.getLogger("trace_store.opening")


@dataclass
class FoundRun:
    """A run on disk; ``partitions`` maps names to directory and segments in write order."""

    name: str
    sites: tuple[Site, ...]
    directory: Path
    partitions: dict[str, tuple[Path, list[OpenedSegment]]] = field(default_factory=dict)


def find_run(directory: Path, root: Path, delete: Callable[[Path], None]) -> FoundRun | None:
    """Read and repair one run; ``delete`` gets the directories of released partitions. None: it is no run.

    Raises:
        StorageFailed, StorageFull: the disk does not allow a repair; nothing was lost.
    """
    headers: list[SegmentHeader] = []
    opened: list[tuple[Path, list[OpenedSegment]]] = []
    for path in sorted(directory.iterdir()):
        if path.name.startswith(RELEASED_PREFIX):
            delete(path)
        elif path.is_dir():
            opened.append((path, list(recover_directory(path, root))))
        elif path.name.startswith(MANIFEST_PREFIX) and path.name.endswith(OPEN_SUFFIX):
            path.unlink()
        else:
            headers.extend(_manifest_header(path, root))
    headers.extend(header for _, segments in opened for _, header, _ in segments)
    headers = [header for header in headers if directory_name(header.run) == directory.name]
    if not headers:
        log.warning("directory without a manifest or segment of its run, ignored, path=%s", directory.name)
        return None
    run = FoundRun(headers[0].run, headers[0].sites, directory)
    for path, segments in opened:
        _add_partition(run, path, segments, root)
    return run


def _manifest_header(path: Path, root: Path) -> list[SegmentHeader]:
    try:
        if not (path.name.startswith(MANIFEST_PREFIX) and path.name.endswith(SEALED_SUFFIX)):
            raise FormatError("no manifest and no partition")
        try:
            return [open_sealed(path)[0]]
        except UnknownVersion:
            raise
        except FormatError as error:
            header = scan_segment(path).header
            log.error("manifest=%s is damaged, its site table is good: %s", path.name, error)
            return [header]
    except UnknownVersion as error:
        log.error("manifest=%s left alone: %s", path.name, error)
    except FormatError as error:
        set_aside(path, root, str(error))
    return []


def _add_partition(run: FoundRun, path: Path, segments: list[OpenedSegment], root: Path) -> None:
    for segment in segments:
        segment_path, header, _ = segment
        if (header.run, header.sites) != (run.name, run.sites) or directory_name(header.partition) != path.name:
            set_aside(segment_path, root, "it belongs to another run, site table or partition")
            continue
        if parse_segment_name(segment_path.stem)[0] != header.sequence:
            set_aside(segment_path, root, "it has another segment's name")  # its rows would count as written elsewhere
            continue
        run.partitions.setdefault(header.partition, (path, []))[1].append(segment)
