"""Fixtures of the object tier: a real S3 server (SeaweedFS from PyPI), a proxy that misbehaves, engines on a bucket.

SeaweedFS runs on free loopback ports with telemetry off. One server serves all tests; each test has its own prefix.
Tests that kill or stop it restart it on the same ports and data.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import quiet_ports, stop_child
from tests.tier.proxy import Proxy
from trace_store import Site, TokenSpan
from trace_store.engine import Engine
from trace_store.retention import Limits
from trace_store.shard import ROLL_SEALED_S
from trace_store.storage.s3 import ObjectStore, Timeouts
from trace_store.testing.records import make_chunk

KEY, SECRET = "tracestore", "tracestore-secret"
START_TIMEOUT_S = 90.0
WAIT_S = 60.0

TABLE = (Site(0, "k", 64), Site(1, "moe_in", 512, form="b2"), Site(2, "moe_in", 2048))
SITES = tuple(range(len(TABLE)))
RUN, PARTITION = "run", "step-1"

PATIENT = Timeouts(connect=30.0, read=30.0, write=30.0)
"""What a store on a busy machine answers within."""

QUICK = Timeouts(connect=1.0, read=2.0, write=2.0)
"""For tests that wait for a store that hangs. One that is merely slow exceeds these too: what such a test expects of a
store that answers, it has to expect eventually."""

START_TRIES = 4


def eventually(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """The first true value of ``condition``; AssertionError after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:g} s"
        time.sleep(0.02)


class S3Server:
    """SeaweedFS: master, volume, filer and S3 gateway in one process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ports = quiet_ports(9)
        self.port = self._ports[0]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, unless it runs, and wait until a signed write and read go through."""
        if self._process is not None and self._process.poll() is None:
            return
        directory, ports = self._directory, self._ports
        (directory / "data").mkdir(exist_ok=True)
        identity = {"name": "test", "credentials": [{"accessKey": KEY, "secretKey": SECRET}]}
        identity["actions"] = ["Admin", "Read", "Write", "List", "Tagging"]  # type: ignore[assignment]
        (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
        weed = Path(sys.executable).with_name("weed")
        command = [str(weed if weed.exists() else shutil.which("weed") or "weed"), "-logtostderr=true", "server"]
        command += [f"-dir={directory}/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        command += [f"-master.port={ports[1]}", f"-master.port.grpc={ports[2]}", "-master.telemetry=false"]
        command += ["-master.volumeSizeLimitMB=1024", "-master.electionTimeout=1s"]
        command += [f"-volume.port={ports[3]}", f"-volume.port.grpc={ports[4]}", "-volume.max=0"]
        command += ["-volume.preStopSeconds=0", "-filer", f"-filer.port={ports[5]}", f"-filer.port.grpc={ports[6]}"]
        command += [f"-filer.localSocket={directory}/f.sock", "-s3", f"-s3.port={ports[0]}"]
        command += [f"-s3.port.grpc={ports[7]}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += [f"-s3.localSocket={directory}/s.sock", f"-s3.config={directory}/s3.json"]
        command += [f"-metricsPort={ports[8]}"]
        with open(directory / "log", "ab") as log:
            self._process = subprocess.Popen(command, cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        eventually(self._answers, "start of the S3 server", START_TIMEOUT_S)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._directory / "log").read_text()[-3000:]
        try:
            store = ObjectStore("s3://test/ready", PATIENT)
            store.put("probe", b"ready", create=False)
            return bytes(store.read("probe", 0, 5)) == b"ready"
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """SIGSTOP: connections stay open, nothing answers."""
        assert self._process is not None
        stop_child(self._process.pid)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="session")
def s3_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    pytest.importorskip("obstore")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for left in reversed(range(START_TRIES)):
            # The path of its sockets must stay below 108 bytes.
            server = S3Server(tmp_path_factory.mktemp("s3"))
            patch.setenv("AWS_ENDPOINT_URL", server.endpoint)
            try:
                server.start()
                break
            except AssertionError:  # another process took one of its ports since they were chosen
                server.kill()
                if not left:
                    raise
        yield server
        server.kill()


@pytest.fixture
def s3(s3_process: S3Server) -> Iterator[S3Server]:
    """The running S3 server; started again afterwards if the test left it stopped."""
    s3_process.start()
    yield s3_process
    s3_process.resume()


@pytest.fixture
def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A TCP proxy in front of the S3 server; stores opened after this go through it."""
    with Proxy(s3.port) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{running.port}")
        yield running


_prefixes = itertools.count()


@pytest.fixture
def url(s3: S3Server) -> str:
    """A prefix of its own."""
    return f"s3://test/prefix-{os.getpid()}-{next(_prefixes)}"


@pytest.fixture(autouse=True)
def rolls_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this process upload what a test rolls, when it rolls it: not also what was sealed two seconds ago."""
    monkeypatch.setattr("trace_store.shard.ROLL_SEALED_S", 3600.0)


@pytest.fixture
def rolls_by_itself(rolls_on_demand: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in production."""
    monkeypatch.setattr("trace_store.shard.ROLL_SEALED_S", ROLL_SEALED_S)


class Sidecar:
    """An engine on a directory and a bucket; rows are those of ``trace_store.testing.records``."""

    def __init__(
        self, root: Path, url: str, name: str, limits: Limits | None, timeouts: Timeouts | None, epoch: str = ""
    ) -> None:
        self.root, self.name = root, name
        unique: dict[str, Any] = {"epoch": lambda: epoch} if epoch else {}
        self.engine = Engine(root, name, limits=limits, objects=ObjectStore(url, timeouts), **unique)

    @property
    def tier(self) -> Any:
        return self.engine._tier

    def write(self, trajectory: str, tokens: int = 40, *, partition: str = PARTITION, seal: bool = True) -> None:
        """Append tokens in two messages, and seal."""
        self.engine.register(RUN, TABLE)
        for low, high in ((0, tokens // 2), (tokens // 2, tokens)):
            chunk = make_chunk(RUN, partition, TABLE, trajectory, low, high)
            self.engine.append(RUN, partition, chunk).result(30)
        if seal:
            future = self.engine.seal(RUN, partition, trajectory, tokens=tokens + 1, prompt_tokens=0)
            future.result(30)

    def upload(self) -> None:
        """Seal the open segments and wait until all are in the bucket."""
        self.engine.roll().result(30)
        eventually(self._is_uploaded, "upload")

    def _is_uploaded(self) -> bool:
        self.tier.tick()
        with self.engine.catalog_lock:
            segments = [
                s for run in self.engine.snapshot_runs() for p in run.partitions.values() for s in p.segments.values()
            ]
        return all(segment.uploaded for segment in segments) and not self.tier.status().waiting

    def read(self, trajectory: str, tokens: int = 40, partition: str = PARTITION) -> tuple[list[Any], set[str]]:
        """Slices as bytes, sorted, and the reasons of missing rows."""
        with self.engine.read(RUN, partition, [TokenSpan(trajectory, 0, tokens)], SITES) as read:
            slices = sorted((s.site, s.dest_row, bytes(s.codes), bytes(s.scales), bytes(s.tensor_scales)) for s in read)
            return slices, {item.reason.name for item in read.missing}

    def reasons(self, trajectory: str, tokens: int = 40, partition: str = PARTITION) -> set[str]:
        return self.read(trajectory, tokens, partition)[1]


@pytest.fixture
def sidecar(tmp_path: Path, url: str) -> Iterator[Callable[..., Sidecar]]:
    """``sidecar(name, limits=, timeouts=, epoch=)``: an engine on ``tmp_path / name`` and the test's bucket."""
    made: list[Sidecar] = []

    def make(name: str, limits: Limits | None = None, timeouts: Timeouts | None = PATIENT, epoch: str = "") -> Sidecar:
        made.append(Sidecar(tmp_path / name, url, name, limits, timeouts, epoch))
        return made[-1]

    yield make
    for item in made:
        item.engine.close()


@pytest.fixture
def store(url: str) -> ObjectStore:
    """The test's bucket, directly."""
    return ObjectStore(url, PATIENT)
