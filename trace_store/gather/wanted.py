"""What a plan wants of one local segment, as columns over its records: index rows, places, and which are plain."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from trace_store.checksum import trajectory_seed
from trace_store.fetch import OpenSegment, Undelivered
from trace_store.gather.places import Places
from trace_store.planner import Column, MissingReason, ReadPlan
from trace_store.segment.schema import ENCODING_RAW

COLUMNS = ("codes", "scales", "tensor")

VECTOR_MAX = 512
"""Views of one preadv; Linux takes 1024."""


class WantedRecords:
    """Records that pieces [first, last) of a plan call for; those of one record follow on one another.

    Attributes:
        rows: index row of each record.
        starts: its first piece, counted from ``first``.
        skip, count, places: of each piece: tokens before it in its record, its tokens, and where it lands.
        code_bytes, scale_bytes: of a token, of each record.
        fits: the index row says what its site calls for.
        raw: scales are not compressed.
        whole: wanted from the first to the last token, in places that follow on one another.
        plain: whole, and with one tensor scale.
        keys: ``checksum.KEY`` of each record, one after another.
    """

    def __init__(self, plan: ReadPlan, segment: OpenSegment, first: int, last: int, places: Places) -> None:
        self.segment, self._plan_position = segment, first
        wanted = slice(first, last)
        row, self.skip, self.count = plan.row[wanted], plan.skip[wanted], plan.rows[wanted]
        self._pieces = last - first
        starts = self.starts = np.flatnonzero(np.diff(row, prepend=-1))
        rows = self.rows = segment.index.rows[row[starts]]
        sites = segment.header.sites
        site = rows["site"].astype(np.int64)
        known = site < len(sites)
        site = np.where(known, site, 0)
        self.code_bytes = np.array([s.code_bytes for s in sites])[site]
        self.scale_bytes = np.array([s.scale_bytes for s in sites])[site]
        tokens = self.tokens = rows["stop"].astype(np.int64) - rows["start"]
        raw = self.raw = rows["scales_encoding"] == ENCODING_RAW
        tensor_bytes = rows["tensor_bytes"]
        one_tensor = tensor_bytes == 4
        # What the index says must be what the site calls for, or the bytes would run over their neighbours.
        fits = known & (site == plan.site[wanted][starts]) & (rows["codes_bytes"] == tokens * self.code_bytes)
        fits &= ~raw | (rows["scales_bytes"] == tokens * self.scale_bytes)
        self.fits = fits & (one_tensor | (tensor_bytes == 4 * tokens))
        self.places = [column[wanted] for column in (places.codes, places.scales, places.tensor)]
        row_bytes = (self.code_bytes, self.scale_bytes, np.full(len(starts), 4))
        lie_whole = _lie_whole(starts, self.skip, self.count, tokens, tuple(zip(self.places, row_bytes, strict=True)))
        self.whole = self.fits & lie_whole
        self.plain = self.whole & one_tensor
        self.keys = _keys(rows)

    @cached_property
    def borders(self) -> list[int]:
        """First piece of each record, and the end of the last one."""
        return [*self.starts.tolist(), self._pieces]

    @cached_property
    def seeds(self) -> list[int]:
        """Checksum seed of each record's trajectory."""
        header, names = self.segment.header, self.segment.index.trajectories
        numbers = self.rows["trajectory"].tolist()
        seeds = {n: trajectory_seed(header.run, header.partition, names[n]) for n in set(numbers)}
        return [seeds[number] for number in numbers]

    def undelivered(self, record: int, reason: MissingReason) -> list[Undelivered]:
        """The pieces of a record that could not be served, by their positions in the plan."""
        pieces = range(self.borders[record], self.borders[record + 1])
        return [Undelivered(self._plan_position + piece, reason) for piece in pieces]


def run_borders(offsets: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint32]) -> list[int]:
    """Positions whose bytes do not follow those of the position before."""
    starts = offsets.astype(np.int64)
    borders: list[int] = (np.flatnonzero(starts[1:] != starts[:-1] + sizes[:-1]) + 1).tolist()
    return borders


def _lie_whole(
    starts: npt.NDArray[np.intp],
    skip: Column,
    count: Column,
    tokens: Column,
    places: Sequence[tuple[Column, Column]],
) -> npt.NDArray[np.bool_]:
    """Which records are wanted from the first to the last token, in pieces whose places follow on one another.

    Those of neighbouring spans do, in a packed microbatch: read and verified like one piece. ``places`` come with the
    row bytes of each record.
    """
    lengths = np.diff(starts, append=len(skip))
    follows = np.zeros(len(skip), bool)
    follows[1:] = skip[1:] == skip[:-1] + count[:-1]
    for place, row_bytes in places:
        follows[1:] &= place[1:] == place[:-1] + count[:-1] * np.repeat(row_bytes, lengths)[:-1]
    follows[starts] = skip[starts] == 0
    whole = np.logical_and.reduceat(follows, starts)
    complete: npt.NDArray[np.bool_] = whole & (np.add.reduceat(count, starts) == tokens)
    return complete


def _keys(rows: npt.NDArray[np.void]) -> memoryview:
    """``checksum.KEY`` of every row, one after another."""
    names = ("kind", "attempt", "policy_version", "site", "start", "stop")
    keys = np.empty(len(rows), np.dtype([(name, rows.dtype[name]) for name in names] + [("tensor_scales", "<u4")]))
    for name in names:
        keys[name] = rows[name]
    keys["tensor_scales"] = rows["tensor_bytes"] // 4
    return memoryview(keys.tobytes())
