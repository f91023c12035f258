"""Retention over a bucket while some clock is wrong: nothing young goes by age, and the oldest is the oldest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.tier.conftest import RUN, Sidecar, eventually
from tests.tier.test_reading import segment_keys
from tests.tier.test_upload import refuse_all
from trace_store.retention import Limits
from trace_store.storage.s3 import ObjectInfo, ObjectStore
from trace_store.tier.marks import BUCKET_CLOCK_FILE

Make = Callable[..., Sidecar]

FREE = {"free_min": 0, "free_low": 0}
DAY = 86400.0
YEAR = 365 * DAY


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trace_store.tier.tier.CLOSE_UPLOAD_S", 0.5)
    monkeypatch.setattr("trace_store.tier.tier.RELIST_S", 0.0)


@pytest.fixture
def machine_off_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """``machine_off_by(seconds)``: the machine's clock from now on."""
    right = time.time

    def put(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: right() + seconds)

    return put


@pytest.fixture
def store_off_by(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """``store_off_by[key] = seconds``: the time that the store gave to an object; ``["probe"]`` to all of the check."""
    apart: dict[str, float] = {}
    listing = ObjectStore.listing

    def shifted(self: ObjectStore, prefix: str) -> Iterator[ObjectInfo]:
        for info in listing(self, prefix):
            name = "probe" if info.key.startswith("probe/") else info.key
            yield replace(info, modified=info.modified + apart.get(name, 0.0))

    monkeypatch.setattr(ObjectStore, "listing", shifted)
    return apart


def released(sidecar: Sidecar) -> dict[str, int]:
    return {rule: count for rule, count in vars(sidecar.engine.usage().retention).items() if count}


def names(store: ObjectStore) -> list[str]:
    return sorted(key.split("/")[2].rpartition("-")[0] for key in segment_keys(store))


@pytest.mark.parametrize("apart", [-YEAR, 14 * 60.0, YEAR])
def test_a_new_server_with_a_wrong_clock_releases_nothing_by_age(
    apart: float, sidecar: Make, store: ObjectStore, machine_off_by: Callable[[float], None]
) -> None:
    first = sidecar("a")
    first.write("t", partition="p1")
    first.upload()
    machine_off_by(apart)
    second = sidecar("b", Limits(age_s=60, **FREE))
    second.engine._keeper.tick()
    assert (released(second), names(store)) == ({}, ["p1"])
    second.write("u", partition="p2")
    second.upload()
    second.tier.follow()
    second.engine._keeper.tick()
    assert (released(second), names(store)) == ({}, ["p1", "p2"])


def test_what_is_old_by_the_stores_clock_goes_although_the_servers_clock_is_behind(
    sidecar: Make, store: ObjectStore, machine_off_by: Callable[[float], None], store_off_by: dict[str, float]
) -> None:
    first = sidecar("a")
    for name in ("old", "new"):
        first.write("t", partition=name)
        first.upload()
    (old,) = (key for key in segment_keys(store) if "/old-" in key)
    store_off_by[old] = -100.0
    machine_off_by(-YEAR)
    second = sidecar("b", Limits(age_s=60, **FREE))
    eventually(lambda: names(store) == ["new"], "release by age")
    assert released(second) == {"age": 1}


@pytest.mark.parametrize("apart", [-YEAR, -600.0, YEAR])
def test_the_partition_that_is_written_is_the_newest_whatever_the_clock_says(
    apart: float, sidecar: Make, store: ObjectStore, machine_off_by: Callable[[float], None]
) -> None:
    first = sidecar("a")
    for name in ("p1", "p2"):
        first.write("t", partition=name)
    first.upload()
    machine_off_by(apart)
    second = sidecar("b", Limits(partitions_kept=2, **FREE))
    second.write("t", partition="p3", seal=False)
    eventually(lambda: released(second) == {"count": 1}, "release by count")
    second.engine.seal(RUN, "p3", "t", tokens=41, prompt_tokens=0).result(30)
    assert second.reasons("t", partition="p3") == set()
    second.upload()
    eventually(lambda: len(names(store)) == 2, "deletion")
    second.engine._keeper.tick()
    assert released(second) == {"count": 1}
    assert "p3" in names(store)


@pytest.mark.parametrize("apart", [-YEAR, 0.0, YEAR])
def test_rows_of_an_earlier_run_that_were_never_uploaded_keep_their_place_in_the_order(
    apart: float,
    sidecar: Make,
    store: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
    machine_off_by: Callable[[float], None],
    store_off_by: dict[str, float],
) -> None:
    other, first = sidecar("b"), sidecar("a")
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "put", refuse_all)
        first.write("t", partition="p1")
        first.engine.close()
    for name in ("p2", "p3"):
        other.write("t", partition=name)
    other.upload()
    for key in ["probe", *segment_keys(store)]:
        store_off_by[key] = 2 * DAY  # the server was away that long by the store's clock
    machine_off_by(apart)
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "put", _only_probes(ObjectStore.put))
        again = sidecar("a", Limits(partitions_kept=2, **FREE))
        eventually(lambda: released(again) == {"count": 1}, "release by count")
    eventually(lambda: again.reasons("t", partition="p1") == {"RELEASED"}, "release")
    assert names(store) == ["p2", "p3"]


def _only_probes(put: Callable[..., None]) -> Callable[..., None]:
    def refuse(self: ObjectStore, key: str, data: bytes, **more: Any) -> None:
        if key.startswith("runs/"):
            raise OSError("refused by the test")
        put(self, key, data, **more)

    return refuse


def test_without_a_note_of_the_stores_time_such_rows_wait_for_their_upload(
    sidecar: Make, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, machine_off_by: Callable[[float], None]
) -> None:
    other, first = sidecar("b"), sidecar("a")
    for name in ("p2", "p3"):
        other.write("t", partition=name)
    other.upload()
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "put", refuse_all)
        first.write("t", partition="p1")
        first.engine.close()
    (first.root / BUCKET_CLOCK_FILE).unlink()
    machine_off_by(YEAR)
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "put", _only_probes(ObjectStore.put))
        again = sidecar("a", Limits(partitions_kept=2, age_s=60, **FREE))
        again.engine._keeper.tick()
        assert released(again) == {}
    eventually(lambda: "p1" in names(store), "upload")
    assert again.reasons("t", partition="p1") == set()


def test_a_stores_clock_that_is_set_back_makes_nothing_old(
    sidecar: Make, store: ObjectStore, store_off_by: dict[str, float]
) -> None:
    first = sidecar("a")
    store_off_by["probe"] = DAY  # so it was at the join
    second = sidecar("b", Limits(age_s=3600, partitions_kept=1, **FREE))
    first.write("t", partition="p1")
    first.upload()
    second.tier.follow()
    second.engine._keeper.tick()
    assert (released(second), names(store)) == ({}, ["p1"])


def test_a_stores_clock_that_jumped_during_a_pause_ages_nothing_by_more_than_a_quarter_of_the_limit(
    sidecar: Make, store: ObjectStore, store_off_by: dict[str, float]
) -> None:
    limits = Limits(age_s=3600, **FREE)
    first = sidecar("a", limits)
    first.write("t", partition="p1")
    first.upload()
    for path in first.root.glob("runs/*/*/*.arrow"):
        with first.engine.catalog_lock:
            first.tier.evict(next(iter(first.engine.snapshot_runs()[0].partitions["p1"].segments.values())))
        eventually(lambda path=path: not path.exists(), "eviction")  # type: ignore[misc]
    for life in range(3):
        first.engine.close()
        store_off_by["probe"] = (life + 1) * YEAR
        first = sidecar("a", limits)
        first.engine._keeper.tick()
        assert released(first) == {}
    assert first.reasons("t", partition="p1") == set()


def test_a_note_that_cannot_be_read_is_none(sidecar: Make, caplog: pytest.LogCaptureFixture) -> None:
    for number, content in enumerate(("", "{}", '{"time": "x", "directory": 1, "pauses": []}', '{"time": 1.0}')):
        first = sidecar(f"a{number}")
        first.engine.close()
        (first.root / BUCKET_CLOCK_FILE).write_text(content)
        assert sidecar(first.name).tier.joined
        assert "clock is not readable" in caplog.text
        caplog.clear()
