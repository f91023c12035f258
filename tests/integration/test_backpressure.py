"""Slow disks, dying clients and servers: memory stays bounded, nobody hangs, nothing is half there.

The long versions are in tests/torture.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import trace_client
from tests.integration.bulk import MIB, WIDE, GatedServer, is_serving, rss_bytes, wait_until, wide_rows
from trace_client import stream as stream_module
from trace_server import append as append_module
from trace_store.errors import DeadlineExceeded
from trace_store.segment import writer as segment_writer
from trace_store.v1 import trace_store_service_pb2 as service_pb2


@pytest.fixture
def gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedServer]:
    server = GatedServer(tmp_path, monkeypatch)
    yield server
    server.close()


@pytest.fixture
def arena_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In place of /dev/shm for clients of this test, so that no other test's arenas are in it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        monkeypatch.setenv("TRACE_STORE_ARENA_DIR", directory)
        yield Path(directory)


class TestStuckDisk:
    @pytest.mark.parametrize(("arena", "bound"), [("off", 32 * MIB), ("required", 16 * MIB)])
    @pytest.mark.parametrize("durability", ["memory", "written"])
    def test_the_producer_waits_within_its_bound_and_loses_nothing(
        self, gated: GatedServer, monkeypatch: pytest.MonkeyPatch, arena: str, bound: int, durability: str
    ) -> None:
        if durability == "memory" and arena == "off":
            bound += 64 * MIB + 4 * MIB  # answered from the server's queue, and what gRPC holds on the way there
        with trace_client.connect(gated.address, arena=arena, arena_bytes=16 * MIB) as client:
            client.register("r", [WIDE])
            writer = client.writer("r", "p", durability)
            writer.append("t", 0, wide_rows(200))
            writer.flush()
            gated.gate.clear()
            done = threading.Event()

            def append_all() -> None:
                for number in range(1, 160):
                    writer.append("t", 200 * number, wide_rows(200, number))
                done.set()

            producer = threading.Thread(target=append_all)
            producer.start()
            before = -1
            while before != (before := writer.sent_bytes) or before < bound // 2:
                assert not done.wait(0.3), "160 appends of 0.9 MiB do not fit"
            assert writer.sent_bytes <= bound + 2 * MIB
            assert is_serving(gated.address, 10.0), "health answers while the disk is stuck"
            gated.gate.set()
            producer.join(60)
            assert done.is_set()
            writer.seal("t", tokens=32_001, prompt_tokens=0)
            batch = client.reader("r", "p").read([("t", 31_800, 32_000)])
            assert (batch.planes[WIDE] == wide_rows(200, 159)[WIDE][0]).all()

    @pytest.mark.parametrize("arena", ["off", "required"])
    def test_small_appends_are_bounded_by_what_they_cost_and_not_by_their_payload(
        self, gated: GatedServer, monkeypatch: pytest.MonkeyPatch, arena: str
    ) -> None:
        monkeypatch.setattr(append_module, "REQUEST_BYTES", MIB)  # 64 in the queue instead of 16,384
        monkeypatch.setattr(stream_module, "UNANSWERED_MAX", 50)
        with trace_client.connect(gated.address, arena=arena, arena_bytes=16 * MIB) as client:
            client.register("r", [WIDE])
            writer = client.writer("r", "p", "memory")
            writer.append("t", 0, wide_rows(1))
            writer.flush()
            gated.gate.clear()
            sent = [0]

            def append_all() -> None:
                for number in range(1, 1000):
                    writer.append("t", number, wide_rows(1))
                    sent[0] = number

            producer = threading.Thread(target=append_all)
            producer.start()
            before = -1
            while before != sent[0] or before < 64:  # it moves on for as long as there is room
                before = sent[0]
                producer.join(0.5)
                assert producer.is_alive(), "1000 appends do not fit"
            assert sent[0] < 150
            assert is_serving(gated.address, 10.0)
            gated.gate.set()
            producer.join(60)
            writer.seal("t", tokens=1001, prompt_tokens=0)
            assert writer.stored == 1000

    def test_a_slow_disk_that_goes_on_is_no_deadline(self, gated: GatedServer, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each answer comes in time, all of them take longer than one answer may."""
        with trace_client.connect(gated.address) as client:
            client.register("r", [WIDE])
            writer = client.writer("r", "p", "written")
            writer.append("t", 0, wide_rows(1))
            writer.flush()
            monkeypatch.setattr(stream_module, "ANSWER_TIMEOUT_S", 3.0)
            delayed = segment_writer._write_all

            def slow(*arguments: Any) -> int:
                time.sleep(0.5)  # the disk's time
                return delayed(*arguments)

            monkeypatch.setattr(segment_writer, "_write_all", slow)
            for number in range(1, 9):
                writer.append("t", number, wide_rows(1))
            writer.flush()
            assert writer.stored == 9

    def test_a_deadline_shorter_than_the_write_is_typed_and_the_retry_finds_it_done(
        self, gated: GatedServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with trace_client.connect(gated.address) as client:
            client.register("r", [WIDE])
            writer = client.writer("r", "p")
            writer.append("t", 0, wide_rows(10))
            writer.flush()
            gated.gate.clear()
            request = service_pb2.SealRequest(run="r", partition="p", trajectory="t", tokens=11, prompt_tokens=0)
            with pytest.raises(DeadlineExceeded):
                client._channel.call("Seal", request, timeout_s=0.2)
            monkeypatch.setattr(stream_module, "ANSWER_TIMEOUT_S", 0.2)
            writer.append("u", 0, wide_rows(10))
            with pytest.raises(DeadlineExceeded):
                writer.flush()
            monkeypatch.setattr(stream_module, "ANSWER_TIMEOUT_S", 30)
            gated.gate.set()
            assert writer.seal("t", tokens=11, prompt_tokens=0).tokens == 11
            writer.append("u", 0, wide_rows(10))
            writer.seal("u", tokens=11, prompt_tokens=0)
            assert client.status()["records"] == 2, "one copy of each"


class TestClientsThatDie:
    def test_killed_in_mid_append_nothing_is_half_there_and_its_arena_is_gone(
        self, new_server: Any, arena_directory: Path
    ) -> None:
        server = new_server("--arena-dir", str(arena_directory)).start()
        code = (
            "import sys, numpy as np, trace_client\n"
            "from trace_store import Site\n"
            "site = Site(0, 'moe_in', 8192, form='full')\n"
            "client = trace_client.connect(sys.argv[1], arena='required')\n"
            "writer = client.writer('r', 'p', 'memory')\n"
            "rows = (np.zeros((400, 4096), np.uint8), np.zeros((400, 512), np.uint8), 1.0)\n"
            "for number in range(10**6):\n"
            "    writer.append(f't{number}', 0, {site: rows})\n"
            "    if number == 20:\n"
            "        writer.flush()\n"
            "        print('going', flush=True)\n"
        )
        with trace_client.connect(server.address) as client:
            client.register("r", [WIDE])
            child = subprocess.Popen([sys.executable, "-c", code, server.address], stdout=subprocess.PIPE)
            assert child.stdout is not None
            assert child.stdout.readline() == b"going\n"
            child.kill()
            child.wait()
            child.stdout.close()
            maps = Path(f"/proc/{server.pid}/maps")
            wait_until(lambda: maps.read_text().count("trace-store-") == 0)
            assert list(arena_directory.iterdir()) == []
            wait_until(lambda: client.status()["queued_bytes"] == 0)
            names = [entry.name for entry in client.list("r", "p")]
            assert {f"t{number}" for number in range(21)} <= set(names), "acknowledged, so the server has them"
            spans = [(name, 0, 400, 400 * number) for number, name in enumerate(names)]
            batch = client.reader("r", "p").read(spans, include_open=True)
            whole = batch.valid[WIDE].reshape(-1, 400)
            assert (whole.all(axis=1) | ~whole.any(axis=1)).all()
            whole_names = {name for name, there in zip(names, whole.all(axis=1), strict=True) if there}
            assert {f"t{number}" for number in range(21)} <= whole_names
            assert not [rows for rows in batch.missing if rows.reason == "data loss"]

    def test_a_hundred_idle_channels_cost_little(self, server: Any) -> None:
        before = rss_bytes(server.pid)
        channels = []
        for number in range(100):
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.primary_user_agent", f"idle-{number}")]
            channels.append(grpc.insecure_channel(server.address, options))
        for channel in channels:
            grpc.channel_ready_future(channel).result(30)
        assert rss_bytes(server.pid) - before < 100 * MIB // 2
        assert is_serving(server.address, 10.0)
        for channel in channels:
            channel.close()


class TestServerRestarts:
    @pytest.mark.parametrize("arena", ["required", "off"])
    def test_killed_and_started_again_under_load_the_writer_goes_on(self, new_server: Any, arena: str) -> None:
        server = new_server().start()
        appends = 60
        with trace_client.connect(server.address, arena=arena) as client:
            client.register("r", [WIDE])
            writer = client.writer("r", "p")
            halfway = threading.Event()
            failures: list[BaseException] = []

            def append_all() -> None:
                try:
                    for number in range(appends):
                        writer.append("t", 100 * number, wide_rows(100, number))
                        if number == appends // 3:
                            halfway.set()
                    writer.seal("t", tokens=100 * appends + 1, prompt_tokens=0)
                except BaseException as error:
                    failures.append(error)

            producer = threading.Thread(target=append_all)
            producer.start()
            assert halfway.wait(30)
            server.pause()  # so that some of it is surely unanswered
            server.kill()
            server.start()
            producer.join(60)
            assert not failures, failures
            assert client.status()["records"] == appends, "nothing lost, nothing twice"
            batch = client.reader("r", "p").read([("t", 0, 100 * appends)])
            expected = np.concatenate([wide_rows(100, number)[WIDE][0] for number in range(appends)])
            assert (batch.planes[WIDE] == expected).all()
            assert writer.stored + writer.duplicates >= 1
