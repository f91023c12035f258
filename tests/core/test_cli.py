"""The console script as a person meets it: help, unknown commands, errors in one line, missing extras."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from trace_store import cli


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).with_name("trace-store")
    return subprocess.run([script, *arguments], capture_output=True, text=True)


def test_help_names_every_command() -> None:
    answer = run("--help")
    assert answer.returncode == 0
    for name in ("demo", "inspect", "ls", "plan", "release", "serve", "status", "verify"):
        assert f"  {name} " in answer.stdout


def test_without_a_command_it_shows_help_and_fails() -> None:
    answer = run()
    assert answer.returncode == 2
    assert "usage: trace-store COMMAND" in answer.stdout


def test_unknown_command_says_so_in_one_line() -> None:
    answer = run("frobnicate")
    assert answer.returncode == 2
    assert answer.stderr == "trace-store: unknown command, command=frobnicate; see trace-store --help\n"


def test_an_error_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    answer = run("inspect", str(tmp_path / "nothing"))
    assert answer.returncode == 1
    assert answer.stderr == f"trace-store inspect: no such file or directory, path={tmp_path / 'nothing'}\n"


def test_status_without_a_server_says_what_to_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trace_client.channel.CONNECT_TIMEOUT_S", 0.2)
    assert cli.main(["status", "--target", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("trace-store status: no server answers, target=127.0.0.1:1")


def test_a_missing_package_names_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_grpc(self: EntryPoint) -> None:
        raise ModuleNotFoundError("No module named 'grpc'", name="grpc")

    monkeypatch.setattr(EntryPoint, "load", no_grpc)
    assert cli.main(["serve", "--data", "x"]) == 1
    assert 'pip install "trace-store[server]"' in capsys.readouterr().err
