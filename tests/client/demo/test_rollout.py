"""Rollout: what is recorded is what the quantizer wrote, for the tokens that ran a forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trace_client.demo.model import ModelSize, calibrate, capture, forward, token_log_probs
from trace_client.demo.rollout import Rollout, RolloutTap, decode, new_rollout
from trace_store import Receipt, Site, codebook

PROMPTS = torch.randint(32, 127, (3, 5), generator=torch.Generator().manual_seed(4))
TOKENS, PROMPT = 12, 5


class Rows:
    """A writer that keeps rows by trajectory, site and position."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, Site], dict[int, tuple[np.ndarray, np.ndarray]]] = {}
        self.sealed: list[str] = []

    def append(self, trajectory: str, start: int, records: Any, **_: Any) -> None:
        for site, (planes, scales, _scale) in records.items():
            held = self.rows.setdefault((trajectory, site), {})
            for number in range(len(planes)):
                assert start + number not in held
                held[start + number] = planes[number], scales[number]

    def seal(self, trajectory: str, *, tokens: int, prompt_tokens: int, attempt: int = 0) -> Receipt:
        self.sealed.append(trajectory)
        return Receipt("run", "step", trajectory, attempt, tokens, prompt_tokens, "synced", "memory")


def roll_out(model: Any, size: ModelSize, scales: dict[Any, float], *writers: tuple[Rows, list[Site]]) -> Rollout:
    rollout = new_rollout(size, PROMPTS, TOKENS, scales, "t")
    tap = RolloutTap(rollout)
    for writer, sites in writers:
        tap.record_to(writer, sites)
    decode(model, tap, torch.Generator().manual_seed(0), lambda units: None)
    tap.finish()
    return rollout


@pytest.fixture
def bf16(model: Any) -> Any:
    return model.bfloat16()


@pytest.fixture
def scales(bf16: Any) -> dict[Any, float]:
    return calibrate(bf16, PROMPTS)


def test_records_are_the_quantizers_output(bf16: Any, size: ModelSize, scales: dict[Any, float]) -> None:
    writer, sites = Rows(), size.sites("b1")
    rollout = roll_out(bf16, size, scales, (writer, sites))
    assert writer.sealed == rollout.names
    for site in sites:
        key = (site.layer, site.kind)
        first = PROMPT if site.kind == "moe_in" else 0
        for number, name in enumerate(rollout.names):
            held = writer.rows[name, site]
            assert sorted(held) == list(range(first, TOKENS - 1)), site
            x = rollout.inputs[key][number, first:].float().numpy()
            codes, block_scales, _ = codebook.quantize(x, format="nvfp4", tensor_scale=scales[key])
            planes = codebook.pack(codes, bits=1)
            for row, position in enumerate(sorted(held)):
                assert np.array_equal(held[position][0], planes[row])
                assert np.array_equal(held[position][1], block_scales[row])


def test_one_decode_fills_several_runs(bf16: Any, size: ModelSize, scales: dict[Any, float]) -> None:
    half, full = Rows(), Rows()
    rollout = roll_out(bf16, size, scales, (half, size.sites("b1", first_layer=2)), (full, size.sites("full")))
    assert {site.layer for _, site in half.rows} == {2, 3}
    site = size.sites("full")[-1]
    codes = rollout.codes[size.layers - 1, "moe_in"][0, PROMPT:]
    stored = np.stack([full.rows[rollout.names[0], site][position][0] for position in range(PROMPT, TOKENS - 1)])
    assert np.array_equal(stored, codebook.pack_full(codes))


def test_the_model_goes_on_with_the_quantized_values(bf16: Any, size: ModelSize, scales: dict[Any, float]) -> None:
    plain = roll_out(bf16, size, {})
    coarse = roll_out(bf16, size, {key: 4 * scale for key, scale in scales.items()})
    assert torch.equal(plain.inputs[0, "k"][:, :PROMPT], coarse.inputs[0, "k"][:, :PROMPT])
    assert not torch.equal(plain.inputs[1, "k"][:, :PROMPT], coarse.inputs[1, "k"][:, :PROMPT])
    assert not plain.codes


def test_log_probs_are_the_models(bf16: Any, size: ModelSize) -> None:
    rollout = roll_out(bf16, size, {})
    with (
        torch.no_grad(),
        capture(bf16, RolloutTap(new_rollout(size, PROMPTS, TOKENS, {}, "u"), count=TOKENS - 1)) as cache,
    ):
        logits = forward(bf16, rollout.tokens[:, :-1], cache)
    batched = token_log_probs(logits[:, PROMPT - 1 :], rollout.tokens[:, PROMPT:])
    torch.testing.assert_close(rollout.log_probs, batched, rtol=0, atol=0.05)
    assert torch.equal(rollout.tokens[:, :PROMPT], PROMPTS)


def test_a_seed_gives_the_same_tokens(bf16: Any, size: ModelSize, scales: dict[Any, float]) -> None:
    first, second = roll_out(bf16, size, scales), roll_out(bf16, size, scales)
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.log_probs, second.log_probs)
