"""Arrow schema and metadata of a segment. FORMAT.md is normative; this module is its tables in code.

A segment is an Arrow IPC file, one row per record, of one run and one partition. Rows of other kinds (a seal, a
release, the index) use the same columns, so that a stock Arrow reader opens every part of it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa
import xxhash

from trace_store.errors import FormatError, InvalidRequest
from trace_store.record import Site, check_site_table

FORMAT_VERSION = "2"

READABLE_VERSIONS = ("1", "2")
"""In version 1 a SEAL or RELEASE speaks of all rows of segments with lower names, since then of those that it knew."""

CHECKSUM_KEY = "trace_store.checksum"

OPEN_SUFFIX = ".open"
SEALED_SUFFIX = ".arrow"

ENCODING_RAW = 0
ENCODING_ZSTD = 1
"""Block scales of one record as one zstd frame with its content size; used only where it is smaller than raw."""

COLUMNS: tuple[tuple[str, pa.DataType], ...] = (
    ("kind", pa.uint8()),
    ("trajectory", pa.string()),
    ("attempt", pa.uint32()),
    ("policy_version", pa.uint64()),
    ("site", pa.uint32()),
    ("start", pa.uint32()),
    ("stop", pa.uint32()),
    ("codes", pa.binary()),
    ("scales", pa.binary()),
    ("scales_encoding", pa.uint8()),
    ("tensor_scales", pa.binary()),
    ("checksum", pa.uint64()),
)

FIELDS = [pa.field(name, kind, nullable=False) for name, kind in COLUMNS]


@dataclass(frozen=True)
class SegmentHeader:
    """What a segment says of itself in the schema metadata: enough to rebuild the catalog from segments alone."""

    run: str
    partition: str
    sites: tuple[Site, ...]
    server: str
    sequence: int
    """Order among the segments of a partition that one server wrote."""
    version: str = FORMAT_VERSION


class UnknownVersion(FormatError):
    """The segment is whole and of a format version that this library does not know: leave it to one that does."""


def make_schema(header: SegmentHeader) -> pa.Schema:
    """Schema with the segment's metadata, keys and values in UTF-8."""
    metadata = {
        "trace_store.format": header.version,
        "trace_store.run": header.run,
        "trace_store.partition": header.partition,
        "trace_store.server": header.server,
        "trace_store.sequence": str(header.sequence),
        "trace_store.sites": sites_json(header.sites),
    }
    return pa.schema(FIELDS, metadata={**metadata, CHECKSUM_KEY: metadata_checksum(metadata)})


def metadata_checksum(metadata: Mapping[str, str]) -> str:
    """xxh3-64 in 16 hex digits over ``key 00 value 00`` of every other ``trace_store.`` key, sorted by key.

    One flipped bit in a site table would otherwise make every record of the segment look like another's.
    """
    keys = sorted(key for key in metadata if key.startswith("trace_store.") and key != CHECKSUM_KEY)
    return xxhash.xxh3_64_hexdigest("".join(f"{key}\0{metadata[key]}\0" for key in keys).encode())


def read_header(schema: pa.Schema, name: str) -> SegmentHeader:
    """Read a segment's metadata.

    Raises:
        UnknownVersion: a whole schema of another version.
        FormatError: the schema is not that of a segment; names the segment and what differs.
    """
    try:
        metadata = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
    except UnicodeDecodeError as error:
        raise FormatError(f"segment metadata is no UTF-8, segment={name}") from error
    version = metadata.get("trace_store.format")
    if version is None:
        raise FormatError(f"file is no segment, it names no format version, file={name}")
    if metadata.get(CHECKSUM_KEY) != metadata_checksum(metadata):
        raise FormatError(f"segment metadata does not match its checksum, segment={name}")
    if version not in READABLE_VERSIONS:
        raise UnknownVersion(f"segment has an unknown format version, segment={name} version={version}")
    try:
        columns = [(field.name, field.type) for field in schema]
    except UnicodeDecodeError:
        columns = []
    if columns != list(COLUMNS):
        raise FormatError(f"segment has other columns than format {version}, segment={name}")
    try:
        return SegmentHeader(
            run=metadata["trace_store.run"],
            partition=metadata["trace_store.partition"],
            sites=sites_from_json(metadata["trace_store.sites"]),
            server=metadata["trace_store.server"],
            sequence=int(metadata["trace_store.sequence"]),
            version=version,
        )
    except (KeyError, ValueError, TypeError, InvalidRequest) as error:
        raise FormatError(f"segment metadata is malformed, segment={name} cause={error!r}") from error


def sites_json(sites: Sequence[Site]) -> str:
    """Site table as JSON, in table order."""
    return json.dumps([asdict(site) for site in sites], separators=(",", ":"))


@functools.lru_cache(maxsize=64)
def sites_from_json(text: str) -> tuple[Site, ...]:
    """The site table of a segment. Cached: ten thousand segments of a run say the same."""
    return check_site_table([Site(**entry) for entry in json.loads(text)])
