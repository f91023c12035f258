"""The Append stream by raw frames, past every check of our client: bad input is answered and stored nowhere, and the
stream goes on."""

from __future__ import annotations

import queue
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from trace_store import frame, wire
from trace_store.checksum import record_checksum, trajectory_seed
from trace_store.v1 import record_pb2
from trace_store.v1 import trace_store_service_pb2 as service_pb2

T = 4
APPEND = f"/{wire.SERVICE}/Append"


class RawStream:
    """An Append call whose messages are whatever the test sends."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, [("grpc.max_send_message_length", -1)])
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.call = self._channel.stream_stream(APPEND)(iter(self._requests.get, None), timeout=30)
        self.sequence = 0

    def send(self, message: bytes) -> None:
        self._requests.put(message)

    def answer(self) -> Any:
        return service_pb2.AppendResponse.FromString(next(self.call))

    def open(self, run: str, partition: str = "p", durability: int = 3, batched: bool = False) -> RawStream:
        opening = service_pb2.AppendOpen(run=run, partition=partition, durability=durability, batched=batched)  # type: ignore[arg-type]
        self.send(message(service_pb2.AppendHeader(open=opening)))
        return self

    def append(self, groups: list[Any], payload: bytes) -> Any:
        self.sequence += 1
        self.send(message(service_pb2.AppendHeader(sequence=self.sequence, groups=groups), payload))
        return self.answer()

    def close(self) -> None:
        self._requests.put(None)
        self._channel.close()


def message(header: Any, payload: bytes = b"") -> bytes:
    """Bytes of an AppendRequest, from the generated classes: a frame is plain protobuf."""
    return service_pb2.AppendRequest(header=header, payload=payload).SerializeToString()


def group(run: str, **changes: Any) -> tuple[Any, bytes]:
    """A valid group of one record at site 0 (k, width 64, b1, E4M3), and its payload; fields as changed."""
    codes, scales, tensor = bytes(range(T * 8)), bytes(T * 4), np.ones(T, "<f4").tobytes()
    scales = changes.pop("scales", scales)
    tensor = changes.pop("tensor", tensor)
    fields = {"trajectory": "t", "attempt": 0, "policy_version": 1, "start": 0, "stop": T, "sites": [0], **changes}
    fields.setdefault("scale_per_token", [True])
    name = fields["trajectory"]
    seed = trajectory_seed(run, "p", name if isinstance(name, str) else "")
    checksum = record_checksum(
        seed, fields["attempt"], fields["policy_version"], 0, fields["start"], fields["stop"], codes, scales, tensor
    )
    fields.setdefault("checksums", [checksum])
    return record_pb2_group(fields), codes + scales + tensor


def record_pb2_group(fields: dict[str, Any]) -> Any:
    return service_pb2.RecordGroup(**fields)


@pytest.fixture
def stream(server: Any, run: str) -> Iterator[RawStream]:
    opened = RawStream(server.address).open(run)
    assert opened.answer().credit_bytes > 0
    yield opened
    opened.close()


def scales_with(byte: int) -> bytes:
    return bytes(T * 4 - 1) + bytes([byte])


def tensor_with(value: float) -> bytes:
    return np.array([1, 1, 1, value], "<f4").tobytes()


BAD_GROUPS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "empty trajectory": ("InvalidRequest", "trajectory", {"trajectory": ""}),
    "long trajectory": ("InvalidRequest", "trajectory", {"trajectory": "t" * 513}),
    "NUL in trajectory": ("InvalidRequest", "trajectory", {"trajectory": "t\0"}),
    "path in trajectory": ("InvalidRequest", "trajectory", {"trajectory": "../t"}),
    "negative span": ("InvalidRequest", "stop", {"start": 9, "stop": 5}),
    "empty span": ("InvalidRequest", "stop", {"start": 5, "stop": 5}),
    "span beyond the limit": ("InvalidRequest", "stop", {"start": 0, "stop": 2**31}),
    "attempt beyond the limit": ("InvalidRequest", "attempt", {"attempt": 2**31}),
    "version beyond the limit": ("InvalidRequest", "policy_version", {"policy_version": 2**63}),
    "unknown site": ("InvalidRequest", "sites", {"sites": [4]}),
    "site twice": ("InvalidRequest", "sites", {"sites": [0, 0], "scale_per_token": [True] * 2, "checksums": [0] * 2}),
    "no site": ("InvalidRequest", "sites", {"sites": [], "scale_per_token": [], "checksums": []}),
    "a checksum short": ("InvalidRequest", "sites", {"checksums": []}),
    "a flag short": ("InvalidRequest", "sites", {"scale_per_token": []}),
    "longer span than payload": ("InvalidRequest", "payload", {"stop": T + 1}),
    "scale E4M3 0x7F": ("InvalidRequest", "scales", {"scales": scales_with(0x7F)}),
    "scale E4M3 0xFF": ("InvalidRequest", "scales", {"scales": scales_with(0xFF)}),
    "tensor scale inf": ("InvalidRequest", "tensor_scale", {"tensor": tensor_with(np.inf)}),
    "tensor scale nan": ("InvalidRequest", "tensor_scale", {"tensor": tensor_with(np.nan)}),
    "tensor scale negative": ("InvalidRequest", "tensor_scale", {"tensor": tensor_with(-1)}),
    "checksum of other bytes": ("DataLoss", "", {"checksums": [1]}),
}


@pytest.mark.parametrize("case", BAD_GROUPS)
def test_bad_groups_are_answered_and_nothing_is_stored(stream: RawStream, client: Any, run: str, case: str) -> None:
    kind, argument, changes = BAD_GROUPS[case]
    refused = stream.append(*as_lists(group(run, **changes)))
    assert (refused.error.type, refused.error.argument, refused.sequence) == (kind, argument, 1)
    assert refused.error.message
    assert (refused.stored, refused.duplicates) == (0, 0)
    assert list(client.list(run)) == [] or not list(client.list(run, "p"))
    accepted = stream.append(*as_lists(group(run)))
    assert (accepted.stored, accepted.sequence, accepted.error.type) == (1, 2, ""), "the stream stays usable"


def as_lists(made: tuple[Any, bytes]) -> tuple[list[Any], bytes]:
    return [made[0]], made[1]


def test_a_nan_of_e8m0_is_found_at_its_site(stream: RawStream, run: str) -> None:
    """Site 2/moe_in has E8M0 scales, where 0x7F is one and 255 no number."""
    for byte, stored in ((0x7F, 1), (0xFF, 0)):
        codes, scales, tensor = bytes(16), bytes([byte] * 2), np.ones(1, "<f4").tobytes()
        checksum = record_checksum(trajectory_seed(run, "p", "mx"), 0, 0, 3, byte, byte + 1, codes, scales, tensor)
        made = service_pb2.RecordGroup(
            trajectory="mx", start=byte, stop=byte + 1, sites=[3], scale_per_token=[False], checksums=[checksum]
        )
        answer = stream.append([made], codes + scales + tensor)
        assert (answer.stored, answer.error.argument) == (stored, "" if stored else "scales")


def test_a_message_is_stored_whole_or_not_at_all(stream: RawStream, client: Any, run: str) -> None:
    good, good_payload = group(run, trajectory="good")
    bad, bad_payload = group(run, trajectory="bad", scales=scales_with(0x7F))
    codes, scales, tensor = T * 8, T * 4, T * 4
    parts = [slice(0, codes), slice(codes, codes + scales), slice(codes + scales, codes + scales + tensor)]
    payload = b"".join(p[part] for part in parts for p in (good_payload, bad_payload))
    refused = stream.append([good, bad], payload)
    assert refused.error.argument == "scales"
    assert "bad" in refused.error.message
    assert not list(client.list(run)) or not list(client.list(run, "p"))


def test_overlaps_are_duplicates_conflicts_or_cut(stream: RawStream, run: str) -> None:
    assert stream.append(*as_lists(group(run))).stored == 1
    assert stream.append(*as_lists(group(run))).duplicates == 1
    assert stream.append(*as_lists(group(run, tensor=tensor_with(2)))).error.type == "Conflict"
    twice, payload = group(run, trajectory="u")
    doubled = b"".join(part * 2 for part in (payload[: T * 8], payload[T * 8 : T * 12], payload[T * 12 :]))
    refused = stream.append([twice, twice], doubled)
    assert refused.error.type == "InvalidRequest"
    assert stream.append(*as_lists(group(run, attempt=1))).stored == 1
    assert stream.append(*as_lists(group(run, start=T, stop=2 * T))).error.type == "StaleAttempt"


@pytest.mark.parametrize("batched", [False, True])
def test_requests_in_one_message_are_answered_one_by_one(server: Any, run: str, batched: bool) -> None:
    """Each request stands for itself; a client that did not ask for it gets no answer inside another."""
    stream = RawStream(server.address).open(run, batched=batched)
    assert stream.answer().batched
    made = [group(run, trajectory="good"), group(run, trajectory="bad", checksums=[1]), group(run, trajectory="other")]
    stream.send(
        b"".join(
            message(service_pb2.AppendHeader(sequence=sequence, groups=[header]), payload)
            for sequence, (header, payload) in enumerate(made, 1)
        )
    )
    answers: list[Any] = []
    while len(answers) < 3:
        answer = stream.answer()
        assert batched or not answer.further
        answers += [answer, *answer.further]
    stream.close()
    assert [(a.sequence, a.stored, a.error.type) for a in answers] == [(1, 1, ""), (2, 0, "DataLoss"), (3, 1, "")]


def test_an_opening_stands_alone(server: Any, run: str) -> None:
    stream = RawStream(server.address)
    made, payload = group(run)
    stream.send(opening(run, "p", 3) + message(service_pb2.AppendHeader(sequence=1, groups=[made]), payload))
    with pytest.raises(grpc.RpcError, match="opens it and holds no records"):
        stream.answer()
    stream.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\x0a",
        b"\x0a\x7f",
        b"\x12\x00",
        b"\x0a\x02\xff\xff",
        b"\x0a\x00\x7a\x05ab",
        b"\x0a\x00\x10\x01",
        b"\xff" * 64,
    ],
    ids=lambda value: value[:8].hex() or "empty",
)
def test_a_frame_that_is_none_is_answered(stream: RawStream, run: str, garbage: bytes) -> None:
    stream.sequence += 1
    stream.send(garbage)
    refused = stream.answer()
    assert (refused.sequence, refused.error.type) == (1, "InvalidRequest")
    assert refused.error.argument in ("frame", "sequence", "groups")
    assert stream.append(*as_lists(group(run))).stored == 1


@pytest.mark.parametrize("flood", ["frames", "groups"])
def test_a_flood_of_empty_parts_is_refused_as_one_request(
    stream: RawStream, client: Any, run: str, server: Any, flood: str
) -> None:
    before = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
    if flood == "frames":
        stream.send(b"\x0a\x00" * (8 << 20))
    else:
        header = service_pb2.AppendHeader(sequence=1).SerializeToString() + b"\x1a\x00" * 100_000
        stream.send(frame.encode(header, ()))
    answer = stream.answer()
    assert answer.error.type == "InvalidRequest"
    assert "at most" in answer.error.message
    assert client.status()["queued_bytes"] == 0
    pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1]) - before
    assert pages * resource.getpagesize() < 100 << 20


def test_hand_built_bytes_equal_the_generated_classes(run: str) -> None:
    made, payload = group(run)
    header = service_pb2.AppendHeader(sequence=1, groups=[made])
    by_hand = wire.frame.encode(header.SerializeToString(), [payload[:10], memoryview(payload)[10:]])
    assert by_hand == message(header, payload)
    parsed = service_pb2.AppendRequest.FromString(by_hand)
    assert parsed.header == header
    assert parsed.payload == payload


BAD_OPENINGS: list[tuple[str, grpc.StatusCode, Callable[[str], bytes]]] = [
    ("run", grpc.StatusCode.INVALID_ARGUMENT, lambda run: opening("", "p", 3)),
    ("run", grpc.StatusCode.INVALID_ARGUMENT, lambda run: opening("a\0", "p", 3)),
    ("", grpc.StatusCode.NOT_FOUND, lambda run: opening("nowhere", "p", 3)),
    ("partition", grpc.StatusCode.INVALID_ARGUMENT, lambda run: opening(run, "", 3)),
    ("partition", grpc.StatusCode.INVALID_ARGUMENT, lambda run: opening(run, "a/../b", 3)),
    ("durability", grpc.StatusCode.INVALID_ARGUMENT, lambda run: opening(run, "p", 0)),
    ("durability", grpc.StatusCode.INVALID_ARGUMENT, lambda run: opening(run, "p", 9)),
    ("open", grpc.StatusCode.INVALID_ARGUMENT, lambda run: message(service_pb2.AppendHeader(sequence=1))),
    ("frame", grpc.StatusCode.INVALID_ARGUMENT, lambda run: b"garbage"),
]


def opening(run: str, partition: str, durability: int) -> bytes:
    return message(
        service_pb2.AppendHeader(
            open=service_pb2.AppendOpen(run=run, partition=partition, durability=durability)  # type: ignore[arg-type]
        )
    )


@pytest.mark.parametrize(("argument", "status", "make"), BAD_OPENINGS, ids=range(len(BAD_OPENINGS)))
def test_a_bad_opening_ends_the_stream_with_a_typed_error(
    server: Any, run: str, argument: str, status: grpc.StatusCode, make: Callable[[str], bytes]
) -> None:
    stream = RawStream(server.address)
    stream.send(make(run))
    with pytest.raises(grpc.RpcError) as caught:
        stream.answer()
    stream.close()
    assert caught.value.code() is status
    details = dict(caught.value.trailing_metadata())[wire.ERROR_METADATA_KEY]
    assert record_pb2.ErrorDetail.FromString(details).argument == argument


@pytest.mark.parametrize("sequence", [0, 2, 2**64 - 1])
def test_a_message_out_of_order_ends_the_stream(stream: RawStream, run: str, sequence: int) -> None:
    made, payload = group(run)
    stream.send(message(service_pb2.AppendHeader(sequence=sequence, groups=[made]), payload))
    with pytest.raises(grpc.RpcError, match="numbered from 1"):
        stream.answer()


def test_an_oversized_message_ends_only_its_stream(server: Any, client: Any, run: str) -> None:
    stream = RawStream(server.address).open(run)
    stream.answer()
    made, payload = group(run)
    stream.send(message(service_pb2.AppendHeader(sequence=1, groups=[made]), payload + bytes(17 << 20)))
    with pytest.raises(grpc.RpcError) as caught:
        stream.answer()
    stream.close()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not list(client.list(run)) or not list(client.list(run, "p"))
    assert client.status()["version"]


def test_cancelled_calls_leave_the_server_sound(server: Any, client: Any, run: str) -> None:
    """The engine completes what a cancelled call asked for; the next one finds it there, once."""
    for number in range(30):
        stream = RawStream(server.address).open(run)
        stream.answer()
        made, payload = group(run, trajectory=f"t{number}")
        stream.send(message(service_pb2.AppendHeader(sequence=1, groups=[made]), payload))
        stream.call.cancel()
        stream.close()
    stream = RawStream(server.address).open(run)
    stream.answer()
    for number in range(30):
        answer = stream.append(*as_lists(group(run, trajectory=f"t{number}")))
        assert answer.error.type == ""
        assert answer.stored + answer.duplicates == 1
    stream.close()
    assert {entry.records for entry in client.list(run, "p")} == {1}
    assert "Traceback" not in server.log.read_text()
