"""A fleet read takes a trajectory's rows from several servers only if they are of one seal of one attempt.

The servers here share no bucket, so that each can hold what the other lacks; damage is a flipped byte on a disk.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trace_client
from trace_store import Site

RUN, PARTITION, TOKENS = "run", "step-1", 12


def write(
    address: str,
    sites: Any,
    records: Callable[..., Any],
    *,
    seed: int,
    attempt: int = 0,
    receipts: list[Any] | None = None,
) -> Any:
    """A sealed trajectory, two records a site."""
    with trace_client.connect(address) as client:
        client.register(RUN, sites)
        with client.writer(RUN, PARTITION) as writer:
            rows = records(TOKENS, seed)
            for low in (0, TOKENS // 2):
                part = {s: tuple(column[low : low + TOKENS // 2] for column in columns) for s, columns in rows.items()}
                writer.append("t", low, part, attempt=attempt)
            receipt = writer.seal("t", tokens=TOKENS + 1, prompt_tokens=0, attempt=attempt)
            if receipts is not None:
                receipts.append(receipt)
    return rows


def damage(data: Path, rows: Any, site: Site, low: int) -> None:
    """Flip a byte of the codes of the record that starts at token ``low``."""
    wanted = rows[site][0][low : low + TOKENS // 2].tobytes()
    for path in data.glob("runs/*/*/*"):
        content = bytearray(path.read_bytes())
        place = content.find(wanted)
        if place >= 0:
            with open(path, "r+b") as file:
                file.seek(place)
                file.write(bytes([content[place] ^ 1]))
            return
    raise AssertionError("the record is on no disk")


def same(batch: Any, rows: Any, *, token: slice = slice(0, TOKENS)) -> bool:
    return all(
        batch.valid[site][token].all()
        and np.array_equal(batch.planes[site][token], planes[token])
        and np.array_equal(batch.scales[site][token], scales[token])
        and np.array_equal(batch.tensor_scales[site][token], tensors[token])
        for site, (planes, scales, tensors) in rows.items()
    )


def read(*servers: Any, receipts: Any = ()) -> Any:
    with trace_client.connect([server.address for server in servers]) as fleet:
        batch = fleet.reader(RUN, PARTITION, receipts=receipts).read([("t", 0, TOKENS)])
        for name in ("planes", "scales", "tensor_scales", "valid"):
            setattr(batch, name, {site: array.copy() for site, array in getattr(batch, name).items()})
        return batch


@pytest.fixture(autouse=True)
def _waits_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client does not leave out a server of a test because the machine is busy."""
    monkeypatch.setattr("trace_client.fleet.OTHERS_WAIT_S", 30.0)


@pytest.fixture
def servers(new_server: Callable[..., Any]) -> list[Any]:
    return [new_server("--name", name).start() for name in ("a", "b")]


def test_rows_of_an_older_attempt_do_not_fill_gaps_of_the_newer(servers: list[Any], sites: Any, records: Any) -> None:
    newer = write(servers[0].address, sites, records, seed=1, attempt=1)
    write(servers[1].address, sites, records, seed=2, attempt=0)
    damage(servers[0].data, newer, sites[0], 0)
    batch = read(*servers)
    assert {(m.site, m.start, m.stop, m.reason) for m in batch.missing} == {(sites[0], 0, TOKENS // 2, "data loss")}
    assert not batch.valid[sites[0]][: TOKENS // 2].any()
    assert np.isnan(batch.tensor_scales[sites[0]][: TOKENS // 2]).all()
    assert same(batch, newer, token=slice(TOKENS // 2, TOKENS))
    assert batch.attempts == {"t": 1}


def test_a_newer_attempt_found_later_replaces_the_damaged_older_one(
    servers: list[Any], sites: Any, records: Any
) -> None:
    older = write(servers[0].address, sites, records, seed=1, attempt=0)
    newer = write(servers[1].address, sites, records, seed=2, attempt=1)
    damage(servers[0].data, older, sites[0], 0)
    batch = read(*servers)
    assert (batch.missing, batch.attempts) == ([], {"t": 1})
    assert same(batch, newer)


def test_of_two_seals_of_one_attempt_the_whole_one_is_read(servers: list[Any], sites: Any, records: Any) -> None:
    one = write(servers[0].address, sites, records, seed=1)
    other = write(servers[1].address, sites, records, seed=2)
    damage(servers[0].data, one, sites[0], 0)
    batch = read(*servers)
    assert batch.missing == []
    assert same(batch, other)


def test_two_damaged_copies_of_one_seal_make_one_whole_read(
    new_server: Callable[..., Any], sites: Any, records: Any
) -> None:
    first, second = (new_server("--name", name) for name in ("a", "b"))
    rows = write(first.start().address, sites, records, seed=1)
    first.terminate()
    shutil.copytree(first.data, second.data)
    damage(first.data, rows, sites[0], 0)
    damage(second.data, rows, sites[1], TOKENS // 2)
    batch = read(first.start(), second.start())
    assert batch.missing == []
    assert same(batch, rows)


def test_a_server_that_breaks_off_leaves_no_rows(
    servers: list[Any], sites: Any, records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(servers[0].address, sites, records, seed=1, attempt=0)
    newer = write(servers[1].address, sites, records, seed=2, attempt=1)
    from trace_client.reader import Reader
    from trace_store.errors import Unavailable

    fill, broken = Reader.fill, []

    def break_off(self: Any, *arguments: Any, **options: Any) -> None:
        fill(self, *arguments, **options)
        if not broken:
            broken.append(self)
            raise Unavailable("the server went away")

    monkeypatch.setattr(Reader, "fill", break_off)
    batch = read(*servers)
    assert broken
    assert same(batch, newer)
    assert batch.attempts == {"t": 1}


def test_a_receipt_is_read_as_its_attempt_or_not_at_all(
    servers: list[Any], sites: Any, records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipts: list[Any] = []
    older = write(servers[0].address, sites, records, seed=1, attempt=0, receipts=receipts)
    newer = write(servers[1].address, sites, records, seed=2, attempt=1, receipts=receipts)
    assert same(read(*servers, receipts=receipts[1:]), newer)
    assert same(read(servers[0], receipts=receipts[:1]), older)
    superseded = read(servers[1], receipts=receipts[:1])
    assert {item.reason for item in superseded.missing} == {"superseded by a newer attempt"}
    servers[1].kill()
    monkeypatch.setattr("trace_client.fleet.OTHERS_WAIT_S", 0.1)
    lost = read(*servers, receipts=receipts[1:])
    assert {item.reason for item in lost.missing} == {"not uploaded"}
    for batch in (superseded, lost):
        assert not any(valid.any() for valid in batch.valid.values())
        assert all(np.isnan(tensors).all() for tensors in batch.tensor_scales.values())
        assert batch.attempts == {}
    other_run = dataclasses.replace(receipts[1], run="another")
    assert same(read(servers[0], receipts=[other_run]), older)
