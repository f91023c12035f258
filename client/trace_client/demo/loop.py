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


def run_demo(settings: DemoSettings, output: Path, stages: Stages) -> DemoResult:
    """Run everything; the server's data directory stays in ``output / "store"``.

    Raises:
        TraceStoreError: the server did not start, or refused something.
    """
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    corpus = load_corpus()
    store = output / "store"
    # The server comes first: what keeps it from starting is said before a minute of training, not after it.
    with server_process(store) as server:
        tables = {run.name: run.sites(settings.size) for run in RUNS}
        with recorded_runs(server, tables) as runs:
            loop = _Loop(settings, corpus, runs, stages)
            loop.train()
            fp4 = loop.roll_out(loop.fp4_model, loop.scales, runs)
            sizes = {name: (run.meter.sent, run.meter.received) for name, run in runs.items()}
            bf16 = loop.roll_out(loop.model, {}, {})
            results = loop.compare(bf16, fp4)
    tokens = settings.trajectories * settings.tokens
    volumes = {
        name: Volume(sent / tokens, received / tokens, directory_bytes(store, name) / tokens)
        for name, (sent, received) in sizes.items()
    }
    return DemoResult(
        settings, loop.losses, loop.held_out_loss, sum(weight.numel() for weight in loop.model.parameters()), results,
        checks({result.name: result for result in results}), volumes, bytes(fp4.tokens[0].tolist()), loop.seconds,
        _versions(),
    )  # fmt: skip


class _Loop:
    """The steps of the demo over one trained model."""

    def __init__(self, settings: DemoSettings, corpus: Corpus, runs: dict[str, RecordedRun], stages: Stages) -> None:
        self._settings, self._corpus, self._runs, self._stages = settings, corpus, runs, stages
        self.seconds: dict[str, float] = {}
        self.losses: list[float] = []
        self.model = build_model(settings.size)

    def train(self) -> None:
        """Train, measure the loss on held-out text, round the experts' weights, calibrate the static scales."""
        settings, held_out = self._settings, self._corpus.held_out
        with self._stage("training", settings.schedule.steps):
            self.losses = pretrain(
                self.model, self._corpus.training, settings.schedule, torch.Generator().manual_seed(settings.seed),
                lambda step, loss: self._stages.advance(1, f"loss {loss:.2f}"),
            )  # fmt: skip
        self.model.eval()
        generator = torch.Generator().manual_seed(settings.seed + 1)
        self.held_out_loss = held_out_loss(self.model, held_out, generator)
        self.fp4_model = quantized_weights(self.model)
        self.scales = calibrate(self.fp4_model, windows(held_out, CALIBRATION_WINDOWS, CALIBRATION_LENGTH, generator))
        self._prompts = windows(held_out, settings.trajectories, settings.prompt_tokens, generator)

    def roll_out(self, model: Any, scales: dict[SiteKey, float], runs: dict[str, RecordedRun]) -> Rollout:
        """A rollout of ``model`` from the held-out prompts, recorded into ``runs`` and sealed. No scales: no FP4."""
        settings = self._settings
        name = "fp4" if scales else "bf16"
        with self._stage(f"{name.upper()} rollout", settings.tokens - settings.prompt_tokens):
            rollout = new_rollout(settings.size, self._prompts, settings.tokens, scales, name)
            tap = RolloutTap(rollout)
            for run in runs.values():
                tap.record_to(run.writer, run.sites)
            decode(model, tap, torch.Generator().manual_seed(settings.seed + 2), self._stages.advance)
            tap.finish()
        return rollout

    def compare(self, bf16: Rollout, fp4: Rollout) -> list[ArmResult]:
        """Every arm's trainer forwards, BF16 first."""
        pieces = -(-self._settings.trajectories // self._settings.microbatch)
        with self._stage("trainer forwards", pieces * (1 + len(FP4_ARMS))):
            results = [self._run_arm(BF16, self.model, bf16)]
            results += [self._run_arm(arm, self.fp4_model, fp4) for arm in FP4_ARMS]
        add_excess(results, self._settings.size)
        return results

    def _run_arm(self, arm: Arm, model: Any, rollout: Rollout) -> ArmResult:
        settings = self._settings
        result = run_arm(
            arm, model, rollout, settings.size, self._runs[arm.run.name].reader if arm.run else None,
            trajectories=settings.microbatch, seed=settings.seed + 3,
            progress=lambda units: self._stages.advance(units, arm.name),
        )  # fmt: skip
        result.bytes_per_token = record_bytes(arm, settings.size, rollout)
        return result

    @contextmanager
    def _stage(self, title: str, total: int) -> Iterator[None]:
        self._stages.begin(title, total)
        began = time.monotonic()
        yield
        self.seconds[title] = time.monotonic() - began


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
        "machine": platform.machine(),
    }
