"""Commands and code in the README work as written."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
SCRIPT = Path(sys.executable).with_name("trace-store")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.strip()]
    return [shlex.split(line, comments=True) for line in lines]


def test_python_block_runs_against_a_server(server, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (block,) = blocks("python")
    code = block.replace("127.0.0.1:7077", server.address)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_example_shows_that_guidance_ends_the_difference(server) -> None:  # type: ignore[no-untyped-def]
    answer = subprocess.run(
        [sys.executable, ROOT / "examples/rollout_to_trainer.py", server.address],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert re.search(r"round to nearest: [1-9]\d* of", answer.stdout)
    assert "guided: 0 of" in answer.stdout


def test_every_command_block_is_known() -> None:
    """What the tests below do not run must at least exist: make targets, extras."""
    for command in commands():
        if command[0] == "make":
            subprocess.run(["make", "-n", *command[1:]], cwd=ROOT, check=True, capture_output=True)
        elif command[0] == "pip":
            extras = set(re.findall(r"\[(.*?)\]", command[-1]))
            pyproject = (ROOT / "pyproject.toml").read_text()
            assert all(re.search(rf"^{extra} = \[", pyproject, re.MULTILINE) for extra in extras), command
        else:
            assert command[0] == "trace-store", command


@pytest.mark.parametrize("command", [c for c in commands() if c[0] == "trace-store" and c[1] != "serve"], ids=" ".join)
def test_trace_store_commands_run(command: list[str], server) -> None:  # type: ignore[no-untyped-def]
    import trace_client
    from trace_store import Site

    with trace_client.connect(server.address) as client:
        client.register("run-7", [Site(layer, "moe_in", 2048) for layer in range(4)])  # the table of the README
    arguments = [str(server.data) if word.startswith("/var/lib") else word for word in command[1:]]
    environment = os.environ | {"TRACE_STORE_TARGET": server.address}
    answer = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, env=environment)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
