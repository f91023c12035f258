"""Unary calls and Read by raw requests: statuses, error details, listings by pages, seals that repeat."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest

from trace_server.status import STATUS
from trace_store import Site, errors, wire
from trace_store.v1 import record_pb2
from trace_store.v1 import trace_store_service_pb2 as service_pb2


class Raw:
    """Unary calls and reads without our client's checks."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)

    def call(self, method: str, request: Any, kind: Any = None) -> Any:
        encoded = request if isinstance(request, bytes) else request.SerializeToString()
        answer = self._channel.unary_unary(f"/{wire.SERVICE}/{method}")(encoded, timeout=20)
        return kind.FromString(answer) if kind else answer

    def read(self, request: Any) -> list[bytes]:
        encoded = request if isinstance(request, bytes) else request.SerializeToString()
        return list(self._channel.unary_stream(f"/{wire.SERVICE}/Read")(encoded, timeout=20))

    def close(self) -> None:
        self._channel.close()


@pytest.fixture
def raw(server: Any) -> Any:
    calls = Raw(server.address)
    yield calls
    calls.close()


def detail(error: grpc.RpcError) -> Any:
    return record_pb2.ErrorDetail.FromString(dict(error.trailing_metadata())[wire.ERROR_METADATA_KEY])


SITE = record_pb2.Site(layer=0, kind="k", width=64, block=16, scale=1, form=1)  # type: ignore[arg-type]


def changed(**fields: Any) -> Any:
    site = record_pb2.Site()
    site.CopyFrom(SITE)
    for name, value in fields.items():
        setattr(site, name, value)
    return site


BAD_REQUESTS: list[tuple[str, str, Any]] = [
    ("Register", "run", service_pb2.RegisterRequest(run="", sites=[SITE])),
    ("Register", "run", service_pb2.RegisterRequest(run="a" * 513, sites=[SITE])),
    ("Register", "sites", service_pb2.RegisterRequest(run="r")),
    ("Register", "sites", service_pb2.RegisterRequest(run="r", sites=[SITE, SITE])),
    ("Register", "site.width", service_pb2.RegisterRequest(run="r", sites=[changed(width=0)])),
    ("Register", "site.width", service_pb2.RegisterRequest(run="r", sites=[changed(width=65_552)])),
    ("Register", "site.block", service_pb2.RegisterRequest(run="r", sites=[changed(block=8)])),
    ("Register", "site.scale", service_pb2.RegisterRequest(run="r", sites=[changed(scale=0)])),
    ("Register", "site.form", service_pb2.RegisterRequest(run="r", sites=[changed(form=99)])),
    ("Register", "site.kind", service_pb2.RegisterRequest(run="r", sites=[changed(kind="a/b")])),
    ("Register", "site.layer", service_pb2.RegisterRequest(run="r", sites=[changed(layer=2**32 - 1)])),
    ("DescribeRun", "run", service_pb2.DescribeRunRequest(run="\0")),
    ("Seal", "run", service_pb2.SealRequest(partition="p", trajectory="t", tokens=1)),
    ("Seal", "partition", service_pb2.SealRequest(run="RUN", trajectory="t", tokens=1)),
    ("Seal", "trajectory", service_pb2.SealRequest(run="RUN", partition="p", tokens=1)),
    ("Seal", "tokens", service_pb2.SealRequest(run="RUN", partition="p", trajectory="t")),
    (
        "Seal",
        "prompt_tokens",
        service_pb2.SealRequest(run="RUN", partition="p", trajectory="t", tokens=1, prompt_tokens=2),
    ),
    ("Release", "run", service_pb2.ReleaseRequest(partition="p")),
    ("Release", "partition", service_pb2.ReleaseRequest(run="RUN", partition="..")),
    ("Seal", "message", b"\xff\xff\xff"),
    ("Register", "message", b"\x0a\x02\xc3\x28"),
]


@pytest.mark.parametrize(("method", "argument", "request_"), BAD_REQUESTS, ids=[f"{b[0]}-{b[1]}" for b in BAD_REQUESTS])
def test_bad_requests_name_the_argument(
    raw: Raw, client: Any, run: str, method: str, argument: str, request_: Any
) -> None:
    if getattr(request_, "run", "") == "RUN":
        request_.run = run
    with pytest.raises(grpc.RpcError) as caught:
        raw.call(method, request_)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (detail(caught.value).type, detail(caught.value).argument) == ("InvalidRequest", argument)
    assert "r" not in [entry.name for entry in client.list()]


def span(**fields: Any) -> Any:
    return record_pb2.TokenSpan(**{"trajectory": "t", "start": 0, "stop": 2, **fields})


@pytest.mark.parametrize(
    ("argument", "request_"),
    [
        ("run", service_pb2.ReadRequest(partition="p", spans=[span()], sites=[0])),
        ("partition", service_pb2.ReadRequest(run="RUN", spans=[span()], sites=[0])),
        ("sites", service_pb2.ReadRequest(run="RUN", partition="p", spans=[span()], sites=[4])),
        ("sites", service_pb2.ReadRequest(run="RUN", partition="p", spans=[span()], sites=[0, 0])),
        ("span.stop", service_pb2.ReadRequest(run="RUN", partition="p", spans=[span(start=2)], sites=[0])),
        ("span.trajectory", service_pb2.ReadRequest(run="RUN", partition="p", spans=[span(trajectory="")], sites=[0])),
        ("spans", service_pb2.ReadRequest(run="RUN", partition="p", spans=[span()] * 65_537, sites=[0])),
        ("message", b"\xff\xff\xff"),
    ],
)
def test_bad_reads_name_the_argument(raw: Raw, run: str, argument: str, request_: Any) -> None:
    if getattr(request_, "run", "") == "RUN":
        request_.run = run
    with pytest.raises(grpc.RpcError) as caught:
        raw.read(request_)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert detail(caught.value).argument == argument


def test_unknown_names_are_not_found(raw: Raw) -> None:
    for method, request in (
        ("DescribeRun", service_pb2.DescribeRunRequest(run="nowhere")),
        ("List", service_pb2.ListRequest(run="nowhere")),
        ("Seal", service_pb2.SealRequest(run="nowhere", partition="p", trajectory="t", tokens=1)),
        ("Release", service_pb2.ReleaseRequest(run="nowhere", partition="p")),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            raw.call(method, request)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.RpcError) as caught:
        raw.call("Nothing", b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_every_error_has_a_status() -> None:
    tree = {v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, errors.TraceStoreError)}
    assert set(STATUS) == tree
    for kind, status in STATUS.items():
        retried = status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert not retried or kind.retryable, "what gRPC clients retry must be safe to retry"


def test_a_refused_seal_stores_nothing_and_repeats_alike(raw: Raw, run: str, client: Any, records: Any) -> None:
    with client.writer(run, "p") as writer:
        writer.append("t", 0, records(3))
    seal = service_pb2.SealRequest(run=run, partition="p", trajectory="t", tokens=9, prompt_tokens=0)
    for _ in range(2):
        with pytest.raises(grpc.RpcError) as caught:
            raw.call("Seal", seal)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert [(hole.site, hole.start, hole.stop) for hole in detail(caught.value).holes] == [
            (site, 3, 8) for site in range(4)
        ]
    seal.tokens = 4
    first = raw.call("Seal", seal, service_pb2.SealResponse)
    assert raw.call("Seal", seal, service_pb2.SealResponse) == first
    assert first.receipt.durability == 3


def test_listings_come_in_pages(client: Any) -> None:
    site = Site(0, "k", 16, form="full")
    client.register("pages", [site])
    arrays = (np.zeros((1, 8), np.uint8), np.zeros((1, 1), np.uint8), 1.0)
    with client.writer("pages", "p", durability="written") as writer:
        for number in range(1005):
            writer.append(f"t{number:04}", 0, {site: arrays})
    assert [entry.name for entry in client.list("pages", "p")] == [f"t{number:04}" for number in range(1005)]


def test_a_read_frame_is_plain_protobuf(raw: Raw, run: str, client: Any, records: Any, sites: Any) -> None:
    with client.writer(run, "p") as writer:
        writer.append("t", 0, records(3))
        writer.seal("t", tokens=4, prompt_tokens=0)
    request = service_pb2.ReadRequest(run=run, partition="p", spans=[span(stop=5)], sites=[0])
    data, missing = (service_pb2.ReadResponse.FromString(encoded) for encoded in raw.read(request))
    planes, scales, tensor = records(3)[sites[0]]
    assert data.payload == planes.tobytes() + scales.tobytes() + tensor.tobytes()
    assert (list(data.header.dest_rows), list(data.header.rows)) == ([0], [3])
    assert [(m.start, m.stop, m.reason) for m in missing.header.missing] == [(3, 5, 3)]
