"""The limit of the remote path: messages of raw bytes over gRPC, the same server settings as ours, and nothing else.

Upwards the server drops them; downwards it sends what it got before. What our rows cost beyond these is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from tests.bench.peer import ServerProgram, Transfer

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
    program = ServerProgram(_SERVER)
    channel = grpc.insecure_channel(f"127.0.0.1:{program.port}", _OPTIONS)
    put, keep = channel.stream_stream("/bare.Store/Put"), channel.stream_stream("/bare.Store/Keep")
    get, size = channel.unary_stream("/bare.Store/Get"), sum(map(len, values))

    def write() -> None:
        assert list(put(iter(values))) == [b"k"]

    def read() -> None:
        assert sum(len(message) for message in get(b"")) == size

    assert list(keep(iter(values))) == [b"k"]
    return [
        Transfer("bare gRPC stream up", "up", size, write, program),
        Transfer("bare gRPC stream down", "down", size, read, program),
    ]
