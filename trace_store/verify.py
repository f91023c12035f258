"""``trace-store verify DIRECTORY|s3://bucket/prefix``: read everything that is stored and name what is damaged.

Every byte of every segment is read and every record's checksum computed; then the rows that were found are compared
with the segment's own index, so that a record whose bytes cannot even be found is named too. A directory may be in use
meanwhile: what a server writes or deletes during the check counts as neither.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from trace_store.checksum import RowKind
from trace_store.errors import FormatError, InvalidRequest
from trace_store.naming import directory_name
from trace_store.record import Site
from trace_store.segment.index import SegmentIndex
from trace_store.segment.reader import open_content
from trace_store.segment.scan import Scan, scan_content
from trace_store.segment.schema import OPEN_SUFFIX, SEALED_SUFFIX, SegmentHeader, UnknownVersion

HELP = "check every record of a data directory or bucket; exit status 1 when something is damaged"

FINDINGS_SHOWN = 50


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. A damaged record has all fields, other damage has those that are known."""

    segment: str
    what: str
    run: str = ""
    partition: str = ""
    trajectory: str = ""
    attempt: int | None = None
    site: str = ""
    start: int | None = None
    stop: int | None = None


@dataclass
class Report:
    """Sums over what was read, and what was found."""

    segments: int = 0
    unfinished: int = 0
    records: int = 0
    bytes: int = 0
    damaged: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StoredFile:
    """A file or object: path below ``runs``, bytes, and how to read it (None: it is gone)."""

    path: str
    size: int
    read: Callable[[], bytearray | None]


def command(argv: list[str]) -> int:
    """Check and print; 0 when all is well."""
    parser = argparse.ArgumentParser(prog="trace-store verify", description=HELP)
    parser.add_argument("place", help="data directory, or s3://bucket/prefix (AWS_* variables as for serve)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    report = Report()
    files = find_files(arguments.place, report)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("verify", total=sum(file.size for file in files))
        for file in files:
            check_file(file, report)
            progress.advance(task, file.size)
    if arguments.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        _print(report)
    return 1 if report.damaged else 0


def find_files(place: str, report: Report) -> list[StoredFile]:
    """Segments and manifests of a place; anything else becomes a note.

    Raises:
        InvalidRequest: no such directory, or nothing of ours in it.
        StorageFailed, Unsupported: the object store cannot be used.
    """
    files = list(_objects(place) if "://" in place else _directory(Path(place)))
    known = [file for file in files if file.path.endswith((SEALED_SUFFIX, OPEN_SUFFIX))]
    if not known:
        raise InvalidRequest(f"nothing is stored there, place={place}", argument="place")
    report.notes.extend(f"no segment, file={file.path}" for file in files if file not in known)
    return known


def check_file(file: StoredFile, report: Report) -> None:
    """Check one segment or manifest."""
    content = file.read()
    if content is None:
        return
    report.segments += 1
    report.bytes += len(content)
    name = file.path
    is_open = name.endswith(OPEN_SUFFIX)
    report.unfinished += is_open
    try:
        scan = scan_content(content, name, [])
    except UnknownVersion as error:
        report.notes.append(f"not checked: {error}")
        return
    except FormatError as error:
        report.damaged.append(Finding(name, str(error)))
        return
    report.records += scan.index.records
    header = scan.header
    if not _belongs(name, header):
        report.damaged.append(Finding(name, "it belongs elsewhere", header.run, header.partition))
    if is_open:
        report.damaged.extend(_damage(name, scan, scan.damage))
        return
    try:
        index = open_content(content, name)[1]
    except FormatError as error:
        report.damaged.append(Finding(name, str(error), header.run, header.partition))
        report.damaged.extend(_damage(name, scan, scan.damage))
        return
    lost = list(_lost_rows(name, scan, index))
    report.damaged.extend(lost or _damage(name, scan, scan.damage))
    if scan.torn_bytes and not lost:
        report.damaged.append(Finding(name, f"unreadable bytes={scan.torn_bytes}", header.run, header.partition))


def _lost_rows(name: str, scan: Scan, index: SegmentIndex) -> Iterator[Finding]:
    """Rows that the index names and the scan did not find whole, and the other way round."""
    found = _keys(scan.index)
    wanted = _keys(index)
    for position in np.flatnonzero(~np.isin(wanted, found)):
        yield _finding(name, scan.header, index, int(position), "damaged")
    for position in np.flatnonzero(~np.isin(found, wanted)):
        yield _finding(name, scan.header, scan.index, int(position), "not in the index as it is in the segment")


_KEY_FIELDS = [
    "kind",
    "attempt",
    "policy_version",
    "site",
    "start",
    "stop",
    "checksum",
    "codes_offset",
    "scales_offset",
]


def _keys(index: SegmentIndex) -> np.ndarray:
    rows = index.rows
    keys = np.zeros(len(rows), [(name, rows.dtype[name]) for name in _KEY_FIELDS])
    for name in _KEY_FIELDS:
        keys[name] = rows[name]
    return keys.view(f"V{keys.dtype.itemsize}").copy() if len(keys) else keys.view(f"V{keys.dtype.itemsize}")


def _finding(name: str, header: SegmentHeader, index: SegmentIndex, position: int, what: str) -> Finding:
    row = index.rows[position]
    kind = RowKind(int(row["kind"]))
    return Finding(
        segment=name,
        what=f"{kind.name.lower()} {what}",
        run=header.run,
        partition=header.partition,
        trajectory=index.trajectories[int(row["trajectory"])],
        attempt=int(row["attempt"]),
        site=_site_name(header.sites, int(row["site"])),
        start=int(row["start"]),
        stop=int(row["stop"]),
    )


def _site_name(sites: Sequence[Site], number: int) -> str:
    return sites[number].name if number < len(sites) else ""


def _damage(name: str, scan: Scan, lines: Sequence[str]) -> list[Finding]:
    return [Finding(name, line, scan.header.run, scan.header.partition) for line in lines]


def _belongs(path: str, header: SegmentHeader) -> bool:
    parts = path.split("/")
    expected = [directory_name(header.run)] + ([directory_name(header.partition)] if header.partition else [])
    return parts[:-1] == expected


def _directory(root: Path) -> Iterator[StoredFile]:
    runs = root / "runs"
    if not runs.is_dir():
        raise InvalidRequest(f"no data directory of trace-store, path={root}", argument="place")
    for path in sorted(runs.rglob("*")):
        if path.is_file() and not any(part.startswith(".released-") for part in path.relative_to(runs).parts):
            yield StoredFile(path.relative_to(runs).as_posix(), path.stat().st_size, lambda path=path: _read(path))  # type: ignore[misc]


def _read(path: Path) -> bytearray | None:
    """The file's bytes; under its new name if it was sealed meanwhile, None if it was released."""
    for candidate in (path, path.with_suffix(SEALED_SUFFIX)):
        try:
            return bytearray(candidate.read_bytes())
        except FileNotFoundError:
            continue
    return None


def _objects(url: str) -> Iterator[StoredFile]:
    from trace_store.storage.base import SegmentGone
    from trace_store.storage.s3 import ObjectStore

    store = ObjectStore(url)

    def read(key: str, size: int) -> bytearray | None:
        try:
            return bytearray(store.read(key, 0, size))
        except SegmentGone:
            return None

    for info in sorted(store.listing("runs"), key=lambda info: info.key):
        path = info.key.removeprefix("runs/")
        yield StoredFile(path, info.size, lambda info=info: read(info.key, info.size))  # type: ignore[misc]


def _print(report: Report) -> None:
    console = Console()
    if report.damaged:
        table = Table("segment", "what", "trajectory", "attempt", "site", "tokens", box=None, pad_edge=False)
        for item in report.damaged[:FINDINGS_SHOWN]:
            tokens = f"[{item.start}, {item.stop})" if item.start is not None else ""
            attempt = "" if item.attempt is None else str(item.attempt)
            table.add_row(item.segment, item.what, item.trajectory, attempt, item.site, tokens)
        console.print(table, markup=False)
        if len(report.damaged) > FINDINGS_SHOWN:
            console.print(f"and {len(report.damaged) - FINDINGS_SHOWN} more, all of them with --json", markup=False)
    for note in report.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    console.print(
        f"{report.segments:,} segments ({report.unfinished:,} unfinished), {report.records:,} records,"
        f" {report.bytes:,} bytes read: {len(report.damaged):,} damaged",
        highlight=False,
    )
