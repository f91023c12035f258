"""The torch operators on CPU tensors, where they run the NumPy oracle, and what torch itself asks of an operator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trace_kernels import host, torch_op
from trace_kernels.discrepancy import Discrepancy
from trace_kernels.layout import vllm_kv_page
from trace_kernels.pack import PackSite
from trace_store import codebook
from trace_store.errors import InvalidRequest, Unsupported

NVFP4 = {"format": "nvfp4", "bits": 1}


def record(rows: int = 12, width: int = 64, fmt: str = "nvfp4", bits: int = 1) -> tuple[torch.Tensor, ...]:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)) * 2
    return torch_op.quantize(x, format=fmt, bits=bits)


def activations(rows: int = 12, width: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(rows, width, generator=torch.Generator().manual_seed(1)) * 2).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_guided_round_is_the_oracle_rounded_once(dtype: torch.dtype, bits: int) -> None:
    planes, scales, decode = record(bits=bits)
    x = activations(dtype=dtype)
    want = codebook.guided_round(
        x.float().numpy(), planes.numpy(), scales.numpy(), decode.numpy(), format="nvfp4", bits=bits, rule="cell"
    )
    got = torch_op.guided_round(x, planes, scales, decode, format="nvfp4", bits=bits, rule="cell")
    assert torch.equal(got, torch.from_numpy(want).to(dtype))


def test_rows_without_a_record_round_natively() -> None:
    planes, scales, decode = record()
    x = activations()
    valid = torch.arange(12) % 2 == 0
    y = torch_op.guided_round(x, planes, scales, decode, valid, **NVFP4)
    assert torch.equal(y[1::2], torch.from_numpy(codebook.native_round(x[1::2].numpy(), format="nvfp4")))
    y = torch_op.guided_round(x, planes, scales, decode, valid, native_tensor_scale=0.01, **NVFP4)
    native = codebook.native_round(x[1::2].numpy(), format="nvfp4", tensor_scale=0.01)
    assert torch.equal(y[1::2], torch.from_numpy(native))


def test_record_rows_place_records() -> None:
    planes, scales, decode = record(rows=5)
    x = activations()
    index = torch.tensor([4, 3, 2, 1, 0, -1, 0, 0, 1, 1, -1, 4], dtype=torch.int32)
    y = torch_op.guided_round(x, planes, scales, decode.expand(5), record_rows=index, **NVFP4)
    for row, source in enumerate(index.tolist()):
        if source < 0:
            want = codebook.native_round(x[row : row + 1].numpy(), format="nvfp4")
        else:
            at = slice(source, source + 1)
            want = codebook.guided_round(
                x[row : row + 1].numpy(), planes[at].numpy(), scales[at].numpy(), decode.numpy(), **NVFP4
            )
        assert torch.equal(y[row], torch.from_numpy(want)[0])


def test_leading_axes_flatten_and_strides_do_not_matter() -> None:
    planes, scales, decode = record()
    x = activations(12, 128)[:, ::2]
    y = torch_op.guided_round(x.reshape(3, 4, 64), planes, scales, decode, **NVFP4)
    assert y.shape == (3, 4, 64)
    assert torch.equal(y.reshape(12, 64), torch_op.guided_round(x.contiguous(), planes, scales, decode, **NVFP4))


def test_numbers_and_arrays_stand_in_for_tensors() -> None:
    planes, scales, decode = record()
    x = activations()
    y = torch_op.guided_round(x, planes.numpy(), scales.numpy(), float(decode), **NVFP4)
    assert torch.equal(y, torch_op.guided_round(x, planes, scales, decode, **NVFP4))


def test_gradient_is_straight_through_and_reaches_x_alone() -> None:
    planes, scales, decode = record()
    x, weight = activations().requires_grad_(), torch.randn(12, 64)
    decode = decode.clone().requires_grad_()
    (torch_op.guided_round(x, planes, scales, decode, **NVFP4) * weight).sum().backward()
    assert torch.equal(x.grad, weight)
    assert decode.grad is None
    x.grad = None
    (torch_op.rtn_round(x, scales, decode, format="nvfp4") * weight).sum().backward()
    assert torch.equal(x.grad, weight)


def test_second_derivative_is_refused() -> None:
    planes, scales, decode = record()
    x = activations().requires_grad_()
    y = torch_op.guided_round(x, planes, scales, decode, **NVFP4)
    with pytest.raises(Unsupported, match="second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_compiles_without_a_graph_break() -> None:
    planes, scales, decode = record()

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch_op.guided_round(x * 2, planes, scales, decode, **NVFP4) * 3

    x = activations().requires_grad_()
    y = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(y, step(x))
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.unique().tolist() == [6.0]


@pytest.mark.parametrize("scale", [0.37, 2])
def test_compiles_with_a_number_for_a_tensor_scale(scale: float) -> None:
    planes, scales, _ = record()
    x = activations()

    def step(x: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
        guided = torch_op.guided_round(x, planes, scales, scale, native_tensor_scale=scale, **NVFP4)
        nearest = torch_op.rtn_round(x, scales, scale, format="nvfp4")
        sums = torch_op.discrepancy(x, planes, scales, scale, **NVFP4)
        return guided, nearest, sums, *torch_op.quantize(x, scale, format="nvfp4")

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(compiled(x, scale), step(x, torch.tensor([float(scale)])), strict=True):
        assert torch.equal(ours, theirs)


def test_operators_pass_torchs_own_checks() -> None:
    planes, scales, decode = record()
    x = activations().requires_grad_()
    operators = torch.ops.trace_store
    torch.library.opcheck(
        operators.guided_round.default, (x, planes, scales, decode, None, None, None, "nvfp4", 1, "paper")
    )
    torch.library.opcheck(operators.rtn_round.default, (x, scales, decode, "nvfp4"))
    plain = x.detach()
    torch.library.opcheck(operators.quantize.default, (plain, None, "nvfp4", 2))
    torch.library.opcheck(operators.discrepancy.default, (plain, planes, scales, decode, None, "nvfp4", 1, "paper"))
    codes, _, _ = torch_op.quantize(plain, format="nvfp4")
    outputs = (torch.zeros_like(planes), torch.zeros_like(scales), torch.zeros(1))
    torch.library.opcheck(
        operators.pack.default,
        (codes, scales, *outputs, decode, None, None, [], 64, 12, "nvfp4", 1, "linear", "decode"),
    )


@pytest.mark.parametrize("layout", ["linear", "128x4", "8x4"])
@pytest.mark.parametrize("bits", [1, 4])
def test_pack_undoes_the_layout(layout: str, bits: int) -> None:
    codes, scales, decode = record(rows=130, width=48, bits=4)
    held = torch.from_numpy(host.swizzle(scales.numpy(), layout, padding=0xFF))
    held = held if layout != "linear" else scales
    planes, out, given = torch_op.pack(
        codes, held, width=48, format="nvfp4", bits=bits, layout=layout, global_scale=1 / decode,
        global_scale_kind="encode",
    )  # fmt: skip
    assert torch.equal(planes, torch.from_numpy(host.pack_rows(codes.numpy(), bits)))
    assert torch.equal(out, scales)
    assert given is not None
    assert given.tolist() == (1 / (1 / decode)).tolist()


def test_pack_by_slot_into_rows_of_a_ring() -> None:
    codes, scales, _ = record(rows=20, bits=4)
    planes = torch.zeros(6, 1, 8, dtype=torch.uint8)
    out = torch.zeros(6, 4, dtype=torch.uint8)
    slots, dest = torch.tensor([7, -1, 3, 9]), torch.tensor([5, 0, 1, -1], dtype=torch.int32)
    torch_op.pack(codes, scales, width=64, slots=slots, dest_rows=dest, out=(planes, out, None), **NVFP4)
    want = torch.from_numpy(host.pack_rows(codes.numpy(), 1))
    assert torch.equal(planes[[5, 1]], want[[7, 3]])
    assert torch.equal(out[[5, 1]], scales[[7, 3]])
    assert not planes[[0, 2, 3, 4]].any()
    assert not out[[0, 2, 3, 4]].any()


def test_pack_reads_vllm_pages() -> None:
    page = vllm_kv_page("v", block_size=16, heads=2, head_dim=64, order="hnd", architecture="sm_100")
    cache = torch.randint(0, 256, (4, page.page_bytes), dtype=torch.uint8)
    slots = torch.tensor([3, 17, 63])
    codes, scales = host.page_rows(cache.numpy(), page, slots.numpy())
    planes, out, _ = torch_op.pack(cache, cache, width=128, slots=slots, page=page, **NVFP4)
    assert torch.equal(planes, torch.from_numpy(host.pack_rows(codes, 1)))
    assert torch.equal(out, torch.from_numpy(scales))


def test_discrepancy_counts_what_guidance_corrects() -> None:
    scales, one = torch.full((1, 4), 0x38, dtype=torch.uint8), torch.ones(1)
    x = torch.zeros(1, 64)
    x[0, :4] = torch.tensor([2.49, -2.49, 0.1, 5.5])
    codes = np.zeros((1, 64), np.uint8)
    codes[0, :4] = [5, 4, 9, 7]  # recorded 3, +2 (other side of zero), -0.5, 6
    planes = torch.from_numpy(codebook.pack_full(codes))
    sums = Discrepancy.of(torch_op.discrepancy(x, planes, scales, one, format="nvfp4", bits=4).tolist())
    assert (sums.elements, sums.mismatched, sums.adjacent) == (64, 3, 2)
    assert (sums.raised, sums.lowered, sums.left, sums.flipped) == (1, 0, 2, 2)
    assert sums.rtn_error == pytest.approx(1 + 16 + 0.25)
    assert sums.left_error == pytest.approx(16 + 0.25)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"format": "fp4"}, "format"),
        ({"bits": 5}, "bits"),
        ({"rule": "nearest"}, "rule"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], argument: str) -> None:
    planes, scales, decode = record()
    with pytest.raises(InvalidRequest) as caught:
        torch_op.guided_round(activations(), planes, scales, decode, **{**NVFP4, **change})
    assert caught.value.argument == argument


@pytest.mark.parametrize("call", ["guided_round", "discrepancy"])
@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"valid": torch.ones(7, dtype=torch.bool)}, "valid"),
        ({"valid": torch.ones(12, dtype=torch.float32)}, "valid"),
        ({"planes": torch.zeros(12, 1, 16, dtype=torch.uint8)}, "planes"),
        ({"planes": torch.zeros(12, 1, 8, dtype=torch.float8_e4m3fn)}, "planes"),
        ({"scales": torch.zeros(12, 8, dtype=torch.uint8)}, "scales"),
        ({"scales": torch.zeros(12, 4, dtype=torch.bfloat16)}, "scales"),
        ({"tensor_scale": torch.ones(5)}, "tensor_scale"),
        ({"x": torch.zeros(12, 64, dtype=torch.float64)}, "x"),
        ({"x": torch.zeros(12, 60)}, "x"),
    ],
)
def test_cpu_tensors_are_refused_as_cuda_tensors_are(call: str, change: dict[str, Any], argument: str) -> None:
    planes, scales, decode = record()
    args = {"x": activations(), "planes": planes, "scales": scales, "tensor_scale": decode, **NVFP4, **change}
    with pytest.raises(InvalidRequest) as caught:
        getattr(torch_op, call)(**args)
    assert caught.value.argument == argument, caught.value


def test_record_rows_out_of_range_are_named() -> None:
    planes, scales, decode = record(rows=5)
    index = torch.tensor([0, 1, 5] + [0] * 9, dtype=torch.int32)
    with pytest.raises(InvalidRequest, match="largest=5 rows=5") as caught:
        torch_op.guided_round(activations(), planes, scales, decode, record_rows=index, **NVFP4)
    assert caught.value.argument == "record_rows"


def pack_arguments(**change: Any) -> dict[str, Any]:
    codes, scales, _ = record(rows=8, bits=4)
    return {"codes": codes, "scales": scales, "width": 64, **NVFP4, **change}


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"codes": torch.zeros(8, 32, dtype=torch.float8_e4m3fn)}, "codes"),
        ({"codes": torch.zeros(8, 16, dtype=torch.bfloat16)}, "codes"),
        ({"codes": torch.zeros(4, 64, dtype=torch.uint8), "scales": torch.zeros(8, 4, dtype=torch.uint8)}, "codes"),
        ({"scales": torch.zeros(8, 2, dtype=torch.bfloat16)}, "scales"),
        ({"scales": torch.zeros(4, 8, dtype=torch.uint8)}, "scales"),
        ({"scales": torch.zeros(8, 4, dtype=torch.uint8), "layout": "128x4"}, "scales"),
        ({"global_scale": torch.ones(1), "global_scale_kind": "inverse"}, "global_scale_kind"),
        ({"global_scale": torch.ones(3)}, "global_scale"),
        ({"tokens": 9}, "codes"),
        ({"slots": torch.tensor([0, 1, 8])}, "slots"),
        ({"slots": torch.tensor([0.0, 1.0])}, "slots"),
        ({"dest_rows": torch.tensor([0, 1, 2, 3, 4, 5, 6, 8])}, "dest_rows"),
        ({"width": 60}, "width"),
        ({"bits": 5}, "bits"),
    ],
)  # fmt: skip
def test_packing_cpu_tensors_refuses_what_the_gpu_refuses(change: dict[str, Any], argument: str) -> None:
    args = pack_arguments(**change)
    with pytest.raises(InvalidRequest) as caught:
        torch_op.pack(**args)
    assert caught.value.argument == argument, caught.value


def test_a_refused_pack_writes_nothing() -> None:
    planes, out = torch.zeros(8, 1, 8, dtype=torch.uint8), torch.zeros(8, 4, dtype=torch.uint8)
    with pytest.raises(InvalidRequest, match="slots"):
        torch_op.pack(**pack_arguments(slots=torch.arange(1, 9), out=(planes, out, None)))
    assert not planes.any()
    assert not out.any()


def test_vllm_slots_beyond_the_cache_are_named() -> None:
    page = vllm_kv_page("v", block_size=16, heads=2, head_dim=64, order="hnd", architecture="sm_100")
    cache = torch.zeros(4, page.page_bytes, dtype=torch.uint8)
    with pytest.raises(InvalidRequest, match="largest=64 rows=64"):
        torch_op.pack(cache, cache, width=128, slots=torch.tensor([64]), page=page, **NVFP4)


def test_numpy_sites_are_checked_too() -> None:
    site = PackSite(
        np.zeros((8, 64), np.uint8), np.zeros((8, 4), np.uint8), np.zeros((8, 1, 8), np.uint8),
        np.zeros((8, 4), np.uint8), 64, "nvfp4",
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match="row size"):
        host.pack(site, bits=1)


def test_other_devices_are_refused() -> None:
    planes, scales, decode = record()
    with pytest.raises(Unsupported, match="device=meta"):
        torch_op._on_gpu(torch.empty(1, device="meta"))
    with pytest.raises(InvalidRequest, match="layout"):
        torch_op.pack(planes, scales, width=64, layout="per_expert", **NVFP4)
    assert decode.shape == (1,)
