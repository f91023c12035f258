"""Scale bytes against ml_dtypes: every byte, every bfloat16 value, and the float32 neighbours of every tie."""

import ml_dtypes
import numpy as np
import pytest

from trace_store import codebook

BYTES = np.arange(256, dtype=np.uint8)
BF16 = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)


def e4m3_reference(values: np.ndarray) -> np.ndarray:
    return np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def test_every_e4m3_byte_decodes_as_ml_dtypes_does():
    expected = BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    decoded = codebook.e4m3_decode(BYTES)
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, expected)
    np.testing.assert_array_equal(np.signbit(decoded), BYTES >= 128)
    assert np.isnan(decoded[[0x7F, 0xFF]]).all()
    assert np.isnan(decoded).sum() == 2


def test_every_e8m0_byte_decodes_as_ml_dtypes_does():
    decoded = codebook.e8m0_decode(BYTES)
    np.testing.assert_array_equal(decoded, BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert decoded[0] == 2.0**-127
    assert np.isnan(decoded[255])


def test_e4m3_encodes_every_finite_bfloat16_as_ml_dtypes_does():
    values = BF16[np.isfinite(BF16)]
    np.testing.assert_array_equal(codebook.e4m3_encode(values), e4m3_reference(values))


def test_e4m3_encode_rounds_ties_to_even_and_their_neighbours_to_nearest():
    grid = codebook.e4m3_decode(BYTES[:0x7F])
    ties = ((grid[:-1].astype(np.float64) + grid[1:]) / 2).astype(np.float32)  # exact: 5 significant bits
    below, above = np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))
    lower = BYTES[: ties.size]
    np.testing.assert_array_equal(codebook.e4m3_encode(ties), lower + (lower & 1))
    np.testing.assert_array_equal(codebook.e4m3_encode(below), lower)
    np.testing.assert_array_equal(codebook.e4m3_encode(above), lower + 1)


def test_e4m3_encode_saturates_and_keeps_signs_and_nan():
    values = np.array([448, 464, 465, 3e38, np.inf, -np.inf, np.nan, 0.0, -0.0, -1e-30], dtype=np.float32)
    expected = [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x00, 0x80, 0x80]
    assert codebook.e4m3_encode(values).tolist() == expected


def test_e8m0_encode_floors_to_a_power_of_two():
    values = np.concatenate([BF16[np.isfinite(BF16)], np.float32([1e-45, 2.0**-127, 2.0**-126, 3.4028235e38])])
    encoded = codebook.e8m0_encode_floor(values)
    magnitude = np.abs(values)
    scale = codebook.e8m0_decode(encoded)
    normal = magnitude >= 2.0**-127
    assert ((scale <= magnitude) & (magnitude / 2 < scale))[normal].all()
    assert (encoded[~normal] == 0).all()


def test_e8m0_encode_marks_nan_and_infinity():
    assert codebook.e8m0_encode_floor(np.float32([np.nan, np.inf, -np.inf, 0.0])).tolist() == [255, 255, 255, 0]


@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_scales_keep_the_shape(shape):
    values = np.full(shape, 1.5, dtype=np.float32)
    assert codebook.e4m3_encode(values).shape == shape
    assert codebook.e8m0_encode_floor(values).shape == shape
    assert codebook.e4m3_decode(codebook.e4m3_encode(values)).shape == shape
