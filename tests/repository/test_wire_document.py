"""proto/README.md says what the code does: the example byte for byte, the statuses line for line, the limits."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from trace_client.arena import Slabs
from trace_client.stream import BATCH_BYTES_MAX
from trace_server.append import MESSAGES_UNANSWERED_MAX
from trace_server.flow import CREDIT_BYTES
from trace_server.frames import READ_FRAME_BYTES
from trace_server.status import STATUS
from trace_store import Site, limits, wire
from trace_store.arena import ARENA_BYTES_MAX
from trace_store.checksum import record_checksum, trajectory_seed
from trace_store.chunk import RecordGroup, check_chunk
from trace_store.shard import QUEUE_BYTES_MAX

TEXT = (Path(__file__).resolve().parents[2] / "proto/README.md").read_text()

SITE = Site(3, "k", 16)
CODES, SCALES, TENSOR = b"\x01\x02", b"\x38", struct.pack("<f", 0.5)


def example() -> bytes:
    block = TEXT.split("```")[1]
    lines = [line[:37] for line in block.splitlines()]
    return bytes.fromhex(" ".join(" ".join(re.findall(r"\b[0-9a-f]{2}\b", line)) for line in lines))


def test_the_example_is_what_a_client_sends() -> None:
    checksum = record_checksum(trajectory_seed("run", "step-1", "t0"), 0, 7, 0, 4, 5, CODES, SCALES, TENSOR)
    group = RecordGroup("t0", 0, 7, 4, 5, (0,), (False,), (checksum,))
    assert example() == wire.append_frame(1, (group,), (CODES, SCALES, TENSOR))


def test_the_example_is_what_a_server_takes() -> None:
    ((header, payload),) = wire.parse_append(example())
    chunk = wire.chunk_from_wire(header, payload, (SITE,))
    check_chunk(chunk, "run", "step-1", (SITE,))
    assert (bytes(chunk.codes), bytes(chunk.scales), bytes(chunk.tensor_scales)) == (CODES, SCALES, TENSOR)
    assert f"{chunk.groups[0].checksums[0]:#x}" in TEXT


def test_the_status_table_is_the_servers() -> None:
    rows = re.findall(r"^\| (\w+) \| ([A-Z_]+) \| .+ \|$", TEXT, re.M)
    assert rows == [(kind.__name__, code.name) for kind, code in STATUS.items()]


def test_the_limits_are_those_of_the_code() -> None:
    mib = 1 << 20
    for said, is_so in (
        ("16 MiB + 64 KiB", 16 * mib == limits.FRAME_BYTES_MAX),
        ("1 MiB; 4 MiB in an arena", (mib, 4 * mib) == (limits.FRAME_BYTES, Slabs.SLAB_BYTES)),
        ("| 32 MiB |", 32 * mib == CREDIT_BYTES),
        ("| 256 |", MESSAGES_UNANSWERED_MAX == 256),
        ("64 MiB, and", 64 * mib == QUEUE_BYTES_MAX),
        ("to 16 GiB", ARENA_BYTES_MAX == 16 << 30),
        ("| one each 5 s", limits.PING_INTERVAL_S == 5.0),
        ("| 65536 |", limits.SPANS_MAX == 65536),
        ("| 4194304 |", limits.SPAN_SITES_MAX == 4194304),
        ("| 2 MiB | `READ", 2 * mib == READ_FRAME_BYTES),
        ("joins in one message | 4 MiB", 4 * mib == BATCH_BYTES_MAX),
        ("| 4096 |", limits.SITES_MAX == 4096),
        ("| 512 bytes", limits.ID_BYTES_MAX == 512),
    ):
        assert said in TEXT, said
        assert is_so, said
