"""Trainer: rows land where the reader puts them, routing is the rollout's, every kind of rounding is what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trace_client.demo.metrics import SiteCount
from trace_client.demo.model import ModelSize
from trace_client.demo.rollout import Rollout, new_rollout
from trace_client.demo.trainer import Microbatch, TrainerTap, microbatches
from trace_client.microbatch import Microbatch as Batch
from trace_store import Site, codebook

TOKENS, PROMPT, TRAJECTORIES = 9, 3, 5
KEY = (1, "moe_in")
SCALE = 0.002


@pytest.fixture
def rollout(size: ModelSize) -> Rollout:
    """A rollout by hand: random vectors, their codes, random routing."""
    prompts = torch.zeros(TRAJECTORIES, PROMPT, dtype=torch.long)
    rollout = new_rollout(size, prompts, TOKENS, dict.fromkeys(size.site_keys(), SCALE), "t")
    generator = torch.Generator().manual_seed(0)
    for key, x in rollout.inputs.items():
        x.copy_(torch.randn(x.shape, generator=generator))
        codes, scales, _ = codebook.quantize(x.float().flatten(0, 1).numpy(), format="nvfp4", tensor_scale=SCALE)
        rollout.codes[key][:] = codes.reshape(rollout.codes[key].shape)
        rollout.scales[key][:] = scales.reshape(rollout.scales[key].shape)
    for experts in rollout.experts:
        experts.copy_(torch.randint(0, size.experts, experts.shape, generator=generator))
    return rollout


def site_of(size: ModelSize) -> Site:
    return next(site for site in size.sites("b1") if (site.layer, site.kind) == KEY)


def records(piece: Microbatch, site: Site) -> Batch:
    """The records of one site as a reader returns them: prompt rows missing."""
    rollout = piece.rollout
    codes, scales = piece.flat(rollout.codes[KEY]), piece.flat(rollout.scales[KEY])
    valid = np.arange(len(codes)) % rollout.rows >= PROMPT
    scale = np.where(valid, np.float32(SCALE), np.float32(np.nan)).astype(np.float32)
    return Batch(len(codes), {site: codebook.pack(codes, bits=1)}, {site: scales}, {site: scale}, {site: valid})


def tap_of(piece: Microbatch, counts: Any, site: Site | None, *, read_bits: bool = True) -> TrainerTap:
    return TrainerTap(
        piece, counts, batch=records(piece, site) if site else None, sites={KEY: site} if site else {},
        read_bits=read_bits, with_rtn=True,
    )  # fmt: skip


def noisy(piece: Microbatch) -> torch.Tensor:
    x = piece.flat(piece.rollout.inputs[KEY])
    return x + 0.05 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_microbatches_cover_the_rollout_and_name_their_rows(rollout: Rollout) -> None:
    pieces = list(microbatches(rollout, 2))
    assert [(piece.first, piece.stop) for piece in pieces] == [(0, 2), (2, 4), (4, 5)]
    assert pieces[1].spans() == [("t-002", 0, 8, 0), ("t-003", 0, 8, 8)]
    assert pieces[2].spans("-x") == [("t-004-x", 0, 8, 0)]
    assert pieces[2].scored_rows("moe_in").tolist() == [3, 4, 5, 6, 7]
    for number, (name, start, stop, row) in enumerate(pieces[1].spans()):
        assert rollout.names[2 + number] == name
        assert torch.equal(
            pieces[1].flat(rollout.inputs[KEY])[row : row + stop - start], rollout.inputs[KEY][2 + number]
        )


def test_routing_is_the_rollouts(rollout: Rollout, size: ModelSize) -> None:
    piece = Microbatch(rollout, 2, 4)
    own = torch.zeros(16, size.experts_per_token, dtype=torch.long)
    replayed = tap_of(piece, {}, None).route(3, own)
    assert torch.equal(replayed, rollout.experts[3][2:4].flatten(0, 1))


def test_without_records_rounding_is_native(rollout: Rollout) -> None:
    piece, counts = Microbatch(rollout, 0, 2), {KEY: SiteCount()}
    x = noisy(piece)
    y = tap_of(piece, counts, None).round(*KEY, x)
    native = codebook.native_round(x.float().numpy(), format="nvfp4", tensor_scale=SCALE)
    assert torch.equal(y, torch.from_numpy(native).bfloat16())
    codes, _, _ = codebook.quantize(x.float().numpy(), format="nvfp4", tensor_scale=SCALE)
    scored = piece.scored_rows("moe_in")
    differ = codebook.code_distance(codes, piece.flat(rollout.codes[KEY]))[scored] != 0
    assert counts[KEY].mismatch == pytest.approx(differ.mean())
    assert counts[KEY].mismatches > 0


@pytest.mark.parametrize("read_bits", [False, True])
def test_records_round_their_rows_and_native_the_prompt(rollout: Rollout, size: ModelSize, read_bits: bool) -> None:
    piece, counts, site = Microbatch(rollout, 0, 2), {KEY: SiteCount()}, site_of(size)
    x = noisy(piece)
    y = tap_of(piece, counts, site, read_bits=read_bits).round(*KEY, x)
    rows = x.float().numpy()
    batch = records(piece, site)
    valid, scale = batch.valid[site], np.full(len(rows), SCALE, np.float32)
    expected = codebook.native_round(rows, format="nvfp4", tensor_scale=SCALE)
    if read_bits:
        recorded = codebook.guided_round(rows, batch.planes[site], batch.scales[site], scale, format="nvfp4", bits=1)
    else:
        recorded = codebook.rtn_round(rows, batch.scales[site], scale, format="nvfp4")
    expected[valid] = recorded[valid]
    assert torch.equal(y, torch.from_numpy(expected).bfloat16())
    if read_bits:
        assert counts[KEY].mismatches < counts[KEY].rtn_mismatches
    else:
        assert counts[KEY].mismatches == counts[KEY].rtn_mismatches


def test_noise_and_discrepancy_are_those_of_the_scored_rows(rollout: Rollout, size: ModelSize) -> None:
    piece, counts = Microbatch(rollout, 0, 2), {KEY: SiteCount()}
    x = noisy(piece)
    y = tap_of(piece, counts, site_of(size)).round(*KEY, x).float()
    scored = piece.scored_rows("moe_in")
    before, sent = x.float()[scored], piece.flat(rollout.inputs[KEY]).float()[scored]
    assert counts[KEY].noise == pytest.approx(float((before - sent).norm() / sent.norm()), rel=1e-5)
    values = codebook.dequantize(piece.flat(rollout.codes[KEY]), piece.flat(rollout.scales[KEY]), SCALE, format="nvfp4")
    difference = y[scored] - torch.from_numpy(values).bfloat16().float()[scored]
    assert counts[KEY].discrepancy == pytest.approx(float(difference.square().mean()), rel=1e-5)
