"""``trace-store verify`` over a bucket, the same program as over a directory."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.tier.conftest import PARTITION, Sidecar
from tests.tier.test_reading import damage, segment_keys
from trace_store.storage.s3 import ObjectStore
from trace_store.verify import command


def test_a_bucket_is_checked_and_its_damaged_record_named(
    sidecar: Callable[..., Sidecar], store: ObjectStore, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = sidecar("a")
    first.write("t")
    first.upload()
    assert command([url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == 6
    segment = next(iter(first.engine.snapshot_runs()[0].partitions[PARTITION].segments.values()))
    row = segment.index.rows[4]
    damage(store, segment_keys(store)[0], int(row["codes_offset"]))
    assert command([url, "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["damaged"]
    assert (finding["trajectory"], finding["start"], finding["stop"]) == ("t", 20, 40)
    assert finding["site"] == first.engine.sites("run")[int(row["site"])].name
