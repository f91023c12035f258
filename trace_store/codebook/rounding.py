"""Rounding under given scales: to nearest, and guided by a rollout's record.

Arithmetic, float32 throughout and the same in the kernels:

    s    = fp32(block scale) * tensor_scale        rounded once
    inv  = 1 / s                                   IEEE division, once per block; may overflow to inf
    z    = x * inv                                 one multiplication, compared as it is
    y    = v * s                                   one multiplication, v with the sign of z

    x = +-0 gives +0 whatever the record says, also where inv overflows; s = 0 gives +0
    x not finite, or s not finite (NaN scale byte, NaN or infinite tensor scale, overflow): y = NaN, also for x = 0
    a non-zero x that rounds to magnitude 0 gives a zero with the sign of x
    |z| > 6 (inf included) saturates at 6 under RTN and chooses between 4 and 6 when guided
    v * s overflows to inf as IEEE multiplication does; only |x| within a factor 2 of FLT_MAX can meet it

Producers write non-negative block scales; a byte with the sign bit set decodes to a negative number and the rules then
hold for z. Memory: the work runs over chunks of rows, so the peak is the result plus about 4 MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from trace_store.codebook.formats import BlockFormat, block_format, byte_array, float_rows, total_scales
from trace_store.codebook.grid import CODEWORDS, PLACES, RULES, guided_table, places, rtn_table
from trace_store.codebook.planes import unpack, unpack_full
from trace_store.codebook.scales import Bytes, Floats
from trace_store.errors import InvalidRequest

CHUNK_ELEMENTS = 1 << 17
"""Elements per pass. The temporaries of a chunk stay in a core's L2 cache."""

Choose = Callable[[Floats, slice], Bytes]
"""(z of a chunk, its rows) -> codes 0 to 15 with the sign of z. z is scratch."""


def row_chunks(tokens: int, width: int) -> list[slice]:
    """Rows [0, tokens) cut into slices of about ``CHUNK_ELEMENTS`` elements."""
    step = max(1, CHUNK_ELEMENTS // width)
    return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]


def spread(blocks: Floats, fmt: BlockFormat) -> Floats:
    """One value per block [T, W / block] to one per element [T, W]."""
    return np.repeat(blocks, fmt.block, axis=1)


def sign_bits(z: Floats) -> Bytes:
    """8 where z is negative or -0, else 0."""
    sign: Bytes = np.signbit(z).view(np.uint8)
    sign <<= np.uint8(3)
    return sign


def rtn_choose(z: Floats, rows: slice) -> Bytes:
    """Codes of the nearest codewords, ties to the even code, saturating; the sign of z is kept on underflow."""
    sign = sign_bits(z)
    codes: Bytes = rtn_table()[places(z)]
    codes |= sign
    return codes


def _guided_choose(records: Any, bits: int, rule: str, tokens: int, width: int) -> Choose:
    """The choice that ``records`` of a form of ``bits`` bits dictate."""
    if isinstance(bits, bool) or bits not in (1, 2, 3, 4):
        raise InvalidRequest(f"bits must be 1, 2, 3 or 4, got={bits!r}", argument="bits")
    if rule not in RULES:
        raise InvalidRequest(f"rule must be one of {RULES}, got={rule!r}", argument="rule")
    shape = (tokens, width // 2) if bits == 4 else (tokens, bits, width // 8)
    records = byte_array(records, "planes", shape)
    table = guided_table(bits, "paper" if bits == 4 else rule)

    def choose(z: Floats, rows: slice) -> Bytes:
        sign = sign_bits(z)
        record = unpack_full(records[rows]) ^ sign if bits == 4 else unpack(records[rows])
        entry = record.astype(np.int16) * np.int16(PLACES)
        entry += places(z)
        codes: Bytes = table[entry]
        codes |= sign
        return codes

    return choose


def _codes_of_chunk(x: Floats, inverse: Floats, choose: Choose, rows: slice, fmt: BlockFormat) -> Bytes:
    """Codes of one chunk. Elements that end as NaN get an arbitrary code; x = 0 gives code 0."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        z = x * spread(inverse, fmt)
    z[np.isnan(z)] = 0
    codes = choose(z, rows)
    codes[x == 0] = 0
    return codes


def _round(x: Any, scales: Any, tensor_scale: Any, fmt: BlockFormat, choose: Choose) -> Floats:
    total = total_scales(scales, tensor_scale, fmt, *x.shape)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / total
    out = np.empty(x.shape, dtype=np.float32)
    for rows in row_chunks(*x.shape):
        chunk = x[rows].astype(np.float32)
        s = total[rows]
        codes = _codes_of_chunk(chunk, inverse[rows], choose, rows, fmt)
        with np.errstate(under="ignore", over="ignore"):
            y = np.multiply(CODEWORDS[codes], spread(s, fmt), out=out[rows])
        if not s.all():
            y[spread(s, fmt) == 0] = 0
        if np.signbit(s).any():
            y[(chunk == 0) & (y == 0)] = 0
        y[~np.isfinite(chunk)] = np.nan
    return out


def rtn_round(x: Any, scales: Any, tensor_scale: Any, *, format: str) -> Floats:
    """Round x [T, W] to the nearest codeword under the given scales; float32 [T, W].

    With the rollout's scales this is the b = 0 baseline. Ties go to the even code.
    """
    fmt = block_format(format)
    x = float_rows(x, fmt)
    return _round(x, scales, tensor_scale, fmt, rtn_choose)


def guided_round(
    x: Any, planes: Any, scales: Any, tensor_scale: Any, *, format: str, bits: int, rule: str = "paper"
) -> Floats:
    """Round x [T, W] to the end of its bracket that the rollout's record names; float32 [T, W].

    Args:
        x: float32, float16 or bfloat16 [T, W].
        planes: uint8 [T, bits, W / 8] for ``bits`` 1, 2, 3; whole codes uint8 [T, W / 2] for ``bits`` 4.
        scales: block scales of the rollout, uint8 [T, W / block].
        tensor_scale: decode scale of the rollout, float32 scalar or [T].
        format: ``nvfp4``, ``mxfp4`` or ``mxfp4_block16``.
        bits: code bits in the record; 4 is the full-information variant, never further from the rollout's codeword than
            ``rtn_round``.
        rule: ``paper``, ``cell`` or ``bracket`` (see ``trace_store.codebook.grid``); all agree for bits 3 and 4.

    Raises:
        InvalidRequest: shape, dtype, format, bits or rule is wrong. Non-finite numbers do not raise: they give NaN.
    """
    fmt = block_format(format)
    x = float_rows(x, fmt)
    return _round(x, scales, tensor_scale, fmt, _guided_choose(planes, bits, rule, *x.shape))


def rtn_codes(x: Any, scales: Any, tensor_scale: Any, *, format: str) -> Bytes:
    """Codes uint8 [T, W] that ``rtn_round`` chooses; x = 0 gives code 0, a block whose s is 0 codes 0 and 8.

    Applied to the result of ``guided_round`` under the same scales it gives back the codes that guidance chose: v * s
    is within an ulp of a codeword. Non-finite x or scales raise InvalidRequest, since no code says NaN.
    """
    fmt = block_format(format)
    x = float_rows(x, fmt)
    total = total_scales(scales, tensor_scale, fmt, *x.shape)
    if np.isnan(total).any():
        raise InvalidRequest("scales and tensor_scale must give finite products", argument="scales")
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(total == 0, np.float32(0), np.float32(1) / total)
    codes = np.empty(x.shape, dtype=np.uint8)
    for rows in row_chunks(*x.shape):
        chunk = x[rows].astype(np.float32)
        if not np.isfinite(chunk).all():
            raise InvalidRequest("x must be finite", argument="x")
        codes[rows] = _codes_of_chunk(chunk, inverse[rows], rtn_choose, rows, fmt)
    return codes


def code_distance(codes: Any, reference: Any) -> npt.NDArray[np.int8]:
    """Signed steps on the grid -6 .. -.5, 0, .5 .. 6 from ``reference`` to ``codes``, int8, -14 to 14; -0 equals 0.

    0 is a match, 1 and -1 are adjacent codewords, the sign tells the direction of the correction.
    """
    position = np.concatenate([np.arange(8), -np.arange(8)]).astype(np.int8)
    distance: npt.NDArray[np.int8] = position[np.asarray(codes)] - position[np.asarray(reference)]
    return distance
