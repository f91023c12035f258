"""Time to open many segments and memory of the catalog per million records; figures for tests/README.md."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trace_store.chunk import Chunk
from trace_store.naming import directory_name, segment_name
from trace_store.record import Site
from trace_store.segment.schema import SegmentHeader
from trace_store.segment.writer import SegmentWriter
from trace_store.testing.records import join_chunks, make_chunk

SEGMENTS = 10_000
RECORDS = 1_000_000
BUDGET_BYTES = 300_000_000

OPEN = """
import gc, resource, sys, time
from pathlib import Path
import pyarrow as pa
from trace_store.engine import Engine
def resident():
    gc.collect()
    pa.default_memory_pool().release_unused()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
Engine(Path(sys.argv[1]) / "empty").close()
before, start = resident(), time.perf_counter()
engine = Engine(Path(sys.argv[1]) / "full")
print(time.perf_counter() - start, resident() - before, engine.usage().records, flush=True)
engine.close()
"""


def open_measured(root: Path) -> tuple[float, int, int]:
    """Seconds to open, growth of resident memory in bytes, records found; in a process of its own."""
    command = [sys.executable, "-c", OPEN, str(root)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, growth, records = result.stdout.split()
    return float(seconds), int(growth), int(records)


def write_segment(root: Path, table: tuple[Site, ...], partition: str, sequence: int, chunks: list[Chunk]) -> None:
    """A sealed segment, not synced: this measures reading."""
    directory = root / "full" / "runs" / directory_name("run") / directory_name(partition)
    directory.mkdir(parents=True, exist_ok=True)
    name = segment_name(sequence, "e")
    writer = SegmentWriter(directory, name, SegmentHeader("run", partition, table, "s", sequence))
    for chunk in chunks:
        writer.append_chunk(chunk)
    writer.seal()
    writer.close()


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setattr(os, "fdatasync", lambda _: None)
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.usefixtures("unsynced")
def test_time_to_open_ten_thousand_segments(tmp_path: Path, report: Callable[[str], None]) -> None:
    table = tuple(Site(layer, "moe_in", 2048) for layer in range(20))
    start = time.perf_counter()
    for number in range(SEGMENTS):
        partition = f"step-{number // 100}"
        chunk = make_chunk("run", partition, table, f"t{number}", 0, 1)
        write_segment(tmp_path, table, partition, number % 100, [chunk])
    written = time.perf_counter() - start
    seconds, growth, records = open_measured(tmp_path)
    assert records == SEGMENTS * len(table)
    report(
        f"open segments={SEGMENTS} records={records} seconds={seconds:.1f} ms a segment={seconds / SEGMENTS * 1e3:.2f}"
        f" memory MB={growth / 1e6:.0f} (written in {written:.0f} s)"
    )


@pytest.mark.usefixtures("unsynced")
@pytest.mark.parametrize("sites", [1, 60])
def test_memory_per_million_records(tmp_path: Path, report: Callable[[str], None], sites: int) -> None:
    """Appends of 16 tokens at every site; 1,000 trajectories; small rows, since rows are not kept in memory."""
    table = tuple(Site(layer, "moe_in", 16) for layer in range(sites))
    segments = 20
    groups = RECORDS // sites // segments
    for number in range(segments):
        chunks = []
        for low in range(0, groups, 500):
            made = [
                make_chunk(
                    "run",
                    "p",
                    table,
                    f"t{(number * groups + g) % 1000}",
                    16 * (number * groups + g),
                    16 * (number * groups + g) + 16,
                )
                for g in range(low, min(low + 500, groups))
            ]
            chunks.append(join_chunks(made))
        write_segment(tmp_path, table, "p", number, chunks)
    seconds, growth, records = open_measured(tmp_path)
    assert abs(records - RECORDS) < RECORDS // 100
    per_million = growth / records * 1e6
    assert per_million < BUDGET_BYTES
    report(
        f"memory sites a group={sites} records={records} MB per million={per_million / 1e6:.0f} seconds={seconds:.1f}"
    )
    assert np.isfinite(per_million)
