"""A chunk is proven against the site table before anything of it is stored."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from trace_store import Site
from trace_store.checksum import trajectory_seed
from trace_store.chunk import Chunk, RecordGroup, check_chunk, checksum_of, cut_chunk, iterate_records
from trace_store.errors import DataLoss, InvalidRequest
from trace_store.testing.records import join_chunks, make_chunk

TABLE = (Site(0, "k", 64), Site(0, "moe_in", 64, block=32, scale="e8m0", form="full"))


def chunk(*spans: tuple[int, int]) -> Chunk:
    return join_chunks([make_chunk("run", "p", TABLE, "t", *span) for span in spans])


def payload(made: Chunk) -> memoryview:
    return memoryview(bytes(made.codes) + bytes(made.scales) + bytes(made.tensor_scales))


def test_a_payload_is_cut_where_its_groups_say() -> None:
    made = chunk((0, 3), (3, 7))
    again = cut_chunk(made.groups, payload(made), TABLE)
    assert [bytes(part) for part in (again.codes, again.scales, again.tensor_scales)] == [
        bytes(part) for part in (made.codes, made.scales, made.tensor_scales)
    ]
    check_chunk(again, "run", "p", TABLE)
    assert again.records == 4
    assert again.payload_bytes == len(payload(made))


@pytest.mark.parametrize("change", [-1, 1])
def test_fr15_a_payload_of_another_size_than_its_rows_is_refused(change: int) -> None:
    made = chunk((0, 3))
    raw = bytes(payload(made))
    with pytest.raises(InvalidRequest) as caught:
        cut_chunk(made.groups, memoryview(raw[:change] if change < 0 else raw + b"x"), TABLE)
    assert caught.value.argument == "payload"


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"trajectory": "../x"}, "trajectory"),
        ({"attempt": -1}, "attempt"),
        ({"policy_version": -1}, "policy_version"),
        ({"start": 3}, "stop"),
        ({"start": -1}, "start"),
        ({"sites": (0, 0)}, "sites"),
        ({"sites": (0, 2)}, "sites"),
        ({"sites": (), "scale_per_token": (), "checksums": ()}, "sites"),
        ({"checksums": (1,)}, "sites"),
    ],
)
def test_a_group_out_of_bounds_is_refused_by_name(change: dict[str, Any], argument: str) -> None:
    made = chunk((0, 3))
    group = dataclasses.replace(made.groups[0], **change)
    with pytest.raises(InvalidRequest) as caught:
        cut_chunk((group,), payload(made), TABLE)
    assert caught.value.argument == argument


@pytest.mark.parametrize("part", ["codes", "scales", "tensor_scales"])
def test_a_bit_flipped_on_the_way_is_found(part: str) -> None:
    made = chunk((0, 3), (3, 7))
    for place in (0, len(getattr(made, part)) - 1):
        raw = bytearray(getattr(made, part))
        raw[place] ^= 1 << 3
        with pytest.raises((DataLoss, InvalidRequest)):
            check_chunk(dataclasses.replace(made, **{part: memoryview(bytes(raw))}), "run", "p", TABLE)
    with pytest.raises(DataLoss):
        check_chunk(made, "run", "other", TABLE)


def resum(made: Chunk) -> Chunk:
    seed = trajectory_seed("run", "p", "t")
    sums = [checksum_of(record, seed) for record in iterate_records(made, TABLE)]
    groups: list[RecordGroup] = []
    for group in made.groups:
        groups.append(dataclasses.replace(group, checksums=tuple(sums[: len(group.sites)])))
        sums = sums[len(group.sites) :]
    return dataclasses.replace(made, groups=tuple(groups))


@pytest.mark.parametrize("place", [0, 15])
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_fr03_a_nan_scale_is_refused_with_its_place(place: int, byte: int) -> None:
    made = chunk((0, 4))
    scales = bytearray(made.scales)
    scales[place] = byte
    with pytest.raises(InvalidRequest, match=r"NaN byte, site=0/k trajectory='t' tokens=\[0, 4\)"):
        check_chunk(resum(dataclasses.replace(made, scales=memoryview(bytes(scales)))), "run", "p", TABLE)


def test_0x7f_is_a_number_in_e8m0_even_beside_e4m3() -> None:
    made = chunk((0, 4))
    scales = bytearray(made.scales)
    scales[-1] = 0x7F
    check_chunk(resum(dataclasses.replace(made, scales=memoryview(bytes(scales)))), "run", "p", TABLE)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_a_tensor_scale_must_be_finite_and_not_negative(value: float) -> None:
    made = chunk((0, 4))
    tensor = np.frombuffer(made.tensor_scales, "<f4").copy()
    tensor[2] = value
    with pytest.raises(InvalidRequest, match="tensor_scale"):
        check_chunk(resum(dataclasses.replace(made, tensor_scales=memoryview(tensor.tobytes()))), "run", "p", TABLE)
