"""Spans of the rows that one trainer rank consumes, for ``Reader.read``: padding as holes, cuts where the trainer cuts.

A trainer packs sequences one after another, pads each to a multiple of ``align``, and gives a rank a part of the rows:

    packed      all rows of the pack
    zigzag      context parallel: a sequence padded to P is cut into 2 c pieces, rank r has pieces r and 2 c - 1 - r
    contiguous  sequence parallel: the r-th of n equal stretches of the pack's (or the zigzag part's) rows, which cuts
                sequences anywhere
    sites       pipeline parallel: the layers of a stage, for virtual stages too

Rows that no span covers (padding, and the last token, which ran no forward) stay invalid: the trainer rounds natively
there. All functions are pure; ``rows`` of the result is what the buffers of the rank need.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trace_store.errors import InvalidRequest
from trace_store.record import Site, TokenSpan, check_int

_ROWS_MAX = 2**31 - 1


@dataclass(frozen=True)
class PackedSequence:
    """A trajectory in a pack: tokens [0, length), padded to ``padded`` rows."""

    trajectory: str
    length: int
    padded: int


@dataclass(frozen=True)
class RankRows:
    """Rows of one rank: ``spans`` for ``Reader.read``, ``rows`` in all, padding included."""

    spans: tuple[TokenSpan, ...]
    rows: int


def pad(trajectories: Iterable[tuple[str, int]], align: int = 1, total_align: int = 1) -> tuple[PackedSequence, ...]:
    """A pack of (trajectory, tokens), each padded to a multiple of ``align``, the last one so that the pack's rows are
    a multiple of ``total_align``.

    Megatron aligns to tensor x context parallel size (x 2 for zigzag), with FP8 or FP4 also to 16 and the total to 128
    times that.

    Raises:
        InvalidRequest: a length or an alignment is not positive.
    """
    check_int(align, "align", 1, _ROWS_MAX)
    check_int(total_align, "total_align", 1, _ROWS_MAX)
    pack = []
    for trajectory, length in trajectories:
        check_int(length, "length", 1, _ROWS_MAX)
        pack.append(PackedSequence(trajectory, length, -(-length // align) * align))
    if pack:
        surplus = -sum(sequence.padded for sequence in pack) % total_align
        last = pack[-1]
        pack[-1] = PackedSequence(last.trajectory, last.length, last.padded + surplus)
    return tuple(pack)


def packed(pack: Sequence[PackedSequence]) -> RankRows:
    """All rows: sequences one after another, holes where they are padded."""
    return _gathered([[(sequence, 0, sequence.padded)] for sequence in pack])


def zigzag(pack: Sequence[PackedSequence], rank: int, ranks: int) -> RankRows:
    """Rows of context-parallel rank ``rank`` of ``ranks``: two pieces of each sequence.

    Raises:
        InvalidRequest: a padded length is no multiple of 2 x ranks; names it.
    """
    _check_rank(rank, ranks)
    pieces = []
    for sequence in pack:
        if sequence.padded % (2 * ranks):
            raise InvalidRequest(
                f"zigzag needs sequences padded to a multiple of {2 * ranks}, trajectory={sequence.trajectory!r}"
                f" padded={sequence.padded}",
                argument="pack",
            )
        half = sequence.padded // (2 * ranks)
        low, high = rank * half, sequence.padded - (rank + 1) * half
        pieces.append([(sequence, low, low + half), (sequence, high, high + half)])
    return _gathered(pieces)


def contiguous(rows: RankRows, rank: int, ranks: int) -> RankRows:
    """The ``rank``-th of ``ranks`` equal stretches of rows, as Ulysses and Megatron's sequence parallelism cut them.

    A total that is no multiple of ``ranks`` is padded at its end.
    """
    _check_rank(rank, ranks)
    size = -(-rows.rows // ranks)
    first, last = rank * size, (rank + 1) * size
    spans = []
    for span in rows.spans:
        low, high = max(span.dest_row, first), min(span.dest_row + span.tokens, last)
        if low < high:
            shift = span.start - span.dest_row
            spans.append(TokenSpan(span.trajectory, low + shift, high + shift, low - first))
    return RankRows(tuple(spans), size)


def without_last_token(rows: RankRows, pack: Sequence[PackedSequence]) -> RankRows:
    """The same rows without each trajectory's last token: it was sampled and never ran a forward, so that asking for it
    would only report it as missing."""
    last = {sequence.trajectory: sequence.length - 1 for sequence in pack}
    spans = []
    for span in rows.spans:
        stop = min(span.stop, last[span.trajectory])
        if span.start < stop:
            spans.append(TokenSpan(span.trajectory, span.start, stop, span.dest_row))
    return RankRows(tuple(spans), rows.rows)


def stage_layers(layers: int, stage: int, stages: int, virtual: int = 1) -> tuple[int, ...]:
    """Global 0-based layers of a pipeline stage; with ``virtual`` chunks a stage they interleave, as Megatron's do.

    Raises:
        InvalidRequest: the layers do not divide evenly; pass your own list of layers to ``sites_of_layers`` then.
    """
    _check_rank(stage, stages)
    if layers % (stages * virtual):
        raise InvalidRequest(
            f"layers do not divide evenly, layers={layers} stages={stages} virtual={virtual}", argument="layers"
        )
    size = layers // (stages * virtual)
    starts = [(chunk * stages + stage) * size for chunk in range(virtual)]
    return tuple(layer for start in starts for layer in range(start, start + size))


def sites_of_layers(sites: Iterable[Site], layers: Iterable[int], kinds: Iterable[str] | None = None) -> list[Site]:
    """The run's sites at some layers (global, 0-based), of some kinds or all, in table order."""
    wanted, named = set(layers), None if kinds is None else set(kinds)
    return [site for site in sites if site.layer in wanted and (named is None or site.kind in named)]


def _gathered(pieces: Iterable[Sequence[tuple[PackedSequence, int, int]]]) -> RankRows:
    """Pieces [low, high) of padded sequences, laid one after another."""
    spans: list[TokenSpan] = []
    row = 0
    for group in pieces:
        for sequence, low, high in group:
            stop = min(high, sequence.length)
            if low < stop:
                spans.append(TokenSpan(sequence.trajectory, low, stop, row))
            row += high - low
    return RankRows(tuple(spans), row)


def _check_rank(rank: int, ranks: int) -> None:
    check_int(ranks, "ranks", 1, _ROWS_MAX)
    check_int(rank, "rank", 0, ranks - 1)
