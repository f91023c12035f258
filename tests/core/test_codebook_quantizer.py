"""The quantizer against ml_dtypes over every bfloat16 value, and known failures: midpoints, tiny blocks, NaN."""

import ml_dtypes
import numpy as np
import pytest

from trace_store import codebook
from trace_store.errors import InvalidRequest

FLT_MAX = np.finfo(np.float32).max
ALL_BF16 = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)
ALL_BF16 = ALL_BF16[np.isfinite(ALL_BF16.astype(np.float32))].reshape(-1, 64)
SHUFFLED = np.random.default_rng(5).permutation(ALL_BF16.reshape(-1)).reshape(-1, 64)
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


def fp4_codes(z: np.ndarray) -> np.ndarray:
    return z.astype(np.float32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15


def nvfp4_reference(x: np.ndarray, encode: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """FlashInfer's exact mode written with ml_dtypes; encode scales float32 [1, 1] or [T, 1]."""
    blocks = x.astype(np.float32).reshape(x.shape[0], -1, 16)
    with np.errstate(all="ignore"):
        ideal = np.abs(blocks).max(axis=2) * (encode * np.float32(1 / 6))
        sf = np.minimum(ideal, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        multiplier = np.minimum(np.float32(1) / (sf.astype(np.float32) * (np.float32(1) / encode)), FLT_MAX)
        multiplier[sf.astype(np.float32) == 0] = 0  # the declared rule
        codes = fp4_codes(blocks * multiplier[:, :, None])
    return codes.reshape(x.shape), sf.view(np.uint8)


def mxfp4_reference(x: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    blocks = x.astype(np.float32).reshape(x.shape[0], -1, block)
    amax = np.abs(blocks).max(axis=2).astype(np.float64)
    exponent = np.floor(np.log2(amax, where=amax > 0, out=np.full_like(amax, -1000))) - 2
    byte = np.clip(exponent + 127, 0, 254).astype(np.uint8)
    # In float64 neither the power of two nor the quotient rounds; ml_dtypes then rounds the exact quotient.
    z = blocks.astype(np.float64) / np.exp2(byte.astype(np.float64) - 127)[:, :, None]
    return fp4_codes(z).reshape(x.shape), byte


@pytest.mark.parametrize("x", [ALL_BF16, SHUFFLED], ids=["sorted", "shuffled"])
@pytest.mark.parametrize("tensor_scale", [None, 1.0, 1e-3, 2.0**-20, 1.3e30, 3e-39, 1e-40])
def test_nvfp4_equals_ml_dtypes_over_every_bfloat16(x, tensor_scale):
    codes, scales, decode = codebook.quantize(x, format="nvfp4", tensor_scale=tensor_scale)
    if tensor_scale is None:
        encode = np.float32(2688) / np.abs(x.astype(np.float32)).max()
        assert decode == np.float32(1) / encode
    else:
        with np.errstate(over="ignore"):
            encode = np.minimum(np.float32(1) / np.float32(tensor_scale), FLT_MAX)
        assert decode == np.float32(tensor_scale)
    expected_codes, expected_scales = nvfp4_reference(x, np.full((1, 1), encode))
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(codes, expected_codes)
    assert codes.dtype == scales.dtype == np.uint8
    assert isinstance(decode, np.float32)


def test_the_order_of_operations_is_that_of_the_exact_mode_where_it_decides():
    """Block maxima next to ties of E4M3, and elements next to ties of E2M1, under 4,000 random decode scales."""
    rng = np.random.default_rng(13)
    decode = rng.uniform(1e-4, 1e-2, 4000).astype(np.float32)
    encode = (np.float32(1) / decode)[:, None]
    grid = codebook.e4m3_decode(np.arange(0x30, 0x7F, dtype=np.uint8))
    tie = rng.choice((grid[1:] + grid[:-1]) / 2, (4000, 1))
    x = np.zeros((4000, 16), dtype=np.float32)
    x[:, :1] = tie / (encode * np.float32(1 / 6))
    _, sf = nvfp4_reference(x, encode)
    s = codebook.e4m3_decode(sf) * (np.float32(1) / encode)
    x[:, 1:8] = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) * s
    codes, scales, _ = codebook.quantize(x, format="nvfp4", tensor_scale=decode)
    expected_codes, expected_scales = nvfp4_reference(x, encode)
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(codes, expected_codes)
    amax = x[:, :1]
    for other in (amax * encode * np.float32(1 / 6), amax * encode / np.float32(6), amax * (encode / np.float32(6))):
        assert (codebook.e4m3_encode(other) != scales).sum() > 10  # the cases above can tell these orders apart
    sf_value = codebook.e4m3_decode(scales)
    for other in (np.float32(1) / (sf_value / encode), encode / sf_value):
        assert (fp4_codes(np.clip(x * other, -6, 6)) != codes).sum() > 10


@pytest.mark.parametrize("x", [ALL_BF16, SHUFFLED], ids=["sorted", "shuffled"])
@pytest.mark.parametrize(("format", "block"), [("mxfp4", 32), ("mxfp4_block16", 16)])
def test_mxfp4_equals_ml_dtypes_over_every_bfloat16(x, format, block):
    codes, scales, decode = codebook.quantize(x, format=format)
    expected_codes, expected_scales = mxfp4_reference(x, block)
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(codes, expected_codes)
    assert decode == 1


@pytest.mark.parametrize(
    ("scale", "tensor_scale"), [(0x38, 1.0), (0x5C, 0.37), (0x01, 3e-5), (0x7E, 1e30), (0x08, 1e-40)]
)
def test_codes_under_given_scales_equal_ml_dtypes_over_every_bfloat16(scale, tensor_scale):
    scales = np.full((ALL_BF16.shape[0], 4), scale, dtype=np.uint8)
    codes = codebook.rtn_codes(ALL_BF16, scales, tensor_scale, format="nvfp4")
    x = ALL_BF16.astype(np.float32)
    s = codebook.e4m3_decode(np.uint8(scale)) * np.float32(tensor_scale)
    with np.errstate(all="ignore"):
        z = x * (np.float32(1) / s)
    z[x == 0] = 0
    np.testing.assert_array_equal(codes, fp4_codes(np.clip(z, -6, 6)))


def test_one_decode_scale_per_token_quantizes_each_row_by_itself():
    x = np.random.default_rng(1).standard_normal((5, 48)).astype(np.float32) * np.float32(
        [[1], [9], [1e-4], [300], [2]]
    )
    decode = np.abs(x).max(axis=1) / np.float32(2688)
    codes, scales, returned = codebook.quantize(x, format="nvfp4", tensor_scale=decode)
    np.testing.assert_array_equal(returned, decode)
    for t in range(5):
        alone = codebook.quantize(x[t : t + 1], format="nvfp4", tensor_scale=decode[t])
        np.testing.assert_array_equal(codes[t : t + 1], alone[0])
        np.testing.assert_array_equal(scales[t : t + 1], alone[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp4_block16"])
def test_exact_midpoints_go_to_the_even_code(dtype, format):
    """FR-01: one converter sent them away from zero."""
    midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = np.zeros((1, 32), dtype=dtype)
    for start in (0, 16):  # a 6 in each block of 16 keeps every scale at 1
        x[0, start : start + 15] = [*midpoints, *(-m for m in midpoints), 6.0]
    codes, scales, decode = codebook.quantize(x, format=format, tensor_scale=1.0)
    assert (codebook.FORMATS[format].decode(scales) == 1).all()
    assert codes[0, :15].tolist() == [0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, 7]
    assert codebook.dequantize(codes, scales, decode, format=format)[0, :7].tolist() == [0, 1, 1, 2, 2, 4, 4]
    np.testing.assert_array_equal(codebook.rtn_codes(x, scales, decode, format=format)[0, :15], codes[0, :15])


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp4_block16"])
@pytest.mark.parametrize("beside", [0.0, 1.0])
def test_tiny_blocks_stay_finite_and_never_get_full_scale_codes_from_nothing(format, beside):
    """FR-02: values of 1e-36 to 6e-35 and a subnormal came out as NaN and full-scale codes."""
    x = np.zeros((1, 64), dtype=ml_dtypes.bfloat16)
    x[0, :16] = np.linspace(1e-36, 6e-35, 16) * np.where(np.arange(16) % 2, 1, -1)
    x[0, 3] = 9e-40
    x[0, 40] = beside
    codes, scales, decode = codebook.quantize(x, format=format)
    values = codebook.dequantize(codes, scales, decode, format=format)
    assert np.isfinite(values).all()
    assert (np.abs(values[0, :16]) <= 1.1 * 6e-35).all()
    if beside and format == "nvfp4":
        assert (scales[0, 0], set(codes[0, :16])) == (0, {0, 8})
    else:
        error = np.abs(values[0, :16] - x[0, :16].astype(np.float32)).max()
        assert error <= 6e-35 / 4


@pytest.mark.parametrize(("amax", "least"), [(1e-45, 0), (1e-40, 0), (1e-38, 0.45), (1e-35, 0.93), (3e38, 0.93)])
def test_tensors_at_the_ends_of_float32_decode_to_their_maximum_or_less(amax, least):
    """Below 2^-126 the exact mode's clamps at FLT_MAX cost range: values shrink, they never grow or overflow."""
    x = np.full((1, 16), amax, dtype=np.float32)
    codes, scales, decode = codebook.quantize(x, format="nvfp4")
    ratio = codebook.dequantize(codes, scales, decode, format="nvfp4").astype(np.float64) / x
    assert ((least <= ratio) & (ratio <= 1.07)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("element", [0, 15, 16, 47])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4_block16"])
def test_a_non_finite_value_is_refused_at_any_position(value, element, format):
    """FR-03: a maximum that drops NaN made a poisoned block look finite."""
    x = np.ones((4, 48), dtype=np.float32)
    x[2, element] = value
    with pytest.raises(InvalidRequest, match=f"token=2 element={element}") as caught:
        codebook.quantize(x, format=format, tensor_scale=1.0)
    assert caught.value.argument == "x"


def test_the_position_of_a_non_finite_value_counts_from_the_first_token():
    x = np.ones((9000, 48), dtype=np.float32)
    x[8765, 47] = np.nan
    with pytest.raises(InvalidRequest, match="token=8765 element=47 value=nan"):
        codebook.quantize(x, format="nvfp4")


def test_negative_zero_has_code_8_and_decodes_to_negative_zero():
    """FR-04: code 8 once decoded to 32768."""
    x = np.ones((1, 16), dtype=np.float32)
    x[0, :3] = [-0.0, -1e-20, 0.0]
    codes, scales, decode = codebook.quantize(x, format="nvfp4")
    assert codes[0, :3].tolist() == [8, 8, 0]
    values = codebook.dequantize(codes, scales, decode, format="nvfp4")
    assert (values[0, :3] == 0).all()
    assert np.signbit(values[0, :3]).tolist() == [True, True, False]
    np.testing.assert_array_equal(codebook.unpack_full(codebook.pack_full(codes)), codes)


def test_every_code_decodes_as_ml_dtypes_does():
    codes = np.arange(16, dtype=np.uint8).reshape(1, 16)
    values = codebook.dequantize(codes, np.full((1, 1), 0x38, np.uint8), 1.0, format="nvfp4")
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(np.signbit(values), codes >= 8)


def test_a_small_block_beside_a_large_maximum_has_a_zero_scale_and_decodes_to_zeros():
    """FR-05: implementations differ between a zero scale and an epsilon; the declared rule is the zero scale."""
    x = np.zeros((1, 32), dtype=np.float32)
    x[0, 0], x[0, 16:] = 1e3, np.where(np.arange(16) % 2, -1e-7, 1e-7)
    codes, scales, decode = codebook.quantize(x, format="nvfp4")
    assert scales[0].tolist() == [0x7E, 0]
    assert codes[0, 16:].tolist() == [0, 8] * 8
    assert (codebook.dequantize(codes, scales, decode, format="nvfp4")[0, 16:] == 0).all()


@pytest.mark.parametrize("value", [6e4, 1e-4])
@pytest.mark.parametrize("tensor_scale", [1.0, 1e-3, None])
def test_equal_values_give_equal_bytes_whatever_the_dtype(value, tensor_scale):
    """FR-06: a float16 path overflowed where the global scale came after the down-cast."""
    shared = (
        (np.float32(value) * np.linspace(-1, 1, 32, dtype=np.float32)).astype(ml_dtypes.bfloat16).astype(np.float16)
    )
    shared = shared.astype(ml_dtypes.bfloat16).astype(np.float32).reshape(1, 32)
    kept = (shared.astype(np.float16).astype(np.float32) == shared).all(axis=0)
    shared[:, ~kept] = 0  # keep only what all three types hold exactly
    assert kept.sum() >= 8
    outcomes = [codebook.quantize(shared.astype(d), format="nvfp4", tensor_scale=tensor_scale) for d in DTYPES]
    for codes, scales, decode in outcomes[1:]:
        np.testing.assert_array_equal(codes, outcomes[0][0])
        np.testing.assert_array_equal(scales, outcomes[0][1])
        assert decode == outcomes[0][2]
    values = codebook.dequantize(*outcomes[0], format="nvfp4")
    assert np.isfinite(values).all()
    if tensor_scale is None:
        assert (scales != 0).all()


def test_all_zero_input_has_decode_scale_1_and_zero_bytes():
    for format in codebook.FORMATS:
        codes, scales, decode = codebook.quantize(np.zeros((2, 32), np.float32), format=format)
        assert not codes.any()
        assert not scales.any()
        assert decode == 1


def test_no_tokens_give_empty_arrays():
    codes, scales, decode = codebook.quantize(np.zeros((0, 32), np.float32), format="nvfp4")
    assert (codes.shape, scales.shape, decode) == ((0, 32), (0, 2), 1)


def test_a_row_longer_than_a_chunk_and_many_chunks_change_nothing():
    x = np.random.default_rng(2).standard_normal((40, 32768)).astype(np.float32)
    whole = codebook.quantize(x, format="nvfp4", tensor_scale=1e-3)
    for t in (0, 3, 39):
        row = codebook.quantize(x[t : t + 1], format="nvfp4", tensor_scale=1e-3)
        np.testing.assert_array_equal(whole[0][t], row[0][0])
        np.testing.assert_array_equal(whole[1][t], row[1][0])


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp4_block16"])
def test_native_round_is_each_row_quantized_alone(format):
    x = SHUFFLED[:200].astype(np.float32)
    x[3] = 0
    native = codebook.native_round(x, format=format)
    for t in range(200):
        alone = codebook.quantize(x[t : t + 1], format=format)
        np.testing.assert_array_equal(native[t], codebook.dequantize(*alone, format=format)[0])


def test_native_round_takes_the_trainers_own_scales():
    x = np.random.default_rng(4).standard_normal((6, 64)).astype(np.float32)
    for tensor_scale in (np.float32(2e-3), np.float32([1e-3, 2e-3, 1, 1e-9, 5, 1e-3])):
        expected = codebook.dequantize(*codebook.quantize(x, format="nvfp4", tensor_scale=tensor_scale), format="nvfp4")
        native = codebook.native_round(x, format="nvfp4", tensor_scale=tensor_scale)
        np.testing.assert_array_equal(native, expected)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_native_round_turns_non_finite_blocks_into_nan(value):
    x = np.full((3, 64), 6, dtype=np.float32)
    x[1, 5] = value
    own = codebook.native_round(x, format="nvfp4")
    assert np.isnan(own[1]).all()
    np.testing.assert_allclose(own[[0, 2]], 6, rtol=1e-6)
    for format, tensor_scale in (("nvfp4", 1.0), ("mxfp4_block16", None)):
        given = codebook.native_round(x, format=format, tensor_scale=tensor_scale)
        assert np.isnan(given[1, :16]).all()
        assert (given[1, 16:] == 6).all()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"x": np.ones((2, 24), np.float32)}, "x"),
        ({"x": np.ones((2, 0), np.float32)}, "x"),
        ({"x": np.ones(32, np.float32)}, "x"),
        ({"x": np.ones((2, 32), np.float64)}, "x"),
        ({"x": np.ones((2, 32), np.int32)}, "x"),
        ({"format": "fp4"}, "format"),
        ({"format": ["nvfp4"]}, "format"),
        ({"tensor_scale": 0.0}, "tensor_scale"),
        ({"tensor_scale": -1.0}, "tensor_scale"),
        ({"tensor_scale": np.nan}, "tensor_scale"),
        ({"tensor_scale": np.ones(3, np.float32)}, "tensor_scale"),
        ({"tensor_scale": "1"}, "tensor_scale"),
        ({"tensor_scale": 2.0, "format": "mxfp4"}, "tensor_scale"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, named):
    call = {"x": np.ones((2, 32), np.float32), "format": "nvfp4", **arguments}
    for function in (codebook.quantize, codebook.native_round):
        with pytest.raises(InvalidRequest) as caught:
            function(**call)
        assert caught.value.argument == named


def test_dequantize_refuses_what_is_no_code_row():
    scales = np.zeros((2, 2), np.uint8)
    for codes in (np.full((2, 32), 16, np.uint8), np.zeros((2, 32), np.int64), np.zeros((2, 24), np.uint8)):
        with pytest.raises(InvalidRequest) as caught:
            codebook.dequantize(codes, scales, 1.0, format="nvfp4")
        assert caught.value.argument == "codes"
