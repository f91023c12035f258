"""Under a minute of training, so that the activations are those of a trained network and not of noise.

The gradient step uses a forward of its own over the parameters of the library's model. It computes the same function
and is two to three times faster on a CPU: experts run as one batched product over fixed slots instead of one product
per expert and row count (a new shape costs about a millisecond of kernel set-up, 16 experts x 8 layers x 6 products a
step), norms and row gathers have hand-written gradients, and all of it is BF16 with float32 master weights where the
CPU multiplies BF16 quickly, else float32. An expert takes at most ``CAPACITY`` times its fair share of a batch; what
is over is dropped from that step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional

from trace_client.demo.corpus import windows
from trace_client.demo.model import has_fast_bfloat16
from trace_client.demo.muon import Muon

CAPACITY = 1.5
SLOT_MULTIPLE = 64
BALANCE_WEIGHT = 0.01
"""Weight of the load-balancing loss of Switch Transformer (arXiv 2101.03961, equation 4)."""


@dataclass(frozen=True)
class Schedule:
    """How long and how fast.

    Attributes:
        steps: optimizer steps; Muon for the matrices inside the layers, AdamW for the rest.
        seconds_max: wall time after which training ends even if steps are left; the learning rate follows whichever of
            steps and time is further, so that it always ends low. Only this makes a run depend on the machine's speed.
        batch, length: windows per step and tokens per window.
        matrix_rate, other_rate: peaks of the learning rates.
        warmup: steps until the peak; the second half of training lowers the rates linearly to 0.
    """

    steps: int = 80
    seconds_max: float = 52.0
    batch: int = 16
    length: int = 128
    matrix_rate: float = 0.03
    other_rate: float = 4e-3
    warmup: int = 10

    def factor(self, step: int, seconds: float) -> float:
        """Share of the peak rates that a step gets, 0 once training is over."""
        done = max(step / self.steps, seconds / self.seconds_max)
        return min(1.0, (step + 1) / self.warmup, max(0.0, 2 * (1 - done)))


def pretrain(
    model: Any,
    text: torch.Tensor,
    schedule: Schedule,
    generator: torch.Generator,
    progress: Callable[[int, float], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[float]:
    """Train ``model`` (float32) on ``text`` int64 [n]; leaves it in BF16.

    Args:
        progress: hears the step and its loss.

    Returns:
        Loss of every step, nats per byte.
    """
    optimizer = _Optimizer(model, schedule)
    losses: list[float] = []
    began = clock()
    while len(losses) < schedule.steps and (factor := schedule.factor(len(losses), clock() - began)) > 0:
        tokens = windows(text, schedule.batch, schedule.length + 1, generator)
        logits, balance = training_forward(model, tokens[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        (loss + BALANCE_WEIGHT * balance).backward()  # type: ignore[no-untyped-call]
        optimizer.step(factor)
        losses.append(float(loss.detach()))
        progress(len(losses), losses[-1])
    model.to(torch.bfloat16)
    return losses


class _Optimizer:
    """Float32 masters of a model that it casts to the dtype of training, and both optimizers over them."""

    def __init__(self, model: Any, schedule: Schedule) -> None:
        self._schedule = schedule
        named = dict(model.named_parameters())
        self._parameters = list(named.values())
        self._masters = [parameter.detach().clone() for parameter in self._parameters]
        dtype = torch.bfloat16 if has_fast_bfloat16() else torch.float32
        model.to(dtype)
        matrices, others = [], []
        for name, master in zip(named, self._masters, strict=True):
            if master.dim() < 2 or "embed" in name or "gate.weight" in name:
                others.append(master)
            else:
                matrices.append((master, 2 if "gate_up" in name else 1))
        self._muon = Muon(matrices, dtype)
        self._adamw = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One step at ``factor`` of the peak rates, gradients clipped to norm 1 together."""
        gradients = [parameter.grad.float() for parameter in self._parameters if parameter.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
        shrink = 1 / max(1.0, float(norm))
        for master, gradient in zip(self._masters, gradients, strict=True):
            master.grad = gradient.mul_(shrink)
        for group in self._adamw.param_groups:
            group["lr"] = self._schedule.other_rate * factor
        self._adamw.step()
        self._muon.step(self._schedule.matrix_rate * factor)
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            parameter.copy_(master)
            parameter.grad = None


@torch.no_grad()
def held_out_loss(model: Any, text: torch.Tensor, generator: torch.Generator, count: int = 16) -> float:
    """Nats per byte of the model, through the library's own forward, on ``count`` windows of 128 bytes."""
    tokens = windows(text, count, 129, generator)
    logits = model(input_ids=tokens[:, :-1]).logits.float()
    return float(functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


def training_forward(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B, T, 256] of tokens [B, T], and the load-balancing loss summed over layers."""
    config = model.config
    batch, length = tokens.shape
    x = functional.embedding(tokens, model.model.embed_tokens.weight)
    rope = _rope_tables(config, length, x.dtype)
    mask = torch.full((length, length), float("-inf"), dtype=x.dtype).triu_(1)
    balance = torch.zeros(())
    for layer in model.model.layers:
        x = x + _attention(layer.self_attn, _norm(layer.input_layernorm, x), config, rope, mask)
        rows = _norm(layer.post_attention_layernorm, x).view(batch * length, -1)
        y, layer_balance = _experts(layer.mlp, rows)
        x = x + y.view_as(x)
        balance = balance + layer_balance
    return functional.linear(_norm(model.model.norm, x), model.lm_head.weight), balance


def _rope_tables(config: Any, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    theta = config.rope_parameters["rope_theta"]
    frequencies = 1.0 / theta ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]


def _rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    cos, sin = rope
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def _attention(
    attention: Any, x: torch.Tensor, config: Any, rope: tuple[torch.Tensor, torch.Tensor], mask: torch.Tensor
) -> torch.Tensor:
    batch, length, _ = x.shape
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    group = heads // kv_heads
    q = _rotate(_norm(attention.q_norm, attention.q_proj(x).view(batch, length, heads, width)), rope)
    k = _rotate(_norm(attention.k_norm, attention.k_proj(x).view(batch, length, kv_heads, width)), rope)
    v = attention.v_proj(x).view(batch, length, kv_heads, width)
    # The query heads of a KV head become rows of one product: batch * kv_heads products, no repeated K and V.
    q = (q * attention.scaling).view(batch, length, kv_heads, group, width).permute(0, 2, 3, 1, 4)
    scores = torch.bmm(
        q.reshape(batch * kv_heads, group * length, width), k.permute(0, 2, 3, 1).reshape(-1, width, length)
    )
    weights = torch.softmax(scores.view(-1, group, length, length) + mask, dim=-1)
    values = torch.bmm(weights.view(-1, group * length, length), v.transpose(1, 2).reshape(-1, length, width))
    values = values.view(batch, kv_heads, group, length, width).permute(0, 3, 1, 2, 4)
    result: torch.Tensor = attention.o_proj(values.reshape(batch, length, heads * width))
    return result


def _experts(mlp: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Routed experts of rows [T, hidden], and the balance loss of the layer."""
    count, k, tokens = mlp.experts.num_experts, mlp.gate.top_k, x.shape[0]
    probabilities = torch.softmax(functional.linear(x, mlp.gate.weight).float(), dim=-1)
    weights, chosen = torch.topk(probabilities, k, dim=-1)
    weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
    load = torch.bincount(chosen.flatten(), minlength=count)
    slot_of_pair, pair_of_slot = _slots(chosen.flatten(), load)
    token_of_slot = torch.where(pair_of_slot < tokens * k, pair_of_slot // k, tokens)
    slots = _take(x, token_of_slot, slot_of_pair.view(tokens, k)).view(count, -1, x.shape[1])
    gate, up = torch.bmm(slots, mlp.experts.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
    slots = torch.bmm(functional.silu(gate) * up, mlp.experts.down_proj.transpose(1, 2)).flatten(0, 1)
    pairs = _take(slots, slot_of_pair, pair_of_slot[:, None]).view(tokens, k, -1)
    balance = count * (load / load.sum() * probabilities.mean(dim=0)).sum()
    return (pairs * weights[..., None]).sum(dim=1), balance


def _slots(expert: torch.Tensor, load: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Slot of every (token, choice) pair and pair of every slot, int64; one past the end where there is none."""
    pairs, count = len(expert), len(load)
    capacity = -(-int(CAPACITY * pairs / count) // SLOT_MULTIPLE) * SLOT_MULTIPLE
    order = torch.argsort(expert, stable=True)
    place = torch.arange(pairs) - (load.cumsum(0) - load)[expert[order]]
    fits = place < capacity
    slot = (expert[order] * capacity + place)[fits]
    slot_of_pair = torch.full((pairs,), count * capacity)
    slot_of_pair[order[fits]] = slot
    pair_of_slot = torch.full((count * capacity,), pairs)
    pair_of_slot[slot] = order[fits]
    return slot_of_pair, pair_of_slot


def _take(x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Rows ``index`` of x [n, W], zeros for row n; ``inverse`` [n, k] are the k places where each row went."""
    result: torch.Tensor = _Take.apply(x, index, inverse)  # type: ignore[no-untyped-call]
    return result


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _RmsNorm.apply(x, module.weight, module.variance_epsilon)  # type: ignore[no-untyped-call]
    return result


class _Take(torch.autograd.Function):
    """Gather whose gradient is a gather too: an index_add over the same rows took a tenth of the step."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return torch.cat((x, x.new_zeros(1, x.shape[1]))).index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        gradient = torch.cat((gradients[0], gradients[0].new_zeros(1, gradients[0].shape[1])))
        return gradient.index_select(0, inverse.flatten()).view(*inverse.shape, -1).sum(dim=1), None, None


class _RmsNorm(torch.autograd.Function):
    """y = x / rms(x) * w over the last axis, in the dtype of x with the sum of squares in float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        inverse = torch.rsqrt(norm.square_() / x.shape[-1] + epsilon).to(x.dtype)
        unit = x * inverse
        ctx.save_for_backward(unit, weight, inverse)
        return unit * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        unit, weight, inverse = ctx.saved_tensors
        to_weight = (gradients[0] * unit).reshape(-1, unit.shape[-1]).sum(dim=0)
        to_unit = gradients[0] * weight
        projection = (to_unit * unit).mean(dim=-1, keepdim=True)
        return (to_unit - unit * projection) * inverse, to_weight, None
