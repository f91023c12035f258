"""FR-31: five minutes of ingest at twice the rate of deletion, one deletion hanging: the cap holds, writes slow."""

from __future__ import annotations

import shutil
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trace_store import Site, TokenSpan
from trace_store.engine import Engine
from trace_store.errors import StorageFull
from trace_store.retention import Limits
from trace_store.testing.records import make_chunk

SECONDS = 300.0
CAP_BYTES = 256 << 20
DELETE_BYTES_PER_S, INGEST_BYTES_PER_S = 8 << 20, 16 << 20
TABLE = tuple(Site(layer, "moe_in", 2048) for layer in range(8))
TOKENS, MESSAGES = 512, 8
"""A message is 1.6 MiB, a partition of eight messages 12.5 MiB."""


@dataclass
class Totals:
    """What was seen during a run; ``largest``: bytes of segments on the disk, released ones included."""

    appended_bytes: int = 0
    refused: int = 0
    largest: int = 0
    pending_max: int = 0


def bytes_on_disk(root: Path) -> int:
    """Bytes of the files, each once: a directory that is renamed meanwhile may be listed under both names."""
    sizes: dict[int, int] = {}
    for path in root.rglob("*"):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        if stat.S_ISREG(found.st_mode):
            sizes[found.st_ino] = found.st_size
    return sum(sizes.values())


def watch(root: Path, engine: Engine, totals: Totals, done: threading.Event) -> None:
    while not done.wait(0.2):
        try:
            totals.largest = max(totals.largest, bytes_on_disk(root))
        except FileNotFoundError:  # a directory went while it was being listed
            continue
        totals.pending_max = max(totals.pending_max, engine.usage().deletions_pending)


def ingest(engine: Engine, seconds: float, totals: Totals) -> list[tuple[str, int]]:
    """Offer messages at a steady rate, each again until it is taken; partitions that are whole, with their tokens."""
    begun = time.monotonic()
    whole: list[tuple[str, int]] = []
    while time.monotonic() < begun + seconds:
        partition = f"step-{len(whole)}"
        for message in range(MESSAGES):
            chunk = make_chunk("run", partition, TABLE, "t", message * TOKENS, (message + 1) * TOKENS)
            while True:
                try:
                    engine.append("run", partition, chunk).result(60)
                    break
                except StorageFull:
                    totals.refused += 1
                    time.sleep(0.1)
            totals.appended_bytes += chunk.payload_bytes
            time.sleep(max(begun + totals.appended_bytes / INGEST_BYTES_PER_S - time.monotonic(), 0.0))
        tokens = MESSAGES * TOKENS
        engine.seal("run", partition, "t", tokens=tokens + 1, prompt_tokens=0).result(60)
        whole.append((partition, tokens))
    return whole


def test_deletion_falls_behind_and_one_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Callable[[str], None]
) -> None:
    remove, turn, unstuck = shutil.rmtree, threading.Lock(), threading.Event()
    deleted: list[int] = []

    def slowly(path: Path, *arguments: Any, **more: Any) -> None:
        if "step-0-" in str(path):
            unstuck.wait()
        size = sum(file.stat().st_size for file in Path(path).iterdir())
        with turn:  # one disk: deletions share its rate
            time.sleep(size / DELETE_BYTES_PER_S)
            remove(path, *arguments, **more)
            deleted.append(size)

    totals, done = Totals(), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", slowly)
        engine = Engine(tmp_path / "data", limits=Limits(disk_bytes_max=CAP_BYTES, free_min=0, free_low=0))
        engine.register("run", TABLE)
        watcher = threading.Thread(target=watch, args=(tmp_path / "data", engine, totals, done))
        watcher.start()
        whole = ingest(engine, SECONDS, totals)
        done.set()
        watcher.join()
        usage = engine.usage()
        partition, tokens = whole[-1]
        with engine.read("run", partition, [TokenSpan("t", 0, tokens)], range(len(TABLE))) as read:
            rows = sum(piece.rows for piece in read)
        unstuck.set()
        assert engine._volume.deleter.drain(120)
        engine.close()
    report(
        f"{SECONDS:.0f} s of ingest against deletion at {DELETE_BYTES_PER_S >> 20} MiB/s, one deletion hanging:"
        f" cap {CAP_BYTES >> 20} MiB, at most {totals.largest / (1 << 20):.0f} MiB on the disk, appended"
        f" {totals.appended_bytes / (1 << 20):.0f} MiB ({totals.appended_bytes / SECONDS / (1 << 20):.1f} MiB/s),"
        f" slowed {usage.slowed_seconds:.0f} s, refused {totals.refused}, deletions done {len(deleted)},"
        f" waiting at most {totals.pending_max}"
    )
    assert totals.largest <= 1.01 * CAP_BYTES  # headers of messages and indexes count when the keeper looks next
    assert len(deleted) > 50  # the one that hangs stopped none of the others
    assert usage.slowed_seconds > 0
    assert usage.deletions_pending >= 1
    assert rows == tokens * len(TABLE)
