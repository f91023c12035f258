"""Every command of deploy/README.md is run or parsed here, or run in test_image; options and metrics it names exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import trace_client
from trace_client import Tls
from trace_client.status import _parser
from trace_server.serve import parser

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "deploy" / "README.md").read_text()


def commands() -> list[str]:
    """Lines of the README's shell blocks."""
    return [line for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines() if line]


CLI = "import sys; from trace_store.cli import main; sys.exit(main(sys.argv[1:]))"

IN_TEST_IMAGE = ("docker ", "mkdir ", "openssl rand ", "chown ", "pip wheel ")


def test_every_command_has_a_test() -> None:
    for line in commands():
        known = line.startswith((*IN_TEST_IMAGE, "openssl ", "printf ", "trace-store ", "pip install "))
        assert known, f"no test runs this line: {line}"
    assert {"pip install 'trace-store[server]'"} == {line for line in commands() if line.startswith("pip install")}


def test_options_in_commands_and_table_exist() -> None:
    for line in commands():
        words = shlex.split(line)
        if words[:2] == ["trace-store", "serve"]:
            parser().parse_args(words[2:])
        elif words[0] == "trace-store":
            _parser(words[1], "").parse_args(words[2:])
    table = set(re.findall(r"`(--[a-z-]+)`", README.split("| option |")[1].split("\n\n")[0]))
    assert table <= set(parser()._option_string_actions)
    assert table >= {"--data", "--listen", "--metrics", "--token-file", "--tls-client-ca", "--allow-anonymous"}


def test_metrics_of_the_table_exist(new_server: Any) -> None:
    server = new_server().start()
    exported = urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10).read().decode()
    section = README.split("## Metrics")[1].split("## Backup")[0]
    names = set(re.findall(r"`(trace_store_[a-z_]+)", section)) | {
        f"trace_store{name}" for name in re.findall(r"`(_[a-z_]+)`", section)
    }
    assert len(names) > 15
    for name in names:
        assert re.search(rf"^{name}(_count|_bucket|\b)", exported, re.M), f"{name} is not exported"


def test_the_tls_block_makes_a_store_that_only_its_client_reaches(new_server: Any, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed (apt-get install openssl)")
    block = [line for line in commands() if line.startswith(("openssl req", "openssl x509", "printf"))]
    subprocess.run(["sh", "-ec", "\n".join(block)], cwd=tmp_path, check=True, capture_output=True)
    (serve,) = (shlex.split(line) for line in commands() if "--tls-client-ca ca.pem" in line)
    options = [str(tmp_path / word) if word.endswith((".pem", ".key")) else word for word in serve[4:]]
    server = new_server(*options).start()
    with trace_client.connect(
        server.address, tls=Tls(tmp_path / "ca.pem", tmp_path / "client.pem", tmp_path / "client.key")
    ) as client:
        assert client.status()["version"]
    (status,) = (shlex.split(line) for line in commands() if line.startswith("trace-store status"))
    shown = subprocess.run(
        [sys.executable, "-c", CLI, *status[1:], "--target", server.address, "--json"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert '"version"' in shown
