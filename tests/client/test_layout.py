"""Layouts against a reference that moves single rows: every (trajectory, token) lands where the trainer has it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_client.layout import (
    PackedSequence,
    RankRows,
    contiguous,
    packed,
    pad,
    sites_of_layers,
    stage_layers,
    without_last_token,
    zigzag,
)
from trace_store import Site
from trace_store.errors import InvalidRequest

HOLE = ("", -1)

lengths = st.lists(st.integers(1, 70), min_size=1, max_size=6)


def rows_of(part: RankRows) -> list[tuple[str, int]]:
    """Which token each row holds."""
    rows = [HOLE] * part.rows
    for span in part.spans:
        for token in range(span.start, span.stop):
            row = span.dest_row + token - span.start
            assert rows[row] == HOLE, "two tokens want one row"
            rows[row] = (span.trajectory, token)
    return rows


def padded_rows(sequence: PackedSequence) -> list[tuple[str, int]]:
    tokens = [(sequence.trajectory, token) for token in range(sequence.length)]
    return tokens + [HOLE] * (sequence.padded - sequence.length)


def reference_zigzag(pack: tuple[PackedSequence, ...], rank: int, ranks: int) -> list[tuple[str, int]]:
    """Each sequence as 2 x ranks equal pieces by np.split, pieces rank and 2 x ranks - 1 - rank."""
    rows: list[tuple[str, int]] = []
    for sequence in pack:
        pieces = np.split(np.arange(sequence.padded), 2 * ranks)
        whole = padded_rows(sequence)
        for piece in (pieces[rank], pieces[2 * ranks - 1 - rank]):
            rows.extend(whole[position] for position in piece)
    return rows


def names(sizes: list[int]) -> list[tuple[str, int]]:
    return [(f"t{number}", size) for number, size in enumerate(sizes)]


@given(lengths, st.sampled_from([1, 4, 16]), st.sampled_from([1, 128]))
def test_packed_leaves_holes_where_sequences_are_padded(sizes: list[int], align: int, total: int) -> None:
    pack = pad(names(sizes), align, total)
    expected = [row for sequence in pack for row in padded_rows(sequence)]
    assert rows_of(packed(pack)) == expected
    assert len(expected) % total == 0
    assert all(sequence.padded % align == 0 for sequence in pack[:-1])
    assert all(sequence.padded - sequence.length < align for sequence in pack[:-1])


@given(lengths, st.sampled_from([1, 2, 3, 4, 8]))
def test_zigzag_pairs(sizes: list[int], ranks: int) -> None:
    pack = pad(names(sizes), 2 * ranks)
    for rank in range(ranks):
        assert rows_of(zigzag(pack, rank, ranks)) == reference_zigzag(pack, rank, ranks)


@given(lengths, st.sampled_from([1, 2, 3, 5, 8]))
def test_contiguous_cuts_put_together_are_the_whole(sizes: list[int], ranks: int) -> None:
    whole = packed(pad(names(sizes)))
    together = [row for rank in range(ranks) for row in rows_of(contiguous(whole, rank, ranks))]
    assert together[: whole.rows] == rows_of(whole)
    assert set(together[whole.rows :]) <= {HOLE}


@given(lengths, st.sampled_from([2, 4]), st.sampled_from([2, 4]))
@settings(max_examples=40)
def test_sequence_parallel_cut_of_a_zigzag_part(sizes: list[int], ranks: int, cuts: int) -> None:
    pack = pad(names(sizes), 2 * ranks * cuts)
    part = zigzag(pack, ranks - 1, ranks)
    expected = reference_zigzag(pack, ranks - 1, ranks)
    size = len(expected) // cuts
    for rank in range(cuts):
        assert rows_of(contiguous(part, rank, cuts)) == expected[rank * size : (rank + 1) * size]


@given(lengths)
def test_without_the_last_token_nothing_else_changes(sizes: list[int]) -> None:
    pack = pad(names(sizes), 8)
    last = {(sequence.trajectory, sequence.length - 1) for sequence in pack}
    expected = [HOLE if row in last else row for row in rows_of(packed(pack))]
    assert rows_of(without_last_token(packed(pack), pack)) == expected


def test_stages_share_out_all_layers() -> None:
    assert stage_layers(8, 1, 2) == (4, 5, 6, 7)
    assert stage_layers(8, 0, 2, virtual=2) == (0, 1, 4, 5)
    assert sorted(layer for stage in range(4) for layer in stage_layers(48, stage, 4, virtual=3)) == list(range(48))
    with pytest.raises(InvalidRequest, match="layers=7"):
        stage_layers(7, 0, 2)


def test_sites_of_a_stage_in_table_order() -> None:
    table = [Site(layer, kind, 64) for layer in range(4) for kind in ("k", "v", "moe_in")]
    assert [site.name for site in sites_of_layers(table, stage_layers(4, 1, 2), ("k", "v"))] == [
        "2/k",
        "2/v",
        "3/k",
        "3/v",
    ]
    assert sites_of_layers(table, [9]) == []


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="multiple of 4"):
        zigzag(pad([("t", 6)]), 0, 2)
    with pytest.raises(InvalidRequest, match="rank"):
        zigzag(pad([("t", 4)]), 2, 2)
    with pytest.raises(InvalidRequest, match="length"):
        pad([("t", 0)])


@pytest.mark.parametrize("arena", ["required", "off"])
def test_ranks_read_what_was_written(server: Any, client: Any, run: str, records: Any, sites: Any, arena: str) -> None:
    import trace_client

    sizes = [37, 5, 64]
    written = {}
    with client.writer(run, arena) as writer:
        for number, size in enumerate(sizes):
            rows = records(size - 1, seed=number)
            writer.append(f"t{number}", 0, rows)
            writer.seal(f"t{number}", tokens=size, prompt_tokens=0)
            written[f"t{number}"] = rows
    pack = pad(names(sizes), 8)
    with trace_client.connect(server.address, arena=arena) as other:
        reader = other.reader(run, arena)
        for rank in range(2):
            part = without_last_token(zigzag(pack, rank, 2), pack)
            batch = reader.read(part.spans, sites)
            assert not batch.missing
            for site in sites:
                for row, (name, token) in enumerate(rows_of(part)[: batch.rows]):
                    assert batch.valid[site][row] == (token >= 0)
                    if token >= 0:
                        planes, scales, _ = written[name][site]
                        assert (batch.planes[site][row].reshape(-1) == planes[token].reshape(-1)).all()
                        assert (batch.scales[site][row] == scales[token]).all()
