"""Appends become the same message whether the arrays pass the quick check or need converting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trace_client import columns as columns_module
from trace_client.encode import Encoder
from trace_store import Site
from trace_store.chunk import check_chunk, cut_chunk
from trace_store.errors import InvalidRequest
from trace_store.limits import FRAME_BYTES
from trace_store.record import GuidanceRecord

TABLE = (
    Site(0, "k", 64),
    Site(0, "moe_in", 128, block=32, scale="e8m0", form="b2"),
    Site(1, "k", 64),
    Site(1, "moe_in", 128, form="full"),
    Site(2, "k", 64, form="b3"),
)

Rows = dict[Site, tuple[Any, Any, Any]]


def rows(tokens: int, sites: tuple[Site, ...] = TABLE, tensor: str = "mixed") -> Rows:
    generator = np.random.default_rng(tokens)
    made: Rows = {}
    for number, site in enumerate(sites):
        codes = generator.integers(0, 256, (tokens, *site.code_form.row_shape(site.width)), np.uint8)
        scales = generator.integers(0, 0x7F, (tokens, site.scale_bytes), np.uint8)
        one = np.float32(generator.random())
        many = generator.random(tokens, np.float32)
        scale = {"one": one, "array": np.array([one]), "many": many, "mixed": many if number % 2 else np.array([one])}
        made[site] = (codes, scales, scale[tensor])
    return made


def payloads(made: Rows, start: int = 3, message_bytes: int = 4 << 20) -> list[bytes]:
    """Payloads of the messages of an append, each checked as a server does."""
    encoder = Encoder("run", "p", TABLE)
    found = []
    for outgoing in encoder.messages(encoder.take("t", start, made), 1, 2, message_bytes):
        target = np.zeros(outgoing.size, np.uint8)
        groups = outgoing.fill(target)
        check_chunk(cut_chunk(groups, target.data, TABLE), "run", "p", TABLE)
        found.append(target.tobytes())
    return found


def expected(made: Rows) -> bytes:
    records = [GuidanceRecord.build(site, 0, *made[site]) for site in TABLE if site in made]
    parts = [record.codes for record in records], [record.scales for record in records]
    return b"".join(array.tobytes() for column in (*parts, [r.tensor_scale for r in records]) for array in column)


@pytest.fixture
def quick_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> Any:
        raise AssertionError("these arrays need no conversion")

    monkeypatch.setattr(columns_module, "_slow", refuse)


@pytest.mark.parametrize("tensor", ["one", "array", "many", "mixed"])
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.usefixtures("quick_only")
def test_plain_arrays_are_laid_out_without_conversion(tokens: int, tensor: str) -> None:
    made = rows(tokens, tensor=tensor)
    assert payloads(made) == [expected(made)]


@pytest.mark.usefixtures("quick_only")
def test_sites_come_in_any_order_and_number() -> None:
    made = rows(5)
    assert payloads(dict(reversed(made.items()))) == [expected(made)]
    some = {site: made[site] for site in (TABLE[4], TABLE[1])}
    assert payloads(some) == [expected(some)]


def test_arrays_that_need_converting_give_the_same_bytes() -> None:
    made = rows(6)
    wanted = [expected(made)]
    flat = {site: (codes.reshape(6, -1), scales, tensor) for site, (codes, scales, tensor) in made.items()}
    assert payloads(flat) == wanted
    lists: Rows = {site: [codes, scales, tensor.astype(np.float64)] for site, (codes, scales, tensor) in made.items()}  # type: ignore[misc]
    assert payloads(lists) == wanted


@pytest.mark.usefixtures("quick_only")
def test_strided_arrays_are_copied_row_by_row() -> None:
    made = rows(12)
    half = {site: (codes[::2], scales[::2], np.float32(0.5)) for site, (codes, scales, _) in made.items()}
    assert payloads(half) == [expected(half)]


@pytest.mark.parametrize("tensor", ["one", "many"])
def test_a_long_append_is_cut_by_tokens(tensor: str) -> None:
    row_bytes = sum(site.code_bytes + site.scale_bytes + 4 for site in TABLE)
    tokens = 5 * FRAME_BYTES // row_bytes // 2
    made = rows(tokens, tensor=tensor)
    found = payloads(made, message_bytes=FRAME_BYTES)
    assert len(found) == 3
    step = FRAME_BYTES // row_bytes
    for number, payload in enumerate(found):
        part = slice(number * step, (number + 1) * step)
        cut = {s: (c[part], b[part], t[part] if tensor == "many" else t) for s, (c, b, t) in made.items()}
        assert payload == expected(cut)
    grouped = payloads(made, message_bytes=4 * FRAME_BYTES)
    assert len(grouped) == 1
    assert sorted(grouped[0]) == sorted(b"".join(found))


@pytest.mark.parametrize("tokens", [2, 3 * FRAME_BYTES // 400])
def test_a_nan_scale_is_named_before_anything_leaves(tokens: int) -> None:
    made = rows(tokens)
    made[TABLE[3]][1][-1, -1] = 0x7F
    encoder = Encoder("run", "p", TABLE)
    messages = encoder.messages(encoder.take("t", 0, made), 0, 0, FRAME_BYTES)
    # One message says so when it is filled; of several none is made, or the first would be on its way.
    step = (lambda: [m.fill(np.zeros(m.size, np.uint8)) for m in messages]) if tokens == 2 else lambda: next(messages)
    with pytest.raises(InvalidRequest, match="NaN byte, site=1/moe_in"):
        step()


def test_0x7f_is_no_nan_in_e8m0() -> None:
    made = rows(4)
    made[TABLE[1]][1][:] = 0x7F
    assert payloads(made) == [expected(made)]
