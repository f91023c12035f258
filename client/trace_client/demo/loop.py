"""The demo from end to end: train, roll out, record, seal, read back, compare."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
import transformers

from trace_client.demo.arms import BF16, FP4_ARMS, RUNS, Arm, Check, add_excess, checks, record_bytes, run_arm
from trace_client.demo.corpus import Corpus, load_corpus, windows
from trace_client.demo.metrics import ArmResult
from trace_client.demo.model import ModelSize, SiteKey, build_model, calibrate, quantized_weights
from trace_client.demo.pretrain import Schedule, held_out_loss, pretrain
from trace_client.demo.rollout import Rollout, RolloutTap, decode, new_rollout
from trace_client.demo.store import RecordedRun, directory_bytes, recorded_runs, server_process

CALIBRATION_WINDOWS = 16
CALIBRATION_LENGTH = 128


@dataclass(frozen=True)
class DemoSettings:
    """Everything that decides the run.

    Attributes:
        trajectories, tokens, prompt_tokens: shape of the rollout; ``tokens`` counts the prompt.
        microbatch: trajectories per training forward.
        threads: torch threads; 2 keeps figures comparable between machines of different sizes.
    """

    size: ModelSize = field(default_factory=ModelSize)
    schedule: Schedule = field(default_factory=Schedule)
    trajectories: int = 16
    tokens: int = 192
    prompt_tokens: int = 32
    microbatch: int = 4
    seed: int = 0
    threads: int = 2


@dataclass(frozen=True)
class Volume:
    """Bytes of one recorded run, by token of the rollout.

    Attributes:
        appended: client to server while recording and sealing, counted on the socket.
        acknowledged: server to client meanwhile.
        disk: files of the run after the server stopped.
    """

    appended: float
    acknowledged: float
    disk: float


@dataclass
class DemoResult:
    """What the demo found; ``screen``, ``report`` and ``--json`` show it."""

    settings: DemoSettings
    losses: list[float]
    held_out_loss: float
    parameters: int
    arms: list[ArmResult]
    checks: list[Check]
    volumes: dict[str, Volume]
    sample: bytes
    seconds: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def arm(self, name: str) -> ArmResult:
        """The arm with this short key."""
        return next(arm for arm in self.arms if arm.name == name)


class Stages(Protocol):
    """Where progress is shown."""

    def begin(self, title: str, total: int) -> None:
        """A stage of ``total`` units starts; the one before is done."""

    def advance(self, units: int, note: str = "") -> None:
        """Units of the running stage are done."""


class _Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began


def run_demo(settings: DemoSettings, output: Path, stages: Stages) -> DemoResult:
    """Run everything; the server's directory stays in ``output / "store"``.

    Raises:
        TraceStoreError: the server did not start, or refused something.
    """
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    clock = _Clock()
    corpus = load_corpus()
    model = build_model(settings.size)
    with clock.stage("training"):
        losses = _train(model, corpus, settings, stages)
    generator = torch.Generator().manual_seed(settings.seed + 1)
    loss = held_out_loss(model, corpus.held_out, generator)
    fp4_model = quantized_weights(model)
    scales = calibrate(fp4_model, windows(corpus.held_out, CALIBRATION_WINDOWS, CALIBRATION_LENGTH, generator))
    prompts = windows(corpus.held_out, settings.trajectories, settings.prompt_tokens, generator)
    store = output / "store"
    with server_process(store) as server:
        tables = {run.name: run.sites(settings.size) for run in RUNS}
        with recorded_runs(server, tables) as runs:
            with clock.stage("FP4 rollout, recorded"):
                fp4, sizes = _record(fp4_model, scales, prompts, runs, settings, stages)
            with clock.stage("BF16 rollout"):
                bf16 = _roll_out(model, {}, prompts, {}, settings, stages)
            with clock.stage("trainer forwards"):
                results = _compare(model, fp4_model, bf16, fp4, runs, settings, stages)
    tokens = settings.trajectories * settings.tokens
    volumes = {
        name: Volume(sent / tokens, received / tokens, directory_bytes(store, name) / tokens)
        for name, (sent, received) in sizes.items()
    }
    return DemoResult(
        settings, losses, loss, sum(parameter.numel() for parameter in model.parameters()), results,
        checks({result.name: result for result in results}), volumes, bytes(fp4.tokens[0].tolist()),
        clock.seconds, _versions(),
    )  # fmt: skip


def _train(model: Any, corpus: Corpus, settings: DemoSettings, stages: Stages) -> list[float]:
    stages.begin("training on Python's sources", settings.schedule.steps)
    losses = pretrain(
        model, corpus.training, settings.schedule, torch.Generator().manual_seed(settings.seed),
        lambda step, loss: stages.advance(1, f"loss {loss:.2f}"),
    )  # fmt: skip
    model.eval()
    return losses


def _record(
    model: Any,
    scales: dict[SiteKey, float],
    prompts: torch.Tensor,
    runs: dict[str, RecordedRun],
    settings: DemoSettings,
    stages: Stages,
) -> tuple[Rollout, dict[str, tuple[int, int]]]:
    """The FP4 rollout, sealed, and the bytes (sent, received) that recording it took, by run."""
    rollout = _roll_out(model, scales, prompts, runs, settings, stages)
    return rollout, {name: (run.meter.sent, run.meter.received) for name, run in runs.items()}


def _roll_out(
    model: Any,
    scales: dict[SiteKey, float],
    prompts: torch.Tensor,
    runs: dict[str, RecordedRun],
    settings: DemoSettings,
    stages: Stages,
) -> Rollout:
    name = "fp4" if scales else "bf16"
    stages.begin(f"{name.upper()} rollout, token by token", settings.tokens - settings.prompt_tokens)
    rollout = new_rollout(settings.size, prompts, settings.tokens, scales, name)
    tap = RolloutTap(rollout)
    for run in runs.values():
        tap.record_to(run.writer, run.sites)
    decode(model, tap, torch.Generator().manual_seed(settings.seed + 2), stages.advance)
    tap.finish()
    return rollout


def _compare(
    model: Any,
    fp4_model: Any,
    bf16: Rollout,
    fp4: Rollout,
    runs: dict[str, RecordedRun],
    settings: DemoSettings,
    stages: Stages,
) -> list[ArmResult]:
    pieces = -(-settings.trajectories // settings.microbatch)
    stages.begin("trainer forwards", pieces * (1 + len(FP4_ARMS)))
    results = []
    for arm in (BF16, *FP4_ARMS):
        result = run_arm(
            arm,
            model if arm is BF16 else fp4_model,
            bf16 if arm is BF16 else fp4,
            settings.size,
            runs[arm.run.name].reader if arm.run else None,
            trajectories=settings.microbatch,
            seed=settings.seed + 3,
            progress=_noted(stages, arm),
        )
        result.bytes_per_token = record_bytes(arm, settings.size, fp4)
        results.append(result)
    add_excess(results, settings.size)
    return results


def _noted(stages: Stages, arm: Arm) -> Any:
    return lambda units: stages.advance(units, arm.name)


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
        "machine": platform.machine(),
    }
