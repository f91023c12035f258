"""Bulk frames: what protobuf would write, and nothing else, is taken."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_store.errors import InvalidRequest
from trace_store.frame import decode, decode_all, encode
from trace_store.limits import FRAMES_MAX
from trace_store.v1 import trace_store_service_pb2 as service_pb2


@given(st.binary(max_size=300), st.lists(st.binary(max_size=300), max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_frame_comes_back(header: bytes, parts: list[bytes]) -> None:
    decoded, payload = decode(encode(header, parts))
    assert (decoded, bytes(payload)) == (header, b"".join(parts))


def test_a_frame_is_a_protobuf_message() -> None:
    header = service_pb2.AppendHeader(sequence=300)
    message = service_pb2.AppendRequest.FromString(encode(header.SerializeToString(), [b"ab", b"c"]))
    assert (message.header, message.payload) == (header, b"abc")
    written = service_pb2.AppendRequest(header=header, payload=b"x" * 1000).SerializeToString()
    assert bytes(decode(written)[1]) == b"x" * 1000


def test_an_empty_payload_may_be_left_out() -> None:
    assert [bytes(part) for part in decode(b"\x0a\x01h")] == [b"h", b""]


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x12\x00",
        b"\x0a",
        b"\x0a\x05ab",
        b"\x0a\x80\x80\x80\x80\x80\x01",
        b"\x0a\x01h\x72\x00",
        b"\x0a\x01h\x7a\x05abc",
        b"\x0a\x01h\x7a\x01abc",
        b"\x0a\x01h\x7a",
    ],
)
def test_anything_else_is_refused(message: bytes) -> None:
    with pytest.raises(InvalidRequest, match="malformed frame"):
        decode(message)


def test_frames_that_lie_one_after_another_come_apart() -> None:
    frames = [(b"a", b"xyz"), (b"", b""), (b"b" * 300, b"\x0a" * 200)]
    message = b"".join(encode(header, [payload]) for header, payload in frames) + b"\x0a\x01h"
    assert [(header, bytes(payload)) for header, payload in decode_all(message)] == [*frames, (b"h", b"")]
    assert decode_all(b"\x0a\x01a\x0a\x01b") == [(b"a", b""), (b"b", b"")], "payloads left out"


@pytest.mark.parametrize(
    "message", [b"", b"\x0a\x01h\x7a\x05abc", b"\x0a\x01h\x7a\x01ab", b"\x0a\x01h\x0a", b"\x0a\x01h\x0a\x05ab"]
)
def test_what_is_not_all_frames_is_refused(message: bytes) -> None:
    with pytest.raises(InvalidRequest, match="malformed frame"):
        decode_all(message)


def test_a_message_holds_a_bounded_number_of_frames() -> None:
    empty = b"\x0a\x00"
    assert len(decode_all(empty * FRAMES_MAX)) == FRAMES_MAX
    with pytest.raises(InvalidRequest, match="at most"):
        decode_all(empty * (FRAMES_MAX + 1))
