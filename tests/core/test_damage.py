"""A record whose stored bytes are damaged is no duplicate: sent again it is stored anew, and reads give good rows."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from trace_store.checksum import trajectory_seed
from trace_store.chunk import checksum_of, iterate_records
from trace_store.errors import Conflict, Sealed
from trace_store.planner import MissingReason

SITES = 4


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def spoil(store: Any, start: int, stop: int, path: Path | None = None) -> tuple[Path, int]:
    """Flip a bit of the codes of site 0 of a record of trajectory t; the first good copy, and where."""
    files = [path] if path is not None else store.segments(".open") + store.segments()
    codes = bytes(store.chunk("t", start, stop, sites=[0]).codes)
    for file in files:
        content = file.read_bytes()
        if codes in content:
            flip(file, content.index(codes))
            return file, content.index(codes)
    raise AssertionError("the record is nowhere")


def lost(store: Any, start: int, stop: int, **more: Any) -> set[tuple[int, int, int]]:
    gaps = store.check("t", start, stop, **more)
    assert {gap.reason for gap in gaps} <= {MissingReason.DATA_LOSS}
    return {(gap.site, gap.start, gap.stop) for gap in gaps}


def test_a_damaged_record_that_is_sent_again_is_stored_anew(store: Any) -> None:
    store.append("t", 0, 8)
    spoil(store, 0, 8)
    assert lost(store, 0, 8, include_open=True) == {(0, 0, 8)}
    again = store.append("t", 0, 8)
    assert (again.stored, again.duplicates) == (1, SITES - 1)
    assert lost(store, 0, 8, include_open=True) == set()
    assert store.append("t", 0, 8).stored == 0  # once is enough
    store.seal("t", 9)
    for _ in range(2):
        store.reopen()
        assert lost(store, 0, 8) == set()
        assert store.append("t", 0, 8).stored == 0


def test_a_sealed_attempt_takes_its_own_damaged_rows_again_and_nothing_else(store: Any) -> None:
    store.append("t", 0, 8)
    store.append("t", 9, 12)
    store.seal("t", 16, allow_holes=True)
    store.reopen()
    spoil(store, 0, 8)
    assert lost(store, 0, 8) == {(0, 0, 8)}
    assert store.append("t", 0, 8).stored == 1
    assert lost(store, 0, 8) == set()
    for span in ((8, 9), (6, 9), (12, 14)):
        with pytest.raises(Sealed):
            store.append("t", *span)
    store.reopen()
    assert lost(store, 0, 8) == lost(store, 9, 12) == set()
    with pytest.raises(Sealed):
        store.append("t", 8, 9)


def test_a_copy_that_is_damaged_in_its_turn_is_replaced_too(store: Any) -> None:
    store.append("t", 0, 8)
    store.seal("t", 9)
    for _ in range(3):
        store.reopen()
        for path in store.segments():
            if bytes(store.chunk("t", 0, 8, sites=[0]).codes) in path.read_bytes():
                spoil(store, 0, 8, path)
        assert lost(store, 0, 8) == {(0, 0, 8)}
        assert store.append("t", 0, 8).stored == 1
        assert lost(store, 0, 8) == set()


def test_copies_of_a_row_stand_in_for_each_other_whole_and_in_part(store: Any) -> None:
    store.append("t", 0, 8)
    place = spoil(store, 0, 8)
    assert store.append("t", 2, 12).stored == SITES  # site 0 as a whole, the others from 8 on
    store.seal("t", 13)
    flip(*place)
    assert lost(store, 0, 12) == set()
    place = spoil(store, 2, 12)
    assert lost(store, 0, 12) == {(0, 8, 12)}  # 2 to 8 come from the first record
    assert lost(store, 3, 7) == set()
    flip(*place)
    spoil(store, 0, 8)
    assert lost(store, 0, 12) == {(0, 0, 2)}


@pytest.mark.parametrize(("part", "kept"), [((4, 12), (0, 4)), ((0, 4), (4, 8)), ((2, 6), None)])
def test_a_part_of_a_damaged_record_replaces_that_part(
    store: Any, part: tuple[int, int], kept: tuple[int, int] | None
) -> None:
    store.append("t", 0, 8)
    spoil(store, 0, 8)
    assert store.append("t", *part).stored >= 1
    left = {(0, 0, 2), (0, 6, 8)} if kept is None else {(0, *kept)}
    high = max(part[1], 8)
    assert lost(store, 0, high, include_open=True) == left
    store.reopen()
    assert lost(store, 0, high, include_open=True) == left
    assert store.append("t", 0, 8).stored >= 1
    assert lost(store, 0, high, include_open=True) == set()


@pytest.mark.parametrize("part", [(0, 4), (4, 8), (2, 6)])
def test_of_a_sealed_attempt_only_the_same_record_replaces_a_damaged_one(store: Any, part: tuple[int, int]) -> None:
    """Nobody can tell whether a part is what was lost, and the whole one must still be welcome afterwards."""
    store.append("t", 0, 8)
    store.seal("t", 9)
    spoil(store, 0, 8)
    for seed in (0, 1):
        with pytest.raises(Conflict, match="damaged"):
            store.append("t", *part, seed=seed)
    assert lost(store, 0, 8) == {(0, 0, 8)}
    assert store.append("t", 0, 8).stored == 1
    assert lost(store, 0, 8) == set()


def test_other_rows_do_not_take_the_place_of_damaged_ones(store: Any) -> None:
    store.append("t", 0, 8)
    spoil(store, 0, 8)
    chunk = store.chunk("t", 0, 8, sites=[0])
    raw = bytearray(chunk.codes)
    raw[5] ^= 2
    changed = dataclasses.replace(chunk, codes=memoryview(bytes(raw)))
    seed = trajectory_seed("run", "step-1", "t")
    sums = tuple(checksum_of(record, seed) for record in iterate_records(changed, store.table))
    changed = dataclasses.replace(changed, groups=(dataclasses.replace(changed.groups[0], checksums=sums),))
    with pytest.raises(Conflict):
        store.engine.append("run", "step-1", changed).result(30)
    assert lost(store, 0, 8, include_open=True) == {(0, 0, 8)}


def test_rows_that_the_file_has_no_more_are_taken_again(store: Any) -> None:
    store.append("t", 0, 8)
    store.append("t", 8, 16)
    store.seal("t", 17)
    store.engine.roll().result(30)
    (path,) = store.segments()
    os.truncate(path, path.read_bytes().index(bytes(store.chunk("t", 8, 16, sites=[0]).codes)))
    assert store.append("t", 0, 8).duplicates == SITES
    assert store.append("t", 8, 16).stored == SITES
    assert lost(store, 0, 16) == set()
    path.unlink()
    assert store.append("t", 0, 8).stored == SITES
    store.reopen()  # the seal went with the file
    assert lost(store, 0, 16, include_open=True) == set()


def test_a_seal_counts_rows_once_that_are_stored_twice(store: Any) -> None:
    """Else the attempt would count as damaged once the bad copy is dropped, and take new rows for ever."""
    store.append("t", 0, 8)
    spoil(store, 0, 8)
    assert store.append("t", 0, 8).stored == 1
    store.seal("t", 12, allow_holes=True)
    store.engine.close()
    (path,) = store.segments()
    content = bytearray(path.read_bytes())
    content[-40:] = bytes(40)  # without its footer it is scanned, and rewritten without the damaged row
    path.write_bytes(content)
    store.reopen()
    assert lost(store, 0, 8) == set()
    with pytest.raises(Sealed):
        store.append("t", 8, 10)
