"""/metrics: what it counts, that the number of series never grows, and that a failing disk does not silence it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

import trace_client
from trace_server.metrics import Metrics
from trace_store import Site
from trace_store.engine import Engine
from trace_store.errors import Conflict

WAIT_S = 60.0


def samples(server: Any) -> dict[str, float]:
    """Every series of the server as of now, by name and labels: a scrape that could not wait has older gauges."""
    deadline = time.monotonic() + WAIT_S
    while True:
        text = urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10).read().decode()
        found = {
            sample.name + "".join(f"{{{key}={value}}}" for key, value in sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        if found["trace_store_usage_age_seconds"] == 0.0:
            return found
        assert time.monotonic() < deadline


def eventually(condition: Callable[[], Any]) -> Any:
    """The first true value of ``condition``."""
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline
    return value


def test_traffic_is_counted_in_base_units(new_server: Any, sites: Any, records: Any) -> None:
    server = new_server().start()
    before = samples(server)
    with trace_client.connect(server.address) as client:
        client.register("r", sites)
        writer = client.writer("r", "p")
        writer.append("t", 0, records(8))
        writer.append("t", 0, records(8))
        writer.flush()
        writer.append("t", 0, records(8, seed=1))
        with pytest.raises(Conflict):
            writer.flush()
        writer.seal("t", tokens=9, prompt_tokens=0)
        client.reader("r", "p").read([("t", 0, 12), ("nobody", 0, 2, 12)], sites[:1])
        during = samples(server)
        writer.close()
        client.release("r", "p")
    eventually(lambda: samples(server)["trace_store_append_streams"] == 0)
    after = samples(server)
    row_bytes = sum(site.code_bytes + site.scale_bytes + 4 for site in sites)
    assert after["trace_store_append_bytes_total"] == 3 * 8 * row_bytes
    assert after["trace_store_append_records_total{outcome=stored}"] == 4
    assert after["trace_store_append_records_total{outcome=duplicate}"] == 4
    assert after["trace_store_errors_total{error=Conflict}"] == 1
    assert after["trace_store_append_seconds_count{durability=synced}"] == 2
    assert after["trace_store_seals_total"] == after["trace_store_seal_seconds_count"] == 1
    assert after["trace_store_read_rows_total"] == 8
    assert after["trace_store_read_bytes_total"] == 8 * (8 + 4 + 4)
    assert after["trace_store_missing_rows_total{reason=not_recorded}"] == 4
    assert after["trace_store_missing_rows_total{reason=unknown_trajectory}"] == 2
    assert after["trace_store_released_trajectories_total"] == 1
    assert during["trace_store_append_streams"] == 1
    assert during["trace_store_records"] == 4
    assert (after["trace_store_records"], after["trace_store_queue_bytes"]) == (0, 0)
    assert after["process_resident_memory_bytes"] > 1 << 20
    assert set(before) == set(after), "every series exists from the start"


def test_thousands_of_trajectories_leave_the_series_alone(new_server: Any) -> None:
    """And so do runs, partitions, refused names and errors: no label comes from a request."""
    site = Site(0, "k", 16)
    rows = {site: (np.zeros((1, 1, 2), np.uint8), np.zeros((1, 1), np.uint8), 1.0)}
    server = new_server().start()
    before = set(samples(server))
    with trace_client.connect(server.address) as client:
        for run in ("one", "two"):
            client.register(run, [site])
            with client.writer(run, "p", durability="written") as writer:
                for number in range(1_000):
                    writer.append(f"{run}-{number}", 0, rows)
            client.reader(run, "p").read([(f"nobody-{number}", 0, 1, number) for number in range(1_000)])
    after = samples(server)
    assert after["trace_store_trajectories"] == 2_000
    assert set(after) == before


def test_a_hundred_thousand_ids_leave_the_series_alone(tmp_path: Path) -> None:
    """The same over every instrument at once, without a server between."""
    engine = Engine(tmp_path)
    metrics = Metrics(engine)
    before = generate_latest(metrics.registry).decode().count("\n")
    for number in range(100_000):
        metrics.append_bytes.inc(number)
        metrics.append_records.labels("stored").inc()
        metrics.missing_rows.labels("not_recorded").inc()
        metrics.append_seconds.labels("synced").observe(number * 1e-5)
    assert generate_latest(metrics.registry).decode().count("\n") == before
    engine.close()


def test_a_disk_that_cannot_be_asked_does_not_silence_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tmp_path)
    metrics = Metrics(engine)
    metrics.seals.inc()
    assert b"trace_store_usage_failed 0.0" in generate_latest(metrics.registry)

    def broken() -> None:
        raise OSError(5, "input/output error")

    monkeypatch.setattr(engine, "usage", broken)

    def failed() -> str:
        text = generate_latest(metrics.registry).decode()
        return text if "trace_store_usage_failed 1.0" in text else ""

    text = eventually(failed)  # a scrape that could not wait for the answer has the last one
    assert "trace_store_seals_total 1.0" in text
    engine.close()


def test_a_disk_that_hangs_does_not_hold_up_a_scrape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tmp_path)
    metrics = Metrics(engine)
    usage, gate = engine.usage, threading.Event()
    generate_latest(metrics.registry)

    def hanging() -> object:
        assert gate.wait(200)
        return usage()

    monkeypatch.setattr(engine, "usage", hanging)
    metrics.seals.inc()
    text = generate_latest(metrics.registry).decode()
    assert "trace_store_seals_total 1.0" in text
    assert "trace_store_records 0.0" in text
    assert "trace_store_usage_failed 0.0" in text
    assert float(text.split("trace_store_usage_age_seconds ")[-1].split()[0]) > 0
    gate.set()
    eventually(lambda: b"trace_store_usage_age_seconds 0.0" in generate_latest(metrics.registry))
    engine.close()


def test_clients_that_go_away_count_as_no_error(new_server: Any, sites: Any, records: Any) -> None:
    """A killed rollout worker leaves an open stream and an arena; an alert on errors must not fire for that."""
    server = new_server().start()
    with trace_client.connect(server.address) as client:
        client.register("r", sites)
    code = (
        "import os, sys, trace_client\n"
        "client = trace_client.connect(sys.argv[1])\n"
        "writer = client.writer('r', 'p')\n"
        "site = writer.sites[0]\n"
        "import numpy as np\n"
        "codes = np.zeros((4, *site.code_form.row_shape(site.width)), 'u1')\n"
        "writer.append('t', 0, {site: (codes, np.zeros((4, site.scale_bytes), 'u1'), 1.0)})\n"
        "writer.flush()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    for _ in range(3):
        assert subprocess.run([sys.executable, "-c", code, server.address]).returncode == -9
    eventually(lambda: not samples(server)["trace_store_append_streams"])
    counted = {name: value for name, value in samples(server).items() if name.startswith("trace_store_errors")}
    assert counted
    assert not any(counted.values()), counted
