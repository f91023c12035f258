"""Connecting: addresses, proxies, forks, servers that are not there, and gRPC failures as errors of the tree."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import trace_client
from trace_client import channel
from trace_client.channel import Channel, Tls
from trace_store import Site
from trace_store.errors import (
    DeadlineExceeded,
    InvalidRequest,
    TraceStoreError,
    Unavailable,
    Unsupported,
)
from trace_store.v1 import trace_store_service_pb2 as service_pb2


@pytest.mark.parametrize(
    "target", ["", "localhost", 7077, None, "127.0.0.1:abc", "127.0.0.1:", ":7077", "127.0.0.1:65536"]
)
def test_bad_targets_are_refused(target: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        trace_client.connect(target)
    assert caught.value.argument == "target"


def test_nobody_there_is_a_typed_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(channel, "CONNECT_TIMEOUT_S", 0.3)
    with socket.socket() as taken:  # bound and not listening: the port refuses
        taken.bind(("127.0.0.1", 0))
        for target in (f"127.0.0.1:{taken.getsockname()[1]}", f"unix:{tmp_path}/none"):
            with pytest.raises(Unavailable, match="no server answers") as caught:
                trace_client.connect(target)
            assert caught.value.retryable
            assert isinstance(caught.value, ConnectionError)


def test_a_proxy_of_the_environment_is_not_used(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    host, port = server.address.split(":")
    assert host == "127.0.0.1"
    for target in (server.address, f"localhost:{port}"):
        with trace_client.connect(target) as client:
            assert client.status()["version"]


@pytest.mark.parametrize("token", ["two\nlines", "ümlaut", 7])
def test_tokens_that_cannot_travel_are_refused(server: Any, token: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        trace_client.connect(server.address, token=token)
    assert caught.value.argument == "token"


def test_tls_files_are_checked_before_connecting(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read") as caught:
        trace_client.connect("127.0.0.1:1", tls=Tls(ca=tmp_path / "none.pem"))
    assert caught.value.argument == "tls.ca"
    with pytest.raises(InvalidRequest, match="go together"):
        trace_client.connect("127.0.0.1:1", tls=Tls(certificate=tmp_path / "none.pem"))


FORKING = """
import os, pickle, sys
import trace_client
import numpy as np
from trace_store import Site
from trace_store.errors import Unsupported

def in_child(call):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            result = call()
        except BaseException as error:
            result = error
        os.write(writing, pickle.dumps(result))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        result = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "the child died"
    return pickle.loads(result)

site = Site(0, "k", 64)
rows = {site: (np.zeros((1, 1, 8), np.uint8), np.zeros((1, 4), np.uint8), 1.0)}
client = trace_client.connect(sys.argv[1])
client.register("fork", [site])
writer, reader = client.writer("fork", "p"), client.reader("fork", "p")
writer.append("t", 0, rows)
ahead = reader.prefetch([[("t", 0, 1)]] * 3)
next(ahead)
for call in (
    lambda: next(ahead),
    client.status,
    lambda: reader.read([("t", 0, 1)]),
    lambda: writer.append("t", 2, rows),
    writer.flush,
    lambda: writer.seal("t", tokens=2, prompt_tokens=0),
    writer.close,
    lambda: trace_client.connect(sys.argv[1]),
):
    refused = in_child(call)
    assert isinstance(refused, Unsupported) and "spawn" in str(refused), refused
assert in_child(client.close) is None
for number in range(30):
    writer.append("t", 1 + number, rows)
    assert in_child(lambda: sum(range(10_000))) == 49_995_000
writer.seal("t", tokens=32, prompt_tokens=0)
assert writer.stored == 31, "the parent's writer must not notice its children"
print("done")
"""


def test_forked_children_are_told_and_live(server: Any) -> None:
    """In a process of its own: gRPC decides about forks when it is imported, and this one has it already."""
    finished = subprocess.run(
        [sys.executable, "-c", FORKING, server.address], capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.stdout == "done\n", finished.stderr


LONG: dict[str, Any] = {
    "over gRPC's own": 1e10,
    "float": 1e300,
    "inf": math.inf,
    "maxsize": sys.maxsize,
    "no float": 10**400,
    "np.int64": np.int64(60),
    "np.float32": np.float32(60),
    "fraction": Fraction(60),
}


@pytest.mark.parametrize("timeout_s", LONG.values(), ids=LONG)
@pytest.mark.parametrize("fleet", [False, True])
def test_a_long_timeout_is_one(client: Any, run: str, timeout_s: Any, fleet: bool) -> None:
    if not fleet:
        assert client.reader(run, "p").read([("t", 0, 1)], timeout_s=timeout_s).missing
        return
    with trace_client.connect([client._channel.target]) as several:
        assert several.reader(run, "p").read([("t", 0, 1)], timeout_s=timeout_s).missing


@pytest.mark.parametrize("timeout_s", [0, -1, -math.inf, -(10**400)], ids=["0", "-1", "-inf", "no float"])
def test_no_time_is_a_deadline_that_names_the_server(client: Any, run: str, timeout_s: Any) -> None:
    with pytest.raises(DeadlineExceeded, match=f"target={client._channel.target}"):
        client.reader(run, "p").read([("t", 0, 1)], timeout_s=timeout_s)


@pytest.mark.parametrize("flushed", [True, False])
def test_a_writer_that_outlives_its_client_says_what_matters(new_server: Any, flushed: bool) -> None:
    server, site = new_server().start(), Site(0, "k", 64)
    client = trace_client.connect(server.address)
    client.register("closing", [site])
    writer = client.writer("closing", "p")
    row = {site: (np.zeros((1, 1, 8), np.uint8), np.zeros((1, 4), np.uint8), 1.0)}
    writer.append("t", 0, row)
    writer.flush()
    if flushed:
        client.close()
        writer.close()
        return
    server.pause()
    writer.append("t", 1, row)
    client.close()
    with pytest.raises(InvalidRequest, match="closed"):
        writer.close()
    server.resume()


def test_a_hanging_server_is_a_deadline(new_server: Any) -> None:
    server = new_server().start()
    with trace_client.connect(server.address) as client:
        server.pause()
        try:
            with pytest.raises(DeadlineExceeded) as caught:
                client._channel.call("Status", service_pb2.StatusRequest(), timeout_s=0.2)
        finally:
            server.resume()
        assert caught.value.retryable
        assert client.status()["version"]


def test_a_dead_server_is_unavailable_and_found_again(new_server: Any) -> None:
    server = new_server().start()
    with trace_client.connect(server.address) as client:
        server.kill()
        with pytest.raises(Unavailable) as caught:
            client.status()
        assert caught.value.retryable
        server.start()
        client._channel.wait_ready()
        assert client.status()["version"]


def test_a_message_over_the_limit_names_the_setting(client: Any, run: str) -> None:
    name = "n" * 512
    spans = [(name, row, row + 1, row) for row in range(40_000)]
    with pytest.raises(InvalidRequest, match="FRAME_BYTES_MAX=16777216"):
        client.reader(run, "p").read(spans, [])
    assert client.status()["version"], "the connection stays usable"


class _Failed(grpc.RpcError):
    def __init__(self, status: grpc.StatusCode, details: str = "") -> None:
        self.code, self.details, self.trailing_metadata = lambda: status, lambda: details, lambda: None


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (_Failed(grpc.StatusCode.UNAVAILABLE, "Socket closed"), Unavailable),
        (_Failed(grpc.StatusCode.CANCELLED), Unavailable),
        (_Failed(grpc.StatusCode.UNKNOWN, "Stream removed"), Unavailable),
        (_Failed(grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2"), Unavailable),
        (_Failed(grpc.StatusCode.DEADLINE_EXCEEDED), DeadlineExceeded),
        (_Failed(grpc.StatusCode.DEADLINE_EXCEEDED, "Stream removed (Deadline Exceeded)"), DeadlineExceeded),
        (_Failed(grpc.StatusCode.UNAVAILABLE, "Stream removed (ping timeout)"), Unavailable),
        (_Failed(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"), Unsupported),
        (_Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, "Sent message larger than max (2 vs. 1)"), InvalidRequest),
        (_Failed(grpc.StatusCode.UNKNOWN, "boom"), TraceStoreError),
    ],
    ids=lambda value: value.code().name if isinstance(value, _Failed) else None,
)
def test_failures_without_our_detail_get_the_nearest_error(failure: _Failed, kind: type[TraceStoreError]) -> None:
    unused = Channel("127.0.0.1:1", None, None)
    assert type(unused.error(failure)) is kind
    unused.close()


def test_a_call_that_breaks_after_its_deadline_was_ended_for_that() -> None:
    """Where the server's clock is first it resets the stream, and the client may see that before its own deadline."""
    unused = Channel("127.0.0.1:1", None, None)
    for failure in (
        _Failed(grpc.StatusCode.CANCELLED),
        _Failed(grpc.StatusCode.INTERNAL, "RST_STREAM with error code 8"),
    ):
        assert type(unused.error(failure, deadline=time.monotonic() - 1)) is DeadlineExceeded
        assert type(unused.error(failure, deadline=time.monotonic() + 60)) is Unavailable
    unused.close()


def test_a_site_is_what_the_server_says_it_is(client: Any) -> None:
    odd = Site(7, "free.name-1", 96, block=32, scale="e8m0", form="b3", quantizer="fi-exact")
    client.register("odd-site", [odd])
    with trace_client.connect(client._channel.target) as other:
        assert other.sites("odd-site") == (odd,)
