"""What the tests of the bulk paths under load share: wide records, resident memory, and a server whose disk stops."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import trace_client
from trace_server.app import Listen, Server
from trace_store import Site, wire
from trace_store.engine import Engine
from trace_store.segment import writer as segment_writer
from trace_store.v1 import record_pb2
from trace_store.v1 import trace_store_service_pb2 as service_pb2

MIB = 1 << 20

WIDE = Site(0, "moe_in", 8192, form="full")
"""4,608 bytes a token: a few hundred tokens fill a message."""


def wide_rows(tokens: int, seed: int = 0) -> dict[Site, Any]:
    random = np.random.default_rng(seed)
    return {
        WIDE: (
            random.integers(0, 256, (tokens, 4096), np.uint8),
            random.integers(0, 0x7F, (tokens, 512), np.uint8),
            np.float32(1),
        )
    }


def rss_bytes(pid: int) -> int:
    """Resident memory that is the process's own: what it shares with clients is theirs to bound."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


class GatedServer:
    """A server in this process whose disk stops at a gate."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.gate.set()
        write = segment_writer._write_all

        def gated(*arguments: Any) -> int:
            self.gate.wait()
            return write(*arguments)

        patch.setattr(segment_writer, "_write_all", gated)
        self._directory, self._ready = directory, threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._ready.wait(20)

    async def _main(self) -> None:
        self.engine = Engine(self._directory)
        self._server = Server(self.engine, Listen("127.0.0.1:0", metrics_address="127.0.0.1:0"))
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await self._server.start()
        self.address = f"127.0.0.1:{self._server.port}"
        self.metrics = f"127.0.0.1:{self._server.metrics_port}"
        self._ready.set()
        await self._stop.wait()
        await self._server.stop()

    def close(self) -> None:
        self.gate.set()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()


def is_serving(address: str, timeout_s: float) -> bool:
    with grpc.insecure_channel(address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def open_read(channel: Any, run: str, spans: list[tuple[str, int, int]]) -> Any:
    request = service_pb2.ReadRequest(
        run=run,
        partition="p",
        sites=[0],
        spans=[
            record_pb2.TokenSpan(trajectory=name, start=start, stop=stop, dest_row=2000 * number)
            for number, (name, start, stop) in enumerate(spans)
        ],
    )
    return channel.unary_stream(f"/{wire.SERVICE}/Read")(request.SerializeToString())


def open_segments(pid: int) -> int:
    """Segment files that a process has open."""
    count = 0
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since the listing
            count += os.readlink(f"/proc/{pid}/fd/{entry}").endswith((".arrow", ".open"))
    return count


def metric(address: str, name: str) -> float:
    """Value of one series without labels."""
    text = urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read().decode()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


class Resident:
    """Samples a process's resident memory until it is left. Arena pages would count, so measure with arena off."""

    def __init__(self, pid: int) -> None:
        self._pid, self._done = pid, threading.Event()
        self.first = self.peak = self._now()
        self._thread = threading.Thread(target=self._sample)

    def _now(self) -> int:
        return int(Path(f"/proc/{self._pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _sample(self) -> None:
        while not self._done.wait(0.02):
            self.peak = max(self.peak, self._now())

    def __enter__(self) -> Resident:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        return self.peak - self.first


BACKLOG_GROWTH_MAX = 256 * MIB
"""What a server may take for one writer and one reader: 64 MiB queue, 32 MiB credit and as much again on its way
through gRPC, 3 frames of a read and what gRPC holds of it, and 64 MiB by which the allocator grows ahead."""


def backlog_behind_a_slow_reader(server: Any, backlog_bytes: int, pause_s: float, turns: int) -> Resident:
    """Write a backlog while a reader takes a message each ``pause_s``, then read all of it at that pace for ``turns``
    messages; the server's resident memory meanwhile."""
    options = [("grpc.max_receive_message_length", 17 * MIB)]
    spans = [(f"t{number}", 0, 2000) for number in range(-(-backlog_bytes // (2000 * 4608)))]
    parts = [wide_rows(400, seed) for seed in range(5)]
    with trace_client.connect(server.address, arena="off") as client:
        client.register("backlog", [WIDE])
        writer = client.writer("backlog", "p", "memory")

        def write(name: str) -> None:
            for place, rows in enumerate(parts):
                writer.append(name, 400 * place, rows)
            writer.seal(name, tokens=2001, prompt_tokens=0)

        with Resident(server.pid) as resident, grpc.insecure_channel(server.address, options) as channel:
            for name, _, _ in spans[:10]:
                write(name)
            call, written = open_read(channel, "backlog", spans[:10]), threading.Event()

            def read() -> None:
                while not written.wait(pause_s):
                    next(call, None)

            reader = threading.Thread(target=read)
            reader.start()
            for name, _, _ in spans[10:]:
                write(name)
            writer.close()
            written.set()
            reader.join()
            call.cancel()
            call = open_read(channel, "backlog", spans)
            for _ in range(turns):
                assert wire.parse_read(next(call))[1].nbytes
                time.sleep(pause_s)
            call.cancel()
        batch = client.reader("backlog", "p").read([(name, start, stop) for name, start, stop in spans[-1:]])
        assert (batch.planes[WIDE][:400] == parts[0][WIDE][0]).all()
        client.release("backlog", "p")
    return resident
