"""The HTTP side alone: health that asks, a probe for containers, and no way to hold a thread for ever."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from trace_server import http, probe
from trace_server.http import HttpServer


class State:
    reason = ""


@pytest.fixture
def served() -> Iterator[tuple[HttpServer, State]]:
    state = State()
    server = HttpServer("127.0.0.1:0", CollectorRegistry(), lambda: state.reason)
    yield server, state
    server.close()


def test_health_says_why_not(served: tuple[HttpServer, State]) -> None:
    server, state = served
    url = f"http://127.0.0.1:{server.port}/health"
    assert urllib.request.urlopen(url, timeout=30).status == 200
    state.reason = "the event loop did not answer within 2 s"
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url, timeout=30)
    assert caught.value.code == 503
    assert caught.value.read().decode().strip() == state.reason


def test_the_probe_says_the_same(served: tuple[HttpServer, State], monkeypatch: pytest.MonkeyPatch) -> None:
    server, state = served
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for host in ("127.0.0.1", "0.0.0.0"):
        assert probe.probe(f"{host}:{server.port}") == ""
    state.reason = "starting or stopping"
    assert probe.probe(f"127.0.0.1:{server.port}") == "starting or stopping"
    assert "no answer" in probe.probe("127.0.0.1:1")
    assert "host:port" in probe.probe("")


def test_the_probe_is_a_command(server: Any) -> None:
    def run(metrics: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "trace_server.probe"],
            env={"TRACE_STORE_METRICS": metrics, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )

    assert run(server.metrics).returncode == 0
    refused = run("127.0.0.1:1")
    assert (refused.returncode, refused.stderr.startswith("no answer from 127.0.0.1:1")) == (1, True)


def test_a_client_that_sends_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http._Handler, "timeout", 0.1)
    server = HttpServer("127.0.0.1:0", CollectorRegistry(), lambda: "")
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as idle:
        assert idle.recv(1) == b"", "the server closes the connection"
    server.close()


def test_ipv6_is_served() -> None:
    try:
        server = HttpServer("[::1]:0", CollectorRegistry(), lambda: "")
    except http.StorageFailed as error:
        pytest.skip(f"no IPv6 here: {error}")
    assert probe.probe(f"[::1]:{server.port}") == ""
    server.close()
