"""The naive version of the remote path: one protobuf message an append with a bytes field, streams over sync gRPC.

The server keeps the messages in memory; nothing is checked, nothing reaches a disk.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from trace_client.bench.measure import Sample, timed
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
    server = _Server()
    return [_Put(server, values), _Get(server, values)]


class _Server:
    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._channel = grpc.insecure_channel(f"127.0.0.1:{int(self._process.stdout.readline())}", _OPTIONS)
        encode, self.pid = _encode, self._process.pid
        self.put = self._channel.stream_unary("/naive.Store/Put", encode, service_pb2.ReleaseResponse.FromString)
        self.get = self._channel.unary_stream("/naive.Store/Get", encode, service_pb2.AppendRequest.FromString)

    def close(self) -> None:
        if self._process.poll() is None:
            self._channel.close()
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()


class _Put:
    name, direction = "protobuf field, gRPC up", "up"

    def __init__(self, server: _Server, values: Sequence[bytes]) -> None:
        self._server, self._values = server, values

    def run(self, turn: int) -> Sample:
        del turn
        return timed(sum(map(len, self._values)), self.write, self._server.pid)

    def close(self) -> None:
        self._server.close()

    def write(self) -> None:
        self._server.put(service_pb2.AppendRequest(payload=value) for value in self._values)


class _Get:
    name, direction = "protobuf field, gRPC down", "down"

    def __init__(self, server: _Server, values: Sequence[bytes]) -> None:
        self._server, self._size = server, sum(map(len, values))
        _Put(server, values).write()

    def run(self, turn: int) -> Sample:
        del turn
        return timed(self._size, self._read, self._server.pid)

    def close(self) -> None:
        self._server.close()

    def _read(self) -> None:
        assert sum(len(message.payload) for message in self._server.get(service_pb2.StatusRequest())) == self._size


def _encode(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded
