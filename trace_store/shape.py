"""Where the records of a group lie in its chunk: sizes and slices that depend on its sites and tokens alone.

A rollout appends groups of few shapes, so they are kept: then nothing is computed for each record of a message but
its checksum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from trace_store.record import Site

Offsets = npt.NDArray[np.int64]

RECORDS_KEPT_MAX = 1 << 16
"""Records of all shapes that a process keeps, about 0.4 KiB each."""


@dataclass(frozen=True, eq=False)
class GroupShape:
    """Places of a group's records, relative to the first byte of the group in each part of a chunk.

    Attributes:
        table: the site table that the sizes are from.
        sites: site numbers, uint32.
        codes, scales, tensors: byte offsets of the records, and the end of the last one.
        parts: slices of codes, scales and tensor scales by record.
        key_parts: bytes of ``checksum.KEY`` by record that stand between those of the whole group: site, and number of
            tensor scales.
        scale_types: types of the block scales.
    """

    table: Sequence[Site]
    sites: npt.NDArray[np.uint32]
    codes: Offsets
    scales: Offsets
    tensors: Offsets
    parts: tuple[tuple[slice, slice, slice], ...]
    key_parts: tuple[tuple[bytes, bytes], ...]
    scale_types: frozenset[str]
    code_bytes: int
    scale_bytes: int
    tensor_bytes: int


def group_shape(
    table: Sequence[Site], sites: tuple[int, ...], scale_per_token: tuple[bool, ...], tokens: int
) -> GroupShape:
    """Shape of a group whose sites are known to be in the table."""
    return _kept.get(table, sites, scale_per_token, tokens)


class _Kept:
    """Shapes made before. Threads may make one twice; all are dropped when there are too many."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[int, tuple[int, ...], tuple[bool, ...], int], GroupShape] = {}
        self._records = 0

    def get(
        self, table: Sequence[Site], sites: tuple[int, ...], scale_per_token: tuple[bool, ...], tokens: int
    ) -> GroupShape:
        key = (id(table), sites, scale_per_token, tokens)
        found = self._shapes.get(key)
        # The id of a table may be that of one that is gone, so a shape holds its own.
        if found is not None and found.table is table:
            return found
        if self._records >= RECORDS_KEPT_MAX:
            self._shapes, self._records = {}, 0
        made = self._shapes[key] = _make(table, sites, scale_per_token, tokens)
        self._records += len(sites)
        return made


_kept = _Kept()


def _make(table: Sequence[Site], sites: tuple[int, ...], scale_per_token: tuple[bool, ...], tokens: int) -> GroupShape:
    chosen = [table[number] for number in sites]
    counts = [tokens if per_token else 1 for per_token in scale_per_token]
    codes = _offsets([tokens * site.code_bytes for site in chosen])
    scales = _offsets([tokens * site.scale_bytes for site in chosen])
    tensors = _offsets([4 * count for count in counts])
    return GroupShape(
        table=table,
        sites=np.array(sites, np.uint32),
        codes=codes,
        scales=scales,
        tensors=tensors,
        parts=tuple(zip(_slices(codes), _slices(scales), _slices(tensors), strict=True)),
        key_parts=tuple(
            (number.to_bytes(4, "little"), count.to_bytes(4, "little"))
            for number, count in zip(sites, counts, strict=True)
        ),
        scale_types=frozenset(site.scale for site in chosen),
        code_bytes=int(codes[-1]),
        scale_bytes=int(scales[-1]),
        tensor_bytes=int(tensors[-1]),
    )


def _offsets(sizes: Sequence[int]) -> Offsets:
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _slices(offsets: Offsets) -> list[slice]:
    return [slice(low, high) for low, high in pairwise(offsets.tolist())]
