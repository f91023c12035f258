"""Records of one local segment that a plan calls for, read straight to their places and verified there.

The usual record is wanted whole and has one tensor scale: reads, checksums, one assignment and, where its scales are
compressed, one call to zstd are all that is done for it. Steps with any other record are left to ``gather.odd``.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from trace_store.checksum import KEY
from trace_store.errors import DataLoss
from trace_store.fetch import OpenSegment, Undelivered
from trace_store.gather.odd import OddRecords
from trace_store.gather.places import Places
from trace_store.gather.scratch import Scratch
from trace_store.gather.wanted import COLUMNS, VECTOR_MAX, WantedRecords, run_borders
from trace_store.planner import MissingReason, ReadPlan
from trace_store.segment.scan import decode_scales

STEP_BYTES = 2 << 20
"""Payload read before it is verified: it stays in the last-level cache until then."""


class LocalRecords:
    """Records that pieces [first, last) of a plan call for, in steps."""

    def __init__(self, plan: ReadPlan, segment: OpenSegment, first: int, last: int, places: Places) -> None:
        self._wanted = wanted = WantedRecords(plan, segment, first, last, places)
        rows = wanted.rows
        self._descriptor = segment.source.descriptor
        self._unlike_plain = np.cumsum(~wanted.plain).tolist()
        self._packed_before = np.cumsum(~wanted.raw).tolist()
        starts = wanted.starts
        self._places = [column[starts].tolist() for column in wanted.places]
        self._sizes = {name: rows[f"{name}_bytes"].tolist() for name in COLUMNS}
        self._offsets = {name: rows[f"{name}_offset"].tolist() for name in COLUMNS}
        self._runs = {name: run_borders(rows[f"{name}_offset"], rows[f"{name}_bytes"]) for name in COLUMNS}
        self._checksums, self._tokens = rows["checksum"].tolist(), wanted.tokens.tolist()
        self._encodings = rows["scales_encoding"].tolist()
        self._scales_bytes = (wanted.scale_bytes * wanted.tokens).tolist()

    @cached_property
    def _odd(self) -> OddRecords:
        return OddRecords(self._wanted)

    def steps(self) -> list[tuple[int, int]]:
        """Ranges of records of about STEP_BYTES each."""
        rows = self._wanted.rows
        sizes = rows["codes_bytes"].astype(np.int64) + rows["scales_bytes"]
        borders = (np.flatnonzero(np.diff(np.cumsum(sizes) // STEP_BYTES)) + 1).tolist()
        return list(pairwise([0, *borders, len(sizes)]))

    def fill(self, low: int, high: int, target: memoryview, floats: npt.NDArray[np.float32]) -> list[Undelivered]:
        """Read, verify and place records [low, high); ``floats`` is ``target`` as float32."""
        if _count(self._unlike_plain, low, high) == 0:
            undelivered = self._fill_plain(low, high, target, floats)
            if undelivered is not None:
                return undelivered
        return self._odd.fill(low, high, target, floats)

    def _fill_plain(
        self, low: int, high: int, target: memoryview, floats: npt.NDArray[np.float32]
    ) -> list[Undelivered] | None:
        """The usual step: whole records with one tensor scale each. Every call in this loop counts: it holds the GIL
        for 2 microseconds a record, while the disk's part of 48 KiB takes 4. None: the disk failed."""
        pieces = slice(low, high)
        code_places, scale_places, tensor_places = (places[pieces] for places in self._places)
        codes = [target[a : a + n] for a, n in zip(code_places, self._sizes["codes"][pieces], strict=True)]
        scales = [target[a : a + n] for a, n in zip(scale_places, self._scales_bytes[pieces], strict=True)]
        packed = _count(self._packed_before, low, high) > 0
        scratch = Scratch(4 * (high - low) + (sum(self._sizes["scales"][pieces]) if packed else 0))
        block = scratch.take(4 * (high - low))
        tensors = [block[a : a + 4] for a in range(0, 4 * (high - low), 4)]
        stored = [scratch.take(size) for size in self._sizes["scales"][pieces]] if packed else scales
        if not all(
            self._read_runs(name, low, high, views)
            for name, views in (("codes", codes), ("scales", stored), ("tensor", tensors))
        ):
            return None
        expectations = self._unpack(low, high, stored, scales) if packed else self._checksums[pieces]
        undelivered: list[Undelivered] = []
        digest, key_size, wanted_keys = xxhash.xxh3_64_intdigest, KEY.size, self._wanted.keys
        keys = [wanted_keys[a : a + key_size] for a in range(low * key_size, high * key_size, key_size)]
        values = np.frombuffer(block, np.float32).tolist()
        # The chain of checksum.record_checksum, written out: a call less for each part of each record.
        for record, key, seed, code, scale, tensor, expected, place, count, value in zip(
            range(low, high),
            keys,
            self._wanted.seeds[pieces],
            codes,
            scales,
            tensors,
            expectations,
            tensor_places,
            self._tokens[pieces],
            values,
            strict=True,
        ):
            if digest(tensor, digest(scale, digest(code, digest(key, seed)))) == expected:
                floats[place // 4 : place // 4 + count] = value
            else:
                undelivered.extend(self._wanted.undelivered(record, MissingReason.DATA_LOSS))
        return undelivered

    def _unpack(
        self, low: int, high: int, stored: Sequence[memoryview], scales: Sequence[memoryview]
    ) -> list[int | None]:
        """Put scales to their places as they were appended; returns the checksums of the records, None of those whose
        scales cannot be decompressed."""
        checksums: list[int | None] = self._checksums[low:high]
        sizes = self._scales_bytes[low:high]
        for step, (encoding, part, size) in enumerate(zip(self._encodings[low:high], stored, sizes, strict=True)):
            try:
                scales[step][:] = decode_scales(encoding, part, size)
            except DataLoss:
                checksums[step] = None
        return checksums

    def _read_runs(self, name: str, low: int, high: int, views: Sequence[memoryview]) -> bool:
        """Fill the views of a column of records [low, high), neighbours in the file in one call; False if that failed
        or was cut short."""
        borders, offsets, sizes = self._runs[name], self._offsets[name], self._sizes[name]
        inner = borders[bisect_right(borders, low) : bisect_left(borders, high)]
        for first, last in pairwise([low, *inner, high]):
            for start in range(first, last, VECTOR_MAX):
                stop = min(start + VECTOR_MAX, last)
                wanted = offsets[stop - 1] + sizes[stop - 1] - offsets[start]
                try:
                    vector = views[start - low : stop - low]
                    if os.preadv(self._descriptor, vector, offsets[start]) != wanted:
                        return False
                except OSError:
                    return False
        return True


def _count(sums: Sequence[int], low: int, high: int) -> int:
    """How many of [low, high) were counted in cumulative sums."""
    return sums[high - 1] - (sums[low - 1] if low else 0)
