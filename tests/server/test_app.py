"""A server's life: start, health, reflection, SIGTERM, and two of them that want the same thing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

import trace_client
from trace_server import app
from trace_server.app import GRACE_S, prepare_unix_path
from trace_store.engine import Engine
from trace_store.errors import InvalidRequest, StorageFailed, TraceStoreError
from trace_store.v1 import trace_store_service_pb2 as service_pb2
from trace_store.wire import SERVICE


def test_sigterm_finishes_and_syncs_what_was_accepted(new_server: Any, sites: Any, records: Any) -> None:
    server = new_server().start()
    with trace_client.connect(server.address) as client:
        client.register("r", sites)
        writer = client.writer("r", "p", durability="memory")
        for start in range(0, 256, 32):
            writer.append("t", start, records(32, seed=start))
        writer.flush()
        assert server.terminate() == 0
    assert "Traceback" not in server.log.read_text()
    assert not list(server.data.rglob("*.open")), "every segment is sealed"
    server.start()
    with trace_client.connect(server.address) as client:
        batch = client.reader("r", "p").read([("t", 0, 256)], include_open=True)
        assert all(valid.all() for valid in batch.valid.values())
        expected = b"".join(records(32, seed=start)[sites[0]][0].tobytes() for start in range(0, 256, 32))
        assert batch.planes[sites[0]].tobytes() == expected


def stop_took(log: Path) -> float:
    """Seconds from the signal to the end of the stop by the server's log, without the end of its process."""
    begun, ended = (
        datetime.strptime(line[: len("2026-11-30 10:48:36,286")], "%Y-%m-%d %H:%M:%S,%f")
        for line in log.read_text().splitlines()
        if " stopping: " in line or line.endswith(" stopped")
    )
    return (ended - begun).total_seconds()


def append_until_refused(writer: Any, records: Any) -> None:
    for start in range(4, 1_000_000, 4):
        writer.append("t", start, records(4, seed=start))
        writer.flush()


def test_sigterm_ends_open_streams_at_once(
    new_server: Any, sites: Any, records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers keep a stream open for as long as they live; a stop must not wait for them."""
    monkeypatch.setattr("trace_client.writer.RESUME_TIMEOUT_S", 0.1)  # it does not come back
    server = new_server().start()
    with trace_client.connect(server.address) as client:
        client.register("r", sites)
        writer = client.writer("r", "p")
        writer.append("t", 0, records(4))
        writer.flush()
        assert server.terminate() == 0
        assert stop_took(server.log) < GRACE_S, "the grace period is not spent on the writer"
        with pytest.raises(TraceStoreError) as caught:
            append_until_refused(writer, records)
        assert caught.value.retryable


def test_sigterm_under_load_loses_nothing_that_was_answered(
    new_server: Any, sites: Any, records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trace_client.writer.RESUME_TIMEOUT_S", 0.1)  # it does not come back meanwhile
    server = new_server().start()
    with trace_client.connect(server.address) as client:
        client.register("r", sites)
        writer = client.writer("r", "p", durability="written")
        writer.append("t", 0, records(4))
        writer.flush()  # the machine may be slow to get here
        stopper = threading.Timer(0.2, os.kill, (server.pid, signal.SIGTERM))
        stopper.start()
        with pytest.raises(TraceStoreError) as caught:
            append_until_refused(writer, records)
        assert caught.value.retryable
        flushed = writer.stored // len(sites)
    assert server.wait() == 0
    server.start()
    with trace_client.connect(server.address) as client:
        assert flushed > 0
        batch = client.reader("r", "p").read([("t", 0, 4 * flushed)], include_open=True)
        assert all(valid.all() for valid in batch.valid.values())


def test_health_follows_the_server(new_server: Any) -> None:
    server = new_server().start()
    with grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=30)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        os.kill(server.pid, signal.SIGTERM)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert server.wait() == 0


def test_reflection_describes_the_service(server: Any) -> None:
    with grpc.insecure_channel(server.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
        described = database.FindFileContainingSymbol(SERVICE)
    assert {method.name for method in described.service[0].method} >= {"Append", "Read", "Seal", "Register"}


def test_http_answers_health_metrics_and_nothing_else(server: Any) -> None:
    assert urllib.request.urlopen(f"http://{server.metrics}/health", timeout=10).read() == b"serving\n"
    assert b"trace_store_records " in urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10).read()
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://{server.metrics}/", timeout=10)
    assert caught.value.code == 404


def test_two_servers_on_one_data_directory(new_server: Any, server: Any) -> None:
    second = new_server(data=server.data)
    second.spawn()
    assert second.wait() == 1
    assert "another process owns the data directory" in second.log.read_text()
    assert "Traceback" not in second.log.read_text()
    with trace_client.connect(server.address) as client:
        assert client.status()["version"]


def test_two_servers_on_one_port(new_server: Any, server: Any) -> None:
    second = new_server(listen=server.address)
    second.spawn()
    assert second.wait() == 1
    assert f"cannot listen, address={server.address}" in second.log.read_text()
    assert "Traceback" not in second.log.read_text()
    third = new_server()
    third.metrics = server.metrics
    third.spawn()
    assert third.wait() == 1
    assert f"cannot listen for metrics, address={server.metrics}" in third.log.read_text()
    assert "Traceback" not in third.log.read_text()
    with trace_client.connect(server.address) as client:
        assert client.status()["version"]


class TestUnixSocket:
    def test_private_live_not_stolen_and_gone_after_a_stop(self, new_server: Any, tmp_path: Path) -> None:
        path = tmp_path / "store.sock"
        first = new_server(listen=f"unix:{path}").start()
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, "nobody else may connect"
        second = new_server(listen=f"unix:{path}")
        second.spawn()
        assert second.wait() == 1
        assert "another server listens on the socket" in second.log.read_text()
        with trace_client.connect(f"unix:{path}") as client:
            assert client.status()["version"], "the live socket is not stolen"
        assert first.terminate() == 0
        assert not path.exists()

    def test_a_stale_socket_is_replaced(self, new_server: Any, tmp_path: Path) -> None:
        path = tmp_path / "store.sock"
        killed = new_server(listen=f"unix:{path}").start()
        killed.kill()
        assert path.exists()
        new_server(listen=f"unix:{path}").start()
        with trace_client.connect(f"unix:{path}") as client:
            assert client.status()["version"]

    def test_long_paths_and_other_files_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequest, match="longer than 100 bytes"):
            prepare_unix_path(Path("/tmp") / ("s" * 120))
        plain = tmp_path / "file"
        plain.write_text("precious")
        with pytest.raises(InvalidRequest, match="is no socket"):
            prepare_unix_path(plain)
        assert plain.read_text() == "precious"

    def test_a_socket_that_answers_is_left_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "live.sock"
        with socket.socket(socket.AF_UNIX) as live:
            live.bind(str(path))
            live.listen()
            with pytest.raises(StorageFailed, match="another server"):
                prepare_unix_path(path)
        prepare_unix_path(path)
        assert not path.exists(), "nobody listens any more"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_directory_of_another_user_names_the_fix() -> None:
    """What a container without root sees on a bind mount that root owns."""
    script = (
        "import os, sys; from pathlib import Path; from trace_store.engine import Engine\n"
        "os.setgid(10001); os.setuid(10001); Engine(Path(sys.argv[1]))"
    )
    with tempfile.TemporaryDirectory() as owned_by_root:
        os.chmod(owned_by_root, 0o755)
        finished = subprocess.run(
            [sys.executable, "-c", script, owned_by_root], capture_output=True, text=True, check=False
        )
    assert finished.returncode == 1
    assert "make it writable for uid 10001" in finished.stderr.splitlines()[-1]


def test_clients_may_ping_as_often_as_ours_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's servers end a connection after three pings in less than five minutes each, if they are not told."""
    interval_s, pings = 1.0, 6  # grpc pings no faster
    monkeypatch.setattr(app, "PING_INTERVAL_S", interval_s)
    options = [
        ("grpc.keepalive_time_ms", int(1000 * interval_s)),
        ("grpc.http2.max_pings_without_data", 0),
    ]

    async def wait_in_a_call() -> None:
        server = app.Server(Engine(tmp_path), app.Listen("127.0.0.1:0"))
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options) as channel:
                call = channel.stream_stream(f"/{SERVICE}/AttachArena")()
                await call.write(service_pb2.AttachArenaRequest(size_bytes=4096).SerializeToString())
                assert await call.read(), "an offer; then the server waits for an answer"
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(call.read(), pings * interval_s)
        finally:
            await server.stop()

    asyncio.run(wait_in_a_call())
