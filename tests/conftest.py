"""Fixtures shared by the tests of server, client and deployment: real server processes and random records.

A server's log and data lie under pytest's temporary directory, which is kept for the last runs; when a test fails, the
end of the log of every server that it used is part of the report.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# Idle OpenMP threads of torch would spin on the two cores that servers under test need; read when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from trace_store import Site

# How long an example takes is the machine's affair; the default of 200 ms fails on one that is busy.
settings.register_profile("any machine", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

START_TIMEOUT_S = 60.0
START_TRIES = 4
STOP_TIMEOUT_S = 60.0
LOG_LINES_SHOWN = 60

SITES = (
    Site(0, "k", 64),
    Site(0, "v", 64),
    Site(1, "moe_in", 128, form="full"),
    Site(2, "moe_in", 64, block=32, scale="e8m0", form="b2"),
)

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]

_used_logs: list[Path] = []


class ServerProcess:
    """A server in a process of its own. A restart keeps data directory and address.

    Its ports are chosen anew if another process takes one before the first start.

    Attributes:
        address, metrics: ``host:port`` (or ``unix:/path``) once started.
        data, log: data directory and log file.
    """

    def __init__(
        self, directory: Path, arguments: Sequence[str] = (), *, listen: str = "", data: Path | None = None
    ) -> None:
        self.data, self.log = data or directory / "data", directory / "server.log"
        self.address, self.metrics = listen, ""
        self._chooses = not listen
        self._choose_ports()
        self._ready = directory / "ready"
        self._arguments = list(arguments)
        self._process: subprocess.Popen[bytes] | None = None

    def _choose_ports(self) -> None:
        ports = [f"127.0.0.1:{port}" for port in quiet_ports(2)]
        self.address, self.metrics = ports[0] if self._chooses else self.address, ports[1]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, **environment: str) -> ServerProcess:
        """Start and wait until it serves; AssertionError with its log when it ends instead."""
        for left in reversed(range(START_TRIES if self._chooses else 1)):
            self._ready.unlink(missing_ok=True)
            self.spawn(**environment)
            if self._becomes_ready():
                break
            log = self.log.read_text()
            assert left > 0, f"the server ended: {log}"
            assert "cannot listen" in log, f"the server ended: {log}"
            self._choose_ports()
        self._chooses = False  # clients know them now
        self.address, self.metrics = self._ready.read_text().split("\n")[:2]
        return self

    def _becomes_ready(self) -> bool:
        """Wait until it serves; False when it ends instead."""
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._ready.exists():
            if self._process.poll() is not None:
                return False
            assert time.monotonic() < deadline, f"the server did not start: {self.log.read_text()}"
            time.sleep(0.01)
        return True

    def spawn(self, **environment: str) -> None:
        """Start without waiting."""
        command = [sys.executable, "-m", "trace_server", "--data", str(self.data), "--listen", self.address]
        command += ["--metrics", self.metrics, "--ready-file", str(self._ready), *self._arguments]
        _used_logs.append(self.log)
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})

    def wait(self) -> int:
        """Exit status, once it ended by itself."""
        assert self._process is not None
        return self._process.wait(STOP_TIMEOUT_S)

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        assert self._process is not None
        self._process.terminate()
        return self.wait()

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """SIGSTOP: the server hangs, its connections stay open."""
        stop_child(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


def quiet_ports(count: int) -> list[int]:
    """Free loopback ports for a server that is started later, or started again: below those that the kernel gives away,
    so that neither a connection of another process nor a server that asks for any port takes them meanwhile."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    low, high = (10_000, first) if first > 12_000 else (1024, first)
    found: list[int] = []
    with contextlib.ExitStack() as held:
        while len(found) < count:
            port = random.SystemRandom().randrange(low, high)
            candidate = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                candidate.bind(("127.0.0.1", port))
                found.append(port)
    return found


def stop_child(pid: int) -> None:
    """SIGSTOP a child and wait until all of its threads stand still; until then a thread can still answer."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for the tests of a module, which keep apart by run names."""
    process = ServerProcess(tmp_path_factory.mktemp("server")).start()
    yield process
    process.kill()


@pytest.fixture
def new_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ServerProcess]]:
    """``new_server(arguments, listen=, data=)`` makes a server that is not started yet; it is killed after the test."""
    made: list[ServerProcess] = []

    def make(*arguments: str, **where: Any) -> ServerProcess:
        made.append(ServerProcess(tmp_path_factory.mktemp("server"), arguments, **where))
        return made[-1]

    yield make
    for process in made:
        process.kill()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    """A client of the module's server, shared by its tests: closing a connection takes 0.2 s."""
    import trace_client

    with trace_client.connect(server.address) as connected:
        yield connected


_run_numbers = itertools.count()


@pytest.fixture
def run(client: Any) -> str:
    """Name of a new run with the table ``sites``."""
    name = f"run-{next(_run_numbers)}"
    client.register(name, SITES)
    return name


@pytest.fixture(scope="session")
def sites() -> tuple[Site, ...]:
    """A site table with every scale type, and forms b1, b2 and full."""
    return SITES


@pytest.fixture(scope="session")
def rows() -> Callable[..., Rows]:
    """``rows(site, tokens, seed)``: planes, scales and tensor scales [tokens] that are valid and random."""

    def make(site: Site, tokens: int, seed: int = 0) -> Rows:
        random = np.random.default_rng([seed, site.layer, tokens])
        planes = random.integers(0, 256, (tokens, *site.code_form.row_shape(site.width)), np.uint8)
        scales = random.integers(0, 0x7F, (tokens, site.scale_bytes), np.uint8)
        return planes, scales, random.random(tokens, np.float32)

    return make


@pytest.fixture(scope="session")
def records(rows: Callable[..., Rows]) -> Callable[..., dict[Site, Rows]]:
    """``records(tokens, seed)``: rows of every site of the table."""

    def make(tokens: int, seed: int = 0, table: Sequence[Site] = SITES) -> dict[Site, Rows]:
        return {site: rows(site, tokens, seed) for site in table}

    return make


@pytest.fixture(scope="session", autouse=True)
def _no_proxy() -> Iterator[None]:
    """Loopback only: a proxy of the machine must not decide what a test sees."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            patch.delenv(name, raising=False)
        yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.when == "call" and report.failed:
        for log in dict.fromkeys(_used_logs[-4:]):
            if log.exists():
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])
                report.sections.append((f"log of {log}", tail))
