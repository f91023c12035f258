"""Reading by microbatch from a real server: rows land where asked, what is missing says why, bad requests are named."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import trace_client
from trace_store import Site, TokenSpan
from trace_store.arena import ARENA_BYTES_MAX
from trace_store.errors import DeadlineExceeded, InvalidRequest, NotFound, Unavailable


@pytest.fixture
def filled(client: Any, run: str, records: Any) -> Any:
    """A reader of two sealed trajectories of 20 tokens and an open one."""
    with client.writer(run, "p") as writer:
        for seed, name in enumerate(("a", "b")):
            writer.append(name, 0, records(20, seed=seed), policy_version=7 + seed)
            writer.seal(name, tokens=21, prompt_tokens=0)
        writer.append("open", 0, records(20, seed=2))
    return client.reader(run, "p")


def test_rows_land_where_asked_and_padding_is_invalid(filled: Any, records: Any, sites: Any) -> None:
    batch = filled.read([("a", 3, 9, 10), TokenSpan("b", 0, 4, 2)], [sites[2], sites[0]])
    assert batch.rows == 16
    assert list(batch.planes) == [sites[2], sites[0]]
    valid = [2 <= row < 6 or row >= 10 for row in range(16)]
    for site in (sites[2], sites[0]):
        for position, array in enumerate((batch.planes, batch.scales, batch.tensor_scales)):
            assert array[site][10:].tobytes() == records(20, seed=0)[site][position][3:9].tobytes()
            assert array[site][2:6].tobytes() == records(20, seed=1)[site][position][:4].tobytes()
        assert batch.valid[site].tolist() == valid
        assert np.isnan(batch.tensor_scales[site]).tolist() == [not row for row in valid], "NaN marks what is not data"
    assert batch.missing == []


def test_what_is_missing_says_why(filled: Any, client: Any, run: str, sites: Any, rows: Any) -> None:
    with client.writer(run, "p") as writer:
        writer.append("part", 0, {sites[0]: rows(sites[0], 4)})
        writer.seal("part", tokens=9, prompt_tokens=0, allow_holes=True)
    spans = [("a", 0, 2), ("nobody", 0, 2, 2), ("open", 0, 2, 4), ("part", 2, 6, 6), ("a", 19, 22, 10)]
    batch = filled.read(spans, sites[:2])
    found = {(m.trajectory, m.site.name, m.start, m.stop, m.reason) for m in batch.missing}
    assert found == {
        *(("nobody", name, 0, 2, "unknown trajectory") for name in ("0/k", "0/v")),
        *(("open", name, 0, 2, "not sealed") for name in ("0/k", "0/v")),
        ("part", "0/k", 4, 6, "not recorded"),
        ("part", "0/v", 2, 6, "not recorded"),
        *(("a", name, 20, 22, "not recorded") for name in ("0/k", "0/v")),
    }
    assert batch.valid[sites[0]].tolist() == [True] * 2 + [False] * 4 + [True] * 2 + [False] * 2 + [True] + [False] * 2
    for site in sites[:2]:
        assert np.isnan(batch.tensor_scales[site][~batch.valid[site]]).all()


def test_open_attempts_and_old_weights_are_asked_for(filled: Any, sites: Any) -> None:
    opened = filled.read([("open", 0, 5)], sites[:1], include_open=True)
    assert opened.valid[sites[0]].all()
    stale = filled.read([("a", 0, 2), ("b", 0, 2, 2)], sites[:1], policy_version_min=8)
    assert stale.valid[sites[0]].tolist() == [False, False, True, True]
    assert {missing.reason for missing in stale.missing} == {"stale policy version"}


def test_reading_does_not_consume_and_buffers_are_reused(filled: Any, sites: Any) -> None:
    buffers = trace_client.Buffers()
    first = filled.read([("a", 0, 20)], out=buffers)
    copy = first.planes[sites[0]].copy()
    second = filled.read([("b", 0, 4)], out=buffers)
    assert np.shares_memory(first.planes[sites[0]], second.planes[sites[0]])
    assert not np.array_equal(copy, first.planes[sites[0]]), "an earlier result over the buffers changes"
    third = filled.read([("nobody", 0, 4)], out=buffers)
    assert not third.valid[sites[0]].any()
    assert np.isnan(third.tensor_scales[sites[0]]).all()
    assert filled.read([("a", 0, 20)]).planes[sites[0]].tobytes() == copy.tobytes()


def test_an_empty_read_is_empty(filled: Any, sites: Any) -> None:
    assert filled.read([]).rows == 0
    nothing = filled.read([("a", 0, 4)], [])
    assert (nothing.rows, nothing.planes, nothing.missing) == (4, {}, [])


BAD_READS: list[tuple[str, Any, Any]] = [
    ("spans", None, None),
    ("spans", "a", None),
    ("spans", [("a", 0)], None),
    ("spans", ["abc"], None),
    ("span.start", [("a", -1, 2)], None),
    ("span.start", [("a", 0.0, 2)], None),
    ("span.stop", [("a", 5, 5)], None),
    ("span.stop", [("a", 5, 3)], None),
    ("span.stop", [("a", 5, 2**31)], None),
    ("span.dest_row", [("a", 0, 2, -1)], None),
    ("span.dest_row", [("a", 0, 4, 0), ("b", 0, 2, 3)], None),
    ("span.trajectory", [("../a", 0, 2)], None),
    ("spans", [("a", row, row + 1, row) for row in range(65_537)], None),
    ("sites", [("a", 0, 2)], [Site(9, "k", 64)]),
    ("sites", [("a", 0, 2)], ["0/k"]),
    ("sites", [("a", 0, 2)], Site(0, "k", 64)),
    ("sites", [("a", 0, 2)], [Site(0, "k", 64)] * 2),
]


@pytest.mark.parametrize(
    ("argument", "spans", "wanted"), BAD_READS, ids=[f"{n}-{b[0]}" for n, b in enumerate(BAD_READS)]
)
def test_bad_reads_are_named(filled: Any, argument: str, spans: Any, wanted: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        filled.read(spans, wanted)
    assert caught.value.argument == argument
    assert filled.read([("a", 0, 2)]).rows == 2


@pytest.mark.parametrize("out", [np.zeros(1 << 16, np.uint8), bytearray(64), {}, trace_client.Buffers])
def test_memory_to_read_into_is_buffers_and_nothing_else(filled: Any, out: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"trace_client\.Buffers\(\)") as caught:
        filled.read([("a", 0, 1)], out=out)
    assert caught.value.argument == "out"


@pytest.mark.parametrize("timeout_s", ["3", None, True, float("nan"), np.array([5.0]), 5j])
def test_a_deadline_is_a_number_of_seconds(filled: Any, timeout_s: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        filled.read([("a", 0, 1)], timeout_s=timeout_s)
    assert caught.value.argument == "timeout_s"


@pytest.mark.parametrize("timeout_s", [-1.0, 0, 1e-6, 0.0003, 0.001, 0.003])
def test_a_deadline_that_passes_inside_a_call_is_no_lost_server(filled: Any, timeout_s: float) -> None:
    """gRPC says "Stream removed" of both. A reader that gets Unavailable takes the server for dead."""
    failures = []
    for _ in range(30):
        with suppress(DeadlineExceeded):
            try:
                filled.read([("a", 0, 20)], timeout_s=timeout_s)
            except Unavailable as error:
                failures.append(error)
    assert failures == []
    if timeout_s <= 1e-6:
        with pytest.raises(DeadlineExceeded):
            filled.read([("a", 0, 20)], timeout_s=timeout_s)
    assert not filled.read([("a", 0, 20)]).missing, "the reader stays usable"


def test_policy_version_is_checked(filled: Any) -> None:
    for version in (-1, 2**63, 1.5):
        with pytest.raises(InvalidRequest) as caught:
            filled.read([("a", 0, 2)], policy_version_min=version)
        assert caught.value.argument == "policy_version_min"


def test_an_unknown_run_is_not_found_and_an_unknown_partition_is_missing(client: Any, run: str) -> None:
    with pytest.raises(NotFound):
        client.reader("nowhere", "p")
    batch = client.reader(run, "nothing").read([("a", 0, 2)])
    assert {missing.reason for missing in batch.missing} == {"unknown trajectory"}


def test_thousands_of_spans_in_one_read(client: Any, run: str, rows: Any, sites: Any) -> None:
    site = sites[0]
    planes, scales, tensor = rows(site, 4000)
    with client.writer(run, "p") as writer:
        for start in range(0, 4000, 500):
            part = slice(start, start + 500)
            writer.append("t", start, {site: (planes[part], scales[part], tensor[part])})
        writer.seal("t", tokens=4001, prompt_tokens=0, allow_holes=True)
    spans = [("t", start, start + 1, 3999 - start) for start in range(4000)]
    batch = client.reader(run, "p").read(spans, [site])
    assert batch.planes[site].tobytes() == planes[::-1].tobytes()
    assert batch.valid[site].all()


def test_a_read_too_large_for_an_arena_comes_over_the_connection() -> None:
    asked: list[int] = []
    arenas: Any = SimpleNamespace(attach=lambda size, timeout_s: asked.append(size))
    buffers = trace_client.Buffers()
    assert buffers.arena(arenas, ARENA_BYTES_MAX + 1) is None
    assert asked == []
    buffers.arena(arenas, ARENA_BYTES_MAX - 1)
    assert asked == [ARENA_BYTES_MAX]
