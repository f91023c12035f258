"""The demo on a terminal: progress while it runs, two tables and the checks when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from trace_client.demo.loop import DemoResult
from trace_client.demo.metrics import ArmResult, SiteCount


class Bars:
    """Progress bars, one per stage. A context manager; where no terminal is, a line per stage."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:<36}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=console,
        )
        self._task: TaskID | None = None

    def begin(self, title: str, total: int) -> None:
        """Start the bar of a stage; fill up the one before, which may have ended early."""
        self._end_stage()
        if self._console.is_terminal:
            self._task = self._progress.add_task(title, total=total, note="")
        else:
            self._console.print(f"{title} ...")

    def advance(self, units: int, note: str = "") -> None:
        """Move the running bar."""
        if self._task is not None:
            self._progress.update(self._task, advance=units, note=note)

    def _end_stage(self) -> None:
        if self._task is not None:
            task = next(task for task in self._progress.tasks if task.id == self._task)
            self._progress.update(self._task, total=task.completed or task.total, refresh=True)
            self._progress.stop_task(self._task)

    def __enter__(self) -> Bars:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._end_stage()
        self._progress.stop()


def share(value: float) -> str:
    """A share as a percentage with two significant digits, 0 as 0."""
    return "0" if value == 0 else f"{100 * value:.2g}%"


def excess(value: float | None) -> str:
    """Relative excess MSE: four digits near the floor of -1, else two or whole numbers."""
    if value is None:
        return "-"
    return f"{value:+.4f}" if value < -0.99 else f"{value:+,.0f}" if abs(value) >= 10 else f"{value:+.2f}"


def volume(value: float | None) -> str:
    """Bytes per token."""
    return "-" if value is None else f"{value:,.0f}"


def volumes(result: DemoResult, arm: ArmResult) -> tuple[str, str, str]:
    """Bytes per token of an arm: in the record, on the wire, on disk; the last two where the arm's run is its own."""
    recorded = result.volumes.get(arm.name.replace("_", "-"))
    if recorded is None:
        return volume(arm.bytes_per_token), "-", "-"
    return volume(arm.bytes_per_token), volume(recorded.appended), volume(recorded.disk)


def _table(title: str, columns: Sequence[str]) -> Table:
    """A table that fits 80 characters; the first column is aligned left."""
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", padding=0)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def arms_table(result: DemoResult) -> Table:
    """One row per arm."""
    columns = (
        "", "mean\n|dlogp|", "\nmax", "codes\ndiffer", "excess\nMSE", "record\nB/token", "\nwire", "\ndisk",
    )  # fmt: skip
    table = _table("Trainer against rollout; guided layers are guided at K, V and expert inputs", columns)
    for arm in result.arms:
        codes = "-" if arm.name == "bf16" else share(arm.mismatch)
        cells = (f"{arm.mean_difference:.5f}", f"{arm.max_difference:.3f}", codes, excess(arm.excess))
        style = {"b1": "bold green", "bf16": "cyan"}.get(arm.name, "dim" if arm.title.startswith("control") else "")
        table.add_row(arm.title, *cells, *volumes(result, arm), style=style)
    return table


def layers_table(result: DemoResult) -> Table:
    """One row per layer of the whole chain: routed-expert inputs, then K and V together."""
    columns = ["layer"]
    for site in ("inputs", "K, V"):
        columns += [f"{site}\nnoise", "RTN\nmismatch", "\nadjacent", "\nleft  "]
    table = _table("b=1, whole chain, by layer: expert inputs, then K and V", columns)
    chain = result.arm("b1")
    for layer in range(result.settings.size.layers):
        moe, kv = chain.over([(layer, "moe_in")]), chain.over([(layer, "k"), (layer, "v")])
        table.add_row(str(layer), *layer_cells(moe), *layer_cells(kv))
    return table


def layer_cells(count: SiteCount) -> tuple[str, str, str, str]:
    """Noise, RTN mismatch, adjacent share of it, what guidance left."""
    adjacent = f"{100 * count.adjacent:.2f}%" if count.rtn_mismatches else "-"
    return share(count.noise), share(count.rtn_mismatch), adjacent, share(count.mismatch)


def headline(result: DemoResult) -> str:
    """The result in two sentences."""
    own, chain, bf16 = result.arm("own_scale"), result.arm("b1"), result.arm("bf16")
    codes = sum(count.elements for count in chain.sites.values())
    left = sum(count.mismatches for count in chain.sites.values())
    return (
        f"Guidance of {chain.bytes_per_token:,.0f} bytes a token brings the trainer's log-probabilities "
        f"{own.mean_difference / chain.mean_difference:.1f} times closer to the rollout's than plain FP4 training: "
        f"{chain.mean_difference:.5f} against {own.mean_difference:.5f}, where BF16 on both sides has "
        f"{bf16.mean_difference:.5f}. {left:,} of {codes:,} FP4 codes still differ, "
        f"{sum(count.mismatches for count in own.sites.values()):,} without guidance."
    )


def show(result: DemoResult, console: Console) -> None:
    """Print tables, checks and times."""
    console.print(arms_table(result))
    console.print(layers_table(result))
    for check in result.checks:
        console.print(f"  {'[green]holds[/]' if check.holds else '[bold red]FAILS[/]'}  {check.statement}")
    console.print()
    console.print(headline(result))
    times = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in result.seconds.items())
    console.print(
        f"[dim]{len(result.losses)} training steps, held-out loss {result.held_out_loss:.2f} nats a byte; {times}[/]"
    )
