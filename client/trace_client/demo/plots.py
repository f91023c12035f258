"""Figures of the report, each an SVG that can stand inside a page."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np

from trace_client.demo.loop import DemoResult

INK, MUTED, GRID = "#1f2937", "#6b7280", "#e5e7eb"
COLOURS = {
    "bf16": "#0891b2",
    "own_scale": "#dc2626",
    "b0": "#f97316",
    "b1_half": "#a855f7",
    "b1": "#16a34a",
    "full": "#4d7c0f",
    "shuffled": "#9ca3af",
    "no_record": "#d1d5db",
}
SHORT = {
    "bf16": "BF16",
    "own_scale": "own-scale RTN",
    "b0": "rollout-scale RTN",
    "b1_half": "b = 1, latter half",
    "b1": "b = 1, whole chain",
    "full": "full codes, whole chain",
    "shuffled": "shuffled (control)",
    "no_record": "no record (control)",
}
STYLE: Any = {
    "svg.hashsalt": "trace-store",
    "font.size": 10,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


def figures(result: DemoResult) -> dict[str, str]:
    """Every figure by name, as SVG text."""
    matplotlib.use("svg")
    with matplotlib.rc_context(STYLE):
        return {
            "arms": _svg(_arms, result, (7.6, 3.5)),
            "layers": _svg(_layers, result, (7.6, 3.5)),
            "tail": _svg(_tail, result, (7.6, 3.5)),
            "noise": _svg(_noise, result, (7.6, 3.5)),
            "bytes": _svg(_bytes, result, (7.6, 3.0)),
            "loss": _svg(_loss, result, (7.6, 3.0)),
        }


def _svg(draw: Any, result: DemoResult, inches: tuple[float, float]) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    draw(figure.subplots(), result)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _arms(axes: Any, result: DemoResult) -> None:
    """Bars of mean |dlogp|, the largest as a mark; BF16 as the line to reach."""
    names = [arm.name for arm in result.arms][::-1]
    means = [result.arm(name).mean_difference for name in names]
    bars = axes.barh([SHORT[name] for name in names], means, color=[COLOURS[name] for name in names], height=0.66)
    axes.scatter([result.arm(name).max_difference for name in names], range(len(names)), marker="|", s=90, color=INK)
    axes.bar_label(bars, [f" {mean:.4f}" for mean in means], color=INK, fontsize=9)
    axes.axvline(result.arm("bf16").mean_difference, color=COLOURS["bf16"], linestyle="--", linewidth=1)
    axes.set_xscale("log")
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("mean |log-probability difference| of the sampled tokens; tick: the largest")


def _layers(axes: Any, result: DemoResult) -> None:
    """Share of expert-input codes that differ, by layer."""
    layers = range(result.settings.size.layers)
    for name in ("own_scale", "b0", "b1_half", "b1"):
        shares = [100 * result.arm(name).sites[layer, "moe_in"].mismatch for layer in layers]
        _line(axes, layers, shares, name)
    rtn = [100 * result.arm("b1").sites[layer, "moe_in"].rtn_mismatch for layer in layers]
    axes.plot(
        layers,
        rtn,
        color=COLOURS["b1"],
        linestyle=":",
        marker="o",
        markersize=3,
        label="RTN of the guided chain's inputs",
    )
    axes.set_yscale("symlog", linthresh=0.01)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("layer")
    axes.set_ylabel("codes that differ, % (expert inputs)")
    axes.legend(fontsize=8.5)


def _noise(axes: Any, result: DemoResult) -> None:
    """Relative difference of the expert inputs before rounding, by layer."""
    layers = range(result.settings.size.layers)
    for name in ("own_scale", "b0", "b1_half", "bf16", "b1"):
        _line(axes, layers, [100 * result.arm(name).sites[layer, "moe_in"].noise for layer in layers], name)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("layer")
    axes.set_ylabel("noise before rounding, %")
    axes.legend(fontsize=8.5)


def _tail(axes: Any, result: DemoResult) -> None:
    """Share of sampled tokens whose |dlogp| exceeds x."""
    for name in ("shuffled", "own_scale", "b0", "b1_half", "bf16", "b1"):
        ordered = np.sort(np.abs(result.arm(name).log_prob_difference).ravel())
        share = 1 - np.arange(len(ordered)) / len(ordered)
        axes.plot(ordered, share, color=COLOURS[name], label=SHORT[name], linewidth=1.6)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left=1e-4)
    axes.set_xlabel("|log-probability difference|")
    axes.set_ylabel("share of sampled tokens above")
    axes.legend(fontsize=8.5)


def _bytes(axes: Any, result: DemoResult) -> None:
    """Bytes per token in the record, on the wire and on disk."""
    names = ["full", "b1", "b1_half"]
    kinds = (("record", "#94a3b8"), ("wire", "#0ea5e9"), ("disk", "#1e3a8a"))
    for number, (kind, colour) in enumerate(kinds):
        values = [_volume(result, name, kind) for name in names]
        places = np.arange(len(names)) + (1 - number) * 0.27
        bars = axes.barh(places, values, height=0.25, color=colour, label=kind)
        axes.bar_label(bars, [f" {value:,.0f}" for value in values], color=INK, fontsize=9)
    axes.set_yticks(range(len(names)), [SHORT[name] for name in names])
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.12)
    axes.set_xlabel("bytes per token")
    axes.legend(fontsize=8.5, loc="upper right")


def _volume(result: DemoResult, name: str, kind: str) -> float:
    if kind == "record":
        return result.arm(name).bytes_per_token or 0.0
    stored = result.volumes[name.replace("_", "-")]
    return stored.appended if kind == "wire" else stored.disk


def _loss(axes: Any, result: DemoResult) -> None:
    """Training loss by step."""
    steps = np.arange(1, len(result.losses) + 1)
    axes.plot(steps, result.losses, color=INK, linewidth=1.2)
    axes.axhline(
        result.held_out_loss, color=COLOURS["bf16"], linestyle="--", linewidth=1, label="held-out text, after training"
    )
    axes.set_xlabel("step")
    axes.set_ylabel("nats per byte")
    axes.legend(fontsize=8.5)


def _line(axes: Any, x: Any, y: Sequence[float], name: str) -> None:
    axes.plot(x, y, color=COLOURS[name], label=SHORT[name], marker="o", markersize=4, linewidth=1.8)
