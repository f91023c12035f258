"""Several real servers on one bucket behind one client; the writing one is killed for good."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trace_client
from tests.tier.conftest import S3Server, eventually
from tests.tier.proxy import Proxy
from trace_client.fleet import OTHERS_WAIT_S
from trace_client.status import status_command
from trace_server.serve import parser
from trace_store import Site
from trace_store.errors import (
    Incomplete,
    InvalidRequest,
    StaleAttempt,
    StorageFailed,
    TraceStoreError,
    Unavailable,
)

PARTITION = "step-1"

README = (Path(__file__).resolve().parents[2] / "deploy" / "README.md").read_text()


@pytest.fixture
def servers(new_server: Callable[..., Any], url: str) -> list[Any]:
    """Two servers, a and b, on the test's bucket."""
    made = [new_server("--object-store", url, "--name", name) for name in ("a", "b")]
    for server in made:
        server.start()
    return made


@pytest.fixture(autouse=True)
def _waits_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client does not leave out a server of a test because the machine is busy."""
    monkeypatch.setattr("trace_client.fleet.OTHERS_WAIT_S", 30.0)


@pytest.fixture
def fleet(servers: list[Any], sites: tuple[Site, ...]) -> Iterator[Any]:
    with trace_client.connect([server.address for server in servers]) as client:
        client.register("run", sites)
        yield client


def write(client: Any, records: Callable[..., Any], trajectory: str, *, seed: int = 0) -> Any:
    with client.writer("run", PARTITION) as writer:
        writer.append(trajectory, 0, records(10, seed))
        return writer.seal(trajectory, tokens=11, prompt_tokens=0)


def uploaded(server: Any) -> bool:
    with trace_client.connect(server.address) as client:
        status = client.status()
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as answer:
        text = answer.read().decode()
    done = next(line for line in text.splitlines() if line.startswith("trace_store_uploaded_segments_total "))
    return status["upload_queue_segments"] == 0 and float(done.split()[1]) >= 2  # a manifest and a segment


def same(batch: Any, records: Any) -> bool:
    return all(
        batch.valid[site].all()
        and np.array_equal(batch.planes[site], planes)
        and np.array_equal(batch.scales[site], scales)
        and np.array_equal(batch.tensor_scales[site], tensors)
        for site, (planes, scales, tensors) in records.items()
    )


@pytest.fixture
def cut_off(new_server: Callable[..., Any], url: str, s3: S3Server, proxy: Proxy) -> tuple[list[Any], Proxy]:
    """Two servers, a and b; a reaches the bucket through a proxy."""
    servers = [new_server("--object-store", url, "--name", name) for name in ("a", "b")]
    servers[0].start()
    servers[1].start(AWS_ENDPOINT_URL=s3.endpoint)
    return servers, proxy


def test_with_the_writer_killed_another_server_serves_what_was_uploaded(
    cut_off: tuple[list[Any], Proxy], records: Callable[..., Any], sites: tuple[Site, ...]
) -> None:
    servers, proxy = cut_off
    with trace_client.connect([server.address for server in servers]) as fleet:
        fleet.register("run", sites)
        lose_the_writer(servers, proxy, fleet, records)


def lose_the_writer(servers: list[Any], proxy: Proxy, fleet: Any, records: Callable[..., Any]) -> None:
    receipt = write(fleet, records, "sent")
    assert receipt.server == "a"
    eventually(lambda: uploaded(servers[0]), "upload")
    proxy.refuse = True
    lost = write(fleet, records, "lost")  # sealed and durable, on a's disk only
    servers[0].kill()
    proxy.refuse = False
    reader = fleet.reader("run", PARTITION, receipts=[receipt, lost])
    batch = reader.read([("sent", 0, 10)])
    assert batch.missing == []
    assert same(batch, records(10))
    missing = reader.read([("lost", 0, 10)]).missing
    assert {item.reason for item in missing} == {"not uploaded"}
    assert sum(item.stop - item.start for item in missing) == 10 * len(reader.sites)
    without = fleet.reader("run", PARTITION).read([("lost", 0, 10), ("sent", 0, 10, 10)]).missing
    assert {(item.trajectory, item.reason) for item in without} == {("lost", "server unreachable")}
    servers[0].start()  # it was not for good after all: what it held is uploaded now
    with trace_client.connect(servers[1].address) as second:
        eventually(lambda: not second.reader("run", PARTITION).read([("lost", 0, 10)]).missing, "late upload")


def test_reads_find_the_server_that_has_the_rows(
    servers: list[Any], fleet: Any, records: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with trace_client.connect(servers[1].address) as second:
        on_b = write(second, records, "on-b", seed=2)
    write(fleet, records, "on-a", seed=1)
    reader = fleet.reader("run", PARTITION)
    for _ in range(2):
        batch = reader.read([("on-a", 0, 10, 0), ("on-b", 0, 10, 10)])
        assert batch.missing == []
        for site, (planes, _, _) in records(10, 2).items():
            assert np.array_equal(batch.planes[site][10:], planes)
        for site, (planes, _, _) in records(10, 1).items():
            assert np.array_equal(batch.planes[site][:10], planes)
    asked: list[str] = []
    read_stream = trace_client.channel.Channel.read_stream

    def noted(self: Any, request: Any, timeout_s: float) -> Any:
        asked.append(self.target)
        return read_stream(self, request, timeout_s)

    monkeypatch.setattr(trace_client.channel.Channel, "read_stream", noted)
    assert reader.read([("on-b", 0, 10)]).missing == []
    assert asked == [servers[1].address]  # remembered
    asked.clear()
    assert fleet.reader("run", PARTITION, receipts=[on_b]).read([("on-b", 0, 10)]).missing == []
    assert asked == [servers[1].address]  # by its receipt
    nothing = reader.read([("never", 0, 10)]).missing
    assert {item.reason for item in nothing} == {"unknown trajectory"}


def test_a_writer_goes_to_the_next_server(servers: list[Any], fleet: Any, records: Callable[..., Any]) -> None:
    writer = fleet.writer("run", PARTITION)
    writer.append("t", 0, records(10))
    writer.flush()
    assert writer.server == "a"
    servers[0].kill()

    def fails() -> TraceStoreError | None:
        try:
            writer.append("t", 10, records(5, 1))
            writer.flush()
        except Unavailable as error:
            return error
        return None

    first = fails()
    assert first is None or "retrying is safe" in str(first)
    assert fails() is None
    assert writer.server == "b"
    with pytest.raises(Incomplete) as caught:
        writer.seal("t", tokens=16, prompt_tokens=0)
    assert {(start, stop) for _, start, stop in caught.value.holes} == {(0, 10)}
    writer.append("t", 0, records(10))
    assert writer.seal("t", tokens=16, prompt_tokens=0).server == "b"
    writer.close()


def test_a_server_knows_the_newer_attempt_that_another_one_has_uploaded(
    servers: list[Any], fleet: Any, records: Callable[..., Any]
) -> None:
    with fleet.writer("run", PARTITION) as writer:
        writer.append("t", 0, records(10), attempt=1)
        writer.seal("t", tokens=11, prompt_tokens=0, attempt=1)
    eventually(lambda: uploaded(servers[0]), "upload")
    with trace_client.connect(servers[1].address) as second:

        def is_stale() -> bool:
            with second.writer("run", PARTITION) as late, suppress(StaleAttempt):
                late.append("t", 0, records(10, 1), attempt=0)
                late.flush()
                return False
            return True

        eventually(is_stale, "refusal")  # a stream waits two seconds for what others have uploaded, and then goes on
        assert second.writer("run", PARTITION).seal("t", tokens=11, prompt_tokens=0, attempt=1).attempt == 1


def test_a_release_reaches_every_server_and_the_bucket(
    servers: list[Any], fleet: Any, records: Callable[..., Any], store: Any
) -> None:
    write(fleet, records, "t")
    eventually(lambda: uploaded(servers[0]), "upload")
    with trace_client.connect(servers[1].address) as second:
        assert second.reader("run", PARTITION).read([("t", 0, 10)]).missing == []
        assert [entry.name for entry in fleet.list("run")] == [PARTITION]
        assert fleet.release("run", PARTITION) == 1
        reasons = {item.reason for item in second.reader("run", PARTITION).read([("t", 0, 10)]).missing}
        assert reasons == {"released"}
    eventually(lambda: not [i for i in store.listing("runs") if "/manifest" not in i.key], "deletion of the objects")


def test_a_release_says_whom_it_did_not_reach(
    servers: list[Any], fleet: Any, records: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    write(fleet, records, "t")
    eventually(lambda: uploaded(servers[0]), "upload")
    servers[0].kill()
    assert fleet.release("run", PARTITION, ["t"]) == 1
    assert servers[0].address in caplog.text


def test_one_dead_endpoint_does_not_hold_up_the_client(
    new_server: Callable[..., Any], sites: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trace_client.fleet.OTHERS_WAIT_S", OTHERS_WAIT_S)
    server = new_server().start()
    with trace_client.connect(f"127.0.0.1:1,{server.address}") as client:
        assert client.register("run", sites)
        assert client.status()["server"]
    with pytest.raises(InvalidRequest, match="twice"):
        trace_client.connect([server.address, server.address])
    with pytest.raises(InvalidRequest):
        trace_client.connect([])


def test_metrics_and_status_tell_the_state_of_the_tier(servers: list[Any], fleet: Any, records: Any) -> None:
    write(fleet, records, "t")
    eventually(lambda: uploaded(servers[0]), "upload")
    with urllib.request.urlopen(f"http://{servers[0].metrics}/metrics") as answer:
        text = answer.read().decode()
    for line in (
        'trace_store_disk_state{state="ok"} 1.0',
        "trace_store_upload_lag_seconds 0.0",
        "trace_store_object_store_failing 0.0",
        'trace_store_upload_failures_total{outcome="unknown"} 0.0',
        'trace_store_retention_partitions_total{rule="cap"} 0.0',
        "trace_store_evicted_bytes_total 0.0",
    ):
        assert line in text.splitlines()
    status = fleet.status()
    assert status["object_store"].startswith("s3://test/")
    assert (status["disk_state"], status["upload_lag_seconds"], status["object_store_error"]) == ("ok", 0.0, "")


def test_metrics_and_options_of_the_documentation_exist(servers: list[Any]) -> None:
    section = README.split("## Object store and retention")[1]
    with urllib.request.urlopen(f"http://{servers[0].metrics}/metrics") as answer:
        exported = answer.read().decode()
    rows = [line for line in section.splitlines() if line.startswith("| `trace_store_")]
    names = [name for row in rows for name in re.findall(r"`((?:trace)?_[a-z_]+)(?:\{[a-z]+\})?`", row.split("|")[1])]
    assert len(names) > 15
    for name in names:
        full = name if name.startswith("trace_store") else f"trace_store{name}"
        assert re.search(rf"^{full}[ {{]", exported, re.M), f"{full} is not exported"
    options = set(re.findall(r"\| `(--[a-z-]+)`", section))
    assert options == {word for word in parser()._option_string_actions if re.match("--(object|disk|keep)-", word)}


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--object-store", "gs://bucket", "object store must be"),
        ("--disk-bytes-max", "10", "disk cap must be at least"),
        ("--keep-age", "3 weeks", "keep-age must be a number"),
        ("--keep-partitions", "many", "partitions kept must be a number"),
        ("--disk-free-min", "-1", "disk-free-min must be a number"),
    ],
)
def test_bad_options_are_named(new_server: Callable[..., Any], option: str, value: str, message: str) -> None:
    server = new_server(f"{option}={value}")
    server.spawn()
    assert server.wait() == 1
    assert message in server.log.read_text()


def test_a_store_that_refuses_us_later_is_a_typed_error(
    new_server: Callable[..., Any], url: str, proxy: Any, sites: tuple[Site, ...]
) -> None:
    server = new_server("--object-store", url).start()
    with trace_client.connect(server.address) as client:
        client.register("mine", sites)
        proxy.refuse = True
        with pytest.raises(StorageFailed, match="object store"):
            client.sites("elsewhere")
        assert client.reader("mine", PARTITION).read([("t", 0, 1)]).missing


def test_the_status_command_shows_what_waits(
    new_server: Callable[..., Any], url: str, proxy: Any, sites: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server = new_server("--object-store", url).start()
    proxy.refuse = True
    with trace_client.connect(server.address) as client:
        client.register("run", sites)
        eventually(lambda: client.status()["upload_lag_seconds"] > 0.1, "lag")
    assert status_command(["--target", server.address]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"upload lag seconds +[0-9.]+", shown)
    assert re.search(r"upload queue segments +1 *\n", shown)
    assert "refuses" in shown
