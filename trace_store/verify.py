"""``trace-store verify DIRECTORY|s3://bucket/prefix``: read everything that is stored and name what is damaged.

Every byte of every segment is read and every record's checksum computed; then the rows that were found are compared
with the segment's own index, so that a record whose bytes cannot even be found is named too, and the rows of every
sealed attempt are counted, so that a segment that is gone is missed. What cannot be read is one finding, and the check
goes on. A directory may be in use meanwhile: what a server writes or deletes during the check counts as neither.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from trace_store.checksum import RowKind
from trace_store.errors import FormatError, InvalidRequest
from trace_store.naming import directory_name, parse_segment_name
from trace_store.places import StoredFile, StoredPlace, open_place
from trace_store.record import Site
from trace_store.segment.index import SegmentIndex
from trace_store.segment.reader import open_content
from trace_store.segment.scan import Scan, scan_content
from trace_store.segment.schema import OPEN_SUFFIX, SegmentHeader, UnknownVersion
from trace_store.tally import Tally

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
    row: int | None = None
    """Row of the segment's index."""


@dataclass
class Report:
    """Sums over what was read, and what was found."""

    segments: int = 0
    unfinished: int = 0
    records: int = 0
    bytes: int = 0
    damaged: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def command(argv: list[str]) -> int:
    """Check and print; 0 when all is well."""
    parser = argparse.ArgumentParser(prog="trace-store verify", description=HELP)
    parser.add_argument("place", help="data directory, or s3://bucket/prefix (AWS_* variables as for serve)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    report = Report()
    place = open_place(arguments.place)
    files = find_files(place, report)
    if not files:
        raise InvalidRequest(f"nothing is stored there, place={arguments.place}", argument="place")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("verify", total=sum(file.size for file in files))
        for directory, group in groupby(files, key=lambda file: file.path.rpartition("/")[0]):
            tally = Tally()
            for file in group:
                check_file(file, report, tally)
                progress.advance(task, file.size)
            tally.count()
            _set_healed_apart(directory, tally, report)
            _count_rows(directory, place, tally, report)
            report.damaged.extend(_differing(directory, tally))
    if arguments.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        _print(report)
    return 1 if report.damaged else 0


def find_files(place: StoredPlace, report: Report) -> list[StoredFile]:
    """Segments and manifests of a place; anything else becomes a note."""
    files = place.files("")
    known = [file for file in files if file.is_segment or file.problem.startswith("cannot")]
    report.notes.extend(f"no segment, file={file.path}" for file in files if file not in known)
    return known


def check_file(file: StoredFile, report: Report, tally: Tally) -> None:
    """Check one segment or manifest, and enter its rows for counting."""
    name = file.path
    content = None
    try:
        content = file.read()
    except OSError as error:
        report.damaged.append(Finding(name, f"cannot be read: {error.strerror or error}"))
    if file.problem:
        report.damaged.append(Finding(name, file.problem))
    if content is None:
        return
    report.segments += 1
    report.bytes += len(content)
    report.unfinished += name.endswith(OPEN_SUFFIX)
    if name.endswith(OPEN_SUFFIX) and not content:
        return  # its writer had not come to the first record batch, and nothing is lost
    try:
        scan = scan_content(content, name, [])
    except UnknownVersion as error:
        report.notes.append(f"not checked: {error}")
        return
    except FormatError as error:
        report.damaged.append(Finding(name, str(error)))
        return
    index, lost = _check_rows(name, content, scan, report)
    header = scan.header
    if not _belongs(name, header):
        report.damaged.append(Finding(name, "it belongs elsewhere", header.run, header.partition))
    elif header.partition and not tally.add(name, header, index, lost):
        what = "its site table is another one than that of the segments before it"
        report.damaged.append(Finding(name, what, header.run, header.partition))


def _check_rows(name: str, content: bytearray, scan: Scan, report: Report) -> tuple[SegmentIndex, list[int]]:
    """Report what is damaged within a segment; the rows that it has or says that it had, and which of them it lost."""
    report.records += scan.index.records
    header = scan.header
    if name.endswith(OPEN_SUFFIX):
        report.damaged.extend(_damage(name, scan, scan.damage))
        return scan.index, []
    try:
        index = open_content(content, name)[1]
    except FormatError as error:
        report.damaged.append(Finding(name, str(error), header.run, header.partition))
        report.damaged.extend(_damage(name, scan, scan.damage))
        return scan.index, []
    lost = list(_lost_rows(name, scan, index))
    report.damaged.extend(lost or _damage(name, scan, scan.damage))
    if scan.torn_bytes and not lost:
        report.damaged.append(Finding(name, f"unreadable bytes={scan.torn_bytes}", header.run, header.partition))
    return index, [item.row for item in lost if item.row is not None]


def _set_healed_apart(directory: str, tally: Tally, report: Report) -> None:
    """Make notes of damaged records that were sent again and stored whole: reads take the good copy."""
    damaged: list[Finding] = []
    healed: list[Finding] = []
    for item in report.damaged:
        here = item.row is not None and item.segment.rpartition("/")[0] == directory
        again = here and item.row is not None and tally.is_held_again(item.segment, item.row)
        (healed if again else damaged).append(item)
    report.damaged[:] = damaged
    for segment, items in groupby(healed, key=lambda item: item.segment):
        report.notes.append(f"damaged records were stored again whole, records={len(list(items))} segment={segment}")


def _differing(directory: str, tally: Tally) -> Iterator[Finding]:
    for item in tally.differences():
        key = (item.run, item.partition, item.trajectory, item.attempt, item.site, item.start, item.stop)
        yield Finding(directory, "two stored copies of a record differ", *key)


def _count_rows(directory: str, place: StoredPlace, tally: Tally, report: Report) -> None:
    """Report sealed attempts of a partition that lack rows which no damaged record explains."""
    short = list(tally.shortages())
    if short:
        # Segments may have been added or released since the listing: what is short is looked at once more.
        again = set(_count_again(place.files(directory)).shortages())
        short = [item for item in short if item in again]
    if short and place.partial:
        report.notes.append(
            f"sealed attempts have rows that are not in this directory, attempts={len(short)} path={directory};"
            " it is a cache of a bucket: check that"
        )
        return
    report.damaged.extend(
        Finding(
            directory,
            f"rows are missing: {item.missing} of {item.sealed} that were sealed",
            item.run,
            item.partition,
            item.trajectory,
            item.attempt,
        )
        for item in short
    )


def _count_again(files: Sequence[StoredFile]) -> Tally:
    """A tally by the indexes alone; what cannot be opened counts as gone, as it did before."""
    tally = Tally()
    for file in files:
        with contextlib.suppress(FormatError, OSError):
            content = file.read() if file.is_segment and not file.problem else None
            if content is not None:
                header, index = _open_or_scan(file.path, content)
                if _belongs(file.path, header):
                    tally.add(file.path, header, index)
    tally.count()
    return tally


def _open_or_scan(name: str, content: bytearray) -> tuple[SegmentHeader, SegmentIndex]:
    if not name.endswith(OPEN_SUFFIX):
        with contextlib.suppress(FormatError):
            return open_content(content, name)
    scan = scan_content(content, name, [])
    return scan.header, scan.index


def _lost_rows(name: str, scan: Scan, index: SegmentIndex) -> Iterator[Finding]:
    """Rows that the index names and the scan did not find whole, and the other way round."""
    found = _keys(scan.index)
    wanted = _keys(index)
    for position in np.flatnonzero(~np.isin(wanted, found)):
        yield replace(_finding(name, scan.header, index, int(position), "damaged"), row=int(position))
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
    return Finding(
        segment=name,
        what=f"{_kind_name(int(row['kind']))} {what}",
        run=header.run,
        partition=header.partition,
        trajectory=index.trajectories[int(row["trajectory"])],
        attempt=int(row["attempt"]),
        site=_site_name(header.sites, int(row["site"])),
        start=int(row["start"]),
        stop=int(row["stop"]),
    )


def _kind_name(kind: int) -> str:
    return RowKind(kind).name.lower() if kind in list(RowKind) else f"row of kind {kind}"


def _site_name(sites: Sequence[Site], number: int) -> str:
    return sites[number].name if number < len(sites) else ""


def _damage(name: str, scan: Scan, lines: Sequence[str]) -> list[Finding]:
    return [Finding(name, line, scan.header.run, scan.header.partition) for line in lines]


def _belongs(path: str, header: SegmentHeader) -> bool:
    parts = path.split("/")
    expected = [directory_name(header.run)] + ([directory_name(header.partition)] if header.partition else [])
    sequence = parse_segment_name(parts[-1])[0] if header.partition else header.sequence
    return parts[:-1] == expected and sequence == header.sequence


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
