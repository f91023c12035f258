"""Client of trace-store: write records from a rollout, read them by microbatch in a trainer."""

from trace_client import fork  # noqa: F401 (sets up gRPC, so it comes first)
from trace_client.channel import Tls
from trace_client.client import Client, Listed, connect
from trace_client.microbatch import Buffers, Microbatch, MissingRows
from trace_client.reader import Reader
from trace_client.writer import Writer

__all__ = ["Buffers", "Client", "Listed", "Microbatch", "MissingRows", "Reader", "Tls", "Writer", "connect"]
