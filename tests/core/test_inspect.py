"""``trace-store inspect`` on segments that an engine left behind, sealed and unfinished."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from trace_store import inspect
from trace_store.checksum import record_checksum, trajectory_seed
from trace_store.chunk import Chunk, RecordGroup, cut_chunk
from trace_store.engine import Engine
from trace_store.errors import FormatError, InvalidRequest
from trace_store.record import Site

SITES = (Site(0, "moe_in", 64), Site(0, "k", 32, form="full"))


def chunk(trajectory: str, tokens: int) -> Chunk:
    random = np.random.default_rng(tokens)
    codes = [random.integers(0, 256, tokens * site.code_bytes, np.uint8).tobytes() for site in SITES]
    scales = [random.integers(0, 0x70, tokens * site.scale_bytes, np.uint8).tobytes() for site in SITES]
    tensor = [np.float32(1).tobytes()] * len(SITES)
    seed = trajectory_seed("run", "step", trajectory)
    sums = [
        record_checksum(seed, 0, 0, number, 0, tokens, codes[number], scales[number], tensor[number])
        for number in range(len(SITES))
    ]
    group = RecordGroup(trajectory, 0, 0, 0, tokens, (0, 1), (False, False), tuple(sums))
    return cut_chunk((group,), memoryview(b"".join((*codes, *scales, *tensor))), SITES)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A closed store with one sealed trajectory, and beside it a copy of the segment while it was open."""
    engine = Engine(tmp_path / "store")
    engine.register("run", SITES)
    engine.append("run", "step", chunk("t", 9)).result()
    engine.seal("run", "step", "t", tokens=10, prompt_tokens=4).result()
    unfinished = next((tmp_path / "store").rglob("*.open"))
    (tmp_path / "unfinished").mkdir()
    shutil.copy(unfinished, tmp_path / "unfinished")
    engine.close()
    return tmp_path


def test_json_describes_sealed_and_unfinished_segments_alike(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect.command([str(directory), "--json"]) == 0
    described = {entry["state"]: entry for entry in json.loads(capsys.readouterr().out) if entry["records"]}
    assert set(described) == {"open", "sealed"}
    for entry in described.values():
        assert (entry["run"], entry["partition"], entry["sites"]) == ("run", "step", ["0/moe_in", "0/k"])
        assert entry["codes_bytes"] == 9 * (64 // 8 + 32 // 2)
        assert entry["scales_bytes"] == 9 * (64 // 16 + 32 // 16)
        assert entry["trajectories"] == [
            {
                "trajectory": "t",
                "attempts": [0],
                "records": 2,
                "first_token": 0,
                "last_token": 8,
                "sealed_tokens": 10,
            }
        ]


def test_a_person_gets_a_table(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.command([str(directory / "store")]) == 0
    shown = capsys.readouterr().out
    assert "run / step" in shown
    assert "[0, 9)" in shown


def test_stock_pyarrow_opens_the_same_segment(directory: Path) -> None:
    path = next(p for p in (directory / "store").rglob("0*.arrow"))
    with pa.OSFile(str(path)) as source:
        table = pa.ipc.open_file(source).read_all()
    assert table.column("trajectory").to_pylist()[:2] == ["t", "t"]
    assert len(table.column("codes")[0].as_py()) == 9 * 64 // 8


def test_what_is_no_segment_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.arrow").write_bytes(b"not arrow")
    with pytest.raises(FormatError, match=r"segment=x\.arrow"):
        inspect.command([str(tmp_path / "x.arrow")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequest, match="no segments found"):
        inspect.find_segments([tmp_path / "empty"])
