"""What a path of the benchmark is, how it is run round by round, and what its numbers are."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Sample:
    """One run of a path: payload bytes, wall seconds, CPU seconds of client and server."""

    size: int
    seconds: float
    client_cpu_s: float = 0.0
    server_cpu_s: float = 0.0

    @property
    def rate(self) -> float:
        """GB/s, 10^9."""
        return self.size / self.seconds / 1e9


class Path(Protocol):
    """A way for bytes to go. ``name`` is unique; ``direction`` is up, down or local."""

    name: str
    direction: str

    def run(self, turn: int) -> Sample:
        """Move the payload once; what must not be timed happens before and after."""

    def close(self) -> None:
        """Free what it holds."""


@dataclass
class Result:
    """All samples of a path, in the order of the rounds."""

    name: str
    direction: str
    samples: list[Sample] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        return [sample.rate for sample in self.samples]

    def cpu_per_gib(self, side: str) -> float:
        """Median CPU seconds per 2^30 bytes of ``client`` or ``server``."""
        return statistics.median(float(getattr(s, f"{side}_cpu_s")) / s.size * 2**30 for s in self.samples)

    def ratios(self, base: Result) -> list[float]:
        """Rate over the base's rate of the same round."""
        return [ours / theirs for ours, theirs in zip(self.rates, base.rates, strict=True)]


def timed(size: int, action: Callable[[], object], server_pid: int = 0) -> Sample:
    """Run ``action`` once."""
    server_before, client_before = cpu_seconds(server_pid), time.process_time()
    started = time.perf_counter()
    action()
    seconds = time.perf_counter() - started
    return Sample(size, seconds, time.process_time() - client_before, cpu_seconds(server_pid) - server_before)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and of its threads; 0 for pid 0."""
    if not pid:
        return 0.0
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def run_interleaved(
    paths: Sequence[Path], rounds: int, report: Callable[[str, int, Sample], None] = lambda name, turn, sample: None
) -> list[Result]:
    """Run every path once a round, the order turned by one from round to round. Round 0 only warms up."""
    results = {path.name: Result(path.name, path.direction) for path in paths}
    with ExitStack() as stack:
        for path in paths:
            stack.callback(path.close)
        for turn in range(rounds + 1):
            for path in _turned(paths, turn):
                sample = path.run(turn)
                report(path.name, turn, sample)
                if turn:
                    results[path.name].samples.append(sample)
    return list(results.values())


def _turned(paths: Sequence[Path], turn: int) -> Iterable[Path]:
    shift = turn % len(paths)
    return [*paths[shift:], *paths[:shift]]
