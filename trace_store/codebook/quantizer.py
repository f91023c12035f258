"""A rollout's quantizer and its inverse, as the exact modes of public kernels compute them.

NVFP4 is the exact (non fast-math) mode of FlashInfer, which follows Transformer Engine:

    G    = min(448 * 6 / amax, FLT_MAX), 1 if amax = 0        encode scale; 1 / tensor_scale when that is given
    SF   = e4m3_rn_sat(amax16 * (G * fp32(1 / 6)))            block scale byte
    m    = min(1 / (SF * (1 / G)), FLT_MAX)                   multiplier of the block
    code = e2m1_rn_sat(x * m)                                 nearest, ties to the even code, sign kept on underflow
    D    = 1 / G                                              decode scale

One deviation, on purpose: a block whose SF byte is 0 (all zeros, or so small beside the tensor's maximum that the byte
underflows) gets codes 0 and 8, where those kernels may write +-6 under a zero scale. Both decode to zeros.

MXFP4 uses the scale rule of OCP MX v1.0: the exponent is floor(log2(amax of the block)) - 2, clamped to bytes 0 to 254;
a zero block has byte 0; a maximum above 6 times its scale saturates. ``mxfp4_block16`` uses the same rule on blocks of
16; SGLang's own KV quantizer rounds its exponent up and its ties away from zero, so record its bytes, do not recompute
them. No scale can be recomputed from amax in general: a record always carries the bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trace_store.codebook.formats import (
    BlockFormat,
    block_format,
    byte_array,
    float_rows,
    tensor_scale_rows,
    total_scales,
)
from trace_store.codebook.grid import CODEWORDS
from trace_store.codebook.rounding import row_chunks, rtn_choose, spread
from trace_store.codebook.scales import E4M3_MAX, Bytes, Floats, e4m3_encode, e8m0_encode_floor
from trace_store.errors import InvalidRequest

E2M1_MAX = 6.0
_FULL_RANGE = np.float32(E4M3_MAX * E2M1_MAX)
_SIXTH = np.float32(1) / np.float32(6)
_FLT_MAX = np.finfo(np.float32).max


def quantize(
    x: Any, *, format: str, tensor_scale: Any = None
) -> tuple[Bytes, Bytes, npt.NDArray[np.float32] | np.float32]:
    """Quantize x [T, W] to codes uint8 [T, W] (0 to 15), block scales uint8 [T, W / block] and the decode scale.

    Args:
        x: float32, float16 or bfloat16 [T, W]; equal values give equal bytes whatever the type.
        format: ``nvfp4``, ``mxfp4`` or ``mxfp4_block16``.
        tensor_scale: decode scale for NVFP4, positive and finite: a scalar, or float32 [T] with one per token. None
            takes it from the maximum of all of x. The MXFP4 formats have none: None or 1.

    Returns:
        (codes, scales, decode scale). The decode scale is np.float32, or float32 [T] if one per token was given; it is
        the given one unchanged, else 1 / G. Quantizing again with 1 / G given may differ in a last place of G, because
        1 / (1 / G) is not always G.

    Raises:
        InvalidRequest: wrong dtype, shape or scale, or x holds NaN or infinity; the message names the first position.
    """
    fmt = block_format(format)
    x = float_rows(x, fmt)
    amax = _finite_amax(x)
    if fmt.scale == "e8m0":
        _check_unit_scale(tensor_scale)
        return *_quantize_rows(x, fmt, None), np.float32(1)
    if tensor_scale is None:
        encode = _encode_scales(np.full((1, 1), amax, dtype=np.float32))
        decode: npt.NDArray[np.float32] | np.float32 = np.float32(1) / encode[0, 0]
    else:
        given = _given_scales(tensor_scale, x.shape[0])
        encode = _reciprocal(given)
        decode = given[:, 0] if np.ndim(tensor_scale) else given[0, 0]
    return *_quantize_rows(x, fmt, encode), decode


def dequantize(codes: Any, scales: Any, tensor_scale: Any, *, format: str) -> Floats:
    """float32 [T, W] values codeword * s with s = fp32(block scale) * tensor_scale rounded once.

    Code 8 gives -0.0; a block whose s is 0 gives signed zeros; a NaN scale gives NaN.
    """
    fmt = block_format(format)
    codes = np.asarray(codes)
    if codes.ndim != 2 or codes.shape[1] % fmt.block:
        raise InvalidRequest(
            f"codes must be uint8 [T, W], W a multiple of {fmt.block}, shape={list(codes.shape)}", argument="codes"
        )
    codes = byte_array(codes, "codes", codes.shape)
    if codes.size and int(codes.max()) > 15:
        raise InvalidRequest(f"codes must be 0 to 15, got={int(codes.max())}", argument="codes")
    total = total_scales(scales, tensor_scale, fmt, *codes.shape)
    out = np.empty(codes.shape, dtype=np.float32)
    for rows in row_chunks(*codes.shape):
        with np.errstate(under="ignore", over="ignore"):
            np.multiply(CODEWORDS[codes[rows]], spread(total[rows], fmt), out=out[rows])
    return out


def native_round(x: Any, *, format: str, tensor_scale: Any = None) -> Floats:
    """What a row without a record becomes: quantized with the trainer's own scales and decoded, float32 [T, W].

    For NVFP4 without ``tensor_scale`` each row has its own decode scale, as if ``quantize`` had got the row alone:
    1 / G with G = min(448 * 6 / amax(row), FLT_MAX). Unlike ``quantize`` this raises nothing for NaN and infinity: they
    make their whole block NaN, and the whole row where the row's maximum sets the scale.
    """
    fmt = block_format(format)
    x = float_rows(x, fmt)
    out = np.empty(x.shape, dtype=np.float32)
    if fmt.scale == "e8m0":
        _check_unit_scale(tensor_scale)
        given = None
    else:
        given = None if tensor_scale is None else _given_scales(tensor_scale, x.shape[0])
    for rows in row_chunks(*x.shape):
        chunk = x[rows].astype(np.float32)
        block_bad = ~np.isfinite(chunk).reshape(chunk.shape[0], -1, fmt.block).all(axis=2)
        chunk[spread(block_bad, fmt)] = 0
        encode, decode = None, np.ones((1, 1), np.float32)
        if fmt.scale == "e4m3" and given is None:
            block_bad[block_bad.any(axis=1)] = True
            encode = _encode_scales(np.abs(chunk).max(axis=1, keepdims=True))
            decode = np.float32(1) / encode
        elif given is not None:
            decode = given if given.shape[0] == 1 else given[rows]
            encode = _reciprocal(decode)
        codes, scales = _quantize_rows(chunk, fmt, encode)
        total = fmt.decode(scales) * decode
        with np.errstate(under="ignore", over="ignore"):
            y = np.multiply(CODEWORDS[codes], spread(total, fmt), out=out[rows])
        y[spread(block_bad, fmt)] = np.nan
    return out


def _quantize_rows(x: npt.NDArray[Any], fmt: BlockFormat, encode: Floats | None) -> tuple[Bytes, Bytes]:
    """Codes and scale bytes of finite x under encode scales [1, 1] or [T, 1] (None for E8M0)."""
    tokens, width = x.shape
    codes = np.empty(x.shape, dtype=np.uint8)
    scales = np.empty((tokens, width // fmt.block), dtype=np.uint8)
    for rows in row_chunks(tokens, width):
        chunk = x[rows].astype(np.float32)
        amax = np.abs(chunk).reshape(chunk.shape[0], -1, fmt.block).max(axis=2)
        with np.errstate(over="ignore", under="ignore", divide="ignore"):
            if encode is None:
                # The division by 4 loses bits only below 2^-127, where the byte is clamped to 0 anyway.
                scales[rows] = e8m0_encode_floor(amax * np.float32(0.25))
                s = fmt.decode(scales[rows])
            else:
                g = encode if encode.shape[0] == 1 else encode[rows]
                scales[rows] = e4m3_encode(amax * (g * _SIXTH))
                s = fmt.decode(scales[rows]) * (np.float32(1) / g)
            multiplier = np.where(s == 0, np.float32(0), np.minimum(np.float32(1) / s, _FLT_MAX))
            chunk *= spread(multiplier, fmt)
        codes[rows] = rtn_choose(chunk, rows)
    return codes, scales


def _encode_scales(amax: Floats) -> Floats:
    with np.errstate(divide="ignore", over="ignore"):
        encode: Floats = np.minimum(_FULL_RANGE / amax, _FLT_MAX)
    encode[amax == 0] = 1
    return encode


def _reciprocal(decode: Floats) -> Floats:
    with np.errstate(over="ignore"):
        encode: Floats = np.minimum(np.float32(1) / decode, _FLT_MAX)
    return encode


def _given_scales(tensor_scale: Any, tokens: int) -> Floats:
    rows = tensor_scale_rows(tensor_scale, tokens)
    if not np.isfinite(rows).all() or bool((rows <= 0).any()):
        raise InvalidRequest("tensor_scale must be finite and > 0", argument="tensor_scale")
    return rows


def _check_unit_scale(tensor_scale: Any) -> None:
    if tensor_scale is not None and bool((np.asarray(tensor_scale) != 1).any()):
        raise InvalidRequest("the mxfp4 formats have no tensor scale; give None or 1", argument="tensor_scale")


def _finite_amax(x: npt.NDArray[Any]) -> float:
    """max |x|, 0 for no tokens; raises at the first NaN or infinity."""
    largest = 0.0
    for rows in row_chunks(*x.shape):
        amax = np.abs(x[rows].astype(np.float32)).max()
        if not np.isfinite(amax):
            token, element = (int(axis[0]) for axis in np.nonzero(~np.isfinite(x[rows].astype(np.float32))))
            token += rows.start
            raise InvalidRequest(
                f"x must be finite, token={token} element={element} value={float(x[token, element])}", argument="x"
            )
        largest = max(largest, float(amax))
    return largest
