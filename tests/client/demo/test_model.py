"""Taps: they see what the library's model computes, and what they return is what it goes on with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trace_client.demo.model import ModelSize, calibrate, capture, forward, quantized_weights
from trace_store import codebook


class Watcher:
    """Remembers everything; ``change`` replaces the vectors of one (layer, kind)."""

    def __init__(self, change: tuple[int, str] | None = None, experts: torch.Tensor | None = None) -> None:
        self.seen: list[tuple[int, str]] = []
        self.values: dict[tuple[int, str], torch.Tensor] = {}
        self.change, self.experts = change, experts

    def route(self, layer: int, experts: torch.Tensor) -> torch.Tensor:
        self.values[layer, "route"] = experts
        return experts if self.experts is None else self.experts

    def round(self, layer: int, kind: str, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((layer, kind))
        self.values[layer, kind] = x
        return x * 1.5 if (layer, kind) == self.change else x


TOKENS = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))


def logits_with(model: Any, tap: Watcher) -> torch.Tensor:
    with torch.no_grad(), capture(model, tap) as cache:
        return forward(model, TOKENS, cache)


def test_a_passive_tap_sees_every_site_in_order_and_changes_nothing(model: Any, size: ModelSize) -> None:
    tap = Watcher()
    logits = logits_with(model, tap)
    with torch.no_grad():
        assert torch.equal(logits, model(input_ids=TOKENS).logits)
    assert tap.seen == size.site_keys()
    assert {key: tuple(x.shape) for key, x in tap.values.items() if key[1] != "route"} == {
        (layer, kind): (18, size.width(kind)) for layer, kind in size.site_keys()
    }


@pytest.mark.parametrize("kind", ["k", "v", "moe_in"])
def test_what_a_tap_returns_is_used(model: Any, kind: str) -> None:
    plain, changed = Watcher(), Watcher(change=(1, kind))
    assert not torch.equal(logits_with(model, plain), logits_with(model, changed))
    assert torch.equal(plain.values[1, kind], changed.values[1, kind])
    assert not torch.equal(plain.values[2, "moe_in"], changed.values[2, "moe_in"])


def test_the_router_sees_the_vector_before_rounding(model: Any) -> None:
    plain, changed = Watcher(), Watcher(change=(0, "moe_in"))
    logits_with(model, plain), logits_with(model, changed)
    assert torch.equal(plain.values[0, "route"], changed.values[0, "route"])


def test_replayed_routing_is_weighted_by_the_models_own_logits(model: Any) -> None:
    own = Watcher()
    logits = logits_with(model, own)
    replay = Watcher()
    replay.route = lambda layer, experts: own.values[layer, "route"].clone()  # type: ignore[method-assign]
    torch.testing.assert_close(logits_with(model, replay), logits)
    forced = Watcher(experts=torch.tensor([[0, 1]]).expand(18, 2))
    assert not torch.allclose(logits_with(model, forced), logits)


def test_forced_experts_share_the_routers_softmax_over_them(model: Any) -> None:
    mlp, seen = model.model.layers[0].mlp, {}
    gate = mlp.gate.register_forward_hook(lambda module, inputs, outputs: seen.update(logits=outputs[0]))
    with torch.no_grad(), capture(model, Watcher(experts=torch.tensor([[0, 1]]).expand(18, 2))) as cache:
        experts = mlp.experts.register_forward_pre_hook(lambda module, inputs: seen.update(weights=inputs[2]))
        forward(model, TOKENS, cache)
    gate.remove(), experts.remove()
    torch.testing.assert_close(seen["weights"], torch.softmax(seen["logits"][:, :2], dim=-1))


def test_leaving_the_capture_removes_the_tap(model: Any) -> None:
    logits_with(model, Watcher(change=(0, "moe_in")))
    with torch.no_grad():
        plain = model(input_ids=TOKENS).logits
    assert torch.equal(logits_with(model, Watcher()), plain)


def test_only_the_experts_weights_are_quantized(model: Any) -> None:
    model = model.bfloat16()
    rounded = quantized_weights(model)
    changed = {
        name for (name, before), after in zip(model.named_parameters(), rounded.parameters(), strict=True)
        if not torch.equal(before, after)
    }  # fmt: skip
    assert changed == {name for name, _ in model.named_parameters() if "experts" in name}
    weight = rounded.model.layers[0].mlp.experts.down_proj.detach().float().reshape(-1, 32).numpy()
    codes, scales, scale = codebook.quantize(weight, format="nvfp4")
    again = torch.from_numpy(codebook.dequantize(codes, scales, scale, format="nvfp4")).bfloat16()
    torch.testing.assert_close(again, torch.from_numpy(weight).bfloat16(), rtol=0.05, atol=1e-3)


def test_calibrated_scales_reach_the_largest_value(model: Any, size: ModelSize) -> None:
    scales = calibrate(model, TOKENS)
    tap = Watcher()
    logits_with(model, tap)
    assert list(scales) == size.site_keys()
    for key, scale in scales.items():
        assert scale * 448 * 6 == pytest.approx(float(tap.values[key].abs().max()), rel=1e-6)


def test_site_tables_differ_in_form_and_cover_the_latter_half(size: ModelSize) -> None:
    assert [(site.layer, site.kind) for site in size.sites("b1")] == size.site_keys()
    half = size.sites("full", first_layer=2)
    assert {site.layer for site in half} == {2, 3}
    assert {site.form for site in half} == {"full"}
