"""Code rows: bit planes of the low b code bits, and whole 4-bit codes.

Element i of a plane is bit ``i % 8`` of byte ``i // 8``; planes are stored lowest code bit first, so a b = 1 row is the
first plane of a b = 2 row. A full row holds two codes a byte, the even element in the low nibble, which is the order of
every rollout producer (``cvt.rn.satfinite.e2m1x2`` gets its operands as (odd, even)).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trace_store.codebook.scales import Bytes
from trace_store.errors import InvalidRequest


def pack(codes: Any, *, bits: int) -> Bytes:
    """Planes uint8 [T, bits, W / 8] of the low ``bits`` (1, 2 or 3) bits of codes uint8 [T, W], W a multiple of 8."""
    if bits not in (1, 2, 3):
        raise InvalidRequest(f"bits must be 1, 2 or 3 (pack_full stores 4), got={bits!r}", argument="bits")
    codes = _codes(codes, 8)
    planes = [np.packbits((codes >> bit) & 1, axis=1, bitorder="little") for bit in range(bits)]
    return np.stack(planes, axis=1)


def unpack(planes: Any) -> Bytes:
    """Low code bits uint8 [T, W] of planes uint8 [T, b, W / 8], b = 1, 2 or 3."""
    planes = np.asarray(planes)
    if planes.dtype != np.uint8 or planes.ndim != 3 or planes.shape[1] not in (1, 2, 3):
        raise InvalidRequest(
            f"planes must be uint8 [T, 1 to 3, W / 8], dtype={planes.dtype} shape={list(planes.shape)}",
            argument="planes",
        )
    low: Bytes = np.unpackbits(planes[:, 0], axis=1, bitorder="little")
    for bit in range(1, planes.shape[1]):
        low |= np.unpackbits(planes[:, bit], axis=1, bitorder="little") << bit
    return low


def pack_full(codes: Any) -> Bytes:
    """Full rows uint8 [T, W / 2] of codes uint8 [T, W], W even."""
    codes = _codes(codes, 2)
    packed: Bytes = codes[:, 1::2] << np.uint8(4)
    packed |= codes[:, 0::2]
    return packed


def unpack_full(rows: Any) -> Bytes:
    """Codes uint8 [T, W] of full rows uint8 [T, W / 2]."""
    rows = np.asarray(rows)
    if rows.dtype != np.uint8 or rows.ndim != 2:
        raise InvalidRequest(
            f"full rows must be uint8 [T, W / 2], dtype={rows.dtype} shape={list(rows.shape)}", argument="rows"
        )
    codes = np.empty((rows.shape[0], 2 * rows.shape[1]), dtype=np.uint8)
    codes[:, 0::2] = rows & np.uint8(15)
    codes[:, 1::2] = rows >> np.uint8(4)
    return codes


def _codes(codes: Any, multiple: int) -> Bytes:
    """``codes`` if they are uint8 [T, W] of values 0 to 15 with W a multiple of ``multiple``."""
    checked: Bytes = np.asarray(codes)
    if checked.dtype != np.uint8 or checked.ndim != 2:
        raise InvalidRequest(
            f"codes must be uint8 [T, W], dtype={checked.dtype} shape={list(checked.shape)}", argument="codes"
        )
    if checked.shape[1] % multiple:
        raise InvalidRequest(
            f"the width of codes must be a multiple of {multiple}, width={checked.shape[1]}", argument="codes"
        )
    if checked.size and int(checked.max()) > 15:
        raise InvalidRequest(f"codes must be 0 to 15, got={int(checked.max())}", argument="codes")
    return checked
