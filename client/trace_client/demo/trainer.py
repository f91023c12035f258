"""Trainer: one batched forward over a microbatch's tokens in BF16, routing replayed, FP4 at the same taps.

A microbatch is M trajectories of one rollout; row ``m * (N - 1) + t`` is token t of its trajectory m, which is also
where the reader puts the record of that token. The rounding of an arm is one function per site:

    native    own block scales under the static tensor scale, to nearest       (what a trainer without records does)
    nearest   the rollout's scales, to nearest; native where no record is      (b = 0)
    guided    ``GuidanceContext.round``, which reads the bits too; native where no record is
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trace_client.demo.metrics import Bytes, Floats, SiteCount
from trace_client.demo.model import FORMAT, SiteKey, capture, forward, token_log_probs
from trace_client.demo.rollout import Rollout
from trace_client.torch import GuidanceBatch, GuidanceContext, host_rows, straight_through
from trace_store import Site, codebook


@dataclass(frozen=True)
class Microbatch:
    """Trajectories [first, stop) of a rollout."""

    rollout: Rollout
    first: int
    stop: int

    def spans(self, suffix: str = "") -> list[tuple[str, int, int, int]]:
        """What to read for it: (trajectory, start, stop, dest_row). ``suffix`` asks for other trajectories instead."""
        rows = self.rollout.rows
        names = self.rollout.names[self.first : self.stop]
        return [(name + suffix, 0, rows, number * rows) for number, name in enumerate(names)]

    def flat(self, array: Any) -> Any:
        """The microbatch's part of an array or tensor [B, N - 1, W] as [rows, W]."""
        return array[self.first : self.stop].reshape(-1, array.shape[-1])

    def scored_rows(self, kind: str) -> slice | npt.NDArray[np.intp]:
        """Rows that can have a record at a site of this kind."""
        if kind != "moe_in":
            return slice(None)
        rows = np.arange((self.stop - self.first) * self.rollout.rows)
        generated: npt.NDArray[np.intp] = rows[rows % self.rollout.rows >= self.rollout.prompt_tokens]
        return generated


def microbatches(rollout: Rollout, trajectories: int) -> Iterator[Microbatch]:
    """The rollout cut into pieces of ``trajectories``."""
    for first in range(0, len(rollout.names), trajectories):
        yield Microbatch(rollout, first, min(first + trajectories, len(rollout.names)))


class TrainerTap:
    """Replays the routing, rounds as the arm says, and counts.

    Args:
        microbatch: what is being trained on.
        counts: by site, added to.
        batch: records of the microbatch; None if ``sites`` is empty.
        sites: by key, the sites that use the records; the others round natively.
        read_bits: False rounds to nearest under the rollout's scales.
        with_rtn: also count what rounding to nearest would have chosen.
    """

    def __init__(
        self,
        microbatch: Microbatch,
        counts: dict[SiteKey, SiteCount],
        *,
        batch: GuidanceBatch | None,
        sites: Mapping[SiteKey, Site],
        read_bits: bool,
        with_rtn: bool,
    ) -> None:
        self._microbatch = microbatch
        self._counts = counts
        self._batch = batch
        self._sites = sites
        self._read_bits = read_bits
        self._with_rtn = with_rtn
        scales = microbatch.rollout.tensor_scales
        native = {site: scales[key] for key, site in sites.items()}
        self.context = GuidanceContext(batch, native_tensor_scale=native) if batch is not None else None

    def route(self, layer: int, experts: torch.Tensor) -> torch.Tensor:
        replayed: torch.Tensor = self._microbatch.flat(self._microbatch.rollout.experts[layer])
        return replayed

    def round(self, layer: int, kind: str, x: torch.Tensor) -> torch.Tensor:
        key = (layer, kind)
        rollout = self._microbatch.rollout
        before = host_rows(x)
        count, rows = self._counts[key], self._microbatch.scored_rows(kind)
        count.add_inputs(before[rows], host_rows(self._microbatch.flat(rollout.inputs[key]))[rows])
        if not rollout.tensor_scales:
            count.add_values(before[rows], host_rows(self._microbatch.flat(rollout.inputs[key]))[rows])
            return x
        rounded = self._rounded(key, x, before)
        self._count(key, count, rows, before, host_rows(rounded))
        return rounded

    def _rounded(self, key: SiteKey, x: torch.Tensor, before: Floats) -> torch.Tensor:
        native_scale = self._microbatch.rollout.tensor_scales[key]
        if key not in self._sites or self.context is None:
            return straight_through(x, codebook.native_round(before, format=FORMAT, tensor_scale=native_scale))
        site = self._sites[key]
        if self._read_bits:
            return self.context.round(site, x)
        valid, scales, tensor_scale = self._records(site)
        out = codebook.native_round(before, format=FORMAT, tensor_scale=native_scale)
        out[valid] = codebook.rtn_round(before[valid], scales[valid], tensor_scale[valid], format=FORMAT)
        return straight_through(x, out)

    def _records(self, site: Site) -> tuple[npt.NDArray[np.bool_], Bytes, Floats]:
        assert self._batch is not None
        return (
            np.asarray(self._batch.valid[site]),
            np.asarray(self._batch.scales[site]),
            np.asarray(self._batch.tensor_scales[site]),
        )

    def _count(
        self, key: SiteKey, count: SiteCount, rows: slice | npt.NDArray[np.intp], before: Floats, after: Floats
    ) -> None:
        """Compare the codes behind ``after`` with the rollout's, on the scored rows."""
        rollout, scale = self._microbatch.rollout, self._microbatch.rollout.tensor_scales[key]
        codes = self._microbatch.flat(rollout.codes[key])[rows]
        scales = self._microbatch.flat(rollout.scales[key])[rows]
        values = codebook.dequantize(codes, scales, scale, format=FORMAT)
        count.add_values(after[rows], host_rows(torch.from_numpy(values).bfloat16()))
        count.add_codes(self._chosen_codes(key, before, after)[rows], codes)
        if self._with_rtn:
            count.add_rtn(codebook.rtn_codes(before[rows], scales, scale, format=FORMAT), codes)

    def _chosen_codes(self, key: SiteKey, before: Floats, after: Floats) -> Bytes:
        """The code of every element, under the scale with which its row was rounded."""
        scale = self._microbatch.rollout.tensor_scales[key]
        codes, _, _ = codebook.quantize(before, format=FORMAT, tensor_scale=scale)
        if key in self._sites:
            valid, scales, tensor_scale = self._records(self._sites[key])
            codes[valid] = codebook.rtn_codes(after[valid], scales[valid], tensor_scale[valid], format=FORMAT)
        return codes


@torch.no_grad()
def train_log_probs(model: Any, microbatch: Microbatch, tap: TrainerTap) -> torch.Tensor:
    """float32 [M, N - P] log-probabilities of the sampled tokens, from one batched forward."""
    tokens = microbatch.rollout.tokens[microbatch.first : microbatch.stop]
    with capture(model, tap) as cache:
        logits = forward(model, tokens[:, :-1], cache)
    prompt = microbatch.rollout.prompt_tokens
    return token_log_probs(logits[:, prompt - 1 :], tokens[:, prompt:])
