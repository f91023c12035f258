"""The kernels' numeric core, compiled as C++, against the NumPy oracle. Needs g++ (or $CXX), no GPU.

The sweep covers every bfloat16 value, 65,536 of them with all NaNs, infinities and denormals, times every E4M3 byte,
times every record of 1, 2, 3 and 4 bits. float32 neighbours of every threshold cover what bfloat16 cannot express.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from trace_kernels import host
from trace_store import codebook

HERE = Path(__file__).parent
CUDA = HERE.parents[1] / "kernels" / "trace_kernels" / "cuda"
FLOATS = np.ctypeslib.ndpointer(np.float32, flags="C_CONTIGUOUS")
COUNTS = np.ctypeslib.ndpointer(np.int64, flags="C_CONTIGUOUS")
BYTES = np.ctypeslib.ndpointer(np.uint8, flags="C_CONTIGUOUS")

CODEWORDS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
BANDS = (2.125, 2.25, 4.25, 4.5, 1.625, 2.375, 3.375, 3.75)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("e2m1") / "e2m1.so"
    flags = ["-O2", "-std=c++14", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
    command = [compiler, *flags, "-shared", "-fPIC", f"-I{CUDA}", str(HERE / "e2m1_host.cpp"), "-o", str(library)]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    integer, number, count = ctypes.c_int, ctypes.c_float, ctypes.c_int64
    loaded.round_values.argtypes = [
        FLOATS, count, ctypes.c_uint32, integer, number, ctypes.c_uint32, integer, integer, integer, FLOATS,
    ]  # fmt: skip
    loaded.compare_values.argtypes = [FLOATS, count, number, ctypes.c_uint32, integer, integer, COUNTS]
    loaded.compare_values.restype = count
    loaded.decode_bytes.argtypes = [integer, FLOATS]
    loaded.encode_values.argtypes = [FLOATS, count, integer, BYTES]
    loaded.quantize_block.argtypes = [FLOATS, integer, integer, number, number, BYTES, BYTES]
    return loaded


def every_bfloat16() -> npt.NDArray[np.float32]:
    return (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)


def neighbours(points: Iterator[float] | tuple[float, ...], ulps: int = 3) -> npt.NDArray[np.float32]:
    """Each point and its float32 neighbours up to ``ulps`` away, both signs."""
    bits = np.array(sorted(points), np.float32).view(np.int32)
    near = (bits[:, None] + np.arange(-ulps, ulps + 1)).astype(np.int32).view(np.float32).ravel()
    return np.concatenate([near, -near])


def from_core(
    core: ctypes.CDLL, x: npt.NDArray[np.float32], byte: int, fmt: str, scale: float, record: int, bits: int, **how: Any
) -> npt.NDArray[np.float32]:
    y = np.empty_like(x)
    rule, kernel = codebook.RULES.index(how.get("rule", "paper")), how.get("kernel", True)
    core.round_values(x, x.size, byte, fmt != "nvfp4", scale, record, bits, rule, kernel, y)
    return y


def from_oracle(
    x: npt.NDArray[np.float32], bytes_: list[int], fmt: str, scale: float, record: int, bits: int, rule: str = "paper"
) -> npt.NDArray[np.float32]:
    """One row of results a scale byte. bits 0 is rounding to nearest."""
    block = codebook.FORMATS[fmt].block
    rows, width = len(bytes_), -(-x.size // (8 * block)) * 8 * block
    padded = np.zeros((rows, width), np.float32)
    padded[:, : x.size] = x
    scales = np.repeat(np.array(bytes_, np.uint8)[:, None], width // block, axis=1)
    if bits == 0:
        return codebook.rtn_round(padded, scales, scale, format=fmt)[:, : x.size]
    if bits == 4:
        planes = np.full((rows, width // 2), record * 17, np.uint8)
    else:
        planes = np.repeat([[(255 * (record >> j & 1))] for j in range(bits)], width // 8, axis=1).astype(np.uint8)
        planes = np.broadcast_to(planes, (rows, bits, width // 8))
    return codebook.guided_round(padded, planes, scales, scale, format=fmt, bits=bits, rule=rule)[:, : x.size]


def assert_same_bits(
    got: npt.NDArray[np.float32], want: npt.NDArray[np.float32], x: npt.NDArray[np.float32], what: tuple[Any, ...]
) -> None:
    """NaN matches NaN."""
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    if not same.all():
        first = int(np.flatnonzero(~same)[0])
        raise AssertionError(f"{what}: x={x[first]!r} got={got[first]!r} want={want[first]!r} of {int((~same).sum())}")


def sweep(core: ctypes.CDLL, x: Any, bytes_: list[int], fmt: str, scale: float, bits: int, rule: str) -> None:
    for record in range(1 << bits):
        for chunk in [bytes_[i : i + 16] for i in range(0, len(bytes_), 16)]:
            want = from_oracle(x, chunk, fmt, scale, record, bits, rule)
            for row, byte in enumerate(chunk):
                got = from_core(core, x, byte, fmt, scale, record, bits, rule=rule)
                assert_same_bits(got, want[row], x, (fmt, byte, scale, record, bits, rule))


@pytest.mark.parametrize("rule", codebook.RULES)
def test_every_bfloat16_times_every_e4m3_byte_times_both_bits(core: ctypes.CDLL, rule: str) -> None:
    sweep(core, every_bfloat16(), list(range(256)), "nvfp4", 1.0, 1, rule)


@pytest.mark.parametrize("rule", codebook.RULES)
def test_two_bit_records(core: ctypes.CDLL, rule: str) -> None:
    sweep(core, every_bfloat16(), list(range(256)), "nvfp4", 1.0, 2, rule)


@pytest.mark.parametrize("bits", [3, 4])
def test_magnitude_and_whole_code_records(core: ctypes.CDLL, bits: int) -> None:
    sweep(core, every_bfloat16(), list(range(256)), "nvfp4", 1.0, bits, "paper")


def test_rounding_to_nearest_for_every_bfloat16_and_byte(core: ctypes.CDLL) -> None:
    sweep(core, every_bfloat16(), list(range(256)), "nvfp4", 0.0123, 0, "paper")


@pytest.mark.parametrize("bits", [0, 1, 2])
def test_mxfp4_scales_from_denormal_to_nan(core: ctypes.CDLL, bits: int) -> None:
    sweep(core, every_bfloat16(), [0, 1, 2, 60, 126, 127, 128, 200, 253, 254, 255], "mxfp4", 1.0, bits, "paper")


@pytest.mark.parametrize("scale", [1e-30, 3.1e-5, 0.37, 700.0, 1e5, 3e38, np.inf, np.nan, 0.0])
def test_tensor_scales_from_vanishing_to_overflowing(core: ctypes.CDLL, scale: float) -> None:
    sweep(core, every_bfloat16(), [0, 1, 0x38, 0x45, 0x7E, 0xC1], "nvfp4", scale, 1, "paper")


@pytest.mark.parametrize("rule", codebook.RULES)
@pytest.mark.parametrize("bits", [0, 1, 2, 3, 4])
def test_float32_neighbours_of_every_threshold(core: ctypes.CDLL, bits: int, rule: str) -> None:
    tiny = (1e-45, 1e-40, 1.2e-38, 2.0**-24, 2.0**-23, 2.0**-22)
    x = neighbours((*CODEWORDS, *BOUNDARIES, *BANDS, *tiny, 7.0, 8.0, 1e30))
    for scale in (1.0, 0.7234):
        for byte in (0x38, 0x39, 0x3F):
            scaled = (x * np.float32(codebook.e4m3_decode(byte) * np.float32(scale))).astype(np.float32)
            sweep(core, np.concatenate([scaled, neighbours(tuple(np.abs(scaled)))]), [byte], "nvfp4", scale, bits, rule)


def test_the_short_form_equals_the_long_form(core: ctypes.CDLL) -> None:
    rng = np.random.default_rng(5)
    x = np.ldexp(rng.uniform(-1, 1, 200_000).astype(np.float32), rng.integers(-30, 6, 200_000)).astype(np.float32)
    for bits in range(5):
        for record in range(1 << bits):
            for byte in (0x35, 0x38, 0x44):
                long = from_core(core, x, byte, "nvfp4", 0.91, record, bits, kernel=False)
                short = from_core(core, x, byte, "nvfp4", 0.91, record, bits, kernel=True)
                assert_same_bits(short, long, x, (bits, byte, record))


def test_worked_examples_of_the_paper(core: ctypes.CDLL) -> None:
    x = np.array([2.51, 2.49, 2.40], np.float32)
    assert from_core(core, x, 0x38, "nvfp4", 1.0, 0, 0).tolist() == [3, 2, 2]
    assert from_core(core, x, 0x38, "nvfp4", 1.0, 0, 1).tolist() == [2, 2, 2]
    assert from_core(core, x, 0x38, "nvfp4", 1.0, 1, 1).tolist() == [3, 3, 3]


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_scale_bytes_decode_as_the_oracle(core: ctypes.CDLL, fmt: str) -> None:
    out = np.empty(256, np.float32)
    core.decode_bytes(fmt != "nvfp4", out)
    want = codebook.FORMATS[fmt].decode(np.arange(256))
    assert_same_bits(out, want, np.ones(256, np.float32), (fmt, 0))


def test_scale_bytes_encode_as_the_oracle(core: ctypes.CDLL) -> None:
    exact = codebook.e4m3_decode(np.arange(127))
    middle = (exact[1:] + exact[:-1]) / 2
    values = np.abs(np.concatenate([neighbours(tuple(exact[1:])), neighbours(tuple(middle)), every_bfloat16()]))
    values = np.ascontiguousarray(values[~np.isnan(values)])
    out = np.empty(values.size, np.uint8)
    core.encode_values(values, values.size, 0, out)
    np.testing.assert_array_equal(out, codebook.e4m3_encode(values))
    values = values[np.isfinite(values)]
    out = np.empty(values.size, np.uint8)
    core.encode_values(values, values.size, 1, out)
    np.testing.assert_array_equal(out, codebook.e8m0_encode_floor(values * np.float32(0.25)))


def blocks_to_quantize() -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(11)
    plain = rng.standard_normal((300, 32)).astype(np.float32)
    spread = np.ldexp(rng.uniform(-1, 1, (300, 32)), rng.integers(-60, 40, (300, 1))).astype(np.float32)
    edge = np.zeros((8, 32), np.float32)
    edge[1, 3], edge[2], edge[3, ::2], edge[4] = 1e-45, -0.0, -1e-40, 3.4e38
    edge[5, :7], edge[6, :7], edge[7, 0] = BOUNDARIES, [-b for b in BOUNDARIES], 6.0
    edge[5:7, 7] = 6.0
    return np.concatenate([plain, spread, edge])


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp4_block16"])
@pytest.mark.parametrize("scale", [None, 1.0, 2.3e-4])
def test_quantize_equals_the_oracle(core: ctypes.CDLL, fmt: str, scale: float | None) -> None:
    block = codebook.FORMATS[fmt].block
    e8m0 = fmt != "nvfp4"
    if e8m0 and scale not in (None, 1.0):
        pytest.skip("the mxfp4 formats have no tensor scale")
    for row in blocks_to_quantize():
        codes, scales, _ = codebook.quantize(row[None], format=fmt, tensor_scale=scale)
        for start in range(0, 32, block):
            got, byte = np.empty(block, np.uint8), np.empty(1, np.uint8)
            part = np.ascontiguousarray(row[start : start + block])
            core.quantize_block(part, block, e8m0, float(np.abs(row).max()), scale or 0.0, got, byte)
            assert byte[0] == scales[0, start // block]
            np.testing.assert_array_equal(got, codes[0, start : start + block])


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_counts_of_every_bfloat16_equal_the_host(core: ctypes.CDLL, bits: int) -> None:
    x = every_bfloat16()
    for byte, scale in ((0x38, 1.0), (0x35, 0.91), (0x01, 0.002)):
        s = np.float32(codebook.e4m3_decode(byte) * np.float32(scale))
        for record in range(1 << bits):
            for rule in codebook.RULES if bits < 3 else ("paper",):
                counts = np.zeros(7, np.int64)
                number = codebook.RULES.index(rule)
                assert core.compare_values(x, x.size, float(s), record, bits, number, counts) == 0
                if bits == 4:
                    planes = np.full((1, x.size // 2), record * 17, np.uint8)
                else:
                    planes = np.stack(
                        [np.full((1, x.size // 8), 255 * (record >> j & 1), np.uint8) for j in range(bits)], 1
                    )
                scales = np.full((1, x.size // 16), byte, np.uint8)
                want = host.discrepancy(
                    x[None], planes, scales, np.array([scale], np.float32), None, format="nvfp4", bits=bits, rule=rule
                )
                assert counts.tolist() == want[:7].tolist(), (byte, record, rule)
