"""Checksum of a record: xxh3-64 over its key and its bytes, the same on the client, on the wire and in a segment.

The four parts are chained through the seed, so that no part has to be copied next to another:

    s0 = xxh3_64(run 00 partition 00 trajectory, seed 0)                    names in UTF-8
    s1 = xxh3_64(<BIQIIII: kind, attempt, policy version, site, start, stop, number of tensor scales>, seed s0)
    s2 = xxh3_64(codes, seed s1)
    s3 = xxh3_64(scales, uncompressed, seed s2)
    checksum = xxh3_64(tensor scales, little-endian float32, seed s3)

A flipped bit in a key column is found like one in the codes: no row can be served under another key.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence

import xxhash

from trace_store.frame import Buffer

KEY = struct.Struct("<BIQIIII")
"""Hashed into s1: kind, attempt, policy version, site, start, stop, number of tensor scales."""


class RowKind(enum.IntEnum):
    """What a segment row is."""

    RECORD = 0
    SEAL = 1
    RELEASE = 2
    INDEX = 3
    KNOWN = 4


NO_SITE = 0xFFFF_FFFF
"""Site number of rows that are no records."""


def trajectory_seed(run: str, partition: str, trajectory: str) -> int:
    """s0: one call for all records of a trajectory."""
    return int(xxhash.xxh3_64_intdigest(f"{run}\0{partition}\0{trajectory}".encode()))


def record_checksum(
    seed: int,
    attempt: int,
    policy_version: int,
    site: int,
    start: int,
    stop: int,
    codes: Buffer,
    scales: Buffer,
    tensor_scales: Buffer,
    kind: int = RowKind.RECORD,
) -> int:
    """Checksum of one row; ``seed`` is ``trajectory_seed`` of its trajectory, buffers are flat bytes."""
    digest = xxhash.xxh3_64_intdigest
    key = KEY.pack(kind, attempt, policy_version, site, start, stop, len(tensor_scales) // 4)
    state = digest(codes, digest(key, seed))
    return int(digest(tensor_scales, digest(scales, state)))


_KEY_HEAD, _KEY_SPAN = struct.Struct("<BIQ"), struct.Struct("<II")


def group_checksums(
    seed: int,
    attempt: int,
    policy_version: int,
    start: int,
    stop: int,
    key_parts: Sequence[tuple[bytes, bytes]],
    parts: Sequence[tuple[slice, slice, slice]],
    codes: memoryview,
    scales: memoryview,
    tensor_scales: memoryview,
) -> list[int]:
    """Checksums of all records of a group, at 1 us a record instead of 2 besides the bytes.

    ``key_parts`` and ``parts`` are those of the group's ``shape.GroupShape``; the buffers start where the group does.
    """
    digest = xxhash.xxh3_64_intdigest
    head, span = _KEY_HEAD.pack(RowKind.RECORD, attempt, policy_version), _KEY_SPAN.pack(start, stop)
    return [
        digest(
            tensor_scales[tensor],
            digest(scales[scale], digest(codes[code], digest(head + site + span + count, seed))),
        )
        for (site, count), (code, scale, tensor) in zip(key_parts, parts, strict=True)
    ]
