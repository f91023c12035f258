"""Readers that are slow, stop, or go away: memory stays bounded, files are given back, the rest goes on.

The long versions are in tests/torture.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import trace_client
from tests.integration.bulk import (
    BACKLOG_GROWTH_MAX,
    MIB,
    WIDE,
    GatedServer,
    backlog_behind_a_slow_reader,
    metric,
    open_read,
    open_segments,
    rss_bytes,
    wait_until,
    wide_rows,
)
from trace_server import sending
from trace_store import wire
from trace_store.errors import DeadlineExceeded


def write_backlog(client: Any, run: str, count: int) -> list[tuple[str, int, int]]:
    """``count`` sealed trajectories of 9.2 MB in partition p of a new run; their spans."""
    client.register(run, [WIDE])
    with client.writer(run, "p", "written") as writer:
        for number in range(count):
            writer.append(f"t{number}", 0, wide_rows(2000, number))
            writer.seal(f"t{number}", tokens=2001, prompt_tokens=0)
    return [(f"t{number}", 0, 2000) for number in range(count)]


@pytest.fixture(scope="module")
def backlog(server: Any) -> tuple[str, list[tuple[str, int, int]]]:
    """A sealed backlog of 92 MB in the module's server: run name and spans."""
    with trace_client.connect(server.address) as client:
        return "backlog", write_backlog(client, "backlog", 10)


@pytest.fixture
def in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedServer]:
    server = GatedServer(tmp_path, monkeypatch)
    yield server
    server.close()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> float:
    """A server in this process cuts readers off after this many seconds."""
    monkeypatch.setattr(sending, "STALLED_READER_S", 3.0)  # a busy machine may stop a reader for a second
    return sending.STALLED_READER_S


NARROW = [
    ("grpc.max_receive_message_length", 17 * MIB),
    ("grpc.http2.lookahead_bytes", 64 << 10),
    ("grpc.http2.bdp_probe", 0),
]
"""A connection whose window does not grow: else gRPC may take a whole backlog of 18 MB while nobody reads."""


class TestReaders:
    def test_a_slow_reader_costs_the_server_a_few_messages(self, server: Any, backlog: Any) -> None:
        run, spans = backlog
        with trace_client.connect(server.address, arena="off") as client:
            placed = [(name, start, stop, 2000 * number) for number, (name, start, stop) in enumerate(spans)]
            client.reader(run, "p").read(placed)  # what one reader needs is there
            before = rss_bytes(server.pid)
            with grpc.insecure_channel(server.address, NARROW) as channel:
                calls = [open_read(channel, run, spans) for _ in range(4)]
                for call in calls:
                    next(call)
                started = time.monotonic()
                assert not client.reader(run, "p").read(placed).missing
                assert time.monotonic() - started < sending.STALLED_READER_S / 2, "others do not wait for them"
                for _ in range(3):  # a message a call and round, of some ninety that wait
                    for call in calls:
                        next(call)
                    assert rss_bytes(server.pid) - before < 4 * 12 * MIB
                for call in calls:
                    call.cancel()

    def test_a_backlog_behind_a_slow_reader_stays_on_the_disk(self, new_server: Any) -> None:
        resident = backlog_behind_a_slow_reader(new_server().start(), 768 * MIB, pause_s=0.05, turns=20)
        assert resident.growth < BACKLOG_GROWTH_MAX

    def test_cancelled_reads_give_back_their_files(self, server: Any, backlog: Any) -> None:
        run, spans = backlog
        before = open_segments(server.pid)
        with grpc.insecure_channel(server.address, [("grpc.max_receive_message_length", 17 * MIB)]) as channel:
            calls = [open_read(channel, run, spans) for _ in range(5)]
            for call in calls:
                next(call)
            assert open_segments(server.pid) > before, "a read in progress holds its segments"
            for call in calls:
                call.cancel()
            wait_until(lambda: open_segments(server.pid) <= before)

    def test_one_that_stops_is_cut_off_and_hears_why(self, in_process: GatedServer, short: float) -> None:
        with trace_client.connect(in_process.address, arena="off") as client:
            spans = write_backlog(client, "r", 2)
            with grpc.insecure_channel(in_process.address, NARROW) as channel:
                before = open_segments(os.getpid())
                call = open_read(channel, "r", spans)
                next(call)
                assert open_segments(os.getpid()) > before, "a read in progress holds its segments"
                wait_until(lambda: metric(in_process.metrics, "trace_store_stalled_readers_total") == 1)
                wait_until(lambda: open_segments(os.getpid()) <= before)
                assert not client.reader("r", "p").read([("t0", 0, 2000)]).missing, "others are served"
                with pytest.raises(grpc.RpcError) as caught:
                    for _ in call:
                        pass
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            error = client._channel.error(caught.value)
            assert isinstance(error, DeadlineExceeded)
            assert "repeat the read" in str(error)

    def test_one_that_is_merely_slow_gets_everything(self, in_process: GatedServer, short: float) -> None:
        with trace_client.connect(in_process.address, arena="off") as client:
            spans = write_backlog(client, "r", 4)
            with grpc.insecure_channel(in_process.address, [("grpc.max_receive_message_length", 17 * MIB)]) as channel:
                rows = 0
                for number, message in enumerate(open_read(channel, "r", spans)):
                    rows += sum(wire.parse_read(message)[0].rows)
                    if number < 30:
                        time.sleep(short / 20)  # one and a half times the limit in all
            assert rows == 8000
            assert metric(in_process.metrics, "trace_store_stalled_readers_total") == 0

    def test_cancelled_reads_leave_no_traceback_in_the_log(self, new_server: Any) -> None:
        server = new_server().start()
        with trace_client.connect(server.address, arena="off") as client:
            spans = write_backlog(client, "r", 10)

        before = open_segments(server.pid)

        def cancel_many(number: int) -> None:
            options = [("grpc.max_receive_message_length", 17 * MIB), ("grpc.use_local_subchannel_pool", 1)]
            chance = random.Random(number)
            with grpc.insecure_channel(server.address, options) as channel:
                for turn in range(60):
                    call = open_read(channel, "r", spans)
                    for _ in range(turn % 4):
                        next(call)
                    time.sleep((turn % 3) * 0.008 * chance.random())
                    call.cancel()

        threads = [threading.Thread(target=cancel_many, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_until(lambda: open_segments(server.pid) <= before)
        assert server.terminate() == 0
        log = server.log.read_text()
        assert "Traceback" not in log
        assert "ERROR" not in log
