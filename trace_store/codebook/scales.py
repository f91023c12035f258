"""Block scale bytes: E4M3 (OCP FP8, no infinity, NaN 0x7F and 0xFF) and E8M0 (OCP MX, NaN 0xFF).

Decoding is a table of 256 float32 values; every value of both types is exact in float32.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

E4M3_MAX = 448.0
"""Largest finite E4M3 value, byte 0x7E."""


def _e4m3_table() -> Floats:
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    # Exponent field 0 is denormal: no hidden bit, and the exponent of field 1. A value is an integer times 2^(e - 10).
    value = np.ldexp(np.where(exponent == 0, mantissa, mantissa + 8).astype(np.float64), np.maximum(exponent, 1) - 10)
    value[(byte & 0x7F) == 0x7F] = np.nan
    table: Floats = np.copysign(value, np.where(byte & 0x80, -1.0, 1.0)).astype(np.float32)
    return table


def _e8m0_table() -> Floats:
    return np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))


E4M3_TABLE = _e4m3_table()
E8M0_TABLE = _e8m0_table()


def e4m3_decode(scales: npt.ArrayLike) -> Floats:
    """float32 values of E4M3 bytes, any shape. 0x7F and 0xFF give NaN, 0x80 gives -0.0."""
    decoded: Floats = E4M3_TABLE[np.asarray(scales, dtype=np.uint8)]
    return decoded


def e4m3_encode(values: npt.ArrayLike) -> Bytes:
    """E4M3 bytes of float32 values, any shape: round to nearest, ties to even, saturating at 448, sign kept.

    Infinities saturate as ``cvt.rn.satfinite.e4m3x2.f32`` does; NaN gives 0x7F.
    """
    values = np.asarray(values, dtype=np.float32)
    nan = np.isnan(values)
    magnitude = np.minimum(np.where(nan, np.float32(0), np.abs(values)), np.float32(E4M3_MAX))
    # Steps of 2^(e - 3) inside the binade 2^e, and of 2^-9 below the smallest normal 2^-6. The scaling is exact and
    # np.rint rounds halves to even; a carry out of 15 steps lands on the next binade's first code by itself.
    exponent = np.where(magnitude == 0, -6, np.maximum(np.frexp(magnitude)[1] - 1, -6))
    steps = np.rint(np.ldexp(magnitude, 3 - exponent)).astype(np.int32)
    code: Bytes = np.asarray((exponent + 6) * 8 + steps).astype(np.uint8)
    code |= np.signbit(values).astype(np.uint8) << np.uint8(7)
    return np.where(nan, np.uint8(0x7F), code)


def e8m0_decode(scales: npt.ArrayLike) -> Floats:
    """float32 values 2^(byte - 127) of E8M0 bytes, any shape. Byte 0 is 2^-127 (a float32 denormal), 255 is NaN."""
    decoded: Floats = E8M0_TABLE[np.asarray(scales, dtype=np.uint8)]
    return decoded


def e8m0_encode_floor(values: npt.ArrayLike) -> Bytes:
    """E8M0 bytes of the largest power of two not above ``|value|``, clamped to 0 to 254; 0 gives 0, NaN and inf 255."""
    magnitude = np.abs(np.asarray(values, dtype=np.float32))
    exponent = np.clip(np.frexp(np.where(np.isfinite(magnitude), magnitude, 1))[1] - 1 + 127, 0, 254)
    exponent = np.where(magnitude == 0, 0, exponent)
    return np.where(np.isfinite(magnitude), exponent, 255).astype(np.uint8)
