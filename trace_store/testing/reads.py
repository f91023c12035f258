"""The two ways to read from an engine, in one shape: slices as they come, and pieces gathered into the caller's memory.

Both give ``{(site number, token): (codes, scales, tensor scale)}`` of one span and what is missing; they must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trace_store.engine import Engine
from trace_store.gather.places import Places
from trace_store.planner import Missing
from trace_store.record import TokenSpan

Rows = dict[tuple[int, int], tuple[bytes, bytes, float]]


def read_slices(
    engine: Engine, run: str, partition: str, span: TokenSpan, sites: Sequence[int], **options: Any
) -> tuple[Rows, list[Missing]]:
    """Iterate over a read. AssertionError: a row came twice."""
    table, rows = engine.sites(run), Rows()
    with engine.read(run, partition, [span], sites, **options) as read:
        for piece in read:
            site = table[piece.site]
            tensor = np.frombuffer(piece.tensor_scales, "<f4")
            for n in range(piece.rows):
                key = (piece.site, span.start + piece.dest_row - span.dest_row + n)
                assert key not in rows
                codes = bytes(piece.codes[n * site.code_bytes : (n + 1) * site.code_bytes])
                scales = bytes(piece.scales[n * site.scale_bytes : (n + 1) * site.scale_bytes])
                rows[key] = (codes, scales, float(tensor[n]))
        return rows, list(read.missing)


def read_gathered(
    engine: Engine, run: str, partition: str, span: TokenSpan, sites: Sequence[int], **options: Any
) -> tuple[Rows, list[Missing]]:
    """Gather a read into one buffer, every piece behind the one before. AssertionError: a row came twice."""
    table, rows = engine.sites(run), Rows()
    with engine.read(run, partition, [span], sites, **options) as read:
        pieces = read.pieces()
        code_bytes = np.array([site.code_bytes for site in table], np.int64)[pieces.site] * pieces.rows
        scale_bytes = np.array([site.scale_bytes for site in table], np.int64)[pieces.site] * pieces.rows
        tensor_bytes = 4 * pieces.rows
        tensor_places = np.cumsum(tensor_bytes) - tensor_bytes
        code_places = np.cumsum(code_bytes) - code_bytes + int(tensor_bytes.sum())
        scale_places = np.cumsum(scale_bytes) - scale_bytes + int(tensor_bytes.sum() + code_bytes.sum())
        target = bytearray(int(tensor_bytes.sum() + code_bytes.sum() + scale_bytes.sum()))
        lost = set(read.gather(pieces, memoryview(target), Places(code_places, scale_places, tensor_places)))
        for position in range(len(pieces.row)):
            if position in lost:
                continue
            number = int(pieces.site[position])
            site, first = table[number], span.start + int(pieces.dest_row[position]) - span.dest_row
            tensor = np.frombuffer(target, "<f4", int(pieces.rows[position]), int(tensor_places[position]))
            for n in range(int(pieces.rows[position])):
                assert (number, first + n) not in rows
                code = int(code_places[position]) + n * site.code_bytes
                scale = int(scale_places[position]) + n * site.scale_bytes
                rows[(number, first + n)] = (
                    bytes(target[code : code + site.code_bytes]),
                    bytes(target[scale : scale + site.scale_bytes]),
                    float(tensor[n]),
                )
        return rows, list(read.missing)
