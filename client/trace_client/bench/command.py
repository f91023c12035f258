"""``trace-store bench``: the store's paths against memcpy, loopback TCP and the local disk, in one interleaved run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path as FilePath
from typing import Any

from rich.console import Console

from trace_client.bench import scaling
from trace_client.bench.limits import LocalWrite, Memcpy, RawTcp
from trace_client.bench.measure import Path, Result, Sample, run_interleaved
from trace_client.bench.paths import Append, Read, ServerProcess, Stored, temporary_directory
from trace_client.bench.records import Load, Pool, load_of
from trace_client.bench.table import BUDGETS, Budget, as_json, judge, print_results
from trace_store.allocator import environment
from trace_store.version import VERSION

HELP = "measure the data plane on this machine"

DURABILITIES = ("memory", "written", "synced")
SPANS = (64, 256, 512)

MakePeers = Callable[[Load, Pool, FilePath], Sequence[Path]]


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="trace-store bench", description=HELP)
    result.add_argument("--mib", type=int, default=256, help="payload of one run of a path")
    result.add_argument("--rounds", type=int, default=5, help="rounds that count; one more warms up")
    result.add_argument("--only", default="", help="run only paths whose name holds one of these, comma separated")
    result.add_argument("--directory", type=FilePath, default=None, help="on the disk to measure (default: temporary)")
    result.add_argument("--scaling", action="store_true", help="run the scaling table instead")
    result.add_argument("--json", action="store_true", help="print JSON")
    return result


def command(argv: list[str]) -> int:
    """Run and print; the exit status does not judge, a shared machine may miss a budget for reasons of its own."""
    return run(argv, lambda load, pool, directory: (), ())


def run(argv: list[str], make_peers: MakePeers, peer_budgets: Sequence[Budget]) -> int:
    """``command`` with paths of peers beside the store's own."""
    arguments = parser().parse_args(argv)
    _restart_with_allocator()
    console = Console(stderr=arguments.json, width=140)
    with temporary_directory(arguments.directory) as name:
        directory = FilePath(name)
        if arguments.scaling:
            rows = scaling.measure(directory, console)
            if arguments.json:
                print(json.dumps({"machine": machine(), "scaling": rows}))
            else:
                scaling.print_rows(console, rows)
            return 0
        results = _measure(arguments, directory, make_peers, console)
    verdicts = judge(results, [*BUDGETS, *peer_budgets])
    if arguments.json:
        print(json.dumps({"machine": machine(), **as_json(results, verdicts)}))
    else:
        print_results(console, results, verdicts)
    return 0


def machine() -> dict[str, Any]:
    """What a reader of the numbers has to know."""
    return {
        "version": VERSION,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
    }


def _measure(
    arguments: argparse.Namespace, directory: FilePath, make_peers: MakePeers, console: Console
) -> list[Result]:
    load = load_of(arguments.mib << 20)
    pool = Pool(load)
    with ExitStack() as stack:
        server = ServerProcess(directory)
        stack.callback(server.close)
        paths: list[Path] = [Memcpy(load.size), RawTcp(load.size)]
        appends = [pool.joined(number) for number in range(load.size // load.append_bytes)]
        paths.append(LocalWrite(directory, appends))
        for arena in ("required", "off"):
            paths.extend(Append(server, arena, durability, load, pool) for durability in DURABILITIES)
        raw = Stored(server, load, compressed=False)
        paths.extend(Read(server, "required", raw, span) for span in SPANS)
        paths.extend(Read(server, "required", raw, span, files=True) for span in SPANS)
        paths.append(Read(server, "off", raw, SPANS[-1]))
        small = load_of(min(arguments.mib, 128) << 20)
        paths.append(Read(server, "required", Stored(server, small, compressed=True), SPANS[-1]))
        paths.extend(make_peers(load, pool, directory))
        raw.wait_sealed(server)
        wanted = [word.strip() for word in arguments.only.split(",") if word.strip()]
        chosen = [path for path in paths if not wanted or any(word in path.name for word in wanted)]
        for path in paths:
            if path not in chosen:
                path.close()

        def report(name: str, turn: int, sample: Sample) -> None:
            console.print(f"[dim]round {turn}  {name}  {sample.rate:.2f} GB/s[/dim]", highlight=False)

        return run_interleaved(chosen, arguments.rounds, report)


def _restart_with_allocator() -> None:
    """Start this program once more with the allocator settings, which every process that it starts then has too."""
    wanted = environment()
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **wanted})
