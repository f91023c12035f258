"""The demo's model: transformers' own Qwen3-MoE in BF16, and taps at the places where FP4 enters it.

A tap sees, in every forward and layer, in this order:

    k, v      K after RoPE and V as they enter the cache, rows [B * T, kv_heads * head_dim]
    routing   the expert ids that the router chose, [B * T, k]
    moe_in    the hidden vectors that enter the routed experts, rows [B * T, hidden], once per token, before dispatch

and may replace each. The router itself always sees the unrounded vector. ``capture`` installs a tap through forward
hooks and a cache class, so the class that computes everything else is the library's.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as functional
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.cache_utils import DynamicCache

from trace_store import Site, codebook

FORMAT = "nvfp4"
NVFP4_RANGE = 448.0 * 6.0
"""Largest block scale times largest code: amax / NVFP4_RANGE is the static decode scale of a tensor."""

KINDS = ("k", "v", "moe_in")

SiteKey = tuple[int, str]
"""(layer, kind); a ``Site`` adds the form, in which the same rows are stored twice here."""


@dataclass(frozen=True)
class ModelSize:
    """Shape of the model. 16 experts of 128, 2 per token: 30.6 M parameters, 8.4 M of them active for a token."""

    hidden: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 16
    experts_per_token: int = 2
    expert_width: int = 128

    def width(self, kind: str) -> int:
        """Elements of one token row at a site of this kind."""
        return self.hidden if kind == "moe_in" else self.kv_heads * self.head_dim

    def site_keys(self) -> list[SiteKey]:
        """Every site in the order of the forward pass."""
        return [(layer, kind) for layer in range(self.layers) for kind in KINDS]

    def sites(self, form: str, first_layer: int = 0) -> list[Site]:
        """A site table of the layers from ``first_layer`` on, with codes stored in ``form``."""
        return [
            Site(layer, kind, width=self.width(kind), form=form, quantizer="exact, static tensor scale")
            for layer, kind in self.site_keys()
            if layer >= first_layer
        ]


class Tap(Protocol):
    """What may watch and replace values inside the model."""

    def route(self, layer: int, experts: torch.Tensor) -> torch.Tensor:
        """Expert ids [rows, k] as chosen -> expert ids to use."""

    def round(self, layer: int, kind: str, x: torch.Tensor) -> torch.Tensor:
        """Rows [rows, W] -> rows to use, of the same dtype."""


def has_fast_bfloat16() -> bool:
    """Whether torch multiplies BF16 matrices on this CPU by a kernel of its own (AVX-512 and newer on x86).

    Without it (``ONEDNN_MAX_CPU_ISA=AVX2``) batched and grouped BF16 products ran at 2.6 GFLOP/s on two cores, single
    ones at 45 and float32 at 200.
    """
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def build_model(size: ModelSize) -> Any:
    """A randomly initialised float32 model for byte tokens; the caller seeds torch."""
    shape: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "moe_intermediate_size": size.expert_width,
        "intermediate_size": size.expert_width * size.experts_per_token,
        "num_experts": size.experts,
        "num_experts_per_tok": size.experts_per_token,
        "norm_topk_prob": True,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape))
    # One product per expert where a grouped one would be slow; both are the library's own.
    model.set_experts_implementation("grouped_mm" if has_fast_bfloat16() else "eager")
    return model


def quantized_weights(model: Any) -> Any:
    """A copy of the BF16 model whose routed-expert weights went through NVFP4, as rollout and trainer both see them."""
    rounded = copy.deepcopy(model)
    for layer in rounded.model.layers:
        for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            rows = weight.detach().float().reshape(-1, weight.shape[-1]).numpy()
            values = codebook.dequantize(*codebook.quantize(rows, format=FORMAT), format=FORMAT)
            weight.data.copy_(torch.from_numpy(values).view(weight.shape))
    return rounded


@contextmanager
def capture(model: Any, tap: Tap) -> Iterator[TapCache]:
    """Install ``tap`` in ``model``; yields the empty KV cache to hand to ``forward``. Leaving removes the tap."""
    hooks = []
    for number, layer in enumerate(model.model.layers):
        hooks.append(layer.mlp.gate.register_forward_hook(_routing_hook(tap, number)))
        hooks.append(layer.mlp.experts.register_forward_pre_hook(_experts_hook(tap, number)))
    try:
        yield TapCache(tap)
    finally:
        for hook in hooks:
            hook.remove()


def _routing_hook(tap: Tap, layer: int) -> Any:
    def hook(gate: Any, inputs: Any, outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Any:
        logits, scores, chosen = outputs
        experts = tap.route(layer, chosen)
        if experts is chosen:
            return outputs
        # Rollout routing replay: the recorded mask, weighted by the trainer's own logits restricted to it.
        replayed = torch.softmax(logits.float().gather(1, experts), dim=-1)
        return logits, replayed.to(scores.dtype), experts

    return hook


def _experts_hook(tap: Tap, layer: int) -> Any:
    def hook(experts: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (tap.round(layer, "moe_in", inputs[0]), *inputs[1:])

    return hook


class TapCache(DynamicCache):
    """transformers' growing KV cache with the tap in front of what it stores."""

    def __init__(self, tap: Tap) -> None:
        super().__init__()
        self._tap = tap

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        key_states = self._rounded(layer_idx, "k", key_states)
        value_states = self._rounded(layer_idx, "v", value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _rounded(self, layer: int, kind: str, states: torch.Tensor) -> torch.Tensor:
        batch, heads, tokens, width = states.shape
        rows = states.transpose(1, 2).reshape(batch * tokens, heads * width)
        return self._tap.round(layer, kind, rows).view(batch, tokens, heads, width).transpose(1, 2)


def forward(model: Any, tokens: torch.Tensor, cache: TapCache) -> torch.Tensor:
    """Logits float32 [B, T, 256] of tokens [B, T] that continue what ``cache`` holds."""
    # transformers renamed the argument in its 5 series; both names mean the same cache.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    logits: torch.Tensor = model(input_ids=tokens, use_cache=True, **{name: cache}).logits
    return logits.float()


def token_log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float32 [...] log-probability of ``tokens`` [...] under ``logits`` [..., 256]."""
    return functional.log_softmax(logits, dim=-1).gather(-1, tokens[..., None])[..., 0]


class _LargestValue:
    """Tap that remembers the largest magnitude at every site."""

    def __init__(self) -> None:
        self.amax: dict[SiteKey, float] = {}

    def route(self, layer: int, experts: torch.Tensor) -> torch.Tensor:
        return experts

    def round(self, layer: int, kind: str, x: torch.Tensor) -> torch.Tensor:
        self.amax[layer, kind] = max(float(x.abs().max()), self.amax.get((layer, kind), 0.0))
        return x


@torch.no_grad()
def calibrate(model: Any, tokens: torch.Tensor) -> dict[SiteKey, float]:
    """Static decode scale of every site, from the largest magnitude that an unrounded forward over ``tokens`` meets."""
    tap = _LargestValue()
    with capture(model, tap) as cache:
        forward(model, tokens, cache)
    return {key: amax / NVFP4_RANGE for key, amax in tap.amax.items()}
