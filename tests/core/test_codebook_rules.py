"""Decisions on the grid against an exact enumeration from the definitions, and against the published tables.

The enumerator below works on rationals and shares nothing with the product: it compares a codeword's decision cell as
an interval, chooses by the order of criteria that the specification names, and takes the bracket end nearest to the
reconstruction. The product is asked through its public function at scale 1, where z is x.
"""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from trace_store import codebook

F = Fraction
UNBOUNDED = F(10**40)  # above every float32
VALUES = [F(0), F(1, 2), F(1), F(3, 2), F(2), F(3), F(4), F(6)]
# Thresholds of the hardware conversion: |x| <= .25 -> 0, < .75 -> .5, <= 1.25 -> 1, < 1.75 -> 1.5, <= 2.5 -> 2, ...
RTN_STEPS = [(F(1, 4), True), (F(3, 4), False), (F(5, 4), True), (F(7, 4), False), (F(5, 2), True), (F(7, 2), False)]
CELLS = list(zip([F(0), F(1, 4), F(3, 4), F(5, 4), F(7, 4), F(5, 2), F(7, 2), F(5)], [
    F(1, 4), F(3, 4), F(5, 4), F(7, 4), F(5, 2), F(7, 2), F(5), UNBOUNDED], strict=True))  # fmt: skip


def rtn(a: Fraction) -> Fraction:
    for value, (threshold, included) in zip(VALUES, RTN_STEPS, strict=False):
        if a < threshold or (included and a == threshold):
            return value
    return F(4) if a <= 5 else F(6)


def bracket(a: Fraction) -> tuple[Fraction, Fraction]:
    lower = max(value for value in VALUES[:7] if value <= a)
    return lower, min(value for value in VALUES if value > lower)


def nearest_end(a: Fraction, target: Fraction) -> Fraction:
    lower, upper = bracket(a)
    assert abs(lower - target) != abs(upper - target), "a codeword is never half-way between two neighbours"
    return lower if abs(lower - target) < abs(upper - target) else upper


def outside_cell(value: Fraction, a: Fraction) -> Fraction:
    low, high = CELLS[VALUES.index(value)]
    return low - a if a < low else a - high if a > high else F(0)


def reconstruct(a: Fraction, record: int, bits: int, rule: str) -> Fraction:
    candidates = [value for index, value in enumerate(VALUES) if index % 2**bits == record]
    if rule == "bracket":
        inside = [value for value in bracket(a) if value in candidates]
        if inside:
            return inside[0]
    criteria = [lambda v: abs(v - a), lambda v: outside_cell(v, a)]
    for criterion in reversed(criteria) if rule == "cell" else criteria:
        least = min(criterion(value) for value in candidates)
        candidates = [value for value in candidates if criterion(value) == least]
    return candidates[0] if len(candidates) == 1 else rtn(a)


def guided(a: Fraction, record: int, bits: int, rule: str) -> Fraction:
    return nearest_end(a, reconstruct(a, record, bits, rule))


def full(a: Fraction, signed: Fraction) -> Fraction:
    return nearest_end(a, signed)


def sample_points() -> np.ndarray:
    """Non-negative float32 values: every multiple of 1/64 up to 7, both float32 neighbours of the multiples of 1/8, all
    bfloat16 values from 2^-4 to 16, and extremes."""
    sixty_fourths = np.arange(0, 7 * 64 + 1, dtype=np.float32) / np.float32(64)
    eighths = sixty_fourths[::8]
    bf16 = np.arange(0x3D80, 0x4180, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    extremes = np.float32([1e-45, 1e-38, 1e-3, 100, 1e30, 3.4028235e38])
    around = [np.nextafter(eighths[1:], np.float32(0)), np.nextafter(eighths, np.float32(100))]
    return np.unique(np.concatenate([sixty_fourths, bf16, extremes, *around]))


POINTS = sample_points()
EXACT = [F(float(point)) for point in POINTS]
INTERIOR = [i for i, a in enumerate(EXACT) if a * 16 == int(a * 16) and int(a * 16) % 2 == 1 and a < 6]
"""Points strictly between two multiples of 1/8, one an interval: where the tables' open intervals are sampled."""


def product(values: np.ndarray, code: int, bits: int, rule: str = "paper") -> np.ndarray:
    """guided_round at scale 1 for every value under one recorded code."""
    width = -(-values.size // 16) * 16
    x = np.zeros((1, width), dtype=np.float32)
    x[0, : values.size] = values
    codes = np.full((1, width), code, dtype=np.uint8)
    rows = codebook.pack_full(codes) if bits == 4 else codebook.pack(codes, bits=bits)
    ones = np.full((1, width // 16), 0x38, dtype=np.uint8)
    return codebook.guided_round(x, rows, ones, 1.0, format="nvfp4", bits=bits, rule=rule)[0, : values.size]


def at_zero_and_elsewhere(values: np.ndarray, expected: list[Fraction]) -> np.ndarray:
    return np.where(values == 0, 0, np.float32([float(value) for value in expected]))


def test_rtn_equals_the_hardware_thresholds():
    x = np.zeros((1, -(-POINTS.size // 16) * 16), dtype=np.float32)
    x[0, : POINTS.size] = POINTS
    ones = np.full((1, x.shape[1] // 16), 0x38, dtype=np.uint8)
    for sign in (1, -1):
        rounded = codebook.rtn_round(sign * x, ones, 1.0, format="nvfp4")[0, : POINTS.size]
        np.testing.assert_array_equal(rounded, sign * np.float32([float(rtn(a)) for a in EXACT]))


@pytest.mark.parametrize("rule", codebook.RULES)
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_compact_rules_equal_the_definitions(bits, rule):
    for code in range(16):
        expected = at_zero_and_elsewhere(POINTS, [guided(a, code % 2**bits, bits, rule) for a in EXACT])
        np.testing.assert_array_equal(product(POINTS, code, bits, rule), expected, err_msg=f"code={code}")
        np.testing.assert_array_equal(product(-POINTS, code, bits, rule), -expected, err_msg=f"code={code}")


def test_full_variant_equals_the_definition_with_signs():
    for code in range(16):
        signed = VALUES[code] if code < 8 else -VALUES[code - 8]
        same_side = at_zero_and_elsewhere(POINTS, [full(a, signed) for a in EXACT])
        other_side = at_zero_and_elsewhere(POINTS, [full(a, -signed) for a in EXACT])
        np.testing.assert_array_equal(product(POINTS, code, 4), same_side, err_msg=f"code={code}")
        np.testing.assert_array_equal(product(-POINTS, code, 4), -other_side, err_msg=f"code={code}")


def span(text: str) -> tuple[Fraction, bool, Fraction, bool]:
    low, high = text[1:-1].split(",")
    return F(low), text[0] == "[", F(high) if high != "inf" else UNBOUNDED, text[-1] == "]"


def within(a: Fraction, text: str) -> bool:
    low, low_in, high, high_in = span(text)
    return (a > low or (low_in and a == low)) and (a < high or (high_in and a == high))


# The outcome table for b = 1: |z|, output for c = 0, outputs for c = 1 under paper, cell, bracket.
OUTCOMES = [
    ("[0,.5)", 0, (0.5, 0.5, 0.5)),
    ("(.5,.75)", 1, (0.5, 0.5, 0.5)),
    ("[.75,1)", 1, (0.5, 0.5, 0.5)),
    ("(1,1.25]", 1, (1.5, 1.5, 1.5)),
    ("(1.25,1.5)", 1, (1.5, 1.5, 1.5)),
    ("(1.5,2)", 2, (1.5, 1.5, 1.5)),
    ("[2,2.125)", 2, (2, 2, 3)),
    ("(2.125,2.25)", 2, (2, 3, 3)),
    ("[2.25,2.5]", 2, (3, 3, 3)),
    ("(2.5,3)", 2, (3, 3, 3)),
    ("(3,4)", 4, (3, 3, 3)),
    ("[4,4.25]", 4, (4, 4, 6)),
    ("(4.25,4.5)", 4, (4, 6, 6)),
    ("[4.5,inf)", 4, (6, 6, 6)),
]


@pytest.mark.parametrize("which", range(3))
def test_published_outcome_table_of_one_bit(which):
    rule = codebook.RULES[which]
    even, odd = product(POINTS, 0, 1, rule), product(POINTS, 1, 1, rule)
    covered = 0
    for text, for_even, for_odd in OUTCOMES:
        for i in (i for i, a in enumerate(EXACT) if within(a, text) and a > 0):
            assert even[i] == for_even, (text, POINTS[i])
            assert odd[i] == for_odd[which], (text, POINTS[i])
            covered += 1
    assert covered == len(POINTS) - 1 - 5  # all but 0 and the five open points .5, 1, 1.5, 2.125, 3


@pytest.mark.parametrize(
    ("a", "c", "paper", "cell", "bracket"),
    [
        (0.5, 0, 0.5, 0.5, 1),  # ties between codewords of the other parity: z keeps its own codeword
        (1, 1, 1, 1, 1.5),
        (1.5, 0, 1.5, 1.5, 2),
        (3, 0, 3, 3, 4),
        (2.25, 1, 3, 3, 3),  # equal codeword distance, nearer cell
        (4.5, 1, 6, 6, 6),
        (2.125, 1, 2, 2, 3),  # equal cell distance, nearer codeword
        (4.25, 1, 4, 4, 6),
        (0.5, 1, 0.5, 0.5, 0.5),
        (2, 1, 2, 2, 3),
        (4, 1, 4, 4, 6),
        (6, 0, 4, 4, 4),
        (100, 0, 4, 4, 4),
    ],
)
def test_points_on_ties_and_codewords(a, c, paper, cell, bracket):
    for rule, expected in zip(codebook.RULES, (paper, cell, bracket), strict=True):
        for sign in (1, -1):
            assert product(np.float32([sign * a]), c, 1, rule)[0] == sign * expected


# Where one bit decodes wrongly although codes are adjacent: recorded codeword -> open intervals of |z|.
INSIDE_WRONG = {
    "paper": {3: ["(2,2.25)"], 6: ["(4,4.5)"]},
    "cell": {3: ["(2,2.125)"], 6: ["(4,4.25)"]},
    "bracket": {},
}
OUTSIDE_WRONG = {
    0: ["(.5,.75)"],
    0.5: ["(1,1.25)"],
    1: ["(.25,.5)", "(1.5,1.75)"],
    1.5: ["(.75,1)", "(2.25,2.5)"],
    2: ["(1.25,1.5)", "(3,3.5)"],
    3: ["(1.75,2)", "(4.5,5)"],
    4: ["(2.5,3)"],
    6: ["(3.5,4)"],
}
OUTSIDE_CHANGES = {"paper": {}, "cell": {1.5: "(2.125,2.5)", 3: "(4.25,5)"}, "bracket": {1.5: "(2,2.5)", 3: "(4,5)"}}


def disagreements(bits: int, rule: str) -> tuple[dict[int, set[float]], dict[int, set[float]], set[float]]:
    """Interior points where the compact rule differs from the full one: codes adjacent and the recorded codeword in the
    bracket; adjacent and outside; equal codes. The first two by recorded magnitude index."""
    inside: dict[int, set[float]] = {k: set() for k in range(8)}
    outside: dict[int, set[float]] = {k: set() for k in range(8)}
    equal = set()
    for k in range(8):
        compact, complete = product(POINTS, k, bits, rule), product(POINTS, k, 4)
        for i in INTERIOR:
            if compact[i] == complete[i]:
                continue
            steps = abs(VALUES.index(rtn(EXACT[i])) - k)
            if steps == 0:
                equal.add(float(POINTS[i]))
            elif steps == 1:
                (inside if VALUES[k] in bracket(EXACT[i]) else outside)[k].add(float(POINTS[i]))
    return inside, outside, equal


def interior_of(texts: list[str]) -> set[float]:
    return {float(POINTS[i]) for i in INTERIOR if any(within(EXACT[i], text) for text in texts)}


@pytest.mark.parametrize("rule", codebook.RULES)
def test_published_bands_where_one_bit_is_wrong(rule):
    inside, outside, equal = disagreements(1, rule)
    assert equal == set()
    for k, value in enumerate(VALUES):
        magnitude = float(value)
        assert inside[k] == interior_of(INSIDE_WRONG[rule].get(magnitude, [])), (rule, magnitude)
        texts = list(OUTSIDE_WRONG[magnitude])
        if magnitude in OUTSIDE_CHANGES[rule]:
            texts[-1] = OUTSIDE_CHANGES[rule][magnitude]
        assert outside[k] == interior_of(texts), (rule, magnitude)


def test_published_band_where_two_bits_are_wrong():
    inside, outside, equal = disagreements(2, "paper")
    assert not equal
    assert not any(inside.values())
    assert outside == {k: (interior_of(["(3.5,3.75)"]) if k == 7 else set()) for k in range(8)}


def test_three_bits_decide_as_the_full_record_does_when_signs_agree():
    inside, outside, equal = disagreements(3, "paper")
    assert not equal
    assert not any(inside.values())
    assert not any(outside.values())


def test_a_sign_flip_is_the_one_case_where_one_bit_is_worse_than_rtn():
    z = np.float32([0.2])
    recorded_minus_half = 8 | 1
    assert product(z, recorded_minus_half, 4)[0] == 0
    assert product(z, recorded_minus_half, 1)[0] == 0.5
    assert product(z, 8 | 2, 1)[0] == 0


ALL_BF16 = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
ALL_BF16 = ALL_BF16[np.isfinite(ALL_BF16)].reshape(-1, 64)


@pytest.mark.parametrize(
    ("format", "scale", "tensor_scale"),
    [
        ("nvfp4", 0x38, 1.0),
        ("nvfp4", 0x5C, 0.37),
        ("nvfp4", 0x01, 3e-5),
        ("mxfp4", 120, 1.0),
        ("mxfp4_block16", 200, 1.0),
    ],
)
def test_full_guidance_is_never_further_from_the_rollout_than_rtn(format, scale, tensor_scale):
    block = codebook.FORMATS[format].block
    scales = np.full((ALL_BF16.shape[0], 64 // block), scale, dtype=np.uint8)
    rtn_values = codebook.rtn_round(ALL_BF16, scales, tensor_scale, format=format).astype(np.float64)
    total = float(codebook.FORMATS[format].decode(np.uint8(scale)) * np.float32(tensor_scale))
    nearer = 0
    for code in range(16):
        codes = np.full(ALL_BF16.shape, code, dtype=np.uint8)
        rollout = codebook.dequantize(codes, scales, tensor_scale, format=format).astype(np.float64)
        rows = codebook.pack_full(codes)
        y = codebook.guided_round(ALL_BF16, rows, scales, tensor_scale, format=format, bits=4).astype(np.float64)
        assert (np.abs(y - rollout) <= np.abs(rtn_values - rollout)).all(), code
        nearer += int((np.abs(y - rollout) < np.abs(rtn_values - rollout)).sum())
        # The change to the trainer's own value is less than one step of the bracket, or RTN's own saturation.
        step = np.where(np.abs(ALL_BF16) < 2 * total, 0.5, np.where(np.abs(ALL_BF16) < 4 * total, 1, 2)) * total
        excess = np.maximum(np.abs(ALL_BF16.astype(np.float64)) - 6 * total, 0)
        assert (np.abs(y - ALL_BF16) <= (step + excess) * (1 + 1e-6)).all(), code
    assert nearer > 0
