"""Flipped bits anywhere in the files of a store: none is served as good, the engine starts, the rest is read."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from trace_store.engine import Engine
from trace_store.testing.load import RUN, TABLE, check_rows
from trace_store.testing.records import make_chunk

FLIPS = 120
FLIPS_IN_FRONT = 200
TRAJECTORIES, TOKENS = 6, 10


def fill(root: Path) -> None:
    """A sealed segment, and an open one as a crash leaves it: each with three trajectories."""
    engine = Engine(root)
    engine.register(RUN, TABLE)
    for number in range(TRAJECTORIES):
        for start, stop in ((0, 5), (5, TOKENS - 1)):
            chunk = make_chunk(RUN, "p", TABLE, f"t{number}", start, stop)
            engine.append(RUN, "p", chunk, "written").result(30)
        engine.seal(RUN, "p", f"t{number}", tokens=TOKENS, prompt_tokens=0).result(30)
        if number == TRAJECTORIES // 2 - 1:
            engine.roll().result(30)
    copy = root.with_name("crashed")
    shutil.copytree(root, copy, ignore=shutil.ignore_patterns("*.partial"))  # may vanish meanwhile
    engine.close()
    shutil.rmtree(root)
    copy.rename(root)


def flip(path: Path, chance: random.Random) -> int:
    """Flip one random bit; its offset."""
    offset = chance.randrange(path.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))
    return offset


def wrong_rows(engine: Engine) -> tuple[list[str], int]:
    """Rows served with other bytes, and how many parts are missing."""
    wrong, missing = [], 0
    for number in range(TRAJECTORIES):
        for include_open in (False, True):
            lines = check_rows(engine, "p", f"t{number}", 0, TOKENS - 1, include_open=include_open)
            wrong += [line for line in lines if not line.startswith("missing")]
            missing += len([line for line in lines if line.startswith("missing")])
    return wrong, missing


def flip_before_start(pristine: Path, work: Path, chance: random.Random, flips: int) -> Counter[str]:
    """Flip a bit of a file of a stopped store, open it, read everything."""
    totals: Counter[str] = Counter()
    for _ in range(flips):
        shutil.copytree(pristine, work)
        files = sorted(path for path in (work / "runs").rglob("*") if path.is_file())
        path = chance.choices(files, weights=[file.stat().st_size for file in files])[0]
        offset = flip(path, chance)
        engine = Engine(work)
        try:
            wrong, missing = wrong_rows(engine)
        finally:
            engine.close()
        assert wrong == [], (path.name, offset)
        kind = "manifest" if path.name.startswith("manifest") else path.suffix[1:]
        totals[f"{kind} {'lost rows' if missing else 'harmless'}"] += 1
        shutil.rmtree(work)
    return totals


def flip_while_open(root: Path, chance: random.Random, flips: int) -> Counter[str]:
    """Flip a bit under a running engine, read everything, flip it back."""
    totals: Counter[str] = Counter()
    engine = Engine(root)
    try:
        files = sorted(path for path in (root / "runs").rglob("0*") if path.is_file())
        for _ in range(flips):
            path = chance.choice(files)
            before = path.read_bytes()
            offset = flip(path, chance)
            wrong, missing = wrong_rows(engine)
            path.write_bytes(before)
            assert wrong == [], (path.name, offset)
            totals["lost rows" if missing else "harmless"] += 1
        assert wrong_rows(engine) == ([], 0)
    finally:
        engine.close()
    return totals


@pytest.fixture
def pristine(tmp_path: Path) -> Path:
    fill(tmp_path / "pristine")
    engine = Engine(shutil.copytree(tmp_path / "pristine", tmp_path / "probe"))
    assert wrong_rows(engine) == ([], 0)
    engine.close()
    return tmp_path / "pristine"


def test_a_bit_flipped_in_a_stopped_store(pristine: Path, tmp_path: Path, chance: random.Random) -> None:
    totals = flip_before_start(pristine, tmp_path / "work", chance, FLIPS)
    assert sum(totals.values()) == FLIPS
    assert totals["arrow lost rows"] + totals["open lost rows"] > FLIPS // 20


def test_a_bit_flipped_in_front_of_an_unfinished_segment_costs_nothing(
    pristine: Path, tmp_path: Path, chance: random.Random
) -> None:
    """Its schema alone says whose the rows are and what their sites: there is no footer yet."""
    for _ in range(FLIPS_IN_FRONT):
        work = tmp_path / "work"
        shutil.copytree(pristine, work)
        (path,) = (work / "runs").rglob("*.open")
        content = bytearray(path.read_bytes())
        first = 16 + int.from_bytes(content[12:16], "little")
        offset, bit = chance.randrange(first), chance.randrange(8)
        content[offset] ^= 1 << bit
        path.write_bytes(content)
        engine = Engine(work)
        try:
            assert wrong_rows(engine) == ([], 0), (offset, bit)
        finally:
            engine.close()
        shutil.rmtree(work)


def test_a_bit_flipped_under_a_running_store(pristine: Path, chance: random.Random) -> None:
    totals = flip_while_open(pristine, chance, FLIPS)
    assert totals["lost rows"] > FLIPS // 20


@pytest.mark.parametrize("size", [1, 64, 4096])
def test_a_zeroed_range_in_a_stopped_store(pristine: Path, tmp_path: Path, chance: random.Random, size: int) -> Any:
    for _ in range(8):
        work = tmp_path / "work"
        shutil.copytree(pristine, work)
        path = chance.choice(sorted(path for path in (work / "runs").rglob("0*") if path.is_file()))
        with open(path, "r+b") as file:
            file.seek(chance.randrange(max(path.stat().st_size - size, 1)))
            file.write(bytes(size))
        engine = Engine(work)
        assert wrong_rows(engine)[0] == []
        engine.close()
        shutil.rmtree(work)
