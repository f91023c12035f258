"""Print results: every path, then the budgets with pass or miss."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from trace_client.bench.limits import LocalWrite, Memcpy, RawTcp
from trace_client.bench.measure import Result


@dataclass(frozen=True)
class Budget:
    """A ratio that must be reached: ``path`` over ``base`` within a round, median over rounds."""

    path: str
    base: str
    must: float
    moonshot: float


BUDGETS = (
    Budget("append memory, arena", RawTcp.name, 1.3, 2.0),
    Budget("append synced, arena", LocalWrite.name, 0.85, 0.95),
    Budget("append memory, gRPC", RawTcp.name, 0.55, 0.8),
    Budget("read spans of 512, gRPC", RawTcp.name, 0.55, 0.8),
    Budget("read spans of 64, arena", Memcpy.name, 0.5, 0.8),
    Budget("read spans of 256, arena", Memcpy.name, 0.5, 0.8),
    Budget("read spans of 512, arena", Memcpy.name, 0.5, 0.8),
)


@dataclass(frozen=True)
class Verdict:
    """A budget and what was measured."""

    budget: Budget
    median: float
    low: float
    high: float

    @property
    def word(self) -> str:
        if self.median >= self.budget.moonshot:
            return "moonshot"
        return "pass" if self.median >= self.budget.must else "MISS"


def judge(results: Sequence[Result], budgets: Sequence[Budget]) -> list[Verdict]:
    """Verdicts of the budgets whose paths were run."""
    by_name = {result.name: result for result in results}
    verdicts = []
    for budget in budgets:
        if budget.path in by_name and budget.base in by_name:
            ratios = by_name[budget.path].ratios(by_name[budget.base])
            verdicts.append(Verdict(budget, statistics.median(ratios), min(ratios), max(ratios)))
    return verdicts


def print_results(console: Console, results: Sequence[Result], verdicts: Sequence[Verdict]) -> None:
    """Two tables: paths, and budgets."""
    table = _table("path", "GB/s median (min-max)", "CPU s/GiB client", "server")
    for result in results:
        rates = result.rates
        table.add_row(
            result.name,
            f"{statistics.median(rates):.2f} ({min(rates):.2f}-{max(rates):.2f})",
            f"{result.cpu_per_gib('client'):.2f}",
            f"{result.cpu_per_gib('server'):.2f}" if result.direction != "local" else "-",
        )
    console.print(table)
    if not verdicts:
        return
    table = _table("budget", "over", "must", "moonshot", "ratio median (min-max)", "verdict")
    for verdict in verdicts:
        budget = verdict.budget
        table.add_row(
            budget.path,
            budget.base,
            f"{budget.must:g}",
            f"{budget.moonshot:g}",
            f"{verdict.median:.2f} ({verdict.low:.2f}-{verdict.high:.2f})",
            verdict.word,
        )
    console.print(table)


def as_json(results: Sequence[Result], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The same for machines."""
    return {
        "paths": [
            {
                "name": result.name,
                "direction": result.direction,
                "gb_per_s": result.rates,
                "client_cpu_s_per_gib": result.cpu_per_gib("client"),
                "server_cpu_s_per_gib": result.cpu_per_gib("server"),
            }
            for result in results
        ],
        "budgets": [
            {
                "path": verdict.budget.path,
                "over": verdict.budget.base,
                "must": verdict.budget.must,
                "moonshot": verdict.budget.moonshot,
                "ratio": verdict.median,
                "ratio_min": verdict.low,
                "ratio_max": verdict.high,
                "verdict": verdict.word,
            }
            for verdict in verdicts
        ],
    }


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
