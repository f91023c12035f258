"""What the tests of the bulk paths under load share: wide records, resident memory, and a server whose disk stops."""

from __future__ import annotations

import asyncio
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


def wait_until(condition: Any, seconds: float = 20.0) -> None:
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
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
    return sum(link.endswith((".arrow", ".open")) for link in links)


def metric(address: str, name: str) -> float:
    """Value of one series without labels."""
    text = urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read().decode()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))
