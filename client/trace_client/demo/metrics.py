"""What is counted: at a site, how far the trainer's codes are from the rollout's; over an arm, what that costs.

    noise          |x_train - x_rollout| / |x_rollout|, Euclidean, of the vectors before the quantizer
    mismatch       share of elements whose E2M1 code differs from the rollout's; +0 and -0 are the same code
    RTN mismatch   the same, had this arm's own vectors been rounded to nearest under the rollout's scales
    adjacent       share of the RTN mismatches that are one step on the grid
    discrepancy    D = mean squared difference of the vectors that the experts or the attention consume
    excess         (D_FP4 - D_BF16) / D_BF16; -1 is the floor, reached when every value is the rollout's

Scored rows are those that can have a record: K and V of every token, routed-expert inputs of generated tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trace_client.demo.model import SiteKey
from trace_store import codebook

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass
class SiteCount:
    """Sums over the scored rows of one site in one arm."""

    elements: int = 0
    mismatches: int = 0
    rtn_mismatches: int = 0
    rtn_adjacent: int = 0
    input_error: float = 0.0
    input_energy: float = 0.0
    value_error: float = 0.0

    def add_inputs(self, trainer: Floats, rollout: Floats) -> None:
        """Vectors before the quantizer, [rows, W]."""
        self.input_error += float(np.square(trainer - rollout, dtype=np.float64).sum())
        self.input_energy += float(np.square(rollout, dtype=np.float64).sum())

    def add_values(self, trainer: Floats, rollout: Floats) -> None:
        """Vectors as consumed, [rows, W]."""
        self.elements += trainer.size
        self.value_error += float(np.square(trainer - rollout, dtype=np.float64).sum())

    def add_codes(self, trainer: Bytes, rollout: Bytes) -> None:
        """Codes 0 to 15, [rows, W]."""
        self.mismatches += int(np.count_nonzero(codebook.code_distance(trainer, rollout)))

    def add_rtn(self, rtn: Bytes, rollout: Bytes) -> None:
        """Codes that rounding to nearest would have chosen, [rows, W]."""
        distance = np.abs(codebook.code_distance(rtn, rollout))
        self.rtn_mismatches += int(np.count_nonzero(distance))
        self.rtn_adjacent += int(np.count_nonzero(distance == 1))

    @property
    def noise(self) -> float:
        return float(np.sqrt(self.input_error / self.input_energy)) if self.input_energy else 0.0

    @property
    def mismatch(self) -> float:
        return _ratio(self.mismatches, self.elements)

    @property
    def rtn_mismatch(self) -> float:
        return _ratio(self.rtn_mismatches, self.elements)

    @property
    def adjacent(self) -> float:
        """1 where nothing was mismatched."""
        return _ratio(self.rtn_adjacent, self.rtn_mismatches) if self.rtn_mismatches else 1.0

    @property
    def discrepancy(self) -> float:
        return _ratio(self.value_error, self.elements)


@dataclass
class ArmResult:
    """One compared run.

    Attributes:
        name: short key of the arm, used in JSON.
        title: what the table prints.
        log_prob_difference: float32 [B, N - P], trainer minus rollout, of the sampled tokens.
        sites: counts by site.
        guided_rows, native_rows: rows rounded with a record and without one, summed over sites.
        guided: sites that had guidance.
        bytes_per_token: record bytes by token that this arm's guidance takes; None where no record is used.
        excess: relative excess MSE at the last layer's routed-expert input; None for the BF16 arm.
    """

    name: str
    title: str
    log_prob_difference: Floats
    sites: dict[SiteKey, SiteCount]
    guided_rows: int = 0
    native_rows: int = 0
    guided: tuple[SiteKey, ...] = ()
    bytes_per_token: float | None = None
    excess: float | None = field(default=None)

    @property
    def mean_difference(self) -> float:
        return float(np.abs(self.log_prob_difference).mean())

    @property
    def max_difference(self) -> float:
        return float(np.abs(self.log_prob_difference).max())

    @property
    def mismatch(self) -> float:
        """Share of codes that differ, over all sites."""
        counts = self.sites.values()
        return _ratio(sum(count.mismatches for count in counts), sum(count.elements for count in counts))

    def over(self, keys: Iterable[SiteKey]) -> SiteCount:
        """Counts summed over some sites."""
        total = SiteCount()
        for key in keys:
            for name, value in vars(self.sites[key]).items():
                setattr(total, name, getattr(total, name) + value)
        return total


def relative_excess(fp4: float, bf16: float) -> float | None:
    """(D_FP4 - D_BF16) / D_BF16; None where BF16 itself has no discrepancy, and so nothing to compare with."""
    return (fp4 - bf16) / bf16 if bf16 > 0 else None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def arm_record(arm: ArmResult) -> dict[str, Any]:
    """The arm as plain values for ``--json``."""
    return {
        "arm": arm.name,
        "title": arm.title,
        "mean_abs_logprob_difference": arm.mean_difference,
        "max_abs_logprob_difference": arm.max_difference,
        "code_mismatch": arm.mismatch,
        "relative_excess_mse_last_layer": arm.excess,
        "record_bytes_per_token": arm.bytes_per_token,
        "guided_rows": arm.guided_rows,
        "native_rows": arm.native_rows,
        "sites": {
            f"{layer}/{kind}": {
                "noise": count.noise,
                "mismatch": count.mismatch,
                "rtn_mismatch": count.rtn_mismatch,
                "adjacent": count.adjacent,
                "guided": (layer, kind) in arm.guided,
            }
            for (layer, kind), count in arm.sites.items()
        },
    }
