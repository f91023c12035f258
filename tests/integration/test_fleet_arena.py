"""A client of several servers reads through the memory that it shares with the one on its host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import trace_client
from trace_client import reader as reader_module
from trace_client.microbatch import Buffers

TOKENS = 12


def spans(*names: str) -> list[tuple[str, int, int, int]]:
    return [(name, 0, TOKENS, (TOKENS + 1) * place) for place, name in enumerate(names)]


@pytest.fixture
def servers(new_server: Callable[..., Any], records: Any, sites: Any) -> list[Any]:
    """Two servers, each with trajectories of its own: a0, a1, a2 and b0."""
    made = [new_server("--name", name).start() for name in "ab"]
    for server, names in zip(made, (("a0", "a1", "a2"), ("b0",)), strict=True):
        with trace_client.connect(server.address) as client:
            client.register("r", sites)
            with client.writer("r", "p") as writer:
                for name in names:
                    writer.append(name, 0, records(TOKENS, seed=ord(name[0]) + int(name[1])))
                    writer.seal(name, tokens=TOKENS + 1, prompt_tokens=0)
    return made


@pytest.fixture(autouse=True)
def _waits_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client does not leave out a server of a test because the machine is busy."""
    monkeypatch.setattr("trace_client.fleet.OTHERS_WAIT_S", 30.0)


@pytest.fixture
def fleet(servers: list[Any]) -> Iterator[Any]:
    with trace_client.connect([server.address for server in servers]) as client:
        yield client


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that came in a message, one entry a message that held some."""
    seen: list[int] = []
    place = reader_module.place

    def spy(batch: Any, positions: Any, dest_rows: Any, rows: Any, payload: Any) -> None:
        if rows:
            seen.append(sum(rows))
        place(batch, positions, dest_rows, rows, payload)

    monkeypatch.setattr(reader_module, "place", spy)
    return seen


def check(batch: Any, records: Any, sites: Any, *names: str) -> None:
    for place, name in enumerate(names):
        expected = records(TOKENS, seed=ord(name[0]) + int(name[1]))
        rows = slice((TOKENS + 1) * place, (TOKENS + 1) * place + TOKENS)
        for site in sites:
            assert batch.valid[site][rows].all()
            for found, wanted in zip((batch.planes, batch.scales, batch.tensor_scales), expected[site], strict=True):
                assert (found[site][rows] == wanted).all()


def test_rows_of_the_server_beside_need_no_messages(fleet: Any, records: Any, sites: Any, sent: list[int]) -> None:
    assert (fleet.describe()["reads"], fleet.describe()["path"]) == ("arena", "arena")
    reader = fleet.reader("r", "p")
    names = ("a0", "a1", "a2")
    check(reader.read(spans(*names)), records, sites, *names)
    assert not sent
    check(reader.read(spans("a0", "b0", "a2")), records, sites, "a0", "b0", "a2")
    assert sum(sent) == TOKENS * len(sites), "those of the other server alone"
    batch = reader.read([("a0", 2, 5), ("nobody", 0, 3, 3)])
    assert batch.valid[sites[0]].tolist() == [True] * 3 + [False] * 3
    assert np.isnan(batch.tensor_scales[sites[0]][3:]).all()
    assert {rows.trajectory for rows in batch.missing} == {"nobody"}


def test_a_restarted_server_does_not_know_the_memory_any_more(
    fleet: Any, servers: list[Any], records: Any, sites: Any
) -> None:
    reader, buffers = fleet.reader("r", "p"), Buffers()
    kept = reader.read(spans("a0", "a1"))
    check(reader.read(spans("a0", "b0"), out=buffers), records, sites, "a0", "b0")
    servers[0].kill()
    servers[0].start()
    check(reader.read(spans("a2", "b0"), out=buffers), records, sites, "a2", "b0")
    check(reader.read(spans("a2", "a1")), records, sites, "a2", "a1")
    check(kept, records, sites, "a0", "a1")


def test_one_that_is_gone_costs_its_own_rows(fleet: Any, servers: list[Any], records: Any, sites: Any) -> None:
    reader, buffers = fleet.reader("r", "p"), Buffers()
    reader.read(spans("a0", "b0"), out=buffers)
    servers[0].kill()
    batch = reader.read(spans("b0", "a0"), out=buffers)
    check(batch, records, sites, "b0")
    assert {(rows.trajectory, rows.reason) for rows in batch.missing} == {("a0", "server unreachable")}
    assert not batch.valid[sites[0]][TOKENS:].any()


def test_off_means_the_connection(servers: list[Any], records: Any, sites: Any, sent: list[int]) -> None:
    with trace_client.connect([server.address for server in servers], arena="off") as client:
        assert client.describe()["reads"] == "stream"
        check(client.reader("r", "p").read(spans("a0", "b0")), records, sites, "a0", "b0")
    assert sum(sent) == 2 * TOKENS * len(sites)


def test_sealed_segments_of_the_server_beside_are_read_by_the_client(
    servers: list[Any], records: Any, sites: Any, sent: list[int]
) -> None:
    assert servers[1].terminate() == 0
    servers[1].start()
    targets = [server.address for server in servers]
    with trace_client.connect(targets, data_dir=servers[1].data) as client:
        assert client.describe()["reads"] == "files"
        check(client.reader("r", "p").read(spans("b0", "a0")), records, sites, "b0", "a0")
