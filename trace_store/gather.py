"""Execute a read plan into the caller's memory: positioned reads straight to each piece's place, every record verified.

Codes of one appended message lie next to each other in the file, so they arrive by one ``preadv`` whose vector is the
caller's layout: the kernel's copy is the only one. Raw scales go the same way. Compressed scales, and records of which
only a part is wanted, pass through a scratch buffer, since a checksum covers the whole record. Work goes on in steps of
about 2 MiB, so that a record is verified while it is still in the cache.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from trace_store.checksum import KEY, trajectory_seed
from trace_store.errors import DataLoss, StorageFailed
from trace_store.fetch import OpenSegment, Slice, Undelivered, fetch
from trace_store.planner import Column, MissingReason, ReadPlan
from trace_store.segment.scan import decode_scales
from trace_store.segment.schema import ENCODING_RAW

STEP_BYTES = 2 << 20
"""Payload read before it is verified: it stays in the last-level cache until then."""

_VECTOR_MAX = 512
"""Views of one preadv; Linux takes 1024."""

_COLUMNS = ("codes", "scales", "tensor")
_PLAN_COLUMNS = ("segment", "row", "site", "skip", "rows", "dest_row", "span")


@dataclass(frozen=True)
class Places:
    """Byte offsets in the target where each piece of a plan lands: codes, scales, and float32 tensor scales.

    ``tensor`` offsets are multiples of 4.
    """

    codes: Column
    scales: Column
    tensor: Column


def file_order(plan: ReadPlan, segments: Mapping[int, OpenSegment]) -> ReadPlan:
    """The plan with its pieces in the order of their bytes on disk."""
    offsets = np.zeros(len(plan.row), np.int64)
    for number in np.unique(plan.segment):
        chosen = plan.segment == number
        offsets[chosen] = segments[int(number)].index.rows["codes_offset"][plan.row[chosen]]
    return select(plan, np.lexsort((plan.skip, plan.row, offsets, plan.segment)))


def select(plan: ReadPlan, pieces: npt.NDArray[np.intp] | slice) -> ReadPlan:
    """The plan of some of its pieces."""
    return replace(plan, **{name: getattr(plan, name)[pieces] for name in _PLAN_COLUMNS})


def gather(
    plan: ReadPlan, segments: Mapping[int, OpenSegment], target: memoryview, places: Places
) -> list[Undelivered]:
    """Fill the places of a plan that ``file_order`` sorted; returns the pieces that could not be served.

    ``target`` is writable flat bytes that holds every place. The bytes at the place of an undelivered piece are
    undefined; its tensor scales are left as they were.
    """
    undelivered: list[Undelivered] = []
    floats = np.frombuffer(target[: len(target) // 4 * 4], np.float32)
    borders = [0, *(np.flatnonzero(np.diff(plan.segment)) + 1).tolist(), len(plan.segment)]
    for first, last in pairwise(borders):
        if first == last:
            continue
        segment = segments[int(plan.segment[first])]
        if segment.source.descriptor < 0:
            undelivered.extend(_copy_slices(plan, first, last, segments, target, places))
            continue
        records = _Records(plan, segment, first, last, places)
        for low, high in records.steps():
            undelivered.extend(records.fill(low, high, target, floats))
    return undelivered


class _Records:
    """Records of one local segment that pieces [first, last) of a plan call for, as lists for the loop over them."""

    def __init__(self, plan: ReadPlan, segment: OpenSegment, first: int, last: int, places: Places) -> None:
        self._segment = segment
        wanted = slice(first, last)
        row, skip, count = plan.row[wanted], plan.skip[wanted], plan.rows[wanted]
        starts = np.flatnonzero(np.diff(row, prepend=-1))
        self._pieces = [*starts.tolist(), last - first]
        self._plan_position = first
        rows = self._rows = segment.index.rows[row[starts]]
        sites = segment.header.sites
        known = rows["site"] < len(sites)
        site = np.where(known, rows["site"], 0).astype(np.int64)
        code_bytes = np.array([s.code_bytes for s in sites])[site]
        scale_bytes = np.array([s.scale_bytes for s in sites])[site]
        tokens = rows["stop"].astype(np.int64) - rows["start"]
        raw = rows["scales_encoding"] == ENCODING_RAW
        # What the index says must be what the site calls for, or the bytes would run over their neighbours.
        fits = known & (rows["site"] == plan.site[wanted][starts]) & (rows["codes_bytes"] == tokens * code_bytes)
        fits &= ~raw | (rows["scales_bytes"] == tokens * scale_bytes)
        fits &= (rows["tensor_bytes"] == 4) | (rows["tensor_bytes"] == 4 * tokens)
        columns = tuple(column[wanted] for column in (places.codes, places.scales, places.tensor))
        row_bytes = (code_bytes, scale_bytes, np.full(len(starts), 4))
        whole = fits & _lie_whole(starts, skip, count, tokens, tuple(zip(columns, row_bytes, strict=True)))
        self._fits, self._raw, self._whole = fits.tolist(), raw.tolist(), whole.tolist()
        self._code_bytes, self._scale_bytes, self._tokens = code_bytes.tolist(), scale_bytes.tolist(), tokens.tolist()
        self._skip, self._count = skip.tolist(), count.tolist()
        self._places = [column.tolist() for column in columns]
        self._record_places = [column[starts].tolist() for column in columns]
        self._sizes = {name: rows[f"{name}_bytes"].tolist() for name in _COLUMNS}
        self._encodings, self._checksums = rows["scales_encoding"].tolist(), rows["checksum"].tolist()
        plain = whole & raw & (rows["tensor_bytes"] == 4)
        self._unlike_plain = np.cumsum(~plain).tolist()
        self._runs = {name: _run_borders(rows[f"{name}_offset"], rows[f"{name}_bytes"]) for name in _COLUMNS}
        self._offsets = {name: rows[f"{name}_offset"].tolist() for name in _COLUMNS}
        self._keys = _keys(rows)
        self._seeds = self._trajectory_seeds()

    def steps(self) -> list[tuple[int, int]]:
        """Ranges of records of about STEP_BYTES each."""
        sizes = self._rows["codes_bytes"].astype(np.int64) + self._rows["scales_bytes"]
        borders = (np.flatnonzero(np.diff(np.cumsum(sizes) // STEP_BYTES)) + 1).tolist()
        return list(pairwise([0, *borders, len(sizes)]))

    def fill(self, low: int, high: int, target: memoryview, floats: npt.NDArray[np.float32]) -> list[Undelivered]:
        """Read, verify and place records [low, high)."""
        before = self._unlike_plain[low - 1] if low else 0
        if self._unlike_plain[high - 1] == before:
            undelivered = self._fill_plain(low, high, target, floats)
            if undelivered is not None:
                return undelivered
        return self._fill_any(low, high, target, floats)

    def _fill_plain(
        self, low: int, high: int, target: memoryview, floats: npt.NDArray[np.float32]
    ) -> list[Undelivered] | None:
        """The usual step: whole records, nothing compressed, one tensor scale each. Every call in this loop counts: it
        holds the GIL for 2 microseconds a record, while the disk's part of 48 KiB takes 4. None: the disk failed."""
        pieces, sizes = slice(low, high), self._sizes
        code_places, scale_places, tensor_places = (places[pieces] for places in self._record_places)
        codes = [target[a : a + n] for a, n in zip(code_places, sizes["codes"][pieces], strict=True)]
        scales = [target[a : a + n] for a, n in zip(scale_places, sizes["scales"][pieces], strict=True)]
        block = _Scratch(4 * (high - low)).take(4 * (high - low))
        tensors = [block[a : a + 4] for a in range(0, 4 * (high - low), 4)]
        if not all(
            self._read_runs(name, low, high, views)
            for name, views in (("codes", codes), ("scales", scales), ("tensor", tensors))
        ):
            return None
        undelivered: list[Undelivered] = []
        digest, key_size = xxhash.xxh3_64_intdigest, KEY.size
        keys = [self._keys[a : a + key_size] for a in range(low * key_size, high * key_size, key_size)]
        values = np.frombuffer(block, np.float32).tolist()
        # The chain of checksum.record_checksum, written out: a call less for each part of each record.
        for record, key, seed, code, scale, tensor, expected, place, count, value in zip(
            range(low, high),
            keys,
            self._seeds[pieces],
            codes,
            scales,
            tensors,
            self._checksums[pieces],
            tensor_places,
            self._tokens[pieces],
            values,
            strict=True,
        ):
            if digest(tensor, digest(scale, digest(code, digest(key, seed)))) == expected:
                floats[place // 4 : place // 4 + count] = value
            else:
                undelivered.extend(self._undelivered(record, MissingReason.DATA_LOSS))
        return undelivered

    def _read_runs(self, name: str, low: int, high: int, views: Sequence[memoryview]) -> bool:
        """Fill the views of a column of records [low, high), neighbours in the file in one call; False if that failed
        or was cut short."""
        borders, offsets, sizes = self._runs[name], self._offsets[name], self._sizes[name]
        inner = borders[bisect_right(borders, low) : bisect_left(borders, high)]
        for first, last in pairwise([low, *inner, high]):
            for start in range(first, last, _VECTOR_MAX):
                stop = min(start + _VECTOR_MAX, last)
                wanted = offsets[stop - 1] + sizes[stop - 1] - offsets[start]
                try:
                    vector = views[start - low : stop - low]
                    if os.preadv(self._segment.source.descriptor, vector, offsets[start]) != wanted:
                        return False
                except OSError:
                    return False
        return True

    def _fill_any(self, low: int, high: int, target: memoryview, floats: npt.NDArray[np.float32]) -> list[Undelivered]:
        scratch = _Scratch(sum(sum(self._sizes[name][low:high]) for name in _COLUMNS))
        whole = self._whole[low:high]
        codes = self._views("codes", low, high, whole, target, scratch)
        straight = [a and b for a, b in zip(whole, self._raw[low:high], strict=True)]
        scales = self._views("scales", low, high, straight, target, scratch)
        tensors = [scratch.take(size) for size in self._sizes["tensor"][low:high]]
        failed: set[int] = set()
        for name, views in zip(_COLUMNS, (codes, scales, tensors), strict=True):
            failed |= _read(self._segment, self._rows[f"{name}_offset"][low:high], views)
        undelivered: list[Undelivered] = []
        digest, key_size, keys = xxhash.xxh3_64_intdigest, KEY.size, self._keys
        tensor_places = self._places[2]
        for step, (code, scale, tensor) in enumerate(zip(codes, scales, tensors, strict=True)):
            record = low + step
            plain: bytes | memoryview | None = scale
            if failed and step in failed:
                undelivered.extend(self._undelivered(record, MissingReason.STORAGE_FAILED))
                continue
            if not self._raw[record]:
                plain = self._decode(record, scale)
            state = digest(keys[record * key_size : (record + 1) * key_size], self._seeds[record])
            if (
                plain is None
                or not self._fits[record]
                or digest(tensor, digest(plain, digest(code, state))) != self._checksums[record]
            ):
                undelivered.extend(self._undelivered(record, MissingReason.DATA_LOSS))
            elif straight[step]:
                place = tensor_places[self._pieces[record]] // 4
                floats[place : place + self._tokens[record]] = np.frombuffer(tensor, np.float32)
            else:
                self._copy(record, code, plain, np.frombuffer(tensor, np.float32), target, floats)
        return undelivered

    def _views(
        self, name: str, low: int, high: int, straight: Sequence[bool], target: memoryview, scratch: _Scratch
    ) -> list[memoryview]:
        """Where the bytes of a column are read to: their place, or scratch memory."""
        places, pieces = self._places[_COLUMNS.index(name)], self._pieces
        return [
            target[places[pieces[record]] : places[pieces[record]] + size] if direct else scratch.take(size)
            for record, size, direct in zip(range(low, high), self._sizes[name][low:high], straight, strict=True)
        ]

    def _decode(self, record: int, scales: memoryview) -> bytes | memoryview | None:
        try:
            return decode_scales(self._encodings[record], scales, self._tokens[record] * self._scale_bytes[record])
        except DataLoss:
            return None

    def _copy(
        self,
        record: int,
        codes: memoryview,
        scales: bytes | memoryview,
        tensor: npt.NDArray[np.float32],
        target: memoryview,
        floats: npt.NDArray[np.float32],
    ) -> None:
        """Place the pieces of a verified record that was not read straight to its place."""
        code_bytes, scale_bytes = self._code_bytes[record], self._scale_bytes[record]
        for piece in range(self._pieces[record], self._pieces[record + 1]):
            code_place, scale_place, tensor_place = (places[piece] for places in self._places)
            skip, count = self._skip[piece], self._count[piece]
            if not self._whole[record]:
                target[code_place : code_place + count * code_bytes] = codes[
                    skip * code_bytes : (skip + count) * code_bytes
                ]
            target[scale_place : scale_place + count * scale_bytes] = scales[
                skip * scale_bytes : (skip + count) * scale_bytes
            ]
            floats[tensor_place // 4 : tensor_place // 4 + count] = (
                tensor if tensor.size == 1 else tensor[skip : skip + count]
            )

    def _undelivered(self, record: int, reason: MissingReason) -> list[Undelivered]:
        pieces = range(self._pieces[record], self._pieces[record + 1])
        return [Undelivered(self._plan_position + piece, reason) for piece in pieces]

    def _trajectory_seeds(self) -> list[int]:
        header, names = self._segment.header, self._segment.index.trajectories
        numbers = self._rows["trajectory"].tolist()
        seeds = {n: trajectory_seed(header.run, header.partition, names[n]) for n in set(numbers)}
        return [seeds[number] for number in numbers]


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
    lengths = np.diff([*starts, len(skip)])
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


def _run_borders(offsets: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint32]) -> list[int]:
    """Positions whose bytes do not follow those of the position before."""
    starts = offsets.astype(np.int64)
    borders: list[int] = (np.flatnonzero(starts[1:] != starts[:-1] + sizes[:-1]) + 1).tolist()
    return borders


def _read(segment: OpenSegment, offsets: npt.NDArray[np.uint64], views: Sequence[memoryview]) -> set[int]:
    """Fill the views from their offsets, neighbours in one call; returns the positions that the disk failed."""
    sizes = np.fromiter(map(len, views), np.int64, len(views))
    starts = offsets.astype(np.int64)
    borders = (np.flatnonzero(starts[1:] != starts[:-1] + sizes[:-1]) + 1).tolist()
    failed: set[int] = set()
    for first, last in pairwise([0, *borders, len(views)]):
        for low in range(first, last, _VECTOR_MAX):
            high = min(low + _VECTOR_MAX, last)
            wanted = int(sizes[low:high].sum())
            try:
                done = os.preadv(segment.source.descriptor, views[low:high], int(starts[low])) if wanted else 0
            except OSError:
                done = -1
            if done == wanted:
                continue
            # A bad sector must cost its own record only, and a short read is finished: each view by itself.
            for position in range(low, high):
                try:
                    segment.source.read_into(views[position], int(starts[position]))
                except StorageFailed:
                    failed.add(position)
    return failed


def _copy_slices(
    plan: ReadPlan, first: int, last: int, segments: Mapping[int, OpenSegment], target: memoryview, places: Places
) -> list[Undelivered]:
    """Pieces whose bytes come over the network: few round trips matter there, not a copy in memory."""
    undelivered = []
    for position, item in enumerate(fetch(select(plan, slice(first, last)), segments), first):
        if isinstance(item, Undelivered):
            undelivered.append(Undelivered(first + item.position, item.reason))
            continue
        _place(item, target, int(places.codes[position]), int(places.scales[position]), int(places.tensor[position]))
    return undelivered


def _place(piece: Slice, target: memoryview, codes: int, scales: int, tensor: int) -> None:
    for place, part in ((codes, piece.codes), (scales, piece.scales), (tensor, piece.tensor_scales)):
        target[place : place + part.nbytes] = part


class _Scratch:
    """Bytes of one step, cut from a buffer that its thread keeps: fresh pages would cost more than the read."""

    _kept = threading.local()

    def __init__(self, size: int) -> None:
        buffer: memoryview = getattr(self._kept, "buffer", memoryview(b""))
        if len(buffer) < size:
            buffer = self._kept.buffer = memoryview(bytearray(max(2 * STEP_BYTES, size)))
        self._buffer, self._used = buffer, 0

    def take(self, size: int) -> memoryview:
        part = self._buffer[self._used : self._used + size]
        self._used += size
        return part
