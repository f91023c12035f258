"""Arrow Flight over TCP: record batches of one append as one binary column; the server keeps them in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trace_client.bench.measure import Sample, timed

try:
    import pyarrow as pa
    import pyarrow.flight as flight
except ImportError:
    flight = None

SCHEMA_COLUMN = "payload"

_SERVER = """
import pyarrow.flight as flight

class Store(flight.FlightServerBase):
    def __init__(self):
        super().__init__("grpc://127.0.0.1:0")
        self.batches = []

    def do_put(self, context, descriptor, reader, writer):
        self.batches = [chunk.data for chunk in reader]

    def do_get(self, context, ticket):
        return flight.GeneratorStream(self.batches[0].schema, iter(self.batches))

server = Store()
print(server.port, flush=True)
server.serve()
"""


def missing() -> str:
    return "" if flight is not None else "pyarrow was built without Flight"


def make(values: Sequence[bytes], directory: Path) -> list[Any]:
    del directory
    server = _Server()
    return [_Put(server, values), _Get(server, values)]


class _Server:
    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.client = flight.FlightClient(f"grpc://127.0.0.1:{int(self._process.stdout.readline())}")
        self.pid = self._process.pid

    def close(self) -> None:
        if self._process.poll() is None:
            self.client.close()
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()


class _Put:
    name, direction = "Flight DoPut, TCP", "up"

    def __init__(self, server: _Server, values: Sequence[bytes]) -> None:
        self._server, self._size = server, sum(map(len, values))
        self._batches = [pa.record_batch([pa.array([value], pa.binary())], names=[SCHEMA_COLUMN]) for value in values]

    def run(self, turn: int) -> Sample:
        del turn
        return timed(self._size, self.write, self._server.pid)

    def close(self) -> None:
        self._server.close()

    def write(self) -> None:
        descriptor = flight.FlightDescriptor.for_path("bench")
        writer, reader = self._server.client.do_put(descriptor, self._batches[0].schema)
        for batch in self._batches:
            writer.write_batch(batch)
        writer.done_writing()
        reader.read()
        writer.close()


class _Get:
    name, direction = "Flight DoGet, TCP", "down"

    def __init__(self, server: _Server, values: Sequence[bytes]) -> None:
        self._server, self._size = server, sum(map(len, values))
        _Put(server, values).write()

    def run(self, turn: int) -> Sample:
        del turn
        return timed(self._size, self._read, self._server.pid)

    def close(self) -> None:
        self._server.close()

    def _read(self) -> None:
        received = 0
        for chunk in self._server.client.do_get(flight.Ticket(b"bench")):
            received += len(chunk.data.column(0)[0].as_buffer())
        assert received == self._size
