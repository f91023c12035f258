"""Rows of a trajectory on their way to the store: packed, in spans of consecutive tokens, by site."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trace_store import Site, codebook
from trace_store.errors import InvalidRequest

Bytes = npt.NDArray[np.uint8]
Rows = tuple[Bytes, Bytes, npt.NDArray[np.float32]]
"""Packed code rows, block scales, decode scale [1] or per row: what ``Writer.append`` takes for a site."""

Piece = tuple[str, int, slice]
"""Trajectory, position of the first token, rows of the call."""


def pack_codes(site: Site, codes: Bytes) -> Bytes:
    """Codes uint8 [T, W] (0 to 15) to uint8 [T, *row] in the form of ``site``."""
    if codes.ndim != 2 or codes.shape[1] != site.width:
        raise InvalidRequest(
            f"codes must have shape [T, {site.width}], site={site.name} shape={list(codes.shape)}", argument="codes"
        )
    if site.form == "full":
        return codebook.pack_full(codes)
    return codebook.pack(codes, bits=site.code_form.bits)


@dataclass
class Span:
    """Rows of one trajectory and site for tokens [start, start + filled)."""

    start: int
    planes: Bytes
    scales: Bytes
    tensor_scale: npt.NDArray[np.float32]
    filled: int = 0

    @classmethod
    def empty(cls, site: Site, start: int, tokens: int) -> Span:
        row = site.code_form.row_shape(site.width)
        return cls(
            start,
            np.empty((tokens, *row), np.uint8),
            np.empty((tokens, site.scale_bytes), np.uint8),
            np.empty(tokens, np.float32),
        )

    @property
    def stop(self) -> int:
        return self.start + self.filled

    def take(self, rows: Rows, start: int, count: int) -> None:
        """Copy ``count`` rows from ``rows[start:]`` behind those that are there."""
        filled = slice(self.filled, self.filled + count)
        self.planes[filled] = rows[0][start : start + count]
        self.scales[filled] = rows[1][start : start + count]
        self.tensor_scale[filled] = rows[2][start : start + count]
        self.filled += count

    def rows(self) -> Rows:
        scale = self.tensor_scale[: self.filled]
        # A static scale is one value, not one per token: 4 bytes a token and site less, a sixth of a b1 row of 128.
        return self.planes[: self.filled], self.scales[: self.filled], scale[:1] if (scale == scale[0]).all() else scale


class OpenRows:
    """Rows of one trajectory that were recorded and not yet appended."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.spans: dict[Site, Span] = {}
        self.complete: dict[tuple[int, int], dict[Site, Rows]] = {}

    def close_span(self, site: Site) -> None:
        """Move the site's span, if it has one, to the complete ones."""
        span = self.spans.pop(site, None)
        if span is not None:
            self.complete.setdefault((span.start, span.stop), {})[site] = span.rows()


def pieces(trajectories: Sequence[str], positions: Sequence[int] | npt.NDArray[Any]) -> Iterator[Piece]:
    """Rows cut where they stop being consecutive tokens of one trajectory."""
    row = 0
    while row < len(trajectories):
        stop = row + 1
        while (
            stop < len(trajectories)
            and trajectories[stop] == trajectories[row]
            and int(positions[stop]) == int(positions[row]) + stop - row
        ):
            stop += 1
        yield trajectories[row], int(positions[row]), slice(row, stop)
        row = stop


def scale_rows(tensor_scale: Any, rows: int) -> npt.NDArray[np.float32]:
    """A scalar or one scale per row as float32 [rows]."""
    scale = np.asarray(tensor_scale, np.float32)
    if scale.shape not in ((), (1,), (rows,)):
        raise InvalidRequest(
            f"tensor_scale must be a scalar or one per row, shape={list(scale.shape)} rows={rows}",
            argument="tensor_scale",
        )
    return np.broadcast_to(scale, (rows,))
