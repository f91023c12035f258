"""Packing and quantizing on the GPU, byte for byte the host's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trace_kernels import host, pack, quantize, torch_op
from trace_kernels.layout import KVPage, vllm_kv_page
from trace_store import codebook
from trace_store.errors import InvalidRequest

pytest.importorskip("cupy", reason="GPU tests need CuPy and a CUDA device")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


def codes_and_scales(rows: int, width: int, block: int = 16, seed: int = 0) -> tuple[Any, Any]:
    """Random whole-code rows [R, W / 2] and scales [R, W / block]; every byte occurs."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (rows, width // 2), np.uint8), rng.integers(0, 256, (rows, width // block), np.uint8)


def planes_of(codes: Any, bits: int) -> Any:
    return codes if bits == 4 else codebook.pack(codebook.unpack_full(codes), bits=bits)


def cuda(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).cuda()


@pytest.mark.parametrize("layout", ["linear", "128x4", "8x4"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize(("rows", "width", "fmt"), [
    (300, 2048, "nvfp4"), (1, 16, "nvfp4"), (130, 48, "nvfp4"), (5, 5472, "nvfp4"), (64, 512, "mxfp4"),
    (257, 96, "mxfp4"), (70_000, 16, "nvfp4"), (9, 16_384, "mxfp4_block16"), (0, 64, "nvfp4"),
])  # fmt: skip
def test_layouts(rows: int, width: int, fmt: str, bits: int, layout: str) -> None:
    codes, scales = codes_and_scales(rows, width, codebook.FORMATS[fmt].block)
    held = cuda(host.swizzle(scales, layout, padding=0xFF)) if layout != "linear" else cuda(scales)
    planes, out, _ = torch_op.pack(cuda(codes), held, width=width, format=fmt, bits=bits, layout=layout)
    np.testing.assert_array_equal(planes.cpu().numpy(), planes_of(codes, bits))
    np.testing.assert_array_equal(out.cpu().numpy(), scales)


def test_disguised_types() -> None:
    codes, scales = codes_and_scales(40, 256)
    want = planes_of(codes, 1)
    c, s = cuda(codes), cuda(scales)
    for codes_view in (c, c.view(torch.int32), c.view(torch.int8)):
        for scales_view in (s, s.view(torch.float8_e4m3fn), s.view(torch.int32)):
            planes, out, _ = torch_op.pack(codes_view, scales_view, width=256, format="nvfp4", bits=1)
            np.testing.assert_array_equal(planes.cpu().numpy(), want)
            np.testing.assert_array_equal(out.cpu().numpy(), scales)
    with pytest.raises(InvalidRequest, match="no FP4 code"):
        torch_op.pack(c.view(torch.float8_e4m3fn), s, width=256, format="nvfp4", bits=1)
    with pytest.raises(InvalidRequest, match="E4M3"):
        torch_op.pack(c, s.view(torch.bfloat16), width=256, format="nvfp4", bits=1)


def test_strided_rows() -> None:
    codes, scales = codes_and_scales(60, 512)
    c, s = cuda(codes), cuda(scales)
    planes, out, _ = torch_op.pack(c[::2, 64:192], s[::2, 8:24], width=256, format="nvfp4", bits=1)
    np.testing.assert_array_equal(planes.cpu().numpy(), planes_of(codes[::2, 64:192], 1))
    np.testing.assert_array_equal(out.cpu().numpy(), scales[::2, 8:24])
    with pytest.raises(InvalidRequest, match="contiguous rows"):
        torch_op.pack(cuda(codes[:32]).t(), s, width=64, format="nvfp4", bits=1)


@pytest.mark.parametrize("heads", [1, 2, 5])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4_block16"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_sglang_pool_by_slot(heads: int, fmt: str, index: torch.dtype) -> None:
    slots_held, head_dim = 500, 64
    codes, scales = codes_and_scales(slots_held, heads * head_dim)
    pool = cuda(codes).view(slots_held, heads, head_dim // 2)
    held = cuda(scales).view(slots_held, heads, -1) if fmt == "nvfp4" else cuda(scales)
    slots = np.random.default_rng(3).permutation(slots_held)[:130]
    planes, out, _ = torch_op.pack(
        pool, held, width=heads * head_dim, format=fmt, bits=1, slots=torch.from_numpy(slots).to("cuda", index)
    )
    np.testing.assert_array_equal(planes.cpu().numpy(), planes_of(codes[slots], 1))
    np.testing.assert_array_equal(out.cpu().numpy(), scales[slots])


def test_heads_apart_in_memory() -> None:
    codes, scales = codes_and_scales(90, 4 * 64)
    pool = cuda(codes).view(90, 4, 32).transpose(0, 1).contiguous().transpose(0, 1)
    held = cuda(scales).view(90, 4, 4).transpose(0, 1).contiguous().transpose(0, 1)
    planes, out, _ = torch_op.pack(pool, held, width=256, format="nvfp4", bits=2)
    np.testing.assert_array_equal(planes.cpu().numpy(), planes_of(codes, 2))
    np.testing.assert_array_equal(out.cpu().numpy(), scales)


@pytest.mark.parametrize("half", ["k", "v"])
@pytest.mark.parametrize("order", ["nhd", "hnd"])
@pytest.mark.parametrize("architecture", ["sm_100", "sm_120"])
def test_vllm_pages(half: str, order: str, architecture: str) -> None:
    page = vllm_kv_page(half, block_size=16, heads=3, head_dim=128, order=order, architecture=architecture)
    cache = np.random.default_rng(4).integers(0, 256, (20, page.page_bytes), np.uint8)
    slots = np.random.default_rng(5).permutation(320)[:77]
    codes, scales = host.page_rows(cache, page, slots)
    held = cuda(cache)
    planes, out, _ = torch_op.pack(
        held, held, width=384, format="nvfp4", bits=1, slots=cuda(slots.astype(np.int64)), page=page
    )
    np.testing.assert_array_equal(planes.cpu().numpy(), planes_of(codes, 1))
    np.testing.assert_array_equal(out.cpu().numpy(), scales)


def test_slots_and_dest_rows_below_zero_are_skipped() -> None:
    codes, scales = codes_and_scales(30, 64)
    slots = torch.tensor([4, -1, 7, 9], dtype=torch.int32, device="cuda")
    dest = torch.tensor([3, 0, -1, 1], dtype=torch.int64, device="cuda")
    planes = torch.full((5, 1, 8), 0xAA, dtype=torch.uint8, device="cuda")
    out = torch.full((5, 4), 0xAA, dtype=torch.uint8, device="cuda")
    decode = torch.full((5,), -1.0, device="cuda")
    scale = torch.tensor([2.0, 4.0, 8.0, 16.0], device="cuda")
    torch_op.pack(
        cuda(codes), cuda(scales), width=64, format="nvfp4", bits=1, slots=slots, dest_rows=dest, global_scale=scale,
        global_scale_kind="encode", out=(planes, out, decode),
    )  # fmt: skip
    want = planes_of(codes, 1)
    assert planes[3].cpu().numpy().tobytes() == want[4].tobytes()
    assert planes[1].cpu().numpy().tobytes() == want[9].tobytes()
    assert out[3].cpu().numpy().tobytes() == scales[4].tobytes()
    assert decode.tolist() == [-1.0, 1 / 16, -1.0, 0.5, -1.0]
    assert bool((planes[[0, 2, 4]] == 0xAA).all())
    assert bool((out[[0, 2, 4]] == 0xAA).all())


@pytest.mark.parametrize("layout", ["linear", "128x4", "8x4"])
def test_global_scales_become_decode_scales(layout: str) -> None:
    codes, scales = codes_and_scales(40, 512)
    held = cuda(host.swizzle(scales, layout)) if layout != "linear" else cuda(scales)
    encode = torch.tensor([2688.0 / 7], device="cuda")
    args = {"width": 512, "format": "nvfp4", "bits": 1, "layout": layout}
    *_, decode = torch_op.pack(cuda(codes), held, global_scale=encode, global_scale_kind="encode", **args)
    assert decode is not None
    assert decode.tolist() == (1 / encode).tolist()
    per_token = torch.rand(40, device="cuda")
    *_, decode = torch_op.pack(cuda(codes), held, global_scale=per_token, **args)
    assert decode is not None
    assert torch.equal(decode, per_token)
    with pytest.raises(InvalidRequest, match="expert"):
        torch_op.pack(cuda(codes), held, global_scale=torch.rand(8, device="cuda"), **args)


def test_many_sites_in_one_call() -> None:
    sites, want = [], []
    for number in range(47):
        width = (256, 2048, 48)[number % 3]
        codes, scales = codes_and_scales(64 + number, width, seed=number)
        layout = ("linear", "128x4", "linear", "8x4")[number % 4]
        held = cuda(host.swizzle(scales, layout)) if layout != "linear" else cuda(scales)
        planes = torch.empty(64 + number, 1, width // 8, dtype=torch.uint8, device="cuda")
        out = torch.empty(64 + number, width // 16, dtype=torch.uint8, device="cuda")
        sites.append(pack.PackSite(cuda(codes), held, planes, out, width, "nvfp4", layout))
        want.append((planes_of(codes, 1), scales))
    torch_op.pack_sites(sites, bits=1, stream=torch.cuda.current_stream().cuda_stream)
    for site, (planes, scales) in zip(sites, want, strict=True):
        np.testing.assert_array_equal(site.planes.cpu().numpy(), planes)
        np.testing.assert_array_equal(site.out_scales.cpu().numpy(), scales)


def test_refusals_name_the_argument() -> None:
    codes, scales = codes_and_scales(32, 64)
    c, s = cuda(codes), cuda(scales)
    args = {"width": 64, "format": "nvfp4", "bits": 1}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("layout", {"layout": "per_expert"}),
        ("layout", {"layout": "swizzled"}),
        ("scales", {"layout": "128x4"}),
        ("width", {"width": 60}),
        ("codes", {"width": 128}),
        ("global_scale_kind", {"global_scale": torch.ones(1, device="cuda"), "global_scale_kind": "inverse"}),
        ("slots", {"page": KVPage(16, 1, 64, 16 * 36, 0, 512, True)}),
    ]
    for argument, change in cases:
        with pytest.raises(InvalidRequest) as caught:
            torch_op.pack(c, s, **{**args, **change})
        assert caught.value.argument == argument, (argument, change, caught.value)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp4_block16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_quantize_equals_the_oracle(fmt: str, dtype: torch.dtype, bits: int) -> None:
    x = torch.randn(203, 352, generator=torch.Generator().manual_seed(1))
    x[3], x[4, ::2], x[5] = 0, -0.0, x[5] * 1e-7
    x[6, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x[7, :8] = -x[6, :8]
    x[8, 0] = 6e4
    x = x.to(dtype)
    per_row = torch.rand(203, generator=torch.Generator().manual_seed(2)) + 1e-3
    for scale in (None, torch.tensor([0.0123]), per_row) if fmt == "nvfp4" else (None,):
        planes, scales, decode = torch_op.quantize(x, scale, format=fmt, bits=bits)
        got = torch_op.quantize(x.cuda(), None if scale is None else scale.cuda(), format=fmt, bits=bits)
        for ours, theirs in zip(got, (planes, scales, decode), strict=True):
            assert torch.equal(ours.cpu(), theirs)


def test_quantize_strided_and_poisoned_blocks() -> None:
    whole = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    view = whole[::2, 128:256]
    for ours, theirs in zip(
        torch_op.quantize(view, format="nvfp4"), torch_op.quantize(view.contiguous(), format="nvfp4"), strict=True
    ):
        assert torch.equal(ours, theirs)
    for position in (0, 15):
        for bad in (float("nan"), float("inf"), float("-inf")):
            x = torch.ones(4, 64, device="cuda", dtype=torch.bfloat16)
            x[2, 16 + position] = bad
            _, scales, decode = torch_op.quantize(x, format="nvfp4")
            assert scales[2].tolist() == [0x7E, 0x7F, 0x7E, 0x7E]
            assert torch.isfinite(decode).all()
            _, scales, _ = torch_op.quantize(x, format="mxfp4")
            assert scales[2].tolist() == [255, 125]


def test_quantize_wants_what_it_needs() -> None:
    x = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
    planes = torch.empty(4, 32, dtype=torch.uint8, device="cuda")
    scales = torch.empty(4, 4, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    with pytest.raises(InvalidRequest, match="workspace"):
        quantize.quantize(x, planes=planes, scales=scales, format="nvfp4", stream=stream)
    with pytest.raises(InvalidRequest, match="tensor scale"):
        quantize.quantize(x, torch.ones(1, device="cuda"), planes=planes, scales=scales, format="mxfp4", stream=stream)
