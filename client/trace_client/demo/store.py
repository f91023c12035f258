"""The demo's store: a real server process on a free port, and a registered run for every table recorded."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import trace_client
from trace_client.demo.meter import Meter
from trace_store import Site
from trace_store.errors import Unavailable
from trace_store.naming import directory_name

PARTITION = "step-0000"
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
_POLL_S = 0.02


@contextmanager
def server_process(directory: Path) -> Iterator[str]:
    """Run ``python -m trace_server`` over ``directory``; yields its address, stops it with SIGTERM when left.

    Raises:
        Unavailable: it did not come up; the message quotes the end of its log, ``server.log`` beside the directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    log = directory.parent / "server.log"
    ready = directory.parent / "server.ready"
    ready.unlink(missing_ok=True)
    arguments = ["--data", str(directory), "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "trace_server", *arguments, "--ready-file", str(ready)],
            stdout=output,
            stderr=subprocess.STDOUT,
            # A machine's own server may be configured by TRACE_STORE_*; this one is not that server.
            env={name: value for name, value in os.environ.items() if not name.startswith("TRACE_STORE_")},
        )
    try:
        yield _address(process, ready, log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        ready.unlink(missing_ok=True)


def _address(process: subprocess.Popen[bytes], ready: Path, log: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if ready.exists():
            return ready.read_text().splitlines()[0]
        time.sleep(_POLL_S)
    tail = " | ".join(log.read_text(errors="replace").splitlines()[-3:])
    raise Unavailable(f"the server did not start, exit={process.returncode} log={tail!r}")


@dataclass
class RecordedRun:
    """One registered run: its sites, its own metered client, a writer and a reader of the demo's only partition."""

    name: str
    sites: list[Site]
    meter: Meter
    writer: trace_client.Writer
    reader: trace_client.Reader


@contextmanager
def recorded_runs(server: str, tables: dict[str, list[Site]]) -> Iterator[dict[str, RecordedRun]]:
    """Register one run per name in ``tables``, each over a connection of its own; yields them by name."""
    with ExitStack() as stack:
        runs = {}
        for name, sites in tables.items():
            meter = stack.enter_context(Meter(server))
            client = stack.enter_context(trace_client.connect(meter.target, arena="off"))
            client.register(name, sites)
            writer = stack.enter_context(client.writer(name, PARTITION, durability="synced"))
            runs[name] = RecordedRun(name, sites, meter, writer, client.reader(name, PARTITION))
        yield runs


def directory_bytes(store: Path, run: str) -> int:
    """Bytes of all files of a run under the server's data directory."""
    directory = store / "runs" / directory_name(run)
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
