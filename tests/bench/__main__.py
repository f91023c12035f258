"""``make bench``: the store beside its peers on the same records, all in one interleaved run.

Redis needs ``redis-server`` on the path (or in REDIS_SERVER) and the Python package ``redis``; a peer that is not
installed is named and left out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path as FilePath

from tests.bench import bare_grpc_peer, flight_peer, protobuf_peer, ray_peer, redis_peer
from trace_client.bench.command import run
from trace_client.bench.measure import Path
from trace_client.bench.records import Load, Pool
from trace_client.bench.table import Budget

PEER_BUDGETS = (
    Budget("append memory, arena", "Redis set, memory", 1.0, 3.0),
    Budget("append synced, arena", "Redis set, AOF every second", 1.0, 3.0),
    Budget("append memory, arena", "Flight DoPut, TCP", 1.0, 3.0),
    Budget("append memory, gRPC", "protobuf field, gRPC up", 1.0, 3.0),
    Budget("read spans of 512, arena", "Redis get", 1.0, 3.0),
    Budget("read spans of 512, arena", "Flight DoGet, TCP", 1.0, 3.0),
    Budget("read spans of 64, arena", "Redis get", 1.0, 3.0),
    Budget("read spans of 64, arena", "Flight DoGet, TCP", 1.0, 3.0),
    Budget("read spans of 512, gRPC", "protobuf field, gRPC down", 1.0, 3.0),
)


def make_peers(load: Load, pool: Pool, directory: FilePath) -> Sequence[Path]:
    """The paths of every peer that is installed. Values are one append each: all codes, then all scales."""
    values = [pool.joined(number) for number in range(load.size // load.append_bytes)]
    paths: list[Path] = []
    for module in (redis_peer, flight_peer, protobuf_peer, bare_grpc_peer, ray_peer):
        missing = module.missing()
        if missing:
            print(f"left out: {module.__name__.rpartition('.')[2]}, {missing}", file=sys.stderr)
            continue
        paths.extend(module.make(values, directory))
    return paths


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], make_peers, PEER_BUDGETS))
