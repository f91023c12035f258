"""How cost grows: with concurrent trajectories, tokens a span, sites, and records in the catalog.

The last one is the promise that counts for a long run: what a record costs to append, plan and read must not depend on
how many the store already has (within 1.3x from 10^4 to 10^6).
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path as FilePath
from typing import Any

from rich.console import Console
from rich.table import Table

import trace_client
from trace_client.bench.measure import cpu_seconds
from trace_client.bench.paths import ServerProcess
from trace_client.bench.records import Load, Pool
from trace_client.microbatch import Buffers

TRAJECTORIES = (1, 4, 16, 64)
SPAN_TOKENS = (64, 256, 1024, 4096)
SITES = (1, 4, 20, 60)
RECORDS = (1_000, 10_000, 100_000, 1_000_000)

SIZE = 64 << 20
"""Payload of a point, but for the catalog's, whose records are small."""

PROBE_TRAJECTORIES = 200


def measure(directory: FilePath, console: Console) -> list[dict[str, Any]]:
    """All points of the table."""
    server = ServerProcess(directory)
    rows: list[dict[str, Any]] = []
    try:
        with trace_client.connect(server.address) as client:
            for count in TRAJECTORIES:
                load = Load(128, max(1, SIZE // (128 * 20 * 384) // count), count)
                rows.append(_point(client, server, "trajectories", count, load))
            for tokens in SPAN_TOKENS:
                rows.append(_point(client, server, "tokens a span", tokens, Load(tokens, 1, SIZE // (tokens * 7680))))
            for sites in SITES:
                tokens = 7680 // (384 * sites) * 128 if sites < 20 else 128
                load = Load(tokens, 4, max(1, SIZE // (4 * tokens * sites * 384)), sites)
                rows.append(_point(client, server, "sites", sites, load))
            rows.extend(_catalog(client, server, console))
    finally:
        server.close()
    return rows


def print_rows(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("varied", "value", "append", "read", "append CPU us/record", "read CPU us/record"):
        table.add_column(column, justify="right" if column != "varied" else "left", no_wrap=True)
    for row in rows:
        table.add_row(
            row["varied"],
            f"{row['value']:,}",
            f"{row['append_gb_per_s']:.2f} GB/s",
            f"{row['read_gb_per_s']:.2f} GB/s",
            f"{row['append_cpu_us']:.1f}",
            f"{row['read_cpu_us']:.1f}",
        )
    console.print(table)


def _point(client: trace_client.Client, server: ServerProcess, varied: str, value: int, load: Load) -> dict[str, Any]:
    """Append, seal and read a load; CPU of client and server together, best of two."""
    run = f"{varied} {value}"
    client.register(run, load.table)
    pool = Pool(load)
    best: dict[str, Any] = {}
    for turn in range(2):
        partition = str(turn)
        appended = _append(client, server, run, partition, load, pool)
        read = _read(client, server, run, partition, load)
        client.release(run, partition)
        if not best or appended[0] + read[0] < best["seconds"]:
            records = load.sites * load.appends * load.trajectories
            best = {
                "varied": varied,
                "value": value,
                "seconds": appended[0] + read[0],
                "append_gb_per_s": load.size / appended[0] / 1e9,
                "read_gb_per_s": load.size / read[0] / 1e9,
                "append_cpu_us": appended[1] / records * 1e6,
                "read_cpu_us": read[1] / records * 1e6,
            }
    return best


def _append(
    client: trace_client.Client, server: ServerProcess, run: str, partition: str, load: Load, pool: Pool
) -> tuple[float, float]:
    """Wall and CPU seconds of appending a load round-robin over its trajectories, as rollouts do."""
    numbers = itertools.count()
    with client.writer(run, partition, "written") as writer:
        started, cpu = time.perf_counter(), time.process_time() + cpu_seconds(server.pid)
        for position in range(load.appends):
            for trajectory in range(load.trajectories):
                writer.append(f"t{trajectory}", position * load.tokens, pool[next(numbers)])
        writer.flush()
        took = time.perf_counter() - started, time.process_time() + cpu_seconds(server.pid) - cpu
        for trajectory in range(load.trajectories):
            writer.seal(f"t{trajectory}", tokens=load.tokens * load.appends + 1, prompt_tokens=0)
    return took


def _read(
    client: trace_client.Client, server: ServerProcess, run: str, partition: str, load: Load
) -> tuple[float, float]:
    length = load.tokens * load.appends
    spans = [(f"t{trajectory}", 0, length, trajectory * length) for trajectory in range(load.trajectories)]
    buffers, reader = Buffers(), client.reader(run, partition)
    reader.read(spans, out=buffers)
    started, cpu = time.perf_counter(), time.process_time() + cpu_seconds(server.pid)
    batch = reader.read(spans, out=buffers)
    took = time.perf_counter() - started, time.process_time() + cpu_seconds(server.pid) - cpu
    if not batch.all_valid.all():
        raise RuntimeError("the benchmark read what it had not written")
    return took


def _catalog(client: trace_client.Client, server: ServerProcess, console: Console) -> list[dict[str, Any]]:
    """The same small load against a catalog that holds more and more records."""
    fill = Load(1, 1, 1, 20)
    client.register("catalog", fill.table)
    pool = Pool(fill)
    rows, held = [], 0
    with client.writer("catalog", "held", "written") as writer:
        for records in RECORDS:
            while held < records - PROBE_TRAJECTORIES * fill.sites:
                writer.append(f"h{held}", 0, pool[held])
                held += fill.sites
            writer.flush()
            console.print(f"[dim]catalog of {records:,} records[/dim]", highlight=False)
            row = _probe(client, server, records, Load(16, 1, PROBE_TRAJECTORIES, 20))
            rows.append(row)
    return rows


def _probe(client: trace_client.Client, server: ServerProcess, records: int, load: Load) -> dict[str, Any]:
    """Append to and read from the partition that holds all the records; median-free: best of three."""
    pool, best = Pool(load), None
    table = load.table
    for turn in range(3):
        numbers = itertools.count()
        names = [f"probe-{records}-{turn}-{number}" for number in range(load.trajectories)]
        with client.writer("catalog", "held", "written") as writer:
            started, cpu = time.perf_counter(), time.process_time() + cpu_seconds(server.pid)
            for name in names:
                writer.append(name, 0, pool[next(numbers)])
            writer.flush()
            append_s, append_cpu = time.perf_counter() - started, time.process_time() + cpu_seconds(server.pid) - cpu
        reader, buffers = client.reader("catalog", "held"), Buffers()
        spans = [(name, 0, load.tokens, number * load.tokens) for number, name in enumerate(names)]
        reader.read(spans, table, out=buffers, include_open=True)
        started, cpu = time.perf_counter(), time.process_time() + cpu_seconds(server.pid)
        for _ in range(4):
            reader.read(spans, table, out=buffers, include_open=True)
        read_s = (time.perf_counter() - started) / 4
        read_cpu = (time.process_time() + cpu_seconds(server.pid) - cpu) / 4
        if best is None or append_cpu + read_cpu < best[1] + best[3]:
            best = (append_s, append_cpu, read_s, read_cpu)
        client.release("catalog", "held", names)
    assert best is not None
    count = load.sites * load.trajectories
    return {
        "varied": "records in the catalog",
        "value": records,
        "seconds": best[0] + best[2],
        "append_gb_per_s": load.size / best[0] / 1e9,
        "read_gb_per_s": load.size / best[2] / 1e9,
        "append_cpu_us": best[1] / count * 1e6,
        "read_cpu_us": best[3] / count * 1e6,
    }
