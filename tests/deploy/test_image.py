"""The image, built and run where a docker engine answers: as a sidecar, on volumes of either kind, stopped in order.

Needs an engine, the compose plugin, the base image PYTHON_IMAGE (pulled, or a stand-in under its name) and pip with an
index for the wheels; the build itself asks no index. A base image with another Python than this one is skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASE = os.environ.get("PYTHON_IMAGE", "python:3.11-slim")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROUND_TRIP = """
import sys, numpy as np, trace_client
from trace_store import Site
site = Site(0, "k", 64)
rows = np.arange(32, dtype=np.uint8).reshape(4, 1, 8)
token = open("/run/secrets/token").read().strip()
with trace_client.connect("trace-store:7077", token=token) as client:
    if sys.argv[1] == "write":
        client.register("r", [site])
        writer = client.writer("r", "p")
        writer.append("sealed", 0, {site: (rows, np.zeros((4, 4), np.uint8), 1.0)})
        writer.seal("sealed", tokens=5, prompt_tokens=0)
        memory = client.writer("r", "p", durability="memory")
        memory.append("open", 0, {site: (rows, np.zeros((4, 4), np.uint8), 1.0)})
        memory.flush()
    batch = client.reader("r", "p").read([("sealed", 0, 4), ("open", 0, 4, 4)], include_open=True)
    assert batch.planes[site].tobytes() == rows.tobytes() * 2, batch.missing
print("same bytes")
"""


def docker(*arguments: str, check: bool = True, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    finished = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False, cwd=cwd)
    assert not check or finished.returncode == 0, finished.stdout + finished.stderr
    return finished


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the repository with wheels and a token, its image built."""
    if shutil.which("docker") is None or docker("version", check=False).returncode:
        pytest.skip("no docker engine answers")
    if docker("compose", "version", check=False).returncode:
        pytest.skip("the docker compose plugin is not installed")
    if docker("image", "inspect", BASE, check=False).returncode and docker("pull", BASE, check=False).returncode:
        pytest.skip(f"the base image can be neither found nor pulled: {BASE}")
    version = docker("run", "--rm", BASE, "python", "-c", "import sys; print(sys.version_info[:2])").stdout.strip()
    if version != str(sys.version_info[:2]):
        pytest.skip(f"wheels are made for this Python, the image has another: {version}")
    copy = tmp_path_factory.mktemp("image") / "trace-store"
    ignored = shutil.ignore_patterns(".git", ".venv", "wheels", "demo-output", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, copy, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "-w", "wheels", ".[server,client,s3]"]
    made = subprocess.run(pip, cwd=copy, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"wheels cannot be made: {made.stderr[-300:]}")
    readme = (ROOT / "deploy" / "README.md").read_text()
    secrets = [line for line in readme.splitlines() if line.startswith(("mkdir -p", "openssl rand"))]
    subprocess.run(["sh", "-ec", "\n".join(secrets)], cwd=copy, check=True)
    docker(
        "build",
        "-f",
        "deploy/Dockerfile",
        "-t",
        "trace-store:test",
        "--build-arg",
        f"PYTHON_IMAGE={BASE}",
        ".",
        cwd=copy,
    )
    yield copy
    docker("image", "rm", "-f", "trace-store:test", check=False)


@pytest.fixture
def sidecar(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``sidecar(*arguments)`` runs docker compose in the copy, as a project of its own with fresh volumes."""
    monkeypatch.setenv("TRACE_STORE_VERSION", "test")
    monkeypatch.setenv("TRACE_STORE_PORT", "0")
    monkeypatch.setenv("TRACE_STORE_METRICS_PORT", "0")

    def compose(*arguments: str) -> str:
        command = ("compose", "-p", "trace-store-test", "-f", "deploy/docker-compose.yml", *arguments)
        return docker(*command, cwd=checkout).stdout

    yield compose
    compose("down", "-v")


def test_a_sidecar_serves_stops_in_order_and_keeps_everything(sidecar: Any) -> None:
    sidecar("up", "-d", "--wait")
    assert "same bytes" in sidecar("exec", "-T", "trace-store", "python", "-c", ROUND_TRIP, "write")
    assert '"records": 2' in sidecar("exec", "-T", "trace-store", "trace-store", "status", "--json")
    assert sidecar("exec", "-T", "trace-store", "id", "-u").strip() == "10001"
    sidecar("stop")
    log = sidecar("logs", "trace-store")
    assert "trace_server: stopped" in log
    assert "Traceback" not in log
    sidecar("up", "-d", "--wait")
    assert "same bytes" in sidecar("exec", "-T", "trace-store", "python", "-c", ROUND_TRIP, "read")
    sidecar("kill", "-s", "KILL", "trace-store")
    sidecar("up", "-d", "--wait")
    assert "same bytes" in sidecar("exec", "-T", "trace-store", "python", "-c", ROUND_TRIP, "read")


def test_a_bind_mount_of_root_fails_at_once_with_the_fix(checkout: Path, tmp_path: Path) -> None:
    del checkout
    (tmp_path / "srv").mkdir(mode=0o755)
    options = ("-e", "TRACE_STORE_ALLOW_ANONYMOUS=1", "-v", f"{tmp_path}/srv:/data", "trace-store:test")
    refused = docker("run", "--rm", *options, check=False)
    assert refused.returncode == 1
    assert "make it writable for uid 10001" in refused.stderr
    assert "Traceback" not in refused.stderr
    os.chown(tmp_path / "srv", 10001, 10001)
    container = docker("run", "-d", *options).stdout.strip()
    deadline = time.monotonic() + 60
    while docker("exec", container, "python", "-m", "trace_server.probe", check=False).returncode:
        assert time.monotonic() < deadline, docker("logs", container).stderr
        time.sleep(0.2)
    docker("rm", "-f", container)
    assert (tmp_path / "srv" / "LOCK").exists()


def test_without_authentication_it_does_not_listen_on_all_interfaces(checkout: Path) -> None:
    del checkout
    refused = docker("run", "--rm", "trace-store:test", check=False)
    assert refused.returncode == 1
    assert "all interfaces without authentication" in refused.stderr


def test_the_image_holds_no_torch_and_no_build_tools(checkout: Path) -> None:
    del checkout
    modules = ("torch", "cupy", "hatchling", "transformers")
    code = f"import importlib.util as u; print([m for m in {modules} if u.find_spec(m)])"
    found = docker("run", "--rm", "--entrypoint", "python", "trace-store:test", "-c", code)
    assert found.stdout.strip() == "[]"
