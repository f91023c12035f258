"""Gathering spans that cut records: adjacent ones, apart ones, overlapping ones, and a record that is damaged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trace_store import TokenSpan
from trace_store.checksum import group_checksums, trajectory_seed
from trace_store.chunk import Chunk, RecordGroup
from trace_store.gather.places import Places
from trace_store.shape import group_shape
from trace_store.testing.records import make_rows

TOKENS, ROWS = 8, 40

LAYOUTS = {
    "whole": [(0, 8, 5)],
    "adjacent": [(0, 3, 5), (3, 8, 8)],
    "adjacent, three": [(0, 1, 5), (1, 7, 6), (7, 8, 12)],
    "with a hole": [(0, 3, 5), (3, 8, 9)],
    "swapped": [(3, 8, 5), (0, 3, 10)],
    "without the first token": [(1, 4, 5), (4, 8, 8)],
    "without the last token": [(0, 4, 5), (4, 7, 9)],
    "a gap between": [(0, 3, 5), (4, 8, 8)],
    "the same tokens twice": [(0, 8, 5), (0, 8, 13)],
    "overlapping, of the record's length": [(0, 5, 5), (5, 8, 10), (3, 5, 20)],
}


def one_scale_chunk(store: Any, trajectory: str, start: int) -> Chunk:
    """Records with one tensor scale each, as a static quantizer gives them."""
    table = store.table
    made = [make_rows(site, n, trajectory, 0, start, start + TOKENS) for n, site in enumerate(table)]
    codes, scales = (memoryview(b"".join(rows[part].tobytes() for rows in made)) for part in (0, 1))
    tensors = memoryview(b"".join(rows[2][:1].tobytes() for rows in made))
    sites, per_token = tuple(range(len(table))), (False,) * len(table)
    shape = group_shape(table, sites, per_token, TOKENS)
    seed = trajectory_seed("run", "step-1", trajectory)
    sums = group_checksums(
        seed, 0, 0, start, start + TOKENS, shape.key_parts, shape.parts, codes, scales, tensors
    )  # fmt: skip
    group = RecordGroup(trajectory, 0, 0, start, start + TOKENS, sites, per_token, tuple(sums))
    return Chunk((group,), codes, scales, tensors)


def gather(store: Any, spans: list[TokenSpan]) -> tuple[dict[int, tuple[Any, Any, Any]], list[Any]]:
    """Arrays by site over ROWS rows, 0xEE and NaN where nothing landed, and what is missing."""
    table = store.table
    sizes = [ROWS * site.code_bytes for site in table], [ROWS * site.scale_bytes for site in table], [4 * ROWS] * 4
    starts = np.cumsum([0, *sizes[2], *sizes[0], *sizes[1]]).tolist()
    target = bytearray(b"\xee" * starts[-1])
    tensor_at, code_at, scale_at = starts[:4], starts[4:8], starts[8:12]
    with store.engine.read("run", "step-1", spans, list(range(4)), include_open=True) as read:
        plan = read.pieces()
        code_bytes, scale_bytes = (
            np.array([getattr(site, name) for site in table])[plan.site] for name in ("code_bytes", "scale_bytes")
        )
        places = Places(
            np.array(code_at)[plan.site] + plan.dest_row * code_bytes,
            np.array(scale_at)[plan.site] + plan.dest_row * scale_bytes,
            np.array(tensor_at)[plan.site] + plan.dest_row * 4,
        )
        read.gather(plan, memoryview(target), places)
        missing = list(read.missing)
    flat = np.frombuffer(bytes(target), np.uint8)
    return {
        number: (
            flat[code_at[number] :][: sizes[0][number]].reshape(ROWS, -1),
            flat[scale_at[number] :][: sizes[1][number]].reshape(ROWS, -1),
            flat[tensor_at[number] :][: 4 * ROWS].view(np.float32),
        )
        for number in range(4)
    }, missing


@pytest.mark.parametrize("one_scale", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_row_lands_at_its_place_and_nowhere_else(store: Any, layout: str, one_scale: bool) -> None:
    for trajectory in ("t", "u"):
        for start in (0, TOKENS):
            chunk = one_scale_chunk(store, trajectory, start) if one_scale else None
            chunk = chunk or store.chunk(trajectory, start, start + TOKENS)
            store.engine.append("run", "step-1", chunk, "written").result(30)
    spans = [TokenSpan("t", low, high, row) for low, high, row in LAYOUTS[layout]]
    spans += [TokenSpan("u", TOKENS, 2 * TOKENS, 30)]
    found, missing = gather(store, spans)
    assert not missing
    for number, site in enumerate(store.table):
        codes, scales, tensors = found[number]
        untouched = set(range(ROWS))
        for span in spans:
            wanted = make_rows(site, number, span.trajectory, 0, span.start, span.stop)
            first = make_rows(site, number, span.trajectory, 0, span.start // TOKENS * TOKENS, span.stop)[2][0]
            rows = slice(span.dest_row, span.dest_row + span.tokens)
            untouched -= set(range(ROWS)[rows])
            np.testing.assert_array_equal(codes[rows], wanted[0])
            np.testing.assert_array_equal(scales[rows], wanted[1])
            np.testing.assert_array_equal(tensors[rows], first if one_scale else wanted[2])
        for row in untouched:
            assert set(codes[row].tolist()) == set(scales[row].tolist()) == {0xEE}


@pytest.mark.parametrize("layout", ["adjacent, three", "with a hole"])
def test_a_damaged_record_costs_every_span_that_wants_it(store: Any, layout: str) -> None:
    chunk = one_scale_chunk(store, "t", 0)
    store.engine.append("run", "step-1", chunk, "written").result(30)
    store.engine.roll().result(30)
    path = store.segments()[0]
    content = bytearray(path.read_bytes())
    content[content.index(bytes(chunk.codes[:32]))] ^= 1
    path.write_bytes(content)
    _, missing = gather(store, [TokenSpan("t", low, high, row) for low, high, row in LAYOUTS[layout]])
    assert sorted((gap.span, gap.site, gap.start, gap.stop) for gap in missing) == [
        (number, 0, low, high) for number, (low, high, _) in enumerate(LAYOUTS[layout])
    ]
