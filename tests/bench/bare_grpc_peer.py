"""The limit of the remote path: messages of raw bytes over gRPC, the same server settings as ours, and nothing else.

Upwards the server drops them; downwards it sends what it got before. What our rows cost beyond these is ours.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from trace_client.bench.measure import Sample, timed

_OPTIONS = [("grpc.max_receive_message_length", 32 << 20), ("grpc.max_send_message_length", 32 << 20)]

_SERVER = f"""
import grpc
import uvloop
from trace_store import allocator

kept = []

async def put(requests, context):
    async for message in requests:
        pass
    yield b"k"

async def keep(requests, context):
    kept[:] = [message async for message in requests]
    yield b"k"

async def get(request, context):
    for message in kept:
        await context.write(message)

async def main():
    server = grpc.aio.server(options={_OPTIONS!r})
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Store", {{
        "Put": grpc.stream_stream_rpc_method_handler(put),
        "Keep": grpc.stream_stream_rpc_method_handler(keep),
        "Get": grpc.unary_stream_rpc_method_handler(get),
    }}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()

allocator.keep_freed_memory()
uvloop.run(main())
"""


def missing() -> str:
    return ""


def make(values: Sequence[bytes], directory: Path) -> list[Any]:
    del directory
    server = _Server()
    return [_Put(server, values), _Get(server, values)]


class _Server:
    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._channel = grpc.insecure_channel(f"127.0.0.1:{int(self._process.stdout.readline())}", _OPTIONS)
        self.pid = self._process.pid
        self.put = self._channel.stream_stream("/bare.Store/Put")
        self.keep = self._channel.stream_stream("/bare.Store/Keep")
        self.get = self._channel.unary_stream("/bare.Store/Get")

    def close(self) -> None:
        if self._process.poll() is None:
            self._channel.close()
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()


class _Put:
    name, direction = "bare gRPC stream up", "up"

    def __init__(self, server: _Server, values: Sequence[bytes]) -> None:
        self._server, self._values = server, values

    def run(self, turn: int) -> Sample:
        del turn
        return timed(sum(map(len, self._values)), self._write, self._server.pid)

    def close(self) -> None:
        self._server.close()

    def _write(self) -> None:
        assert list(self._server.put(iter(self._values))) == [b"k"]


class _Get:
    name, direction = "bare gRPC stream down", "down"

    def __init__(self, server: _Server, values: Sequence[bytes]) -> None:
        self._server, self._size = server, sum(map(len, values))
        assert list(server.keep(iter(values))) == [b"k"]

    def run(self, turn: int) -> Sample:
        del turn
        return timed(self._size, self._read, self._server.pid)

    def close(self) -> None:
        self._server.close()

    def _read(self) -> None:
        assert sum(len(message) for message in self._server.get(b"")) == self._size
