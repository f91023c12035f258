"""Bit order of code rows: the one convention that record, wire, segment and kernels share."""

import numpy as np
import pytest

from trace_store import codebook
from trace_store.errors import InvalidRequest
from trace_store.form import FORMS


def random_codes(tokens: int = 7, width: int = 96) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 16, (tokens, width)).astype(np.uint8)


def test_pack_puts_element_i_in_bit_i_mod_8_of_byte_i_div_8():
    codes = random_codes()
    planes = codebook.pack(codes, bits=3)
    for element in range(codes.shape[1]):
        for bit in range(3):
            stored = planes[:, bit, element // 8] >> (element % 8) & 1
            np.testing.assert_array_equal(stored, codes[:, element] >> bit & 1)


def test_worked_example_of_one_plane():
    codes = np.array([[1, 0, 0, 3, 0, 0, 0, 15, 8, 9, 0, 0, 0, 0, 0, 0]], dtype=np.uint8)
    assert codebook.pack(codes, bits=1).tolist() == [[[0b10001001, 0b00000010]]]


def test_worked_example_of_a_full_row():
    codes = np.array([[1, 2, 0xF, 0x8]], dtype=np.uint8)
    assert codebook.pack_full(codes).tolist() == [[0x21, 0x8F]]


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_unpack_gives_back_the_low_bits(bits):
    codes = random_codes()
    planes = codebook.pack(codes, bits=bits)
    assert planes.shape == (7, *FORMS[f"b{bits}"].row_shape(96))
    np.testing.assert_array_equal(codebook.unpack(planes), codes & ((1 << bits) - 1))


def test_a_narrow_record_is_a_prefix_of_a_wide_one():
    codes = random_codes()
    np.testing.assert_array_equal(codebook.pack(codes, bits=1), codebook.pack(codes, bits=3)[:, :1])


def test_unpack_full_gives_back_every_code():
    codes = random_codes()
    rows = codebook.pack_full(codes)
    assert rows.shape == (7, *FORMS["full"].row_shape(96))
    np.testing.assert_array_equal(codebook.unpack_full(rows), codes)


def test_strided_codes_equal_their_contiguous_copy():
    wide = random_codes(width=192)
    for view in (wide[:, 96:], wide[::2, :96], wide[:, ::2]):
        np.testing.assert_array_equal(codebook.pack(view, bits=2), codebook.pack(view.copy(), bits=2))
        np.testing.assert_array_equal(codebook.pack_full(view), codebook.pack_full(view.copy()))


def test_empty_rows_keep_their_shape():
    assert codebook.pack(np.zeros((0, 16), np.uint8), bits=2).shape == (0, 2, 2)
    assert codebook.unpack(np.zeros((0, 2, 2), np.uint8)).shape == (0, 16)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: codebook.pack(random_codes(), bits=4), "bits"),
        (lambda: codebook.pack(random_codes(), bits=0), "bits"),
        (lambda: codebook.pack(random_codes(width=12), bits=1), "codes"),
        (lambda: codebook.pack(random_codes().astype(np.int64), bits=1), "codes"),
        (lambda: codebook.pack(random_codes()[0], bits=1), "codes"),
        (lambda: codebook.pack(random_codes() + np.uint8(16), bits=1), "codes"),
        (lambda: codebook.pack_full(random_codes(width=3)), "codes"),
        (lambda: codebook.pack_full(np.full((1, 2), 16, np.uint8)), "codes"),
        (lambda: codebook.unpack(np.zeros((2, 4, 2), np.uint8)), "planes"),
        (lambda: codebook.unpack(np.zeros((2, 2), np.uint8)), "planes"),
        (lambda: codebook.unpack_full(np.zeros((2, 2, 2), np.uint8)), "rows"),
        (lambda: codebook.unpack_full(np.zeros((2, 2), np.int8)), "rows"),
    ],
)
def test_wrong_arrays_are_refused_by_name(call, argument):
    with pytest.raises(InvalidRequest) as caught:
        call()
    assert caught.value.argument == argument
