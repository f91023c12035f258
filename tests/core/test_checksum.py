"""The checksum covers every part of a record: a flipped bit anywhere, or another key, gives another value."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import xxhash

from trace_store.checksum import RowKind, record_checksum, trajectory_seed

RECORD: dict[str, Any] = {
    "attempt": 1, "policy_version": 2, "site": 3, "start": 4, "stop": 6, "codes": b"codes", "scales": b"scales",
    "tensor_scales": b"\0\0\x80?", "kind": RowKind.RECORD,
}  # fmt: skip


def test_it_is_the_documented_chain() -> None:
    state = xxhash.xxh3_64_intdigest(b"run\0step\0t")
    for part in (struct.pack("<BIQIIII", 0, 1, 2, 3, 4, 6, 1), b"codes", b"scales", b"\0\0\x80?"):
        state = xxhash.xxh3_64_intdigest(part, state)
    assert record_checksum(trajectory_seed("run", "step", "t"), **RECORD) == state


@pytest.mark.parametrize("field", list(RECORD))
def test_every_field_changes_it(field: str) -> None:
    seed = trajectory_seed("run", "step", "t")
    value = RECORD[field]
    changed = bytes([value[0] ^ 1]) + value[1:] if isinstance(value, bytes) else value + 1
    assert record_checksum(seed, **{**RECORD, field: changed}) != record_checksum(seed, **RECORD)


def test_bytes_cannot_wander_between_the_parts() -> None:
    seed = trajectory_seed("run", "step", "t")
    moved = {**RECORD, "codes": b"codess", "scales": b"cales"}
    assert record_checksum(seed, **moved) != record_checksum(seed, **RECORD)
    assert trajectory_seed("a", "b", "c") != trajectory_seed("ab", "", "c")


def test_every_kind_of_buffer_gives_the_same() -> None:
    seed = trajectory_seed("run", "step", "t")
    wrapped = {**RECORD, "codes": memoryview(bytearray(b"codes")), "scales": np.frombuffer(b"scales", np.uint8).data}
    assert record_checksum(seed, **wrapped) == record_checksum(seed, **RECORD)
