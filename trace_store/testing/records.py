"""Records whose every byte follows from their key, so that whoever reads a row back knows what it must be.

Row t of a (seed, trajectory, attempt, site) is the output of splitmix64 from a state that the key and t give:

    state = xxh3_64(trajectory 00 attempt 00 site, seed) + (t * WORDS + word) * 0x9E3779B97F4A7C15        mod 2^64

Codes are its bytes as they are, scales its bytes & 0x3F (finite in E4M3 and E8M0, and worth compressing), tensor scales
1 + t % 8 / 8. No table of what was written is needed to check a read after a crash.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from trace_store.checksum import record_checksum, trajectory_seed
from trace_store.chunk import Chunk, RecordGroup
from trace_store.record import Site

Rows = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[np.float32]]

_WORDS_MAX = 1 << 14
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def make_rows(site: Site, number: int, trajectory: str, attempt: int, start: int, stop: int, *, seed: int = 0) -> Rows:
    """Codes uint8 [T, code bytes], scales uint8 [T, scale bytes], tensor scales float32 [T] of tokens [start, stop)."""
    key = np.uint64(xxhash.xxh3_64_intdigest(f"{trajectory}\0{attempt}\0{number}".encode(), seed))
    row_bytes = site.code_bytes + site.scale_bytes
    words = (row_bytes + 7) // 8
    tokens = np.arange(start, stop, dtype=np.uint64)[:, None]
    with np.errstate(over="ignore"):
        state = key + (tokens * np.uint64(_WORDS_MAX) + np.arange(words, dtype=np.uint64)[None, :]) * _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    raw = state.astype("<u8").view(np.uint8).reshape(stop - start, 8 * words)
    codes = np.ascontiguousarray(raw[:, : site.code_bytes])
    scales = np.ascontiguousarray(raw[:, site.code_bytes : row_bytes] & 0x3F)
    return codes, scales, (1 + np.arange(start, stop) % 8 / 8).astype(np.float32)


def make_chunk(
    run: str,
    partition: str,
    table: Sequence[Site],
    trajectory: str,
    start: int,
    stop: int,
    *,
    sites: Iterable[int] | None = None,
    attempt: int = 0,
    policy_version: int = 0,
    seed: int = 0,
) -> Chunk:
    """A chunk of one group over tokens [start, stop), one tensor scale a token, checksums included."""
    numbers = tuple(range(len(table))) if sites is None else tuple(sites)
    columns: tuple[list[bytes], list[bytes], list[bytes]] = ([], [], [])
    checksums = []
    base = trajectory_seed(run, partition, trajectory)
    for number in numbers:
        rows = make_rows(table[number], number, trajectory, attempt, start, stop, seed=seed)
        codes, scales, tensors = (array.tobytes() for array in rows)
        checksums.append(record_checksum(base, attempt, policy_version, number, start, stop, codes, scales, tensors))
        for column, part in zip(columns, (codes, scales, tensors), strict=True):
            column.append(part)
    per_token = (True,) * len(numbers)
    group = RecordGroup(trajectory, attempt, policy_version, start, stop, numbers, per_token, tuple(checksums))
    return Chunk((group,), *(memoryview(b"".join(column)) for column in columns))


def join_chunks(chunks: Sequence[Chunk]) -> Chunk:
    """One chunk with the groups of all."""
    return Chunk(
        tuple(group for chunk in chunks for group in chunk.groups),
        memoryview(b"".join(chunk.codes for chunk in chunks)),
        memoryview(b"".join(chunk.scales for chunk in chunks)),
        memoryview(b"".join(chunk.tensor_scales for chunk in chunks)),
    )
