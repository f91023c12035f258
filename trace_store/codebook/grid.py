"""The E2M1 grid and every decision on it as a table over |z|.

All thresholds that rounding and guidance use (codewords, rounding boundaries, band edges of the compact rules) are
multiples of 1/8 not above 6. So a decision depends on |z| only through its place among those multiples:

    place(a) = floor(8 a) + ceil(8 a)        a = min(|z|, 6); even: a = place / 16 exactly; odd: strictly between

8 a is exact in float32, hence 97 places decide exactly what the definitions decide on real numbers. The tables are
built here from the definitions, in integers of 1/16, where every distance is exact.

Definitions (a in units of the total scale, r the recorded low b bits, magnitude index k):

    bracket      k = max{ k <= 6 : v_k <= a }, ends v_k and v_k+1; a > 6 keeps the bracket (4, 6)
    RTN          nearest codeword, ties to the even index: .25 -> 0, .75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2,
                 3.5 -> 4, 5 -> 4; above 6: 6
    reconstruct  the codeword with low bits r chosen by
                   rule ``paper``    distance to a, then distance of its decision cell to a, then RTN(a)
                   rule ``cell``     distance of its decision cell to a, then distance to a, then RTN(a)
                   rule ``bracket``  the bracket end with low bits r; if no end has them (b = 2, 3), as ``paper``
    full record  reconstruct is the signed recorded codeword; opposite signs put it at or below zero
    output       the bracket end nearest to the reconstructed codeword
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from trace_store.codebook.scales import Floats

MAGNITUDES: Floats = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
"""E2M1 magnitudes by the low three code bits."""

CODEWORDS: Floats = np.concatenate([MAGNITUDES, -MAGNITUDES])
"""E2M1 values by code; code 8 is -0.0."""

RULES = ("paper", "cell", "bracket")
"""How a compact record is decoded: ``paper`` literally, ``cell`` the likeliest, ``bracket`` for analysis."""

PLACES = 97

_UNIT = 16
_V = tuple(round(float(v) * _UNIT) for v in MAGNITUDES)
_BOUNDARY = tuple((low + high) // 2 for low, high in pairwise(_V))
_FAR = 10**6


def places(z: Floats) -> npt.NDArray[np.int16]:
    """Place of each |z| in the tables, int16 0 to 96. ``z`` is scratch and is overwritten; it may not hold NaN."""
    np.abs(z, out=z)
    np.minimum(z, np.float32(6), out=z)
    np.multiply(z, np.float32(8), out=z)
    below = z.astype(np.int16)
    # ceil differs from floor exactly where 8 a is no integer.
    between = z != below
    below += below
    below += between
    return below


def _bracket(a: int) -> int:
    return max(k for k in range(7) if _V[k] <= a)


def _rtn(a: int) -> int:
    return min(range(8), key=lambda k: (abs(_V[k] - a), k & 1))


def _cell_distance(k: int, a: int) -> int:
    low = _BOUNDARY[k - 1] if k > 0 else 0
    high = _BOUNDARY[k] if k < 7 else _FAR
    return max(low - a, a - high, 0)


def _reconstruct(a: int, record: int, bits: int, rule: str) -> int:
    """Magnitude index of the reconstructed codeword."""
    period = 1 << bits
    matching = [k for k in range(8) if k % period == record]
    if rule == "bracket":
        ends = [k for k in (_bracket(a), _bracket(a) + 1) if k in matching]
        if ends:
            return ends[0]
    keys = {k: (abs(_V[k] - a), _cell_distance(k, a)) for k in matching}
    if rule == "cell":
        keys = {k: key[::-1] for k, key in keys.items()}
    best = min(keys.values())
    winners = [k for k, key in keys.items() if key == best]
    return winners[0] if len(winners) == 1 else _rtn(a)


def _clamp_to_bracket(a: int, k: int) -> int:
    """Index of the bracket end nearest to codeword k; the ends are neighbours, so nearest is clamping."""
    low = _bracket(a)
    return min(max(k, low), low + 1)


@cache
def rtn_table() -> npt.NDArray[np.uint8]:
    """Magnitude index by place, uint8 [97]."""
    return np.array([_rtn(a) for a in range(PLACES)], dtype=np.uint8)


@cache
def guided_table(bits: int, rule: str) -> npt.NDArray[np.uint8]:
    """Magnitude index by record * 97 + place, uint8 [2^bits * 97].

    ``bits`` 1 to 3: the record is the low code bits. ``bits`` 4: the record is the whole code with its sign bit flipped
    where z is negative, so that 0 to 7 are codewords on z's side and 8 to 15 on the other.
    """
    rows = []
    for record in range(1 << bits):
        for a in range(PLACES):
            k = (record if record < 8 else 0) if bits == 4 else _reconstruct(a, record, bits, rule)
            rows.append(_clamp_to_bracket(a, k))
    return np.array(rows, dtype=np.uint8)
