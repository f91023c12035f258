"""Guided rounding, rounding to nearest and native rows on the GPU, bit for bit the NumPy oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trace_kernels import _launch, _module, guided_round, host, torch_op
from trace_store import codebook
from trace_store.errors import InvalidRequest

pytest.importorskip("cupy", reason="GPU tests need CuPy and a CUDA device")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

TYPES = [torch.bfloat16, torch.float16, torch.float32]
FORMATS = ["nvfp4", "mxfp4", "mxfp4_block16"]


def same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits, NaN matching NaN; reports the first difference."""
    got, want = got.cpu(), want.cpu()
    kind = {2: torch.int16, 4: torch.int32}[got.element_size()]
    bad = (got.view(kind) != want.view(kind)) & ~(got.isnan() & want.isnan())
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(f"{int(bad.sum())} differ, first at {at}: got={got[at]} want={want[at]}")


def record(rows: int, width: int, fmt: str, bits: int, seed: int = 0) -> tuple[Any, Any, np.float32]:
    """Record rows of random activations: planes or whole codes, scales, decode scale."""
    x = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32) * 3
    codes, scales, decode = codebook.quantize(x, format=fmt)
    planes = codebook.pack_full(codes) if bits == 4 else codebook.pack(codes, bits=max(bits, 1))
    return planes, scales, np.float32(decode)


def hard_rows(rows: int, width: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """Random rows with zeros of both signs, NaN, infinities, denormals and very large and small rows."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 3
    x[1], x[2, ::3], x[3, ::2] = 0, 0, -0.0
    x[4, 3], x[5, width - 1], x[6, 0] = float("nan"), float("inf"), float("-inf")
    x[7] *= 1e-6
    x[8] *= 1e4
    x = x.to(dtype)
    x[9, :8] = torch.tensor([1e-45, -1e-45, 1e-40, 9e-40, 6e-35, -1e-36, 2e-7, 6e-8]).to(dtype)
    return x


def on_gpu(*arrays: Any) -> list[torch.Tensor]:
    return [torch.as_tensor(a).cuda() for a in arrays]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("bits", [0, 1, 2, 3, 4])
def test_rounding_equals_the_oracle(fmt: str, bits: int, dtype: torch.dtype) -> None:
    width = 320
    x = hard_rows(64, width, dtype)
    planes, scales, decode = record(64, width, fmt, bits)
    scales[10, 0], scales[11, 1] = 0, 0x7F if fmt == "nvfp4" else 255
    scales[12, 2] = 0x81 if fmt == "nvfp4" else 1
    p, s, d = on_gpu(planes, scales, np.array([decode]))
    for rule in codebook.RULES if bits in (1, 2) else ["paper"]:
        if bits == 0:
            want = codebook.rtn_round(x.float().numpy(), scales, decode, format=fmt)
            got = torch_op.rtn_round(x.cuda(), s, d, format=fmt)
        else:
            want = codebook.guided_round(x.float().numpy(), planes, scales, decode, format=fmt, bits=bits, rule=rule)
            got = torch_op.guided_round(x.cuda(), p, s, d, format=fmt, bits=bits, rule=rule)
        same_bits(got, torch.from_numpy(want).to(dtype))


@pytest.mark.parametrize("bits", [0, 1, 2, 3, 4])
def test_every_bfloat16_value_and_scale_byte(bits: int) -> None:
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    rows = x.expand(256, 65536).contiguous()
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 65536 // 16, axis=1)
    values = rows.float().numpy()
    sample = range(1 << bits) if bits < 3 else range(0, 1 << bits, 3)
    for code in sample:
        if bits == 0:
            planes = None
        elif bits == 4:
            planes = np.full((256, 32768), code * 17, np.uint8)
        else:
            planes = np.stack([np.full((256, 8192), 255 * (code >> j & 1), np.uint8) for j in range(bits)], axis=1)
        (s,) = on_gpu(scales)
        if planes is None:
            want = codebook.rtn_round(values, scales, 1.0, format="nvfp4")
            got = torch_op.rtn_round(rows.cuda(), s, 1.0, format="nvfp4")
        else:
            want = codebook.guided_round(values, planes, scales, 1.0, format="nvfp4", bits=bits)
            got = torch_op.guided_round(rows.cuda(), on_gpu(planes)[0], s, 1.0, format="nvfp4", bits=bits)
        same_bits(got, torch.from_numpy(want).to(torch.bfloat16))


def test_reciprocal_of_every_mantissa() -> None:
    source = _module.source("guided_round.cu") + (
        'extern "C" __global__ void differ(unsigned* bad) {'
        "  unsigned mantissa = blockIdx.x * 256u + threadIdx.x;"
        "  for (unsigned e = 1; e < 143; e += 3) {"
        "    float s = e2m1::of_bits(mantissa | e << 23);"
        "    if (e2m1::bits_of(e2m1::reciprocal(s)) != e2m1::bits_of(e2m1::reciprocal_ordinary(s))) atomicAdd(bad, 1u);"
        "  }}"
    )
    cupy = _module.cupy()
    options = ("-std=c++14", *(f"-DTS_{k}" for k in ("INPUT=0", "BLOCK=16", "E8M0=0", "BITS=1", "RULE=0", "ROWS=0")))
    bad = cupy.zeros(1, dtype=np.uint32)
    cupy.RawModule(code=source, options=options).get_function("differ")((1 << 15,), (256,), (bad,))
    assert int(bad[0]) == 0


@pytest.mark.parametrize(
    ("rows", "width"), [(0, 64), (1, 16), (3, 48), (70_000, 16), (5, 16_384), (129, 2_880), (7, 5_472)]
)
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_shapes(rows: int, width: int, bits: int) -> None:
    planes, scales, decode = record(max(rows, 1), width, "nvfp4", bits)
    planes, scales = planes[:rows], scales[:rows]
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    want = codebook.guided_round(x.float().numpy(), planes, scales, decode, format="nvfp4", bits=bits)
    got = torch_op.guided_round(x.cuda(), *on_gpu(planes, scales), float(decode), format="nvfp4", bits=bits)
    same_bits(got, torch.from_numpy(want).to(torch.bfloat16))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rows_without_a_record_round_natively(fmt: str, dtype: torch.dtype) -> None:
    x = hard_rows(200, 160, dtype)
    planes, scales, decode = record(200, 160, fmt, 1)
    valid = torch.from_numpy(np.random.default_rng(4).random(200) < 0.4)
    valid[:12] = False
    for native in (None, 0.0123) if fmt == "nvfp4" else (None,):
        want = host.guided_round(
            x.float().numpy(), planes, scales, np.array([decode]), valid.numpy(), format=fmt, bits=1, rule="paper",
            native_tensor_scale=native,
        )  # fmt: skip
        got = torch_op.guided_round(
            x.cuda(),
            *on_gpu(planes, scales),
            float(decode),
            valid.cuda(),
            format=fmt,
            bits=1,
            native_tensor_scale=native,
        )
        same_bits(got, torch.from_numpy(want).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("width", [48, 2048, 2880, 4096, 7168, 16_384, 66_048])
def test_wide_rows_some_of_them_native(width: int, bits: int, dtype: torch.dtype) -> None:
    """From rows that share a warp to rows of up to 1,024 threads, and one that these hold in two parts."""
    rows = 37 if width < 20_000 else 5
    planes, scales, decode = record(rows, width, "nvfp4", bits)
    x = (torch.randn(rows, width, generator=torch.Generator().manual_seed(12)) * 3).to(dtype)
    x[1, width - 1], x[2, 0] = 900.0, float("nan")
    valid = torch.arange(rows) % 3 == 0
    want = host.guided_round(
        x.float().numpy(), planes, scales, np.array([decode]), valid.numpy(), format="nvfp4", bits=bits, rule="paper"
    )
    p, s = on_gpu(planes, scales)
    got = torch_op.guided_round(x.cuda(), p, s, float(decode), valid.cuda(), format="nvfp4", bits=bits)
    same_bits(got, torch.from_numpy(want).to(dtype))


@pytest.mark.parametrize("bits", [1, 3, 4])
def test_record_rows_and_a_tensor_scale_per_row(bits: int) -> None:
    planes, scales, _ = record(50, 96, "nvfp4", bits)
    scale = np.random.default_rng(6).uniform(1e-3, 1e-2, 50).astype(np.float32)
    x = hard_rows(80, 96, torch.bfloat16)
    index = np.random.default_rng(7).integers(-1, 50, 80).astype(np.int32)
    want = host.guided_round(
        x.float().numpy(), planes, scales, scale, None, record_rows=index, format="nvfp4", bits=bits, rule="cell"
    )
    p, s, d, i = on_gpu(planes, scales, scale, index)
    got = torch_op.guided_round(x.cuda(), p, s, d, record_rows=i, format="nvfp4", bits=bits, rule="cell")
    same_bits(got, torch.from_numpy(want).to(torch.bfloat16))


def test_strided_rows_equal_their_contiguous_copy() -> None:
    planes, scales, decode = record(40, 64, "nvfp4", 1)
    p, s = on_gpu(planes, scales)
    whole = torch.randn(80, 256, device="cuda", dtype=torch.bfloat16)
    square = torch.randn(64, 40, device="cuda", dtype=torch.bfloat16)
    for view in (whole[::2, 64:128], whole[:40, 64:128], whole[:40, 65:129], square.t(), whole[:1, :64].expand(40, 64)):
        args = (p, s, float(decode))
        got = torch_op.guided_round(view, *args, format="nvfp4", bits=1)
        same_bits(got, torch_op.guided_round(view.contiguous(), *args, format="nvfp4", bits=1))


def test_in_place_and_overlap() -> None:
    planes, scales, decode = record(33, 64, "nvfp4", 1)
    p, s, d = on_gpu(planes, scales, np.array([decode]))
    x = torch.randn(34, 64, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.current_stream().cuda_stream
    want = torch_op.guided_round(x[:33], p, s, d, format="nvfp4", bits=1)
    with pytest.raises(InvalidRequest, match="overlap"):
        guided_round.guided_round(x[:33], p, s, d, out=x[1:], format="nvfp4", bits=1, stream=stream)
    guided_round.guided_round(x[:33], p, s, d, out=x[:33], format="nvfp4", bits=1, stream=stream)
    same_bits(x[:33], want)


def test_more_than_two_to_the_31_elements() -> None:
    rows, width = (1 << 31) // 2048 + 5, 2048
    if torch.cuda.mem_get_info()[0] < 14 << 30:
        pytest.skip("needs 14 GiB of device memory")
    x = torch.empty(rows, width, device="cuda", dtype=torch.bfloat16).normal_()
    planes = torch.randint(0, 256, (rows, 1, width // 8), device="cuda", dtype=torch.uint8)
    scales = torch.randint(0x30, 0x40, (rows, width // 16), device="cuda", dtype=torch.uint8)
    got = torch_op.guided_round(x, planes, scales, 1.0, format="nvfp4", bits=1)
    for part in (slice(0, 40), slice(rows - 40, rows)):
        want = codebook.guided_round(
            x[part].float().cpu().numpy(),
            planes[part].cpu().numpy(),
            scales[part].cpu().numpy(),
            1.0,
            format="nvfp4",
            bits=1,
        )
        same_bits(got[part], torch.from_numpy(want).to(torch.bfloat16))


def test_output_is_written_everywhere() -> None:
    planes, scales, decode = record(257, 112, "nvfp4", 1)
    p, s, d = on_gpu(planes, scales, np.array([decode]))
    x = torch.randn(257, 112, device="cuda", dtype=torch.bfloat16)
    out = torch.full_like(x, 12345.0)
    guided_round.guided_round(
        x, p, s, d, out=out, format="nvfp4", bits=1, stream=torch.cuda.current_stream().cuda_stream
    )
    assert not (out == 12345.0).any()


def test_division_by_multiplication_on_the_device() -> None:
    source = _module.source("rows.cuh") + (
        'extern "C" __global__ void divide(const unsigned* n, unsigned* q, rows::Divisor d) {'
        "  unsigned i = blockIdx.x * 256u + threadIdx.x; q[i] = rows::quotient(n[i], d); }"
    )
    cupy = _module.cupy()
    kernel = cupy.RawModule(code=source, options=("-DTS_INPUT=0", "-DTS_BLOCK=16", "-DTS_E8M0=0")).get_function(
        "divide"
    )
    n = np.random.default_rng(8).integers(0, 2**31, 1 << 16).astype(np.uint32)
    n[:4] = 0, 1, 2**31 - 1, 2**31 - 2
    for divisor in (1, 2, 3, 6, 7, 256, 360, 2047, 65_537, 2**31 - 1):
        q = cupy.empty_like(cupy.asarray(n))
        parameter = np.frombuffer(_launch.Divisor.of(divisor), dtype="V12")
        kernel((256,), (256,), (cupy.asarray(n), q, parameter))
        np.testing.assert_array_equal(cupy.asnumpy(q), n // divisor)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_discrepancy_equals_the_host(bits: int, fmt: str, dtype: torch.dtype) -> None:
    planes, scales, decode = record(200, 256, fmt, bits)
    x = hard_rows(200, 256, dtype)
    scales[10, 0], scales[11, 1] = 0, 0x7F if fmt == "nvfp4" else 255
    scales[12, 2] = 0x81 if fmt == "nvfp4" else 1
    mixed = torch.randn(200, 320, generator=torch.Generator().manual_seed(2)).to(dtype)
    mixed[:, 32:288] = x
    per_row = np.random.default_rng(9).uniform(0.5, 2, 200).astype(np.float32) * decode
    for rule in codebook.RULES if (fmt, dtype) == ("nvfp4", torch.bfloat16) and bits < 3 else ["paper"]:
        how = {"format": fmt, "bits": bits, "rule": rule}
        p, s = torch.from_numpy(planes), torch.from_numpy(scales)
        for rows, scale, valid in (
            (x, torch.tensor([decode]), None),
            (x, torch.tensor([decode]), torch.arange(200) % 3 != 1),
            (mixed[:, 32:288], torch.from_numpy(per_row), None),
        ):
            want = torch_op.discrepancy(rows, p, s, scale, valid, **how)
            held = None if valid is None else valid.cuda()
            on_device = mixed.cuda()[:, 32:288] if rows is not x else x.cuda()
            got = torch_op.discrepancy(on_device, p.cuda(), s.cuda(), scale.cuda(), held, **how).cpu()
            assert got[:7].tolist() == want[:7].tolist()
            np.testing.assert_allclose(got[7:].numpy(), want[7:].numpy(), rtol=1e-6)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (301, 48), (90, 2880), (40, 16_384)])
def test_discrepancy_of_any_width(rows: int, width: int, bits: int) -> None:
    """Rows that do and do not divide what a block takes at a time, less than that, and what is left over."""
    planes, scales, decode = record(rows, width, "nvfp4", bits)
    x = (torch.randn(rows, width, generator=torch.Generator().manual_seed(13)) * 3).to(torch.bfloat16)
    p, s = torch.from_numpy(planes), torch.from_numpy(scales)
    for valid in (None, torch.arange(rows) % 4 != 1):
        want = torch_op.discrepancy(x, p, s, float(decode), valid, format="nvfp4", bits=bits)
        held = None if valid is None else valid.cuda()
        got = torch_op.discrepancy(x.cuda(), p.cuda(), s.cuda(), float(decode), held, format="nvfp4", bits=bits).cpu()
        assert got[:7].tolist() == want[:7].tolist()
        np.testing.assert_allclose(got[7:].numpy(), want[7:].numpy(), rtol=1e-6)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_discrepancy_of_many_rows(bits: int) -> None:
    """Counters of a thread are emptied many times, and rows that all count must not overflow them."""
    rows, width = 40_000, 2048
    planes, scales, decode = record(64, width, "nvfp4", bits)
    x = torch.randn(64, width, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    x[:32] = (torch.randn(32, width, generator=torch.Generator().manual_seed(6)) * 30).to(torch.bfloat16)
    p, s = torch.from_numpy(planes), torch.from_numpy(scales)
    want = torch_op.discrepancy(x, p, s, float(decode), format="nvfp4", bits=bits) * (rows // 64)
    many = [part.cuda().repeat(rows // 64, *[1] * (part.ndim - 1)) for part in (x, p, s)]
    got = torch_op.discrepancy(*many, float(decode), format="nvfp4", bits=bits).cpu()
    assert got[:7].tolist() == want[:7].tolist()
    np.testing.assert_allclose(got[7:].numpy(), want[7:].numpy(), rtol=1e-6)
