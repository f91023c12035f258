"""Values at the door: names, sites, spans, records."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from trace_store import GuidanceRecord, Site, TokenSpan
from trace_store.errors import InvalidRequest
from trace_store.record import check_durability, check_int, check_name, check_site_table, has_nan_scale

SITE = Site(3, "moe_in", 64)


@pytest.mark.parametrize("name", ["a", "a/b", "x" * 512, "é" * 256, "run 7", "…"])
def test_usable_names_come_back_unchanged(name: str) -> None:
    assert check_name(name, "run") == name


@pytest.mark.parametrize(
    "name", ["", "x" * 513, "é" * 257, "a\0", "a\x7f", "..", "a/./b", "a\\..\\b", "/a", "a/", 3, None]
)
def test_fr29_unusable_names_are_refused_and_the_argument_is_named(name: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_name(name, "partition")
    assert caught.value.argument == "partition"


@pytest.mark.parametrize("value", [True, 1.0, "1", None, -1, 11])
def test_integers_are_integers_within_their_bounds(value: Any) -> None:
    with pytest.raises(InvalidRequest):
        check_int(value, "start", 0, 10)
    assert check_int(np.uint8(10), "start", 0, 10) == 10


@pytest.mark.parametrize(
    "change",
    [
        {"layer": -1},
        {"kind": "a/b"},
        {"kind": ""},
        {"width": 0},
        {"width": 72},
        {"width": 65_552},
        {"block": 8},
        {"scale": "fp32"},
        {"form": "b4"},
        {"quantizer": "x" * 129},
    ],
)
def test_a_site_that_cannot_be_stored_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        dataclasses.replace(SITE, **change)


@pytest.mark.parametrize(("form", "codes"), [("b1", 8), ("b2", 16), ("b3", 24), ("full", 32)])
def test_row_sizes_follow_from_form_width_and_block(form: str, codes: int) -> None:
    site = dataclasses.replace(SITE, form=form)
    assert (site.code_bytes, site.scale_bytes) == (codes, 4)
    assert dataclasses.replace(site, block=32, scale="e8m0").scale_bytes == 2


def test_the_format_name_is_that_of_the_code_book() -> None:
    assert [SITE.format, Site(0, "k", 64, 32, "e8m0").format, Site(0, "k", 64, 32).format] == ["nvfp4", "mxfp4", ""]


def test_a_site_table_has_each_site_once() -> None:
    assert check_site_table([SITE]) == (SITE,)
    for table in ([], [SITE, dataclasses.replace(SITE, form="full")], ["3/moe_in"], 7):
        with pytest.raises(InvalidRequest):
            check_site_table(table)


@pytest.mark.parametrize("span", [(5, 5), (6, 5), (-1, 5), (0, 2**31)])
def test_an_empty_or_negative_span_is_refused(span: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest):
        TokenSpan("t", *span)


@pytest.mark.parametrize(
    ("scale", "byte", "nan"), [("e4m3", 0x7F, 1), ("e4m3", 0xFF, 1), ("e8m0", 0xFF, 1), ("e8m0", 0x7F, 0)]
)
@pytest.mark.parametrize("place", [0, 15, 31])
def test_fr03_a_nan_scale_is_found_at_every_position(scale: str, byte: int, nan: int, place: int) -> None:
    scales = bytearray(32)
    scales[place] = byte
    assert has_nan_scale(bytes(scales), scale) == bool(nan)


def test_a_record_is_built_from_what_callers_have() -> None:
    codes, scales = np.zeros((5, 1, 8), np.uint8), np.ones((5, 4), np.uint8)
    record = GuidanceRecord.build(SITE, 7, codes.reshape(5, 8), scales, 0.5)
    assert (record.tokens, record.codes.shape, record.tensor_scale.tolist()) == (5, (5, 1, 8), [0.5])
    assert GuidanceRecord.build(SITE, 7, codes, scales, [1, 2, 3, 4, 5]).tensor_scale.dtype == np.float32
    strided = np.zeros((10, 4), np.uint8)[::2]
    assert GuidanceRecord.build(SITE, 7, codes, strided, 1.0).scales.flags.c_contiguous


@pytest.mark.parametrize(
    "change",
    [
        {"codes": np.zeros((5, 1, 9), np.uint8)},
        {"codes": np.zeros((5, 1, 8), np.int8)},
        {"codes": np.zeros((0, 1, 8), np.uint8)},
        {"scales": np.zeros((4, 4), np.uint8)},
        {"scales": np.full((5, 4), 0x7F, np.uint8)},
        {"tensor_scale": [1.0, 2.0]},
        {"tensor_scale": -1.0},
        {"tensor_scale": float("nan")},
        {"tensor_scale": np.float16(1)},
        {"start": 2**31 - 3},
    ],
)
def test_a_record_that_does_not_fit_its_site_is_refused(change: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "start": 0, "codes": np.zeros((5, 1, 8), np.uint8), "scales": np.zeros((5, 4), np.uint8), "tensor_scale": 1.0
    }  # fmt: skip
    with pytest.raises(InvalidRequest):
        GuidanceRecord.build(SITE, **{**good, **change})


def test_durabilities_are_three() -> None:
    assert check_durability("written") == "written"
    with pytest.raises(InvalidRequest):
        check_durability("fsync")
