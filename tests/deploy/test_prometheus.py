"""A real Prometheus: it accepts our files, its unit tests of the alerts pass, and it scrapes a running server.

Debian's package brings 330 MB of web assets; unpacked alone it is 95 MB:
    apt-get download prometheus && dpkg -x prometheus_*.deb DIRECTORY
with DIRECTORY/usr/bin on PATH or named by TRACE_STORE_TEST_PROMETHEUS.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import trace_client
from tests.conftest import quiet_ports

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "deploy" / "prometheus"
WAIT_S = 60.0


def program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=os.environ.get("TRACE_STORE_TEST_PROMETHEUS", ""))
    if found is None:
        pytest.skip(f"{name} is not on PATH nor in TRACE_STORE_TEST_PROMETHEUS")
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "config", str(FILES / "prometheus.yml")],
        ["check", "rules", str(FILES / "alerts.yml")],
        ["test", "rules", str(ROOT / "tests" / "deploy" / "alerts_test.yml")],
    ],
    ids=["config", "rules", "unit tests"],
)
def test_promtool_accepts(arguments: list[str]) -> None:
    checked = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_says_what_to_do() -> None:
    rules = yaml.safe_load((FILES / "alerts.yml").read_text())["groups"][0]["rules"]
    assert len(rules) >= 4
    for rule in rules:
        assert rule["labels"]["severity"] in ("page", "warning")
        assert len(rule["annotations"]["runbook"]) > 80, rule["alert"]


def test_metric_names_and_help_pass_the_lint(new_server: Any) -> None:
    lint = program("promtool")
    server = new_server().start()
    text = urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10).read()
    checked = subprocess.run([lint, "check", "metrics"], input=text, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout.decode() + checked.stderr.decode()


class Prometheus:
    """A Prometheus with our configuration, pointed at one server and scraping every second."""

    def __init__(self, directory: Path, target: str) -> None:
        config = yaml.safe_load((FILES / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(FILES / "alerts.yml")]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{quiet_ports(1)[0]}"
        self.url = f"http://{address}"
        command = [program("prometheus"), f"--config.file={directory}/prometheus.yml"]
        command += [f"--storage.tsdb.path={directory}/data", f"--web.listen-address={address}"]
        with open(directory / "log", "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory)

    def ask(self, path: str) -> Any:
        """Data of an API answer, None while Prometheus is not there yet."""
        try:
            return json.load(urllib.request.urlopen(f"{self.url}/api/v1/{path}", timeout=5))["data"]
        except OSError:
            return None

    def query(self, expression: str) -> list[Any]:
        return (self.ask("query?" + urllib.parse.urlencode({"query": expression})) or {"result": []})["result"]


def eventually(condition: Callable[[], Any]) -> Any:
    """The first true value of ``condition``, or its last one after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return value


@pytest.fixture
def scraped(new_server: Any, tmp_path: Path) -> Iterator[tuple[Any, Prometheus]]:
    program("prometheus")
    server = new_server().start()
    prometheus = Prometheus(tmp_path, server.metrics)
    yield server, prometheus
    prometheus.process.terminate()
    prometheus.process.wait(20)


def test_a_real_prometheus_scrapes_a_running_server(scraped: tuple[Any, Prometheus], sites: Any, records: Any) -> None:
    server, prometheus = scraped
    with trace_client.connect(server.address) as client:
        client.register("r", sites)
        with client.writer("r", "p") as writer:
            writer.append("t", 0, records(8))
            writer.seal("t", tokens=9, prompt_tokens=0)
    assert eventually(lambda: prometheus.query('up{job="trace-store"} == 1')), (server.log, prometheus.url)
    stored = eventually(lambda: prometheus.query('trace_store_append_records_total{outcome="stored"} == 4'))
    assert stored[0]["metric"]["instance"] == server.metrics
    rules: list[Any] = []

    def are_well() -> bool:
        rules[:] = (prometheus.ask("rules") or {"groups": [{"rules": rules}]})["groups"][0]["rules"]
        return bool(rules) and all(rule["health"] == "ok" for rule in rules)

    assert eventually(are_well), rules
    assert prometheus.query('ALERTS{alertstate="firing"}') == []
    server.terminate()
    assert eventually(lambda: prometheus.query('ALERTS{alertname="TraceStoreDown", alertstate="pending"}'))
