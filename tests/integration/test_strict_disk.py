"""Power cuts after every acknowledgement, on a disk that keeps nothing that was not synced, names included."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.strict_disk import StrictDisk
from trace_store.engine import Engine
from trace_store.errors import StorageFull
from trace_store.recovery import OpenedSegment
from trace_store.testing.load import RUN, TABLE, broken_promises
from trace_store.testing.records import make_chunk

TOKENS = 8


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., StrictDisk]]:
    """``watch(root, unsynced)``: from now on the directory is on a strict disk."""
    made: list[StrictDisk] = []

    def start(root: Path, *unsynced: Path) -> StrictDisk:
        made.append(StrictDisk(root, monkeypatch, unsynced))
        return made[-1]

    yield start
    for disk in made:
        disk.close()


class Promises:
    """Operations on an engine and what they acknowledged; ``check`` cuts the power and looks."""

    def __init__(self, engine: Engine, disk: StrictDisk, directory: Path) -> None:
        self.engine, self._disk, self._directory = engine, disk, directory
        self._messages: dict[str, list[str]] = {}
        self._released: set[str] = set()
        self._registered = False
        self._cuts = itertools.count()

    def register(self) -> None:
        self.engine.register(RUN, TABLE)
        self._registered = True

    def append(self, partition: str, name: str, start: int, stop: int, durability: str = "synced") -> None:
        chunk = make_chunk(RUN, partition, TABLE, name, start, stop)
        self.engine.append(RUN, partition, chunk, durability).result(30)
        self._messages.setdefault(partition, []).append(f"append {name} {start} {stop} {durability}")

    def seal(self, partition: str, name: str, tokens: int) -> None:
        self.engine.seal(RUN, partition, name, tokens=tokens, prompt_tokens=0).result(30)
        self._messages[partition].append(f"seal {name} {tokens}")

    def release(self, partition: str) -> None:
        self.engine.release(RUN, partition).result(30)
        self._messages.pop(partition)
        self._released.add(partition)

    def check(self) -> None:
        target = self._disk.cut(self._directory / f"cut-{next(self._cuts)}")
        engine = Engine(target / "data")
        try:
            assert not self._registered or engine.sites(RUN) == TABLE
            for partition, messages in self._messages.items():
                assert broken_promises(engine, partition, messages, ("synced",)) == []
            for run in engine.snapshot_runs():
                assert self._released.isdisjoint(run.partitions)
        finally:
            engine.close()
            shutil.rmtree(target)


def test_every_acknowledgement_survives_a_cut_right_after_it(tmp_path: Path, watch: Callable[..., StrictDisk]) -> None:
    (tmp_path / "disk").mkdir()
    disk = watch(tmp_path / "disk")
    made = Promises(Engine(tmp_path / "disk" / "data"), disk, tmp_path)
    steps: list[tuple[Any, ...]] = [
        (made.register,),
        (made.append, "p", "t", 0, TOKENS),
        (made.append, "p", "t", TOKENS, 2 * TOKENS),
        (made.append, "q", "u", 0, TOKENS),
        (made.seal, "p", "t", 2 * TOKENS + 1),
        (lambda: made.engine.roll().result(30),),
        (made.append, "p", "v", 0, TOKENS),
        (made.seal, "p", "v", TOKENS + 1),
        (made.release, "q"),
        (made.append, "r", "w", 0, TOKENS, "written"),
        (made.seal, "r", "w", TOKENS + 1),
        (made.engine.close,),
    ]
    for step, *arguments in steps:
        step(*arguments)
        made.check()
    assert disk.syncs > len(steps)


def test_what_was_left_open_for_want_of_room_is_synced_before_it_is_served(
    tmp_path: Path, watch: Callable[..., StrictDisk], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Engine(tmp_path / "first")
    first.register(RUN, TABLE)
    first.append(RUN, "p", make_chunk(RUN, "p", TABLE, "t", 0, TOKENS), "written").result(30)
    shutil.copytree(tmp_path / "first", tmp_path / "killed" / "data")  # as SIGKILL leaves it: in the page cache
    first.close()
    (open_segment,) = (tmp_path / "killed").rglob("*.open")

    def no_room(path: Path, scan: Any) -> OpenedSegment:
        raise StorageFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr("trace_store.recovery.rewrite", no_room)
        disk = watch(tmp_path / "killed", open_segment)
        engine = Engine(tmp_path / "killed" / "data")
    second = Promises(engine, disk, tmp_path)
    second._messages["p"] = [f"append t 0 {TOKENS} synced"]  # served, so it counts
    assert broken_promises(engine, "p", second._messages["p"]) == []
    second.check()
    engine.close()
