"""Tokens, TLS and mutual TLS against real servers, with an authority made for the test."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

import trace_client
from trace_client import Tls, channel
from trace_store.errors import Unauthenticated, Unavailable

TOKEN = "a-long-and-secret-token"


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, and NAME.pem with NAME.key for server and client; stranger.pem is signed by another authority."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed (apt-get install openssl)")
    directory = tmp_path_factory.mktemp("pki")

    def openssl(arguments: str) -> None:
        subprocess.run(["openssl", *arguments.split()], cwd=directory, check=True, capture_output=True)

    key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN"
    for name in ("ca", "other"):
        openssl(f"req -x509 -days 2 {key}={name} -keyout {name}.key -out {name}.pem")
    (directory / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name, authority in (("server", "ca"), ("client", "ca"), ("stranger", "other")):
        openssl(f"req {key}={name} -keyout {name}.key -out {name}.csr")
        signer = f"-CA {authority}.pem -CAkey {authority}.key -CAcreateserial"
        openssl(f"x509 -req -days 2 -extfile names {signer} -in {name}.csr -out {name}.pem")
    return directory


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """``with impatient():`` a failed handshake, which is retried until the time to connect is over, fails soon."""

    @contextlib.contextmanager
    def short() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(channel, "CONNECT_TIMEOUT_S", 1.0)
            yield

    return short


def test_a_token_is_wanted_by_every_call_but_health(new_server: Any, tmp_path: Path, records: Any, sites: Any) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    server = new_server("--token-file", str(tmp_path / "token")).start()
    with trace_client.connect(server.address, token=TOKEN) as client:
        client.register("r", sites)
        with client.writer("r", "p") as writer:
            writer.append("t", 0, records(2))
            writer.seal("t", tokens=3, prompt_tokens=0)
        assert client.reader("r", "p").read([("t", 0, 2)]).valid[sites[0]].all()
    for token in (None, "wrong", TOKEN + "x", TOKEN[:-1]):
        with trace_client.connect(server.address, token=token) as client:
            for call in (client.status, lambda c=client: c.sites("r"), lambda c=client: c.release("r", "p")):
                with pytest.raises(Unauthenticated, match="no valid token") as caught:
                    call()
            assert isinstance(caught.value, PermissionError)
    with grpc.insecure_channel(server.address) as bare:
        answer = health_pb2_grpc.HealthStub(bare).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as refused:
            ProtoReflectionDescriptorDatabase(bare).get_services()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        stream = bare.stream_stream("/trace_store.v1.TraceStoreService/Append")(iter([b""]), timeout=10)
        with pytest.raises(grpc.RpcError) as refused:
            next(stream)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert TOKEN not in server.log.read_text()


def test_tls_proves_the_server(new_server: Any, pki: Path, impatient: Any) -> None:
    server = new_server(
        "--tls-certificate", str(pki / "server.pem"), "--tls-key", str(pki / "server.key")
    ).start()  # fmt: skip
    port = server.address.rpartition(":")[2]
    for target in (server.address, f"localhost:{port}"):
        with trace_client.connect(target, tls=Tls(ca=pki / "ca.pem")) as client:
            assert client.status()["version"]
    for tls in (None, Tls(ca=pki / "other.pem")):
        with impatient(), pytest.raises(Unavailable, match="TLS"):
            trace_client.connect(server.address, tls=tls)


def test_mutual_tls_proves_the_client(new_server: Any, pki: Path, impatient: Any) -> None:
    server = new_server(
        "--tls-certificate", str(pki / "server.pem"), "--tls-key", str(pki / "server.key"),
        "--tls-client-ca", str(pki / "ca.pem"),
    ).start()  # fmt: skip
    known = Tls(ca=pki / "ca.pem", certificate=pki / "client.pem", key=pki / "client.key")
    with trace_client.connect(server.address, tls=known) as client:
        assert client.status()["version"]
    stranger = Tls(ca=pki / "ca.pem", certificate=pki / "stranger.pem", key=pki / "stranger.key")
    for tls in (Tls(ca=pki / "ca.pem"), stranger):
        with impatient(), pytest.raises(Unavailable):
            trace_client.connect(server.address, tls=tls).status()
