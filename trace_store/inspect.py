"""``trace-store inspect FILE...``: what a segment file holds, without a server."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from trace_store.checksum import RowKind
from trace_store.errors import InvalidRequest
from trace_store.segment.index import SegmentIndex
from trace_store.segment.reader import open_sealed
from trace_store.segment.scan import scan_segment
from trace_store.segment.schema import OPEN_SUFFIX, SEALED_SUFFIX, SegmentHeader

HELP = "show what segment files hold: run, partition, sites, trajectories, bytes"

ROWS_SHOWN = 20


def command(argv: list[str]) -> int:
    """Print one table per file, or with --json one list of objects."""
    parser = argparse.ArgumentParser(prog="trace-store inspect", description=HELP)
    parser.add_argument("path", nargs="+", type=Path, help="segment files, or directories to search")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    segments = [describe(path) for path in find_segments(arguments.path)]
    if arguments.json:
        print(json.dumps(segments, indent=2))
        return 0
    console = Console()
    for segment in segments:
        _print(console, segment)
    return 0


def find_segments(paths: list[Path]) -> list[Path]:
    """Segment files among paths, and below directories, in name order.

    Raises:
        InvalidRequest: a path is not there, or holds no segment.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found.extend(p for p in sorted(path.rglob("*")) if p.suffix in (OPEN_SUFFIX, SEALED_SUFFIX))
        elif path.exists():
            found.append(path)
        else:
            raise InvalidRequest(f"no such file or directory, path={path}", argument="path")
    if not found:
        raise InvalidRequest(f"no segments found, path={', '.join(map(str, paths))}", argument="path")
    return found


def describe(path: Path) -> dict[str, Any]:
    """Header and per-trajectory sums of one segment.

    Raises:
        FormatError: no segment.
    """
    if path.suffix == OPEN_SUFFIX:
        scan = scan_segment(path)
        header, index, state = scan.header, scan.index, "open"
    else:
        header, index = open_sealed(path)
        state = "sealed"
    return {"segment": path.name, "path": str(path), "state": state} | _content(path, header, index)


def _content(path: Path, header: SegmentHeader, index: SegmentIndex) -> dict[str, Any]:
    rows = index.rows
    records = rows[rows["kind"] == RowKind.RECORD]
    tokens = records["stop"].astype(np.int64) - records["start"]
    raw_scales = np.array([site.scale_bytes for site in header.sites], np.int64)[records["site"]] * tokens
    trajectories = []
    for number in np.unique(records["trajectory"]).tolist():
        chosen = records["trajectory"] == number
        seals = rows[(rows["kind"] == RowKind.SEAL) & (rows["trajectory"] == number)]
        trajectories.append(
            {
                "trajectory": index.trajectories[number],
                "attempts": sorted(set(records["attempt"][chosen].tolist())),
                "records": int(chosen.sum()),
                "first_token": int(records["start"][chosen].min()),
                "last_token": int(records["stop"][chosen].max()) - 1,
                "sealed_tokens": int(seals["stop"][-1]) if len(seals) else None,
            }
        )
    return {
        "run": header.run,
        "partition": header.partition,
        "server": header.server,
        "sequence": header.sequence,
        "sites": [site.name for site in header.sites],
        "file_bytes": path.stat().st_size,
        "records": len(records),
        "codes_bytes": int(records["codes_bytes"].sum()),
        "scales_bytes": int(raw_scales.sum()),
        "scales_stored_bytes": int(records["scales_bytes"].sum()),
        "trajectories": trajectories,
    }


def _print(console: Console, segment: dict[str, Any]) -> None:
    console.print(f"[bold]{segment['segment']}[/] {segment['state']}", highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    partition = segment["partition"] or "(registration: holds the site table, no records)"
    table.add_row("  run / partition", f"{segment['run']} / {partition}")
    table.add_row("  sites", f"{len(segment['sites'])}: {_shorten(segment['sites'])}")
    table.add_row("  file bytes", f"{segment['file_bytes']:,}")
    table.add_row("  records", f"{segment['records']:,}")
    if segment["records"]:
        stored = segment["scales_stored_bytes"]
        ratio = segment["scales_bytes"] / stored if stored else 1.0
        table.add_row(
            "  codes / scales", f"{segment['codes_bytes']:,} / {stored:,} bytes (scales {ratio:.2f}x smaller)"
        )
    console.print(table, highlight=False)
    if segment["trajectories"]:
        console.print(_trajectory_table(segment["trajectories"]))


def _trajectory_table(trajectories: list[dict[str, Any]]) -> Table:
    table = Table("trajectory", "attempts", "records", "tokens", "sealed at")
    for entry in trajectories[:ROWS_SHOWN]:
        table.add_row(
            entry["trajectory"],
            ", ".join(map(str, entry["attempts"])),
            str(entry["records"]),
            f"[{entry['first_token']}, {entry['last_token'] + 1})",
            "-" if entry["sealed_tokens"] is None else str(entry["sealed_tokens"]),
        )
    if len(trajectories) > ROWS_SHOWN:
        table.caption = f"and {len(trajectories) - ROWS_SHOWN} more (--json shows all)"
    return table


def _shorten(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:3])} ... {', '.join(names[-2:])}"
