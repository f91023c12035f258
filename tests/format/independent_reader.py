"""A reader of segments written from FORMAT.md alone; it imports nothing of this project.

``read_segment(path)`` gives metadata, sites and the rows that verify. ``visible(segments)`` gives what a client may
see: {(trajectory, site, token): (codes, scales, tensor scale)} of the newest sealed attempts.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash
import zstandard

RECORD, SEAL, RELEASE, INDEX, KNOWN = range(5)
COLUMNS = [
    ("kind", pa.uint8()), ("trajectory", pa.string()), ("attempt", pa.uint32()), ("policy_version", pa.uint64()),
    ("site", pa.uint32()), ("start", pa.uint32()), ("stop", pa.uint32()), ("codes", pa.binary()),
    ("scales", pa.binary()), ("scales_encoding", pa.uint8()), ("tensor_scales", pa.binary()), ("checksum", pa.uint64()),
]  # fmt: skip
BITS = {"b1": 1, "b2": 2, "b3": 3, "full": 4}
MAGIC = b"ARROW1\0\0"
Event = tuple["Segment", int, dict[str, Any]]


@dataclass
class Segment:
    metadata: dict[str, str]
    sites: list[dict[str, Any]]
    name: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    bad_rows: int = 0


def read_segment(path: Path) -> Segment:
    """Rows of a sealed or an unfinished segment, in order. ValueError: it is none of version 1 or 2."""
    content = path.read_bytes()
    try:
        batches, schema = _sealed_batches(content)
    except pa.ArrowInvalid:
        batches, schema = _open_batches(content)
    metadata = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
    ours = sorted(key for key in metadata if key.startswith("trace_store.") and key != "trace_store.checksum")
    covered = "".join(f"{key}\0{metadata[key]}\0" for key in ours).encode()
    if metadata.get("trace_store.checksum") != xxhash.xxh3_64_hexdigest(covered):
        raise ValueError("metadata does not match its checksum")
    if metadata["trace_store.format"] not in ("1", "2") or [(f.name, f.type) for f in schema] != COLUMNS:
        raise ValueError("not version 1 or 2")
    segment = Segment(metadata, json.loads(metadata["trace_store.sites"]), path.stem)
    rows = [row for batch in batches for row in batch.to_pylist()]
    segment.rows = [row for row in rows if verifies(segment, row)]
    segment.bad_rows = len(rows) - len(segment.rows)
    return segment


def read_by_index(path: Path) -> list[dict[str, Any]]:
    """RECORD rows found through the index, bytes as stored: what a reader does that wants one record."""
    content = path.read_bytes()
    blob = _sealed_batches(content)[0][-1].column("codes")[0].as_py()
    found = [row for row in pa.ipc.open_stream(blob).read_all().to_pylist() if row["kind"] == RECORD]
    for row in found:
        for name, prefix in (("codes", "codes"), ("scales", "scales"), ("tensor_scales", "tensor")):
            offset, size = row.pop(f"{prefix}_offset"), row.pop(f"{prefix}_bytes")
            row[name] = content[offset : offset + size]
    return found


def _sealed_batches(content: bytes) -> tuple[list[pa.RecordBatch], pa.Schema]:
    file = pa.ipc.open_file(content)
    return [file.get_batch(number) for number in range(file.num_record_batches)], file.schema


def _open_batches(content: bytes) -> tuple[list[pa.RecordBatch], pa.Schema]:
    if content[:8] != MAGIC:
        raise ValueError("no magic")
    schema = pa.ipc.read_schema(pa.ipc.read_message(content[8:]))
    offset = 16 + struct.unpack_from("<i", content, 12)[0]
    batches = []
    while offset + 8 <= len(content):
        marker, size = struct.unpack_from("<Ii", content, offset)
        if marker != 0xFFFFFFFF or size == 0:
            break
        try:
            message = pa.ipc.read_message(content[offset:])
            batches.append(pa.ipc.read_record_batch(message, schema))
        except (pa.ArrowInvalid, OSError, EOFError):
            break  # the torn tail
        offset += 8 + size + message.body.size
    return batches, schema


def decode_scales(row: dict[str, Any]) -> bytes:
    if row["scales_encoding"] == 0:
        return bytes(row["scales"])
    return zstandard.ZstdDecompressor().decompress(row["scales"], allow_extra_data=False)


def verifies(segment: Segment, row: dict[str, Any]) -> bool:
    names = (segment.metadata["trace_store.run"], segment.metadata["trace_store.partition"], row["trajectory"])
    state = xxhash.xxh3_64_intdigest("\0".join(names).encode())
    key = (row["kind"], row["attempt"], row["policy_version"], row["site"], row["start"], row["stop"])
    packed = struct.pack("<BIQIIII", *key, len(row["tensor_scales"]) // 4)
    for part in (packed, row["codes"], decode_scales(row), row["tensor_scales"]):
        state = xxhash.xxh3_64_intdigest(part, state)
    return state == row["checksum"]


def knows(later: Event, earlier: Event) -> bool:
    """Section 5: whether the writer of a row had another row."""
    (ours, place, _), (theirs, other_place, _) = later, earlier
    (number, _, epoch), (other_number, _, other_epoch) = ours.name.partition("-"), theirs.name.partition("-")
    if epoch == other_epoch and later[2]["trajectory"]:
        return (other_number, other_place) < (number, place)
    if ours.metadata["trace_store.format"] == "1":
        return theirs.name < ours.name
    told = (row for row in ours.rows[:place] if row["kind"] == KNOWN and row["trajectory"] == other_epoch)
    return any(row["start"] <= int(other_number) < row["stop"] for row in told)


def visible(segments: list[Segment]) -> dict[tuple[str, str, int], tuple[bytes, bytes, float]]:
    events = [(s, n, row) for s in sorted(segments, key=lambda s: s.name) for n, row in enumerate(s.rows)]
    chosen: dict[str, tuple[Any, list[Event]]] = {}
    for name in {row["trajectory"] for _, _, row in events}:
        mine = [event for event in events if event[2]["trajectory"] == name]
        releases = [event for event in events if event[2]["kind"] == RELEASE and event[2]["trajectory"] in (name, "")]
        alive = [event for event in mine if not any(knows(release, event) for release in releases)]
        for place, seal in enumerate(event for event in alive if event[2]["kind"] == SEAL):
            number, count = seal[2]["attempt"], seal[2]["policy_version"]
            same = [event for event in alive if event[2]["kind"] == RECORD and event[2]["attempt"] == number]
            rows = [event for event in same if knows(seal, event) or knows(event, seal)]
            left = len({key for segment, _, row in rows for key, _ in _token_rows(segment, row)})
            rank = (number, left, left >= count, place)
            chosen[name] = max(chosen.get(name, ((-1,), [])), (rank, rows), key=lambda item: item[0])
    rows = [event for _, found in chosen.values() for event in found]
    return {key: value for segment, _, row in rows for key, value in _token_rows(segment, row)}


def _token_rows(segment: Segment, row: dict[str, Any]) -> Any:
    site = segment.sites[row["site"]]
    codes, scales = BITS[site["form"]] * site["width"] // 8, site["width"] // site["block"]
    decoded, tensor = decode_scales(row), struct.unpack(f"<{len(row['tensor_scales']) // 4}f", row["tensor_scales"])
    for n in range(row["stop"] - row["start"]):
        key = (row["trajectory"], f"{site['layer']}/{site['kind']}", row["start"] + n)
        factor = tensor[n if len(tensor) > 1 else 0]
        yield key, (row["codes"][n * codes :][:codes], decoded[n * scales :][:scales], factor)
