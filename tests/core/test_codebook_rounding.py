"""Arithmetic and edge cases of rounding under given scales; the worked examples of the paper."""

import ml_dtypes
import numpy as np
import pytest

from trace_store import codebook
from trace_store.errors import InvalidRequest

ONE, TWENTY_FOUR = 0x38, 0x5C


def row(*values: float, dtype=np.float32) -> np.ndarray:
    x = np.zeros((1, 16), dtype=dtype)
    x[0, : len(values)] = values
    return x


def scale(byte: int) -> np.ndarray:
    return np.full((1, 1), byte, dtype=np.uint8)


def guided(x, codes, scales, tensor_scale=1.0, *, format="nvfp4", bits=1, rule="paper"):
    rows = codebook.pack_full(codes) if bits == 4 else codebook.pack(codes, bits=bits)
    return codebook.guided_round(x, rows, scales, tensor_scale, format=format, bits=bits, rule=rule)


@pytest.mark.parametrize("rule", codebook.RULES)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_worked_example_of_the_paper(bits, rule):
    """Train 60.24 and rollout 59.76 at scale 24: 2.51 and 2.49 round to 3 and 2, so 0.48 apart becomes 24 apart."""
    assert codebook.e4m3_decode(np.uint8(TWENTY_FOUR)) == 24
    train, rollout = row(60.24), row(59.76)
    codes = codebook.rtn_codes(rollout, scale(TWENTY_FOUR), 1.0, format="nvfp4")
    rolled = codebook.dequantize(codes, scale(TWENTY_FOUR), 1.0, format="nvfp4")
    nearest = codebook.rtn_round(train, scale(TWENTY_FOUR), 1.0, format="nvfp4")
    assert (rolled[0, 0] / 24, nearest[0, 0] / 24) == (2, 3)
    assert nearest[0, 0] - rolled[0, 0] == 24
    assert guided(train, codes, scale(TWENTY_FOUR), bits=bits, rule=rule)[0, 0] - rolled[0, 0] == 0


def test_a_larger_difference_inside_one_cell_costs_nothing():
    """2.40 and 2.49 are further apart than 2.49 and 2.51, and round alike."""
    both = codebook.rtn_round(row(2.40, 2.49, 2.51), scale(ONE), 1.0, format="nvfp4")
    assert both[0, :3].tolist() == [2, 2, 3]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp4_block16"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("rule", codebook.RULES)
def test_unchanged_activations_give_the_rollouts_values_back(format, bits, rule):
    x = np.random.default_rng(bits).standard_normal((50, 256)).astype(np.float32)
    codes, scales, decode = codebook.quantize(x, format=format)
    rollout = codebook.dequantize(codes, scales, decode, format=format)
    np.testing.assert_array_equal(guided(x, codes, scales, decode, format=format, bits=bits, rule=rule), rollout)
    np.testing.assert_array_equal(codebook.rtn_round(x, scales, decode, format=format), rollout)


def test_guidance_removes_mismatches_that_rtn_leaves_under_small_noise():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, 512)).astype(np.float32)
    codes, scales, decode = codebook.quantize(x, format="nvfp4")
    noisy = x + np.float32(3e-3) * rng.standard_normal(x.shape).astype(np.float32)
    left = {"rtn": codebook.rtn_codes(noisy, scales, decode, format="nvfp4")}
    for bits in (1, 4):
        y = guided(noisy, codes, scales, decode, bits=bits)
        left[bits] = codebook.rtn_codes(y, scales, decode, format="nvfp4")
    wrong = {key: float((codebook.code_distance(value, codes) != 0).mean()) for key, value in left.items()}
    assert 0.008 < wrong["rtn"] < 0.013  # 3.3 times the noise: .0100 at 3e-3
    assert wrong[1] < 1e-5
    assert wrong[4] < 1e-5


def test_z_is_one_multiplication_with_the_rounded_reciprocal():
    """x * fp32(1 / s) and x / s differ for these values, on both sides of the boundary 2.5."""
    rng = np.random.default_rng(8)
    tensor_scale = rng.uniform(1e-4, 1e-2, 4000).astype(np.float32)
    s = np.float32(24) * tensor_scale
    x = np.zeros((4000, 16), dtype=np.float32)
    x[:, 0] = np.float32(2.5) * s
    inverse = np.float32(1) / s
    z = x[:, 0] * inverse
    quotient_decides_otherwise = (z > 2.5) != (x[:, 0] / s > 2.5)
    assert quotient_decides_otherwise.sum() > 100
    rounded = codebook.rtn_round(x, np.full((4000, 1), TWENTY_FOUR, np.uint8), tensor_scale, format="nvfp4")[:, 0]
    np.testing.assert_array_equal(rounded, np.where(z > 2.5, 3, 2).astype(np.float32) * s)


def test_s_is_rounded_once_before_the_codeword_multiplies_it():
    tensor_scale = np.random.default_rng(9).uniform(1e-4, 1, 500).astype(np.float32)
    codes = np.full((500, 16), 5, dtype=np.uint8)
    byte = np.full((500, 1), 0x3B, np.uint8)  # 1.375
    values = codebook.dequantize(codes, byte, tensor_scale, format="nvfp4")[:, 0]
    np.testing.assert_array_equal(values, np.float32(3) * (np.float32(1.375) * tensor_scale))
    assert (values != np.float32(3 * 1.375) * tensor_scale).any()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_inputs_are_computed_in_float32(dtype):
    x = np.random.default_rng(7).standard_normal((20, 64)).astype(dtype)
    codes, scales, decode = codebook.quantize(x, format="nvfp4")
    wide = guided(x.astype(np.float32), codes, scales, decode)
    narrow = guided(x, codes, scales, decode)
    assert narrow.dtype == np.float32
    np.testing.assert_array_equal(narrow, wide)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("code", [0, 1, 7, 8, 9, 15])
def test_zero_stays_positive_zero_whatever_the_record(bits, code):
    x = row(0.0, -0.0)
    y = guided(x, np.full((1, 16), code, np.uint8), scale(ONE), bits=bits)
    assert (y == 0).all()
    assert not np.signbit(y).any()
    tiny = guided(x, np.full((1, 16), code, np.uint8), scale(1), 1e-44, bits=bits)  # 1 / s overflows
    assert (tiny == 0).all()
    assert not np.signbit(tiny).any()


def test_recorded_negative_zero_is_the_zero_codeword():
    for x in (0.3, -0.3):
        full = guided(row(x), np.full((1, 16), 8, np.uint8), scale(ONE), bits=4)
        assert full[0, 0] == 0
        assert guided(row(x), np.full((1, 16), 8, np.uint8), scale(ONE))[0, 0] == 0


def test_a_negative_value_that_becomes_zero_keeps_its_sign():
    codes = np.zeros((1, 16), np.uint8)
    for y in (
        guided(row(-0.2, 0.2), codes, scale(ONE)),
        codebook.rtn_round(row(-0.2, 0.2), scale(ONE), 1.0, format="nvfp4"),
    ):
        assert (y[0, :2] == 0).all()
        assert np.signbit(y[0, :2]).tolist() == [True, False]


@pytest.mark.parametrize("byte", [0x00, 0x80])
def test_a_zero_scale_gives_positive_zeros(byte):
    x = row(1.0, -1.0, 1e30, -1e-40)
    for y in (
        guided(x, np.full((1, 16), 7, np.uint8), scale(byte)),
        codebook.rtn_round(x, scale(byte), 1.0, format="nvfp4"),
        codebook.rtn_round(x, scale(ONE), 0.0, format="nvfp4"),
    ):
        assert (y == 0).all()
        assert not np.signbit(y).any()
    assert codebook.rtn_codes(x, scale(byte), 1.0, format="nvfp4")[0, :4].tolist() == [0, 8, 0, 8]


@pytest.mark.parametrize(
    ("format", "byte", "tensor_scale"),
    [
        ("nvfp4", 0x7F, 1.0),
        ("nvfp4", 0xFF, 1.0),
        ("mxfp4_block16", 255, 1.0),
        ("nvfp4", ONE, np.nan),
        ("nvfp4", ONE, np.inf),
        ("nvfp4", 0x00, np.inf),
        ("nvfp4", 0x7E, 3e38),
    ],
)
def test_a_scale_that_is_no_number_gives_nan_even_for_zero(format, byte, tensor_scale):
    x = row(0.0, 1.0, -6.0)
    codes = np.zeros((1, 16), np.uint8)
    assert np.isnan(codebook.rtn_round(x, scale(byte), tensor_scale, format=format)).all()
    assert np.isnan(guided(x, codes, scale(byte), tensor_scale, format=format)).all()
    assert np.isnan(codebook.dequantize(codes, scale(byte), tensor_scale, format=format)).all()
    with pytest.raises(InvalidRequest) as caught:
        codebook.rtn_codes(x, scale(byte), tensor_scale, format=format)
    assert caught.value.argument == "scales"


@pytest.mark.parametrize("byte", [ONE, 0x00])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_gives_nan_and_touches_no_neighbour(value, byte):
    x = row(1.0, value, 1.0)
    for y in (
        guided(x, np.full((1, 16), 2, np.uint8), scale(byte)),
        codebook.rtn_round(x, scale(byte), 1.0, format="nvfp4"),
    ):
        assert np.isnan(y[0, 1])
        assert y[0, [0, 2]].tolist() == ([1, 1] if byte == ONE else [0, 0])
    with pytest.raises(InvalidRequest):
        codebook.rtn_codes(x, scale(byte), 1.0, format="nvfp4")


def test_above_six_rtn_saturates_and_guidance_chooses_between_four_and_six():
    x = row(6.5, -7.0, 1e30)
    codes = np.full((1, 16), 6, np.uint8)
    assert codebook.rtn_round(x, scale(ONE), 1.0, format="nvfp4")[0, :3].tolist() == [6, -6, 6]
    assert guided(x, codes, scale(ONE))[0, :3].tolist() == [4, -4, 4]
    assert guided(x, codes | np.uint8(1), scale(ONE))[0, :3].tolist() == [6, -6, 6]


def test_an_overflowing_reciprocal_counts_as_above_six():
    tensor_scale = np.float32(1e-44)
    x = row(1e-44, -1e-44)
    s = np.float32(tensor_scale)
    assert codebook.rtn_round(x, scale(ONE), tensor_scale, format="nvfp4")[0, :2].tolist() == [6 * s, -6 * s]
    assert guided(x, np.zeros((1, 16), np.uint8), scale(ONE), tensor_scale)[0, 0] == 4 * s


def test_denormal_products_are_kept():
    s = codebook.e8m0_decode(np.uint8(0))  # 2^-127, itself denormal
    x = row(s, -1.5 * s, 0.25 * s, 0.250001 * s)
    y = codebook.rtn_round(x, scale(0), 1.0, format="mxfp4_block16")
    assert y[0, :4].tolist() == [s, -1.5 * s, 0, 0.5 * s]


def test_one_tensor_scale_per_token_is_each_row_by_itself():
    x = np.random.default_rng(6).standard_normal((300, 1024)).astype(np.float32)
    decode = np.random.default_rng(6).uniform(1e-4, 1e-3, 300).astype(np.float32)
    codes, scales, _ = codebook.quantize(x, format="nvfp4", tensor_scale=decode)
    noisy = x * np.float32(1.01)
    whole = guided(noisy, codes, scales, decode)
    for t in (0, 127, 128, 299):
        one = slice(t, t + 1)
        np.testing.assert_array_equal(whole[one], guided(noisy[one], codes[one], scales[one], decode[t]))
        np.testing.assert_array_equal(whole[one], guided(noisy[one], codes[one], scales[one], decode[one]))


def test_blocks_of_16_and_32_use_their_own_scale():
    x = np.full((1, 64), 1.2, dtype=np.float32)
    for format, block, bytes_of_scales in (("mxfp4", 32, [127, 128]), ("mxfp4_block16", 16, [127, 128, 129, 126])):
        y = codebook.rtn_round(x, np.uint8([bytes_of_scales]), 1.0, format=format).reshape(-1, block)
        for number, byte in enumerate(bytes_of_scales):
            s = 2.0 ** (byte - 127)
            expected = {0.5: 1.0, 1.0: 1.0, 2.0: 1.0, 4.0: 2.0}[s]
            assert (y[number] == expected).all()


def test_strided_and_read_only_inputs_equal_copies_and_stay_untouched():
    x = np.random.default_rng(11).standard_normal((64, 128)).astype(np.float32)
    view = x[::2, 32:96]
    codes, scales, decode = codebook.quantize(view, format="nvfp4")
    planes = codebook.pack(codes, bits=1)
    x.setflags(write=False)
    before = view.copy()
    y = codebook.guided_round(view, planes, scales, decode, format="nvfp4", bits=1)
    np.testing.assert_array_equal(y, codebook.guided_round(before, planes, scales, decode, format="nvfp4", bits=1))
    np.testing.assert_array_equal(view, before)


def test_rtn_codes_read_back_what_guidance_chose():
    rng = np.random.default_rng(12)
    x = rng.standard_normal((100, 256)).astype(np.float32)
    codes, scales, decode = codebook.quantize(x, format="nvfp4")
    recorded = rng.integers(0, 16, codes.shape).astype(np.uint8)
    y = guided(x, recorded, scales, decode, bits=4)
    chosen = codebook.rtn_codes(y, scales, decode, format="nvfp4")
    np.testing.assert_array_equal(codebook.dequantize(chosen, scales, decode, format="nvfp4"), y)


def test_code_distance_counts_signed_steps_across_zero():
    codes = np.uint8([3, 2, 0, 8, 1, 9, 15, 7, 5])
    reference = np.uint8([2, 3, 8, 0, 9, 1, 7, 15, 5])
    assert codebook.code_distance(codes, reference).tolist() == [1, -1, 0, 0, 2, -2, -14, 14, 0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"x": np.ones((2, 32), np.float64)}, "x"),
        ({"x": np.ones((2, 40), np.float32)}, "x"),
        ({"planes": np.zeros((2, 2, 4), np.uint8)}, "planes"),
        ({"planes": np.zeros((3, 1, 4), np.uint8)}, "planes"),
        ({"planes": np.zeros((2, 1, 4), np.int8)}, "planes"),
        ({"planes": np.zeros((2, 1, 4), np.uint8), "bits": 4}, "planes"),
        ({"scales": np.zeros((2, 1), np.uint8)}, "scales"),
        ({"scales": np.zeros((2, 2), np.float32)}, "scales"),
        ({"tensor_scale": np.ones(32, np.float32)}, "tensor_scale"),
        ({"tensor_scale": None}, "tensor_scale"),
        ({"format": "mxfp8"}, "format"),
        ({"bits": 5}, "bits"),
        ({"bits": 0}, "bits"),
        ({"bits": True}, "bits"),
        ({"rule": "nearest"}, "rule"),
    ],
)
def test_wrong_arguments_are_refused_by_name(changes, named):
    call = {
        "x": np.ones((2, 32), np.float32),
        "planes": np.zeros((2, 1, 4), np.uint8),
        "scales": np.zeros((2, 2), np.uint8),
        "tensor_scale": 1.0,
        "format": "nvfp4",
        "bits": 1,
        **changes,
    }
    with pytest.raises(InvalidRequest) as caught:
        codebook.guided_round(**call)
    assert caught.value.argument == named
