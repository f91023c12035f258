"""The client's control calls against a real server: every public one, and what it refuses before sending."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trace_client
from trace_client.status import status_command
from trace_store import Site
from trace_store.errors import InvalidRequest, NotFound, SchemaMismatch

BAD_NAMES = ["", "a" * 513, "é" * 257, "nul\0", "line\n", "a/../b", "../x", ".", "a//b", "/a", "\ud800", 7, None]


def test_a_run_is_registered_once_with_one_table(client: Any, sites: tuple[Site, ...]) -> None:
    assert client.register("once", sites) is True
    assert client.register("once", sites) is False
    assert client.sites("once") == sites
    with pytest.raises(SchemaMismatch, match="registered") as caught:
        client.register("once", sites[:2])
    assert caught.value.argument == "sites"
    assert client.sites("once") == sites


@pytest.mark.parametrize("name", BAD_NAMES, ids=[repr(name)[:12] for name in BAD_NAMES])
def test_bad_names_are_refused_with_the_argument(client: Any, run: str, sites: tuple[Site, ...], name: Any) -> None:
    calls = {
        "run": lambda: client.register(name, sites),
        "partition": lambda: client.writer(run, name),
        "trajectory": lambda: client.writer(run, "p").seal(name, tokens=2, prompt_tokens=1),
        "trajectories": lambda: client.release(run, "p", ["fine", name]),
        "span.trajectory": lambda: client.reader(run, "p").read([(name, 0, 1)]),
    }
    for argument, call in calls.items():
        with pytest.raises(InvalidRequest) as caught:
            call()
        assert caught.value.argument == argument


def test_names_at_the_limit_travel_and_stay_apart(client: Any, run: str, records: Any, sites: tuple[Site, ...]) -> None:
    names = ["a" * 512, "é" * 256, "a/b", "a-SEP-b", "a%2Fb", "caf\u00e9", "cafe\u0301", "x-" + "0" * 32]
    for number, name in enumerate(names):
        with client.writer(run, name) as writer:
            writer.append(name, 0, records(3, seed=number))
            writer.seal(name, tokens=4, prompt_tokens=1)
    for number, name in enumerate(names):
        batch = client.reader(run, name).read([(name, 0, 3)])
        for site in sites:
            assert batch.planes[site].tobytes() == records(3, seed=number)[site][0].tobytes()
    assert [entry.name for entry in client.list(run)] == sorted(names)


@pytest.mark.parametrize("table", [[], "k", None, [1], [Site(0, "k", 64), Site(0, "k", 128)], [Site(0, "k", 64)] * 2])
def test_bad_site_tables_are_refused(client: Any, table: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.register("bad-table", table)
    assert caught.value.argument == "sites"
    assert "bad-table" not in [entry.name for entry in client.list()]


def test_unknown_runs_are_not_found(client: Any) -> None:
    for call in (client.sites, lambda run: client.writer(run, "p"), lambda run: list(client.list(run))):
        with pytest.raises(NotFound, match="nowhere"):
            call("nowhere")
    with pytest.raises(NotFound, match="nowhere"):
        client.release("nowhere", "p")


def test_listings_name_runs_partitions_and_trajectories(client: Any, run: str, records: Any) -> None:
    with client.writer(run, "step-1") as writer:
        writer.append("sealed", 0, records(5))
        writer.seal("sealed", tokens=6, prompt_tokens=2)
        writer.append("open", 0, records(4), attempt=3)
    runs = {entry.name: entry for entry in client.list()}
    assert runs[run].trajectories == 2
    assert runs[run].records == 8
    (partition,) = client.list(run)
    assert (partition.name, partition.trajectories) == ("step-1", 2)
    assert partition.disk_bytes > 5 * 64
    opened, sealed = client.list(run, "step-1")
    assert (opened.name, opened.attempt, opened.sealed, opened.tokens) == ("open", 3, False, 0)
    assert (sealed.name, sealed.sealed, sealed.tokens, sealed.prompt_tokens) == ("sealed", True, 6, 2)
    with pytest.raises(NotFound):
        list(client.list(run, "step-2"))


def test_release_forgets_trajectories_or_the_partition(client: Any, run: str, records: Any) -> None:
    with client.writer(run, "p") as writer:
        for name in ("a", "b", "c"):
            writer.append(name, 0, records(3))
            writer.seal(name, tokens=4, prompt_tokens=1)
    assert client.release(run, "p", []) == 0
    assert client.release(run, "p", ["a", "missing"]) == 1
    assert client.release(run, "p", ["a"]) == 0
    batch = client.reader(run, "p").read([("a", 0, 3), ("b", 0, 3, 3)])
    assert {missing.reason for missing in batch.missing} == {"released"}
    assert all(valid.tolist() == [False] * 3 + [True] * 3 for valid in batch.valid.values())
    assert client.release(run, "p") == 2
    assert client.release(run, "p") == 0
    assert list(client.list(run)) == []
    with pytest.raises(InvalidRequest, match="one string") as caught:
        client.release(run, "p", "abc")
    assert caught.value.argument == "trajectories"


def test_status_counts_and_has_room(client: Any, run: str, records: Any) -> None:
    before = client.status()
    with client.writer(run, "p") as writer:
        writer.append("t", 0, records(3))
        writer.flush()
    after = client.status()
    assert after["records"] == before["records"] + 4
    assert after["trajectories"] == before["trajectories"] + 1
    assert after["disk_free_bytes"] > 0
    assert after["write_refusal"] == ""


def test_a_closed_client_says_so(server: Any, records: Any, sites: tuple[Site, ...]) -> None:
    client = trace_client.connect(server.address)
    client.register("closed", sites)
    writer, reader = client.writer("closed", "p"), client.reader("closed", "p")
    client.close()
    client.close()
    for call in (
        client.status,
        lambda: writer.append("t", 0, records(2)),
        writer.flush,
        lambda: reader.read([("t", 0, 1)]),
    ):
        with pytest.raises(InvalidRequest, match="closed") as caught:
            call()
        assert caught.value.argument == "client"


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=f"--token-file cannot be read, path={tmp_path}/none"):
        status_command(["--token-file", f"{tmp_path}/none"])
