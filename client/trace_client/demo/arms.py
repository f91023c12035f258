"""The compared runs: which guidance each gets, and the loop that makes one.

arm          records   bits            sites with guidance
bf16         none      -               none; BF16 rollout against BF16 trainer, no FP4 anywhere
own_scale    none      -               none: own block scales, round to nearest
b0           scales    none            all
b1_half      b1        1               latter half of the layers, with K and V: the paper's compact form
b1           b1        1               all: an unbroken chain
full         full      4, whole code   all
shuffled     b1        1               all, records of one site permuted over the tokens (control: must do harm)
no_record    b1        1               all, asked for trajectories that were never stored (control: equals own_scale)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trace_client.demo.metrics import ArmResult, SiteCount, relative_excess
from trace_client.demo.model import ModelSize, SiteKey
from trace_client.demo.rollout import Rollout
from trace_client.demo.trainer import Microbatch, TrainerTap, microbatches, train_log_probs
from trace_client.torch import GuidanceBatch
from trace_store import Site
from trace_store.errors import InvalidRequest

UNKNOWN_SUFFIX = "-never-stored"
PREFETCH_DEPTH = 2

Spans = list[tuple[str, int, int, int]]


class BatchReader(Protocol):
    """The call of ``client.reader`` that a trainer makes."""

    def prefetch(self, microbatches: Iterable[Spans], *, depth: int, device: str) -> Iterable[GuidanceBatch]: ...


@dataclass(frozen=True)
class Run:
    """How the rollout is recorded once: codes in ``form``, every layer or the last floor(L / 2) of them."""

    name: str
    form: str
    half: bool = False

    def sites(self, size: ModelSize) -> list[Site]:
        """The run's site table."""
        return size.sites(self.form, size.layers - size.layers // 2 if self.half else 0)


B1_HALF, B1, FULL = Run("b1-half", "b1", half=True), Run("b1", "b1"), Run("full", "full")
RUNS = (B1_HALF, B1, FULL)


@dataclass(frozen=True)
class Arm:
    """One forward to compare; fields as the table in the module docstring. ``run`` None uses no records."""

    name: str
    title: str
    run: Run | None = None
    read_bits: bool = True
    shuffled: bool = False
    unknown: bool = False

    @property
    def control(self) -> bool:
        """Whether the arm shows what must not work."""
        return self.shuffled or self.unknown

    def sites(self, size: ModelSize) -> dict[SiteKey, Site]:
        """Sites whose records the arm uses."""
        return {(site.layer, site.kind): site for site in self.run.sites(size)} if self.run else {}


BF16 = Arm("bf16", "BF16 on both sides")
FP4_ARMS = (
    Arm("own_scale", "own scales, RTN (QAT)"),
    Arm("b0", "rollout scales, RTN (b=0)", B1, read_bits=False),
    Arm("b1_half", "b=1, latter half (paper)", B1_HALF),
    Arm("b1", "b=1, whole chain", B1),
    Arm("full", "full codes, whole chain", FULL),
    Arm("shuffled", "control: shuffled records", B1, shuffled=True),
    Arm("no_record", "control: no record", B1, unknown=True),
)


@dataclass(frozen=True)
class ShuffledBatch:
    """A batch whose valid rows were permuted, at every site by its own permutation."""

    planes: Mapping[Site, Any]
    scales: Mapping[Site, Any]
    tensor_scales: Mapping[Site, Any]
    valid: Mapping[Site, Any]

    @classmethod
    def of(cls, batch: GuidanceBatch, random: np.random.Generator) -> ShuffledBatch:
        orders = {site: _permutation(np.asarray(valid), random) for site, valid in batch.valid.items()}
        planes, scales, tensor_scales = (
            {site: np.asarray(rows[site])[order] for site, order in orders.items()}
            for rows in (batch.planes, batch.scales, batch.tensor_scales)
        )
        return cls(planes, scales, tensor_scales, batch.valid)


def _permutation(valid: npt.NDArray[np.bool_], random: np.random.Generator) -> npt.NDArray[np.intp]:
    order = np.arange(len(valid))
    order[valid] = random.permutation(order[valid])
    return order


def run_arm(
    arm: Arm,
    model: Any,
    rollout: Rollout,
    size: ModelSize,
    reader: BatchReader | None,
    *,
    trajectories: int,
    seed: int,
    progress: Callable[[int], None],
) -> ArmResult:
    """Run the trainer over the rollout, ``trajectories`` at a time, with the guidance that ``arm`` names.

    Args:
        reader: reader of the run that holds the arm's form; None for arms without records.
        progress: hears how many microbatches were done.
    """
    counts = {key: SiteCount() for key in size.site_keys()}
    sites = arm.sites(size)
    random = np.random.default_rng(seed)
    pieces, differences, guided_rows, native_rows = list(microbatches(rollout, trajectories)), [], 0, 0
    for microbatch, stored in zip(pieces, _batches(arm, pieces, reader), strict=True):
        batch = ShuffledBatch.of(stored, random) if stored is not None and arm.shuffled else stored
        tap = TrainerTap(
            microbatch, counts, batch=batch, sites=sites, read_bits=arm.read_bits, with_rtn=arm.name == "b1"
        )
        log_probs = train_log_probs(model, microbatch, tap)
        differences.append((log_probs - rollout.log_probs[microbatch.first : microbatch.stop]).numpy())
        if tap.context is not None:
            guided_rows += sum(site.guided for site in tap.context.report().values())
            native_rows += sum(site.native for site in tap.context.report().values())
        progress(1)
    return ArmResult(arm.name, arm.title, np.concatenate(differences), counts, guided_rows, native_rows, tuple(sites))


def _batches(arm: Arm, pieces: list[Microbatch], reader: BatchReader | None) -> Iterable[GuidanceBatch | None]:
    if arm.run is None:
        return [None] * len(pieces)
    if reader is None:
        raise InvalidRequest(f"the arm reads records, arm={arm.name}", argument="reader")
    spans = [piece.spans(UNKNOWN_SUFFIX if arm.unknown else "") for piece in pieces]
    return reader.prefetch(spans, depth=PREFETCH_DEPTH, device="cpu")


def add_excess(arms: list[ArmResult], size: ModelSize) -> None:
    """Fill ``excess`` of the FP4 arms; the first arm is BF16."""
    last = (size.layers - 1, "moe_in")
    bf16 = arms[0].sites[last].discrepancy
    for arm in arms[1:]:
        arm.excess = relative_excess(arm.sites[last].discrepancy, bf16)


def record_bytes(arm: Arm, size: ModelSize, rollout: Rollout) -> float | None:
    """Bytes of codes and block scales that the arm's guidance takes, per token of the rollout; None without any."""
    if arm.run is None or arm.control:
        return None
    total = 0
    for site in arm.run.sites(size):
        rows = rollout.rows - (rollout.prompt_tokens if site.kind == "moe_in" else 0)
        total += rows * (site.scale_bytes + (site.code_bytes if arm.read_bits else 0))
    return total / (rollout.rows + 1)


@dataclass(frozen=True)
class Check:
    """One statement about the run that must hold."""

    statement: str
    holds: bool


def checks(results: Mapping[str, ArmResult]) -> list[Check]:
    """The acceptance of the demo, from its own figures."""
    chain, half, rtn = results["b1"], results["b1_half"], results["b0"]
    own, shuffled, absent = results["own_scale"], results["shuffled"], results["no_record"]
    same_input = all(chain.sites[key].mismatch <= chain.sites[key].rtn_mismatch for key in chain.guided)
    same_site = all(chain.sites[key].mismatch <= rtn.sites[key].mismatch for key in chain.guided)
    half_site = all(half.sites[key].mismatch <= rtn.sites[key].mismatch for key in half.guided)
    equal = bool((own.log_prob_difference == absent.log_prob_difference).all())
    return [
        Check("guided b = 1 at or below RTN of the same input, at every site", same_input),
        Check("guided b = 1 at or below the RTN arm, at every guided site", same_site and half_site),
        Check("whole chain below latter half in mean |dlogp|", chain.mean_difference < half.mean_difference),
        Check("shuffled records worse than RTN", shuffled.mean_difference > rtn.mean_difference),
        Check("no record equals own-scale RTN, bit for bit", equal and absent.guided_rows == 0),
    ]
