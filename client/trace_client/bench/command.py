"""``trace-store bench``: the store's paths against memcpy, loopback TCP and the local disk, in one interleaved run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from importlib import metadata
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
    result.add_argument("--mib", type=_positive, default=256, help="payload of one run of a path")
    result.add_argument("--rounds", type=_positive, default=5, help="rounds that count; one more warms up")
    result.add_argument("--only", default="", help="run only paths whose name holds one of these, comma separated")
    result.add_argument(
        "--directory", type=_directory, default=None, help="on the disk to measure (default: temporary)"
    )
    result.add_argument("--scaling", action="store_true", help="run the scaling table instead")
    result.add_argument("--json", action="store_true", help="print JSON")
    return result


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got={value}")
    return value


def _directory(text: str) -> FilePath:
    path = FilePath(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"is no directory: {text}")
    return path


def command(argv: list[str]) -> int:
    """Run and print; the exit status does not judge, a shared machine may miss a budget for reasons of its own."""
    return run(argv, lambda load, pool, directory: (), ())


def run(argv: list[str], make_peers: MakePeers, peer_budgets: Sequence[Budget]) -> int:
    """``command`` with paths of peers beside the store's own."""
    arguments = parser().parse_args(argv)
    _restart_with_allocator()
    said = {
        "machine": machine(),
        "settings": {"mib": arguments.mib, "rounds": arguments.rounds, "only": arguments.only},
    }
    console = Console(stderr=arguments.json, width=140)
    with temporary_directory(arguments.directory) as name:
        directory = FilePath(name)
        if arguments.scaling:
            rows = scaling.measure(directory, console)
            if arguments.json:
                print(json.dumps({**said, "scaling": rows}))
            else:
                scaling.print_rows(console, rows)
            return 0
        results = _measure(arguments, directory, make_peers, console)
    verdicts = judge(results, [*BUDGETS, *peer_budgets])
    if arguments.json:
        print(json.dumps({**said, **as_json(results, verdicts)}))
    else:
        print_results(console, results, verdicts)
    return 0


def machine() -> dict[str, Any]:
    """What a reader of the numbers has to know, before the run puts its own load on it."""
    return {
        "version": VERSION,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("grpcio", "pyarrow", "numpy", "xxhash")},
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
    }


def _measure(
    arguments: argparse.Namespace, directory: FilePath, make_peers: MakePeers, console: Console
) -> list[Result]:
    load = load_of(arguments.mib << 20)
    pool = Pool(load)
    words = [word.strip() for word in arguments.only.split(",") if word.strip()]
    with ExitStack() as stack:
        server = ServerProcess(directory)
        stack.callback(server.close)
        console.print("[dim]preparing[/dim]", highlight=False)
        own = _own_paths(server, load, pool, directory)
        paths = [make() for name, make in own.items() if not words or any(word in name for word in words)]
        # Peers start servers of their own and load them: not for a run of our paths alone.
        if not words or any(not any(word in name for name in own) for word in words):
            for path in make_peers(load, pool, directory):
                if words and not any(word in path.name for word in words):
                    stack.callback(path.close)  # not yet: it may share its server with one that is run
                else:
                    paths.append(path)
        if not paths:
            raise SystemExit(f"trace-store bench: no path is named so, only={arguments.only!r} paths: {'; '.join(own)}")
        if any(isinstance(path, Read) for path in paths):
            console.print("[dim]waiting for segments to be sealed, about 30 s[/dim]", highlight=False)
            Stored.wait_sealed(server)

        def report(name: str, turn: int, sample: Sample) -> None:
            console.print(f"[dim]round {turn}  {name}  {sample.rate:.2f} GB/s[/dim]", highlight=False)

        return run_interleaved(paths, arguments.rounds, report)


def _own_paths(server: ServerProcess, load: Load, pool: Pool, directory: FilePath) -> dict[str, Callable[[], Path]]:
    """How to make each of the store's paths and limits, by name. What is read is stored when the first one is made."""
    raw = cache(lambda: Stored(server, load, compressed=False))
    small = load_of(min(load.size, 128 << 20))
    appends = cache(lambda: [pool.joined(number) for number in range(load.size // load.append_bytes)])
    paths: dict[str, Callable[[], Path]] = {
        Memcpy.name: lambda: Memcpy(load.size),
        RawTcp.name: lambda: RawTcp(load.size),
        LocalWrite.name: lambda: LocalWrite(directory, appends()),
    }
    for arena in ("required", "off"):
        for durability in DURABILITIES:
            make: Callable[[], Path] = partial(Append, server, arena, durability, load, pool)
            paths[Append.name_of(arena, durability)] = make
    for arena, files, spans in (("required", False, SPANS), ("required", True, SPANS), ("off", False, SPANS[-1:])):
        for span in spans:
            paths[Read.name_of(arena, span, files=files)] = partial(
                lambda arena, span, files: Read(server, arena, raw(), span, files=files), arena, span, files
            )
    paths[Read.name_of("required", SPANS[-1], compressed=True)] = lambda: Read(
        server, "required", Stored(server, small, compressed=True), SPANS[-1]
    )
    return paths


def _restart_with_allocator() -> None:
    """Start this program once more with the allocator settings, which every process that it starts then has too."""
    wanted = environment()
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **wanted})
