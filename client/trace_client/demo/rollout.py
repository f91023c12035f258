"""Rollout: token-by-token decoding with a KV cache in BF16, FP4 at the taps, guidance recorded as the codes arise.

The prompt is one batched prefill and every further token one forward of one token per trajectory, as an inference
engine runs them. Each tapped vector goes through the quantizer of ``trace_store.codebook`` with static tensor scales;
the model computes with the dequantized values, and the codes are what is recorded: routed-expert inputs during the
forward, for generated tokens, and K and V from the FP4 cache when a trajectory ends, prompt included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trace_client.demo.model import FORMAT, ModelSize, SiteKey, TapCache, capture, forward, token_log_probs
from trace_client.recorder import KVRecorder, Recorder, TrajectoryWriter
from trace_store import Receipt, Site, codebook

Bytes = npt.NDArray[np.uint8]


@dataclass
class Rollout:
    """What the rollout saw; the trainer gets the tokens and the routing, everything else only serves the comparison.

    B trajectories of N tokens, P of them prompt; the last token never ran a forward.

    Attributes:
        names: trajectory ids.
        tokens: int64 [B, N].
        prompt_tokens: P.
        log_probs: float32 [B, N - P] of the sampled tokens, as the rollout computed them.
        experts: per layer int64 [B, N - 1, k], the routing to replay.
        inputs: per site BF16 [B, N - 1, W], the vectors before the quantizer.
        codes, scales: per site uint8 [B, N - 1, W] and [B, N - 1, W / 16], what the quantizer wrote; empty in BF16.
        tensor_scales: per site decode scale; empty in BF16.
    """

    names: list[str]
    tokens: torch.Tensor
    prompt_tokens: int
    log_probs: torch.Tensor
    experts: list[torch.Tensor]
    inputs: dict[SiteKey, torch.Tensor]
    codes: dict[SiteKey, Bytes]
    scales: dict[SiteKey, Bytes]
    tensor_scales: Mapping[SiteKey, float]

    @property
    def rows(self) -> int:
        """Tokens per trajectory that ran a forward, N - 1."""
        return int(self.tokens.shape[1]) - 1


@dataclass
class Capture:
    """Where one site table is recorded to: the forward's recorder with its sites by layer, and the cache's."""

    moe: Recorder
    moe_sites: dict[int, Site]
    kv: KVRecorder


@dataclass
class RolloutTap:
    """Quantizer and FP4 cache of the rollout; ``start`` and ``count`` are the tokens of the running forward."""

    rollout: Rollout
    captures: list[Capture] = field(default_factory=list)
    start: int = 0
    count: int = 0

    def route(self, layer: int, experts: torch.Tensor) -> torch.Tensor:
        self.rollout.experts[layer][:, self._span] = experts.view(-1, self.count, experts.shape[-1])
        return experts

    def round(self, layer: int, kind: str, x: torch.Tensor) -> torch.Tensor:
        key, rollout = (layer, kind), self.rollout
        rollout.inputs[key][:, self._span] = x.view(-1, self.count, x.shape[-1])
        if not rollout.tensor_scales:
            return x
        codes, scales, scale = codebook.quantize(
            x.float().numpy(), format=FORMAT, tensor_scale=rollout.tensor_scales[key]
        )
        rollout.codes[key][:, self._span] = codes.reshape(-1, self.count, codes.shape[-1])
        rollout.scales[key][:, self._span] = scales.reshape(-1, self.count, scales.shape[-1])
        if kind == "moe_in" and self.start >= rollout.prompt_tokens:
            self._record(layer, codes, scales, scale)
        return torch.from_numpy(codebook.dequantize(codes, scales, scale, format=FORMAT)).to(x.dtype)

    def rows(self, site: Site, trajectory: str, start: int, stop: int) -> tuple[Bytes, Bytes, float]:
        """The FP4 cache of one trajectory, as ``trace_client.recorder.KVCache`` wants it."""
        key, row = (site.layer, site.kind), self.rollout.names.index(trajectory)
        return (
            self.rollout.codes[key][row, start:stop],
            self.rollout.scales[key][row, start:stop],
            self.rollout.tensor_scales[key],
        )

    def record_to(self, writer: TrajectoryWriter, sites: Sequence[Site]) -> None:
        """Record into ``writer`` from now on, in the forms that ``sites`` name."""
        moe = {site.layer: site for site in sites if site.kind == "moe_in"}
        kv = [site for site in sites if site.kind != "moe_in"]
        self.captures.append(Capture(Recorder(writer, list(moe.values())), moe, KVRecorder(writer, kv, self)))

    def finish(self) -> list[Receipt]:
        """Gather K and V, then seal, for every trajectory and capture."""
        rollout, tokens = self.rollout, self.rollout.rows + 1
        receipts = []
        for recording in self.captures:
            for name in rollout.names:
                recording.kv.gather(name, tokens=tokens)
                receipts.append(recording.moe.finish(name, tokens=tokens, prompt_tokens=rollout.prompt_tokens))
        return receipts

    @property
    def _span(self) -> slice:
        return slice(self.start, self.start + self.count)

    def _record(self, layer: int, codes: Bytes, scales: Bytes, scale: Any) -> None:
        names, positions = self.rollout.names, [self.start] * len(self.rollout.names)
        for recording in self.captures:
            if site := recording.moe_sites.get(layer):
                recording.moe.record(site, names, positions, codes, scales, scale)


def new_rollout(
    size: ModelSize, prompts: torch.Tensor, tokens: int, tensor_scales: Mapping[SiteKey, float], prefix: str
) -> Rollout:
    """An empty rollout over prompts int64 [B, P] that will hold ``tokens`` tokens per trajectory."""
    batch, prompt_tokens = prompts.shape
    rows = tokens - 1
    keys = size.site_keys()
    quantized = keys if tensor_scales else []
    return Rollout(
        names=[f"{prefix}-{number:03d}" for number in range(batch)],
        tokens=torch.cat([prompts, torch.zeros(batch, tokens - prompt_tokens, dtype=torch.long)], dim=1),
        prompt_tokens=prompt_tokens,
        log_probs=torch.zeros(batch, tokens - prompt_tokens),
        experts=[torch.zeros(batch, rows, size.experts_per_token, dtype=torch.long) for _ in range(size.layers)],
        inputs={key: torch.zeros(batch, rows, size.width(key[1]), dtype=torch.bfloat16) for key in keys},
        codes={key: np.zeros((batch, rows, size.width(key[1])), np.uint8) for key in quantized},
        scales={key: np.zeros((batch, rows, size.width(key[1]) // 16), np.uint8) for key in quantized},
        tensor_scales=tensor_scales,
    )


@torch.no_grad()
def decode(model: Any, tap: RolloutTap, generator: torch.Generator, progress: Callable[[int], None]) -> None:
    """Sample every token of ``tap.rollout`` at temperature 1; ``progress`` hears how many forwards were made."""
    rollout = tap.rollout
    prompt_tokens = rollout.prompt_tokens
    with capture(model, tap) as cache:
        logits = _step(model, tap, cache, 0, prompt_tokens)
        for position in range(prompt_tokens, rollout.rows + 1):
            sampled = torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator)[:, 0]
            rollout.tokens[:, position] = sampled
            rollout.log_probs[:, position - prompt_tokens] = token_log_probs(logits, sampled)
            if position < rollout.rows:
                logits = _step(model, tap, cache, position, 1)
            progress(1)


def _step(model: Any, tap: RolloutTap, cache: TapCache, start: int, count: int) -> torch.Tensor:
    """Logits [B, 256] behind the last of the tokens [start, start + count)."""
    tap.start, tap.count = start, count
    return forward(model, tap.rollout.tokens[:, start : start + count], cache)[:, -1]
