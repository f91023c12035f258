"""The writer's thread and group commit: order, backpressure, grouping, idle segments, clock, robustness."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from trace_store import shard
from trace_store.engine import Engine
from trace_store.planner import MissingReason
from trace_store.segment.reader import open_sealed
from trace_store.segment.writer import SegmentWriter


def test_waiting_appends_share_one_sync(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one sync runs, everything that arrives waits for the next one."""
    real, gate, entered, count = os.fdatasync, threading.Event(), threading.Event(), [0]

    def slow(descriptor: int) -> None:
        count[0] += 1
        if count[0] == 1:
            entered.set()
            assert gate.wait(200)
        real(descriptor)

    store.append("t", 0, 1)
    monkeypatch.setattr(os, "fdatasync", slow)
    first = store.engine.append("run", "step-1", store.chunk("t", 1, 2), "synced")
    assert entered.wait(30)
    rest = [store.engine.append("run", "step-1", store.chunk("t", n, n + 1), "synced") for n in range(2, 42)]
    store.append("t", 42, 43, durability="written")
    gate.set()
    for future in [first, *rest]:
        future.result(30)
    assert count[0] == 2


def test_a_full_queue_holds_the_producer_back(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "QUEUE_BYTES_MAX", 1000)
    gate, entered, reached = threading.Event(), threading.Event(), []

    def block() -> None:
        entered.set()
        gate.wait(200)

    store.engine.append("run", "step-1", store.chunk("t", 0, 1), "memory", block)
    assert entered.wait(30)

    def produce() -> None:
        for start in range(1, 60):
            store.engine.append("run", "step-1", store.chunk("t", start, start + 1), "memory")
            reached.append(start)

    producer = threading.Thread(target=produce)
    producer.start()
    while store.engine.queued_bytes <= 1000:
        assert producer.is_alive()
    assert len(reached) < 20
    gate.set()
    producer.join(30)
    assert len(reached) == 59
    store.seal("t", 61)
    assert store.check("t", 0, 60) == []


def test_a_full_segment_is_rolled_and_the_rows_stay(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "SEGMENT_BYTES_MAX", 20_000)
    store.reopen()
    for start in range(0, 200, 10):
        store.append("t", start, start + 10)
    receipt = store.seal("t", 201)
    assert len(receipt.segments) > 2
    assert set(receipt.segments) <= {path.stem for path in store.segments() + store.segments(".open")}
    assert store.check("t", 0, 200) == []
    store.reopen()
    assert store.check("t", 0, 200) == []


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_an_idle_segment_is_sealed_while_others_are_written(store: Any, tmp_path: Any) -> None:
    clock = Clock()
    store.engine.close()
    store.engine = Engine(store.root, server="test", clock=clock)
    store.append("t", 0, 4)
    for _ in range(3):
        clock.now += 20
        store.append("t", int(clock.now), int(clock.now) + 4, partition="busy")
    assert [path.suffix for path in store.segments("") if path.is_file() and "step-1" in str(path)] == [".arrow"]
    assert len(store.segments(".open")) == 1


def test_a_clock_that_stands_still_or_jumps_back_changes_nothing(store: Any) -> None:
    clock = Clock()
    store.engine.close()
    store.engine = Engine(store.root, server="test", clock=clock)
    for start in range(0, 40, 4):
        store.append("t", start, start + 4)
        clock.now -= 1e6
    store.seal("t", 41)
    assert store.check("t", 0, 40) == []


def test_closing_writes_and_seals_what_was_accepted(store: Any) -> None:
    for start in range(0, 40, 4):
        assert store.append("t", start, start + 4, durability="memory").stored == 4
    store.engine.close()
    assert len(store.segments()) == 1
    assert store.segments(".open") == []
    store.reopen()
    assert store.check("t", 0, 40, include_open=True) == []


def test_a_failing_callback_or_an_unexpected_error_does_not_stop_the_writer(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    store.engine.append("run", "step-1", store.chunk("t", 0, 1), "memory", fail)
    store.append("t", 0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shard, "admit", fail)
        future: Future[Any] = store.engine.append("run", "step-1", store.chunk("t", 1, 2), "synced")
        assert "internal error" in str(future.exception(30))
    with monkeypatch.context() as patch:
        patch.setattr(SegmentWriter, "sync", fail)
        future = store.engine.append("run", "step-1", store.chunk("t", 1, 2), "synced")
        assert "internal error" in str(future.exception(30))
        assert "internal error" in store.engine.usage().write_refusal
    # What that round should have synced is copied before anything counts as durable again.
    assert store.append("t", 1, 2).duplicates == 4
    assert len(store.segments()) == 1
    assert store.check("t", 0, 2, include_open=True) == []
    assert store.reasons("t", 0, 2) == {MissingReason.NOT_SEALED}


def test_scales_are_compressed_only_while_nothing_else_waits(store: Any) -> None:
    gate, entered = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        assert gate.wait(200)

    store.engine.append("run", "step-1", store.chunk("t", 0, 256), "memory", block)
    assert entered.wait(30)
    store.engine.append("run", "step-1", store.chunk("t", 256, 512), "memory")
    store.engine.append("run", "step-1", store.chunk("t", 512, 768), "memory")
    gate.set()
    store.engine.close()
    _, index = open_sealed(store.segments(".arrow")[0])
    compressed = {int(row["start"]): bool(row["scales_encoding"]) for row in index.rows}
    assert compressed == {0: True, 256: False, 512: True}
