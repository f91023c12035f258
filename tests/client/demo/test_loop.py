"""The whole loop on a tiny model: real server, every arm, figures that must hold whatever the noise is."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from trace_client.demo.arms import FP4_ARMS, RUNS, ShuffledBatch
from trace_client.demo.command import summary_of
from trace_client.demo.loop import DemoResult, DemoSettings, run_demo
from trace_client.demo.model import ModelSize
from trace_client.demo.pretrain import Schedule
from trace_client.demo.report import render
from trace_client.demo.screen import Bars, show
from trace_client.microbatch import Microbatch
from trace_store import Site


class Quiet:
    """Stages that count what they hear."""

    def __init__(self) -> None:
        self.stages: list[list[int]] = []

    def begin(self, title: str, total: int) -> None:
        self.stages.append([0, total])

    def advance(self, units: int, note: str = "") -> None:
        self.stages[-1][0] += units


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def stages() -> Quiet:
    return Quiet()


@pytest.fixture(scope="module")
def result(size: ModelSize, output: Path, stages: Quiet) -> DemoResult:
    settings = DemoSettings(
        size=size, schedule=Schedule(steps=3, batch=2, length=32), trajectories=4, tokens=28, prompt_tokens=8,
        microbatch=2, threads=1,
    )  # fmt: skip
    return run_demo(settings, output, stages)


def test_every_arm_ran(result: DemoResult) -> None:
    assert [arm.name for arm in result.arms] == ["bf16", *(arm.name for arm in FP4_ARMS)]
    assert all(arm.log_prob_difference.shape == (4, 20) for arm in result.arms)
    assert all(np.isfinite(arm.log_prob_difference).all() for arm in result.arms)


def test_progress_reaches_the_end_of_every_stage(result: DemoResult, stages: Quiet) -> None:
    assert stages.stages == [[3, 3], [20, 20], [20, 20], [16, 16]]


def test_no_record_equals_own_scale_rounding(result: DemoResult) -> None:
    own, absent = result.arm("own_scale"), result.arm("no_record")
    assert np.array_equal(own.log_prob_difference, absent.log_prob_difference)
    assert own.sites == absent.sites
    assert absent.guided_rows == 0


def test_guidance_never_does_worse_than_nearest_at_a_site(result: DemoResult) -> None:
    for name in ("b1", "full"):
        for key, count in result.arm(name).sites.items():
            assert count.mismatches <= result.arm("b0").sites[key].mismatches, (name, key)
    for key, count in result.arm("b1").sites.items():
        assert count.mismatches <= count.rtn_mismatches, key


def test_shuffled_records_do_harm(result: DemoResult) -> None:
    assert result.arm("shuffled").mismatch > 0.2
    assert result.arm("shuffled").mean_difference > result.arm("b0").mean_difference


def test_rows_with_a_record_are_those_the_store_expects(result: DemoResult, size: ModelSize) -> None:
    rows, prompt, trajectories = 27, 8, 4
    per_layer = trajectories * (2 * rows + rows - prompt)
    assert result.arm("b1").guided_rows == per_layer * size.layers
    assert result.arm("b1").native_rows == trajectories * prompt * size.layers
    assert result.arm("b1_half").guided_rows == per_layer * size.layers // 2


def test_volumes_agree_with_the_arithmetic(result: DemoResult, size: ModelSize) -> None:
    kv, moe = 2 * (32 // 8 + 32 // 16), 64 // 8 + 64 // 16
    per_token = size.layers * (27 * kv + 19 * moe) / 28
    assert result.arm("b1").bytes_per_token == pytest.approx(per_token)
    assert result.arm("b1_half").bytes_per_token == pytest.approx(per_token / 2)
    assert result.volumes["b1"].appended > per_token
    assert set(result.volumes) == {run.name for run in RUNS}


def test_segments_open_with_plain_pyarrow(result: DemoResult, output: Path) -> None:
    segments = list((output / "store" / "runs").glob("*/*/*.arrow"))
    assert len(segments) >= len(RUNS)
    for path in segments:
        with pa.OSFile(str(path)) as file:
            assert pa.ipc.open_file(file).read_all().num_rows > 0


def test_the_report_stands_alone(result: DemoResult) -> None:
    page = render(result)
    assert page.count("<svg") == 6
    for needle in ("src=", "<script", "<link", "@import", 'href="http'):
        assert needle not in page, needle
    assert all(arm.title in page for arm in result.arms)


def test_tables_fit_eighty_columns_and_name_every_arm(result: DemoResult) -> None:
    text = io.StringIO()
    show(result, Console(file=text, width=80))
    assert all(arm.title in text.getvalue() for arm in result.arms)
    assert "…" not in text.getvalue()
    assert text.getvalue().count("holds") + text.getvalue().count("FAILS") == len(result.checks)


def test_the_summary_is_json(result: DemoResult) -> None:
    summary = json.loads(json.dumps(summary_of(result)))
    assert {arm["arm"] for arm in summary["arms"]} == {arm.name for arm in result.arms}
    assert summary["training"]["steps"] == 3


def test_bars_print_a_line_per_stage_without_a_terminal() -> None:
    text = io.StringIO()
    with Bars(Console(file=text)) as bars:
        bars.begin("one", 2)
        bars.advance(2)
        bars.begin("two", 1)
    assert text.getvalue().split() == ["one", "...", "two", "..."]


def test_shuffling_moves_valid_rows_only() -> None:
    site = Site(0, "k", 16)
    batch = Microbatch(
        6, {site: np.arange(12, dtype=np.uint8).reshape(6, 1, 2)}, {site: np.arange(6, dtype=np.uint8)[:, None]},
        {site: np.arange(6, dtype=np.float32)}, {site: np.array([True] * 4 + [False] * 2)},
    )  # fmt: skip
    shuffled = ShuffledBatch.of(batch, np.random.default_rng(2))
    order = shuffled.scales[site][:, 0]
    assert sorted(order[:4]) == [0, 1, 2, 3]
    assert order[4:].tolist() == [4, 5]
    assert order.tolist() != list(range(6))
    assert np.array_equal(shuffled.planes[site][:, 0, 0], 2 * order)
