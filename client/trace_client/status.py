"""``trace-store status``, ``ls`` and ``release``: look at a running server and free what is no longer needed."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trace_client.channel import Tls
from trace_client.client import Client, Listed, connect
from trace_store.errors import InvalidRequest

STATUS_HELP = "show the state of a running server"
LS_HELP = "list runs, the partitions of a run, or the trajectories of a partition"
RELEASE_HELP = "forget a partition, or some of its trajectories, and free their bytes"

DEFAULT_TARGET = "127.0.0.1:7077"


def status_command(argv: list[str]) -> int:
    """Print the server's state; exit status 1 when it refuses writes."""
    arguments = _parser("status", STATUS_HELP).parse_args(argv)
    with _connect(arguments) as client:
        state = client.status()
    if arguments.json:
        print(json.dumps(state, indent=2))
    else:
        table = Table(box=None, show_header=False, pad_edge=False)
        for name, value in state.items():
            shown = f"{value:,}" if isinstance(value, (int, float)) else value or "-"
            table.add_row(name.replace("_", " "), shown)
        Console().print(table, highlight=False)
    return 1 if state["write_refusal"] else 0


def ls_command(argv: list[str]) -> int:
    """List what the server holds."""
    parser = _parser("ls", LS_HELP)
    parser.add_argument("run", nargs="?", default="", help="run; left out: list the runs")
    parser.add_argument("partition", nargs="?", default="", help="partition; left out: list the run's partitions")
    arguments = parser.parse_args(argv)
    with _connect(arguments) as client:
        entries = list(client.list(arguments.run, arguments.partition))
    if arguments.json:
        print(json.dumps([asdict(entry) for entry in entries], indent=2))
    else:
        Console().print(_table(entries, trajectories=bool(arguments.partition)), highlight=False)
    return 0


def release_command(argv: list[str]) -> int:
    """Release a partition or trajectories; prints how many were there."""
    parser = _parser("release", RELEASE_HELP)
    parser.add_argument("run")
    parser.add_argument("partition")
    parser.add_argument("trajectory", nargs="*", help="left out: the whole partition")
    arguments = parser.parse_args(argv)
    with _connect(arguments) as client:
        released = client.release(arguments.run, arguments.partition, arguments.trajectory or None)
    print(json.dumps({"released": released}) if arguments.json else f"released {released} trajectories")
    return 0


def _parser(name: str, text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"trace-store {name}", description=text)
    parser.add_argument(
        "--target",
        default=os.environ.get("TRACE_STORE_TARGET", DEFAULT_TARGET),
        help="host:port or unix:/path of the server (TRACE_STORE_TARGET)",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        default=os.environ.get("TRACE_STORE_TOKEN_FILE"),
        help="file with the token (TRACE_STORE_TOKEN_FILE)",
    )
    parser.add_argument("--tls-ca", type=Path, help="PEM file of the authority that signed the server's certificate")
    parser.add_argument("--tls-certificate", type=Path, help="PEM certificate of this client, for mutual TLS")
    parser.add_argument("--tls-key", type=Path, help="PEM private key of this client")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(
            f"--token-file cannot be read, path={path} cause={getattr(error, 'strerror', None) or error}",
            argument="token",
        ) from None


def _connect(arguments: argparse.Namespace) -> Client:
    token = _token(Path(arguments.token_file)) if arguments.token_file else None
    files = (arguments.tls_ca, arguments.tls_certificate, arguments.tls_key)
    tls = Tls(*files) if any(files) else None
    return connect(arguments.target, tls=tls, token=token)


def _table(entries: list[Listed], *, trajectories: bool) -> Table:
    if trajectories:
        table = Table("trajectory", "attempt", "sealed", "tokens", "prompt", "records")
        for entry in entries:
            counts: list[Any] = [entry.tokens, entry.prompt_tokens] if entry.sealed else ["-", "-"]
            table.add_row(
                entry.name, str(entry.attempt), "yes" if entry.sealed else "no", *map(str, counts), f"{entry.records:,}"
            )
        return table
    table = Table("name", "trajectories", "records", "bytes on disk")
    for entry in entries:
        table.add_row(entry.name, f"{entry.trajectories:,}", f"{entry.records:,}", f"{entry.disk_bytes:,}")
    return table
