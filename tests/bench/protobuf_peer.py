"""The naive version of the remote path: one protobuf message an append with a bytes field, streams over sync gRPC.

The server keeps the messages in memory; nothing is checked, nothing reaches a disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from tests.bench.peer import ServerProgram, Transfer
from trace_store.v1 import trace_store_service_pb2 as service_pb2

_OPTIONS = [("grpc.max_receive_message_length", 32 << 20), ("grpc.max_send_message_length", 32 << 20)]

_SERVER = f"""
from concurrent.futures import ThreadPoolExecutor
import grpc
from trace_store.v1 import trace_store_service_pb2 as pb

kept = []

def put(requests, context):
    kept[:] = requests
    return pb.ReleaseResponse()

def get(request, context):
    for message in kept:
        yield message

server = grpc.server(ThreadPoolExecutor(4), options={_OPTIONS!r})
encode = lambda message: message.SerializeToString()
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("naive.Store", {{
    "Put": grpc.stream_unary_rpc_method_handler(put, pb.AppendRequest.FromString, encode),
    "Get": grpc.unary_stream_rpc_method_handler(get, pb.StatusRequest.FromString, encode),
}}),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
print(port, flush=True)
server.wait_for_termination()
"""


def missing() -> str:
    return ""


def make(values: Sequence[bytes], directory: Path) -> list[Any]:
    del directory
    program = ServerProgram(_SERVER)
    channel = grpc.insecure_channel(f"127.0.0.1:{program.port}", _OPTIONS)
    put = channel.stream_unary("/naive.Store/Put", _encode, service_pb2.ReleaseResponse.FromString)
    get = channel.unary_stream("/naive.Store/Get", _encode, service_pb2.AppendRequest.FromString)
    size = sum(map(len, values))

    def write() -> None:
        put(service_pb2.AppendRequest(payload=value) for value in values)

    def read() -> None:
        assert sum(len(message.payload) for message in get(service_pb2.StatusRequest())) == size

    write()
    return [
        Transfer("protobuf field, gRPC up", "up", size, write, program),
        Transfer("protobuf field, gRPC down", "down", size, read, program),
    ]


def _encode(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded
