"""``trace-store demo``: the whole loop on real input, with one command."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from trace_store.errors import InvalidRequest, TraceStoreError, Unsupported

HELP = "train a small MoE, record an FP4 rollout, guide a trainer with what the store gives back, compare"

DEFAULT_OUTPUT = "demo-output"
MARKER = ".trace-store-demo"
"""Names a directory that a demo made, so that a later one may replace its content."""


def command(argv: list[str]) -> int:
    """Run the demo; 0 if every check of it holds, 1 if one fails or the demo could not run."""
    parser = argparse.ArgumentParser(prog="trace-store demo", description=HELP)
    parser.add_argument(
        "--output", metavar="DIR", default=DEFAULT_OUTPUT, help="where report and store go (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON; progress goes to stderr")
    arguments = parser.parse_args(argv)
    console = Console(stderr=arguments.json)
    try:
        output = prepare_output(Path(arguments.output))
        return _run(output, console, arguments.json)
    except TraceStoreError as error:
        print(f"trace-store demo: {error}", file=sys.stderr)
        return 1


def prepare_output(output: Path) -> Path:
    """An empty directory for the demo's files; what an earlier demo left there is removed.

    Raises:
        InvalidRequest: the directory holds something that no demo put there.
    """
    if output.exists() and not output.is_dir():
        raise InvalidRequest(f"output is no directory, path={output}", argument="output")
    if output.is_dir() and any(output.iterdir()):
        if not (output / MARKER).is_file():
            raise InvalidRequest(f"output is not empty and no demo's, path={output}; name another", argument="output")
        for path in output.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    output.mkdir(parents=True, exist_ok=True)
    (output / MARKER).touch()
    return output


def _run(output: Path, console: Console, as_json: bool) -> int:
    console.print("[bold]trace-store demo[/]: train, roll out, record, guide; about two minutes on 2 cores")
    # Read when OpenMP is loaded, that is with torch. Threads that spin while they wait cost a factor 4 to 17 in the
    # decode on two cores that other processes used too, and nothing was lost without them on idle ones.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from trace_client.demo.loop import DemoSettings, run_demo
        from trace_client.demo.report import render
    except ModuleNotFoundError as error:
        raise Unsupported(f"the demo needs the extra [demo], missing={error.name}") from error
    from trace_client.demo.screen import Bars, show

    with Bars(console) as bars:
        result = run_demo(DemoSettings(), output, bars)
    summary = summary_of(result)
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    (output / "report.html").write_text(render(result))
    if as_json:
        print(json.dumps(summary, indent=2))
    else:
        show(result, console)
    console.print(
        f"report   {output / 'report.html'}\nstore    {output / 'store'}   (trace-store inspect, pyarrow.ipc)"
    )
    return 0 if all(check.holds for check in result.checks) else 1


def summary_of(result: Any) -> dict[str, Any]:
    """The result as plain values."""
    from trace_client.demo.metrics import arm_record

    return {
        "arms": [arm_record(arm) for arm in result.arms],
        "checks": [{"statement": check.statement, "holds": check.holds} for check in result.checks],
        "bytes_per_token": {
            name: {"appended": volume.appended, "acknowledged": volume.acknowledged, "disk": volume.disk}
            for name, volume in result.volumes.items()
        },
        "training": {"steps": len(result.losses), "held_out_loss": result.held_out_loss},
        "seconds": result.seconds,
        "versions": result.versions,
    }
