"""Several servers behind one client: one that hangs holds up nothing, and arguments are checked as with one server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

import trace_client
from trace_client import fleet as fleet_module
from trace_store import Site
from trace_store.errors import DeadlineExceeded, InvalidRequest, Unavailable


@pytest.fixture
def hanging(new_server: Any, server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server that hangs, and that this process has a connection to: a new one counts as connected at once."""
    monkeypatch.setattr(fleet_module, "STATUS_TIMEOUT_S", 0.5)
    monkeypatch.setattr("trace_client.client.STATUS_TIMEOUT_S", 0.5)
    stopped = new_server().start()
    with trace_client.connect(stopped.address) as known:
        known.status()
        stopped.pause()
        yield stopped
        stopped.resume()


def test_a_server_that_hangs_does_not_keep_a_client_from_the_others(hanging: Any, server: Any) -> None:
    started = time.monotonic()
    with trace_client.connect([hanging.address, server.address]) as fleet:
        assert time.monotonic() - started < 10.0
        assert fleet.describe()["away"] == hanging.address
        name = fleet.status()["server"]
    with trace_client.connect(server.address) as client:
        assert client.status()["server"] == name


def test_only_servers_that_hang_are_none(hanging: Any) -> None:
    with pytest.raises((DeadlineExceeded, Unavailable), match=f"target={hanging.address}"):
        trace_client.connect([hanging.address])


def test_a_description_says_who_does_not_answer(hanging: Any, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "DOWN_S", 0.0)  # it is asked again each time
    with trace_client.connect([hanging.address, server.address], data_dir=server.data) as fleet:
        monkeypatch.setattr(fleet_module, "DOWN_S", 60.0)
        said = fleet.describe()
        assert said["away"] == hanging.address
        assert said["target"] == f"{hanging.address},{server.address}"
        assert said["reads"] == "files"
        hanging.resume()
        for endpoint in fleet._fleet.endpoints:
            endpoint.down_until = 0.0
        monkeypatch.setattr("trace_client.client.STATUS_TIMEOUT_S", 30.0)
        assert fleet.describe()["away"] == ""


BAD_READS: dict[str, dict[str, Any]] = {
    "negative version": {"policy_version_min": -1},
    "version by name": {"policy_version_min": "x"},
    "version too large": {"policy_version_min": 2**70},
    "one site": {"sites": Site(0, "k", 64)},
    "a number of sites": {"sites": 5},
    "sites by name": {"sites": ["0/k"]},
    "another site": {"sites": [Site(9, "k", 64)]},
    "a site twice": {"sites": [Site(0, "k", 64)] * 2},
    "open by name": {"include_open": "x"},
    "no flag": {"include_open": None},
}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("case", BAD_READS)
def test_bad_reads_are_named(client: Any, run: str, case: str, several: bool) -> None:
    bad = BAD_READS[case]
    if not several:
        with pytest.raises(InvalidRequest) as caught:
            client.reader(run, "p").read([("t", 0, 1)], **bad)
    else:
        with trace_client.connect([client._channel.target]) as fleet, pytest.raises(InvalidRequest) as caught:
            fleet.reader(run, "p").read([("t", 0, 1)], **bad)
    assert [caught.value.argument] == list(bad)


@pytest.mark.parametrize("arena", ["auto", "off"])
def test_a_read_that_runs_out_of_time_says_who_did_not_answer(new_server: Any, sites: Any, arena: str) -> None:
    server = new_server().start()
    with trace_client.connect([server.address], arena=arena) as fleet:
        fleet.register("r", sites)
        reader = fleet.reader("r", "p")
        server.pause()
        try:
            with pytest.raises(DeadlineExceeded, match=f"did not answer.*target={server.address}"):
                reader.read([("t", 0, 1)], timeout_s=0.5)
        finally:
            server.resume()
