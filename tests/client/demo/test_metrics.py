"""Counts: shares, noise and the relative excess, on values that can be done by hand."""

from __future__ import annotations

import numpy as np
import pytest

from trace_client.demo.metrics import ArmResult, SiteCount, arm_record, relative_excess


def count(elements: int = 4, mismatches: int = 1, value_error: float = 2.0) -> SiteCount:
    return SiteCount(elements=elements, mismatches=mismatches, value_error=value_error)


def test_noise_is_relative_to_the_rollout() -> None:
    site = SiteCount()
    site.add_inputs(np.array([[3.0, 4.5]], np.float32), np.array([[3.0, 4.0]], np.float32))
    assert site.noise == pytest.approx(0.1)


def test_codes_are_compared_without_the_sign_of_zero() -> None:
    site = SiteCount(elements=4)
    site.add_codes(np.array([[8, 3, 5, 7]], np.uint8), np.array([[0, 3, 4, 15]], np.uint8))
    assert site.mismatch == 0.5


def test_adjacent_is_a_share_of_the_rtn_mismatches() -> None:
    site = SiteCount(elements=4)
    site.add_rtn(np.array([[1, 9, 6, 2]], np.uint8), np.array([[0, 0, 4, 2]], np.uint8))
    assert site.rtn_mismatch == 0.75
    assert site.adjacent == pytest.approx(2 / 3)


def test_nothing_mismatched_is_all_adjacent() -> None:
    assert SiteCount(elements=4).adjacent == 1


def test_excess_has_its_floor_at_minus_one() -> None:
    assert relative_excess(0.0, 0.5) == -1
    assert relative_excess(1.5, 0.5) == 2
    assert relative_excess(1.5, 0.0) is None


def arm() -> ArmResult:
    sites = {(0, "k"): count(), (1, "k"): count(elements=12, mismatches=7)}
    return ArmResult("b1", "title", np.array([[-0.5, 0.25]], np.float32), sites, guided=((1, "k"),))


def test_an_arm_sums_over_its_sites_and_tokens() -> None:
    assert arm().mean_difference == 0.375
    assert arm().max_difference == 0.5
    assert arm().mismatch == 0.5
    assert arm().over([(1, "k")]).mismatches == 7


def test_the_record_of_an_arm_is_plain_values() -> None:
    record = arm_record(arm())
    assert record["sites"]["1/k"]["guided"] is True
    assert record["sites"]["0/k"] == {"noise": 0, "mismatch": 0.25, "rtn_mismatch": 0, "adjacent": 1, "guided": False}
    assert record["mean_abs_logprob_difference"] == 0.375
