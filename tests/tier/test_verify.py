"""``trace-store verify`` over a bucket, the same program as over a directory."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.tier.conftest import PARTITION, RUN, TABLE, Sidecar
from tests.tier.test_reading import damage, segment_keys
from trace_store.errors import StorageFailed
from trace_store.storage.s3 import ObjectStore
from trace_store.testing.records import make_chunk
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


def test_a_deleted_object_is_missed_and_one_that_cannot_be_read_is_named(
    sidecar: Callable[..., Sidecar],
    store: ObjectStore,
    url: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = sidecar("a")
    first.write("t", seal=False)
    first.upload()
    chunk = make_chunk(RUN, PARTITION, TABLE, "t", 40, 60)
    first.engine.append(RUN, PARTITION, chunk).result(30)
    first.engine.seal(RUN, PARTITION, "t", tokens=61, prompt_tokens=0).result(30)
    first.write("other", partition="step-2")
    first.upload()
    assert command([url, "--json"]) == 0
    capsys.readouterr()
    first_key, read = segment_keys(store)[0], ObjectStore.read
    assert "/step-1" in first_key

    def fail(self: ObjectStore, key: str, start: int, stop: int) -> bytearray:
        if key == first_key:
            raise StorageFailed("no answer")
        return read(self, key, start, stop)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "read", fail)
        assert command([url, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [item["what"] for item in report["damaged"]] == [
        "cannot be read: no answer",
        "rows are missing: 120 of 180 that were sealed",
    ]
    assert report["segments"] == 3  # the manifest, the other segment of step-1, and that of step-2
    store.delete([first_key])
    assert command([url, "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["damaged"]
    assert (finding["trajectory"], finding["what"]) == ("t", "rows are missing: 120 of 180 that were sealed")
