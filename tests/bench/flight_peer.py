"""Arrow Flight over TCP: record batches of one append as one binary column; the server keeps them in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.peer import ServerProgram, Transfer

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
    program = ServerProgram(_SERVER)
    client = flight.FlightClient(f"grpc://127.0.0.1:{program.port}")
    batches = [pa.record_batch([pa.array([value], pa.binary())], names=[SCHEMA_COLUMN]) for value in values]
    size = sum(map(len, values))

    def write() -> None:
        descriptor = flight.FlightDescriptor.for_path("bench")
        writer, reader = client.do_put(descriptor, batches[0].schema)
        for batch in batches:
            writer.write_batch(batch)
        writer.done_writing()
        reader.read()
        writer.close()

    def read() -> None:
        received = 0
        for chunk in client.do_get(flight.Ticket(b"bench")):
            received += len(chunk.data.column(0)[0].as_buffer())
        assert received == size

    write()
    return [
        Transfer("Flight DoPut, TCP", "up", size, write, program),
        Transfer("Flight DoGet, TCP", "down", size, read, program),
    ]
