"""Arrays of one append, by column: checked all at once where they are what a rollout usually hands in, else one by one.

The quick check accepts less than the slow one (uint8 NumPy arrays in the form's own shape, float scales) and decides
nothing else: what it does not accept goes through ``GuidanceRecord.build``, which converts it or names the fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trace_store.errors import InvalidRequest
from trace_store.limits import FRAME_BYTES
from trace_store.record import GuidanceRecord, Site, has_nan_scale

Bytes = npt.NDArray[np.uint8]
Run = tuple[int, int, tuple[int, ...], int]
"""Sites [low, high) whose rows have one shape, the shape, and its bytes."""

_SEQUENCES, _FLOATS = {tuple, list}, {float, np.float32}
_UINT8, _FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)
_INFINITE_BITS = 0x7F80_0000
"""Bits of finite floats from 0 up, read as a number, are smaller than those of infinity."""


@dataclass(frozen=True)
class SitePlan:
    """What is known of an append from its sites alone.

    Attributes:
        given: the sites in the caller's order.
        order: positions of the sites in ``given``, by number.
        sites, numbers: in order of the numbers, as everything below.
        code_runs, scale_runs: neighbours with rows of one shape, which are copied in one go.
        parts: (low, high, row bytes) of sites whose token rows fit a frame together; one part unless the table is huge.
    """

    given: tuple[Site, ...]
    order: tuple[int, ...]
    sites: tuple[Site, ...]
    numbers: tuple[int, ...]
    code_runs: tuple[Run, ...]
    scale_runs: tuple[Run, ...]
    parts: tuple[tuple[int, int, int], ...]
    scale_types: frozenset[str]

    @classmethod
    def of(cls, given: tuple[Any, ...], known: Mapping[Site, int]) -> SitePlan:
        """Raises InvalidRequest for a site that the run does not have."""
        numbers = [known.get(site) for site in given]
        if None in numbers:
            raise InvalidRequest(f"the run has no such site, site={given[numbers.index(None)]}", argument="site")
        order = sorted(range(len(given)), key=numbers.__getitem__)  # type: ignore[arg-type]
        sites = tuple(given[position] for position in order)
        return cls(
            given,
            tuple(order),
            sites,
            tuple(numbers[position] for position in order),  # type: ignore[misc]
            tuple(_runs([site.code_form.row_shape(site.width) for site in sites])),
            tuple(_runs([(site.scale_bytes,) for site in sites])),
            tuple(_parts([site.code_bytes + site.scale_bytes + 4 for site in sites])),
            frozenset(site.scale for site in sites),
        )

    _shapes: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)

    def shapes(self, tokens: int) -> list[tuple[int, ...]]:
        """Shapes of all codes, then of all scales. The last answer is kept: appends of a rollout have one length."""
        if tokens not in self._shapes:
            self._shapes.clear()
            self._shapes[tokens] = [
                (tokens, *row)
                for runs in (self.code_runs, self.scale_runs)
                for low, high, row, _ in runs
                for _ in range(low, high)
            ]
        return self._shapes[tokens]


@dataclass(frozen=True)
class Columns:
    """Codes, scales and tensor scales by site, in order of the site numbers.

    Attributes:
        tensors: float32 [1] or [T] each; flat is all of them in one array where each has one.
        per_token: which of them have one a token.
        checked: whether the block scales are known to hold no NaN.
    """

    plan: SitePlan
    tokens: int
    codes: Sequence[Bytes]
    scales: Sequence[Bytes]
    tensors: Sequence[npt.NDArray[np.float32]]
    flat: npt.NDArray[np.float32] | None
    per_token: tuple[bool, ...]
    checked: bool

    def copy_codes(self, target: Bytes, low: int, high: int, first: int, last: int) -> int:
        """Copy codes of sites [low, high), tokens [first, last); returns how many bytes."""
        return self._copy(target, self.codes, self.plan.code_runs, low, high, first, last)

    def copy_scales(self, target: Bytes, low: int, high: int, first: int, last: int) -> int:
        return self._copy(target, self.scales, self.plan.scale_runs, low, high, first, last)

    def copy_tensors(self, target: Bytes, low: int, high: int, first: int, last: int) -> int:
        if self.flat is not None:
            flat = self.flat[low:high]
        else:
            flat = np.concatenate([t if t.size == 1 else t[first:last] for t in self.tensors[low:high]])
        target[: flat.nbytes] = flat.view(np.uint8)
        return flat.nbytes

    def _copy(
        self, target: Bytes, arrays: Sequence[Bytes], runs: Sequence[Run], low: int, high: int, first: int, last: int
    ) -> int:
        place, tokens = 0, last - first
        for run_low, run_high, row, row_bytes in runs:
            a, b = max(run_low, low), min(run_high, high)
            if a >= b:
                continue
            parts = arrays[a:b] if tokens == self.tokens else [array[first:last] for array in arrays[a:b]]
            size = (b - a) * tokens * row_bytes
            np.concatenate(parts, out=target[place : place + size].reshape((b - a) * tokens, *row))
            place += size
        return place


def build_columns(plan: SitePlan, start: int, values: Sequence[Any]) -> Columns:
    """Columns of the values of an append, in the caller's order.

    Raises:
        InvalidRequest: names the argument at fault.
    """
    ordered = [values[position] for position in plan.order]
    return _quick(plan, ordered) or _slow(plan, start, ordered)


def check_scales(columns: Columns) -> None:
    """Raise InvalidRequest if a block scale is NaN; names the site."""
    for site, scales in zip(columns.plan.sites, columns.scales, strict=True):
        if has_nan_scale(np.ascontiguousarray(scales), site.scale):
            raise InvalidRequest(f"scales hold a NaN byte, site={site.name}", argument="scales")


def _quick(plan: SitePlan, values: Sequence[Any]) -> Columns | None:
    """Columns of what is plainly right. Each test is a call for all sites: 20 us for 20, where ``build`` takes 110."""
    if set(map(type, values)) - _SEQUENCES or set(map(len, values)) != {3}:
        return None
    codes, scales, tensors = zip(*values, strict=True)
    arrays = codes + scales
    if set(map(type, arrays)) != {np.ndarray} or not codes[0].ndim:
        return None
    tokens = len(codes[0])
    if not tokens or [array.shape for array in arrays] != plan.shapes(tokens):
        return None
    if [array.dtype for array in arrays] != [_UINT8] * len(arrays):
        return None
    if set(map(type, tensors)) <= _FLOATS:
        with np.errstate(over="ignore"):  # a double beyond float32 becomes inf, and _slow says so
            flat = np.array(tensors, np.float32)
        parts: Sequence[npt.NDArray[np.float32]] = ()
        per_token = (False,) * len(tensors)
    else:
        if set(map(type, tensors)) != {np.ndarray} or [t.dtype for t in tensors] != [_FLOAT32] * len(tensors):
            return None
        if not {t.shape for t in tensors} <= {(1,), (tokens,)}:
            return None
        parts, flat, per_token = tensors, np.concatenate(tensors), tuple([t.size > 1 for t in tensors])
    if int(flat.view(np.uint32).max()) >= _INFINITE_BITS:
        return None
    return Columns(plan, tokens, codes, scales, parts, flat if not any(per_token) else None, per_token, False)


def _slow(plan: SitePlan, start: int, values: Sequence[Any]) -> Columns:
    built: list[GuidanceRecord] = []
    for site, value in zip(plan.sites, values, strict=True):
        if not isinstance(value, (tuple, list)) or len(value) != 3:
            raise InvalidRequest(
                f"a record is (planes, scales, tensor_scale), site={site.name} got={type(value).__name__}",
                argument="records",
            )
        built.append(GuidanceRecord.build(site, start, *value))
    if len({record.tokens for record in built}) > 1:
        shown = ", ".join(f"{record.site.name}={record.tokens}" for record in built[:4])
        raise InvalidRequest(f"sites of one append differ in tokens: {shown}", argument="planes")
    tensors = [record.tensor_scale for record in built]
    per_token = tuple([t.size > 1 for t in tensors])
    return Columns(
        plan,
        built[0].tokens,
        [record.codes for record in built],
        [record.scales for record in built],
        tensors,
        np.concatenate(tensors) if not any(per_token) else None,
        per_token,
        True,
    )


def _runs(rows: Sequence[tuple[int, ...]]) -> list[Run]:
    runs: list[Run] = []
    for position, row in enumerate(rows):
        joins = bool(runs) and runs[-1][2] == row
        low = runs.pop()[0] if joins else position
        runs.append((low, position + 1, row, math.prod(row)))
    return runs


def _parts(row_bytes: Sequence[int]) -> list[tuple[int, int, int]]:
    parts: list[tuple[int, int, int]] = []
    low = total = 0
    for position, size in enumerate(row_bytes):
        if total and total + size > FRAME_BYTES:
            parts.append((low, position, total))
            low, total = position, 0
        total += size
    return [*parts, (low, len(row_bytes), total)]
