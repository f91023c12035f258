"""Records that take more than a read to their places: wanted in part, with a tensor scale a token, or on a disk that
fails. Their bytes pass through scratch memory, since a checksum covers the whole record."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from trace_store.checksum import KEY
from trace_store.errors import DataLoss, StorageFailed
from trace_store.fetch import OpenSegment, Undelivered
from trace_store.gather.scratch import Scratch
from trace_store.gather.wanted import COLUMNS, VECTOR_MAX, WantedRecords
from trace_store.planner import MissingReason
from trace_store.segment.scan import decode_scales


class OddRecords:
    """Any records of a segment, as lists for the loop over them."""

    def __init__(self, wanted: WantedRecords) -> None:
        rows = self._rows = wanted.rows
        self._wanted, self._segment, self._keys, self._seeds = wanted, wanted.segment, wanted.keys, wanted.seeds
        self._pieces, self._places = wanted.borders, [column.tolist() for column in wanted.places]
        self._skip, self._count = wanted.skip.tolist(), wanted.count.tolist()
        self._fits, self._raw, self._whole = wanted.fits.tolist(), wanted.raw.tolist(), wanted.whole.tolist()
        self._code_bytes, self._scale_bytes = wanted.code_bytes.tolist(), wanted.scale_bytes.tolist()
        self._tokens = wanted.tokens.tolist()
        self._sizes = {name: rows[f"{name}_bytes"].tolist() for name in COLUMNS}
        self._encodings, self._checksums = rows["scales_encoding"].tolist(), rows["checksum"].tolist()

    def fill(self, low: int, high: int, target: memoryview, floats: npt.NDArray[np.float32]) -> list[Undelivered]:
        """Read, verify and place records [low, high); ``floats`` is ``target`` as float32."""
        scratch = Scratch(sum(sum(self._sizes[name][low:high]) for name in COLUMNS))
        whole = self._whole[low:high]
        codes = self._views("codes", low, high, whole, target, scratch)
        straight = [a and b for a, b in zip(whole, self._raw[low:high], strict=True)]
        scales = self._views("scales", low, high, straight, target, scratch)
        tensors = [scratch.take(size) for size in self._sizes["tensor"][low:high]]
        failed: set[int] = set()
        for name, views in zip(COLUMNS, (codes, scales, tensors), strict=True):
            failed |= _read(self._segment, self._rows[f"{name}_offset"][low:high], views)
        undelivered: list[Undelivered] = []
        digest, key_size, keys = xxhash.xxh3_64_intdigest, KEY.size, self._keys
        tensor_places = self._places[2]
        for step, (code, scale, tensor) in enumerate(zip(codes, scales, tensors, strict=True)):
            record = low + step
            plain: bytes | memoryview | None = scale
            if failed and step in failed:
                undelivered.extend(self._wanted.undelivered(record, MissingReason.STORAGE_FAILED))
                continue
            if not self._raw[record]:
                plain = self._decode(record, scale)
            state = digest(keys[record * key_size : (record + 1) * key_size], self._seeds[record])
            if (
                plain is None
                or not self._fits[record]
                or digest(tensor, digest(plain, digest(code, state))) != self._checksums[record]
            ):
                undelivered.extend(self._wanted.undelivered(record, MissingReason.DATA_LOSS))
            elif straight[step]:
                place = tensor_places[self._pieces[record]] // 4
                floats[place : place + self._tokens[record]] = np.frombuffer(tensor, np.float32)
            else:
                self._copy(record, code, plain, np.frombuffer(tensor, np.float32), target, floats)
        return undelivered

    def _views(
        self, name: str, low: int, high: int, straight: Sequence[bool], target: memoryview, scratch: Scratch
    ) -> list[memoryview]:
        """Where the bytes of a column are read to: their place, or scratch memory."""
        places, pieces = self._places[COLUMNS.index(name)], self._pieces
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


def _read(segment: OpenSegment, offsets: npt.NDArray[np.uint64], views: Sequence[memoryview]) -> set[int]:
    """Fill the views from their offsets, neighbours in one call; returns the positions that the disk failed."""
    sizes = np.fromiter(map(len, views), np.int64, len(views))
    starts = offsets.astype(np.int64)
    borders = (np.flatnonzero(starts[1:] != starts[:-1] + sizes[:-1]) + 1).tolist()
    failed: set[int] = set()
    for first, last in pairwise([0, *borders, len(views)]):
        for low in range(first, last, VECTOR_MAX):
            high = min(low + VECTOR_MAX, last)
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
