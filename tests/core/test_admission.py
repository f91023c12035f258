"""What of a chunk is new, known or in conflict; byte comparison where spans differ."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from trace_store.checksum import record_checksum, trajectory_seed
from trace_store.chunk import Chunk, RecordGroup, checksum_of, iterate_records
from trace_store.errors import Conflict, InvalidRequest
from trace_store.testing.records import join_chunks


def one_scale(store: Any, start: int, stop: int, scale: float) -> Chunk:
    """Rows of site 0 with one tensor scale for the record."""
    full = store.chunk("t", start, stop, sites=[0])
    tensor = np.float32([scale]).tobytes()
    seed = trajectory_seed("run", "step-1", "t")
    checksum = record_checksum(seed, 0, 0, 0, start, stop, full.codes, full.scales, tensor)
    group = RecordGroup("t", 0, 0, start, stop, (0,), (False,), (checksum,))
    return Chunk((group,), full.codes, full.scales, memoryview(tensor))


def append(store: Any, chunk: Chunk) -> Any:
    return store.engine.append("run", "step-1", chunk, "written").result(30)


@pytest.mark.parametrize(
    ("first", "second", "stored", "duplicates"),
    [
        ((10, 20), (10, 20), 0, 4),
        ((10, 20), (12, 15), 0, 4),
        ((10, 20), (5, 12), 4, 0),
        ((10, 20), (18, 25), 4, 0),
        ((10, 20), (5, 25), 8, 0),
        ((10, 20), (20, 25), 4, 0),
    ],
)
def test_only_the_new_part_of_an_overlap_is_stored(
    store: Any, first: tuple[int, int], second: tuple[int, int], stored: int, duplicates: int
) -> None:
    store.append("t", *first)
    result = store.append("t", *second)
    assert (result.stored, result.duplicates) == (stored, duplicates)
    low, high = min(first[0], second[0]), max(first[1], second[1])
    assert store.check("t", low, high, include_open=True) == []
    store.reopen()
    assert store.check("t", low, high, include_open=True) == []


@pytest.mark.parametrize("part", ["codes", "scales", "tensor_scales"])
def test_a_single_differing_bit_in_an_overlap_is_a_conflict(store: Any, part: str) -> None:
    store.append("t", 0, 8)
    chunk = store.chunk("t", 4, 12)
    raw = bytearray(getattr(chunk, part))
    raw[0] ^= 2
    changed = dataclasses.replace(chunk, **{part: memoryview(bytes(raw))})
    seed = trajectory_seed("run", "step-1", "t")
    sums = tuple(checksum_of(record, seed) for record in iterate_records(changed, store.table))
    changed = dataclasses.replace(changed, groups=(dataclasses.replace(changed.groups[0], checksums=sums),))
    with pytest.raises(Conflict, match=r"site=0/k tokens=\[4, 8\)"):
        append(store, changed)
    assert {(gap.start, gap.stop) for gap in store.check("t", 0, 12, include_open=True)} == {(8, 12)}


def test_one_tensor_scale_equals_the_same_one_for_every_token(store: Any) -> None:
    append(store, one_scale(store, 0, 8, 1.5))
    assert append(store, one_scale(store, 2, 6, 1.5)).duplicates == 1
    with pytest.raises(Conflict):
        append(store, one_scale(store, 2, 6, 1.25))
    assert append(store, one_scale(store, 6, 12, 1.5)).stored == 1
    rows, missing = store.read("t", 0, 12, [0], include_open=True)
    assert missing == []
    assert rows[0][3].tolist() == [1.5] * 12


@pytest.mark.parametrize("other", [{"start": 2, "stop": 6}, {"start": 4, "stop": 8, "attempt": 1}])
def test_a_message_names_a_row_once_and_one_attempt(store: Any, other: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match="twice or mixes attempts"):
        append(store, join_chunks([store.chunk("t", 0, 4), store.chunk("t", **other)]))
