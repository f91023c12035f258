"""Guidance inside a trainer: the oracle's bits forward, the identity backward, native rounding where nothing is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from trace_client.torch import GuidanceContext, guided_fake_quant
from trace_store import Site, codebook
from trace_store.errors import InvalidRequest

WIDTH = 64
SITE = Site(3, "moe_in", WIDTH)
FULL = Site(3, "k", WIDTH, form="full")
MX = Site(4, "v", WIDTH, block=32, scale="e8m0", form="b2")


@dataclass
class Batch:
    """A reader's answer by hand."""

    planes: dict[Site, Any] = field(default_factory=dict)
    scales: dict[Site, Any] = field(default_factory=dict)
    tensor_scales: dict[Site, Any] = field(default_factory=dict)
    valid: dict[Site, Any] = field(default_factory=dict)


def rollout_rows(site: Site, tokens: int, seed: int = 0) -> tuple[np.ndarray, Any, Any, Any]:
    """What the rollout saw at a site, and its record: x, planes, scales, tensor scale [tokens]."""
    x = np.random.default_rng(seed).standard_normal((tokens, site.width)).astype(np.float32)
    codes, scales, scale = codebook.quantize(x, format=site.format)
    planes = codebook.pack_full(codes) if site.form == "full" else codebook.pack(codes, bits=site.code_form.bits)
    return x, planes, scales, np.full(tokens, scale, np.float32)


def batch_of(*sites: Site, tokens: int = 6, invalid: tuple[int, ...] = ()) -> Batch:
    """Records of every site; the invalid rows hold what a reader leaves there: any bytes under a NaN scale."""
    batch = Batch()
    for site in sites:
        _, batch.planes[site], batch.scales[site], scale = rollout_rows(site, tokens)
        batch.valid[site] = np.ones(tokens, bool)
        batch.valid[site][list(invalid)] = False
        batch.tensor_scales[site] = np.where(batch.valid[site], scale, np.float32(np.nan)).astype(np.float32)
        batch.scales[site][list(invalid)] = 0xFF
    return batch


def trainer_rows(site: Site, tokens: int = 6) -> torch.Tensor:
    """The rollout's vectors with noise large enough to change codes."""
    x, *_ = rollout_rows(site, tokens)
    return torch.from_numpy(x + 0.05 * np.random.default_rng(9).standard_normal(x.shape).astype(np.float32))


@pytest.mark.parametrize("site", [SITE, FULL, MX], ids=lambda site: f"{site.form}-{site.format}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forward_is_the_oracle_in_the_type_of_x(site: Site, dtype: torch.dtype) -> None:
    _, planes, scales, scale = rollout_rows(site, 6)
    x = trainer_rows(site).to(dtype)
    bits = site.code_form.bits
    y = guided_fake_quant(x, planes, scales, scale, format=site.format, bits=bits)
    oracle = codebook.guided_round(x.float().numpy(), planes, scales, scale, format=site.format, bits=bits)
    assert y.dtype == dtype
    assert torch.equal(y, torch.from_numpy(oracle).to(dtype))
    nearest = codebook.rtn_round(x.float().numpy(), scales, scale, format=site.format)
    assert not np.array_equal(oracle, nearest), "the noise must be large enough for guidance to matter"


def test_gradient_passes_unchanged() -> None:
    _, planes, scales, scale = rollout_rows(SITE, 6)
    x = trainer_rows(SITE).requires_grad_()
    weight = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))
    (guided_fake_quant(x, planes, scales, scale, format="nvfp4", bits=1) * weight).sum().backward()
    assert torch.equal(x.grad, weight)


def test_leading_axes_flatten_to_rows() -> None:
    _, planes, scales, scale = rollout_rows(SITE, 6)
    x = trainer_rows(SITE)
    flat = guided_fake_quant(x, planes, scales, scale, format="nvfp4", bits=1)
    deep = guided_fake_quant(x.view(2, 3, WIDTH), planes, scales, scale, format="nvfp4", bits=1)
    assert torch.equal(deep, flat.view(2, 3, WIDTH))


def test_torch_tensors_and_numpy_arrays_give_the_same() -> None:
    _, planes, scales, scale = rollout_rows(SITE, 6)
    valid = np.array([True, False, True, True, True, False])
    x = trainer_rows(SITE)
    of_arrays = guided_fake_quant(x, planes, scales, scale, valid, format="nvfp4", bits=1)
    tensors = [torch.from_numpy(array) for array in (planes, scales, scale, valid)]
    assert torch.equal(guided_fake_quant(x, *tensors, format="nvfp4", bits=1), of_arrays)


@pytest.mark.parametrize("native_scale", [None, 0.0025])
def test_rows_without_a_record_are_rounded_natively(native_scale: float | None) -> None:
    batch, x = batch_of(SITE, invalid=(1, 4)), trainer_rows(SITE)
    y = guided_fake_quant(
        x, batch.planes[SITE], batch.scales[SITE], batch.tensor_scales[SITE], batch.valid[SITE],
        format="nvfp4", bits=1, native_tensor_scale=native_scale,
    )  # fmt: skip
    native = codebook.native_round(x.numpy(), format="nvfp4", tensor_scale=native_scale)
    assert np.array_equal(y[[1, 4]].numpy(), native[[1, 4]])
    whole = batch_of(SITE)
    guided = guided_fake_quant(
        x, whole.planes[SITE], whole.scales[SITE], whole.tensor_scales[SITE], format="nvfp4", bits=1
    )
    assert torch.equal(y[[0, 2, 3, 5]], guided[[0, 2, 3, 5]])


def test_no_valid_row_equals_native_rounding() -> None:
    batch, x = batch_of(SITE, invalid=tuple(range(6))), trainer_rows(SITE)
    y = GuidanceContext(batch).round(SITE, x)
    assert np.array_equal(y.numpy(), codebook.native_round(x.numpy(), format="nvfp4"))


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("planes", {"planes": 5}),
        ("scales", {"scales": 5}),
        ("valid", {"valid": 5}),
        ("tensor_scale", {"tensor_scale": 5}),
    ],
)
def test_a_wrong_number_of_rows_names_the_argument(argument: str, change: dict[str, int]) -> None:
    _, planes, scales, scale = rollout_rows(SITE, 6)
    arguments = {"planes": planes, "scales": scales, "tensor_scale": scale, "valid": np.ones(6, bool)}
    arguments |= {name: arguments[name][:rows] for name, rows in change.items()}
    with pytest.raises(InvalidRequest) as caught:
        guided_fake_quant(trainer_rows(SITE), **arguments, format="nvfp4", bits=1)
    assert caught.value.argument == argument


def test_integer_input_is_refused() -> None:
    _, planes, scales, scale = rollout_rows(SITE, 6)
    with pytest.raises(InvalidRequest, match="float tensor"):
        guided_fake_quant(torch.ones(6, WIDTH, dtype=torch.int32), planes, scales, scale, format="nvfp4", bits=1)


def test_context_counts_guided_and_native_rows() -> None:
    ctx = GuidanceContext(batch_of(SITE, invalid=(0, 1)))
    ctx.round(SITE, trainer_rows(SITE))
    ctx.round(MX, trainer_rows(MX))
    report = ctx.report()
    assert (report[SITE].guided, report[SITE].native) == (4, 2)
    assert (report[MX].guided, report[MX].native) == (0, 6)


def test_context_rounds_an_absent_site_natively_with_its_static_scale() -> None:
    x = trainer_rows(FULL)
    y = GuidanceContext(batch_of(SITE), native_tensor_scale={FULL: 0.01}).round(FULL, x)
    assert np.array_equal(y.numpy(), codebook.native_round(x.numpy(), format="nvfp4", tensor_scale=0.01))


def test_attached_module_sees_rounded_input_until_the_context_ends() -> None:
    batch, x = batch_of(SITE), trainer_rows(SITE)
    seen = torch.nn.Identity()
    with GuidanceContext(batch) as ctx:
        ctx.attach(seen, SITE)
        guided = seen(x)
    assert torch.equal(guided, GuidanceContext(batch).round(SITE, x))
    assert not torch.equal(guided, x)
    assert torch.equal(seen(x), x)


def test_one_hook_can_be_removed_alone() -> None:
    batch, x = batch_of(SITE, FULL), trainer_rows(SITE)
    first, second = torch.nn.Identity(), torch.nn.Identity()
    with GuidanceContext(batch) as ctx:
        ctx.attach(first, SITE).remove()
        ctx.attach(second, FULL)
        assert torch.equal(first(x), x)
        assert not torch.equal(second(x), x)


def test_recompute_in_backward_gives_the_gradient_of_the_plain_pass() -> None:
    batch = batch_of(SITE, invalid=(2,))
    linear = torch.nn.Linear(WIDTH, 4, bias=False)
    gradients = []
    for recompute in (False, True):
        x = trainer_rows(SITE).requires_grad_()
        linear.zero_grad()
        with GuidanceContext(batch) as ctx:
            ctx.attach(linear, SITE)
            y = checkpoint(linear, x, use_reentrant=False) if recompute else linear(x)
            y.square().sum().backward()
        gradients.append((x.grad, linear.weight.grad.clone()))
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert torch.equal(gradients[0][1], gradients[1][1])


def test_a_width_that_is_not_the_sites_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="64 wide") as caught:
        GuidanceContext(batch_of(SITE)).round(SITE, torch.ones(6, 32))
    assert caught.value.argument == "x"


def test_a_site_without_a_rounding_format_is_refused() -> None:
    site = Site(0, "x", WIDTH, block=32, scale="e4m3")
    with pytest.raises(InvalidRequest, match="no rounding format"):
        GuidanceContext(Batch()).round(site, torch.ones(6, WIDTH))
