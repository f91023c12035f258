"""``trace-store verify`` over a directory: nothing damaged goes unnamed, nothing good is called damaged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trace_store.checksum import RowKind
from trace_store.errors import InvalidRequest
from trace_store.segment.reader import open_sealed
from trace_store.verify import command

TRAJECTORIES, TOKENS = 3, 12


@pytest.fixture
def directory(store: Any) -> Path:
    """A closed data directory with one segment."""
    for number in range(TRAJECTORIES):
        store.append(f"t{number}", 0, TOKENS)
        store.seal(f"t{number}", TOKENS + 1)
    store.engine.close()
    root: Path = store.root
    return root


@pytest.fixture
def segment(directory: Path) -> Path:
    (path,) = directory.glob("runs/*/*/*.arrow")
    return path


def verify(capsys: pytest.CaptureFixture[str], directory: Path) -> tuple[int, Any]:
    capsys.readouterr()
    status = command([str(directory), "--json"])
    return status, json.loads(capsys.readouterr().out)


def flipped(path: Path, position: int) -> Iterator[None]:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x04
    path.write_bytes(content)
    yield
    content[position] ^= 0x04
    path.write_bytes(content)


def test_a_sound_directory_is_called_sound(directory: Path, store: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = verify(capsys, directory)
    assert (status, report["damaged"], report["notes"]) == (0, [], [])
    assert report["segments"] == 2  # with the manifest
    assert report["records"] == TRAJECTORIES * len(store.table)
    assert report["bytes"] == sum(path.stat().st_size for path in directory.rglob("*.arrow"))
    assert command([str(directory)]) == 0
    assert "0 damaged" in capsys.readouterr().out


def test_every_damaged_record_is_named_by_its_key(
    directory: Path, segment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header, index = open_sealed(segment)
    records = np.flatnonzero(index.rows["kind"] == RowKind.RECORD)
    for position in records.tolist():
        row = index.rows[position]
        for column in ("codes_offset", "scales_offset", "tensor_offset"):
            for _ in flipped(segment, int(row[column]) + 1):
                status, report = verify(capsys, directory)
                assert status == 1
                (finding,) = report["damaged"]
                assert finding["trajectory"] == index.trajectories[int(row["trajectory"])]
                assert finding["site"] == header.sites[int(row["site"])].name
                assert (finding["start"], finding["stop"], finding["attempt"]) == (0, TOKENS, 0)
    assert verify(capsys, directory)[0] == 0


def test_a_batch_that_cannot_be_read_names_each_of_its_records(
    directory: Path, segment: Path, store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    _, index = open_sealed(segment)
    first = int(index.rows["codes_offset"][index.rows["kind"] == RowKind.RECORD].min())
    content = bytearray(segment.read_bytes())
    start = content.rindex(b"\xff\xff\xff\xff", 0, first)
    content[start + 4 : start + 8] = b"\xff\xff\xff\x7f"  # a message length that is not to be believed
    segment.write_bytes(content)
    status, report = verify(capsys, directory)
    assert status == 1
    assert {item["trajectory"] for item in report["damaged"]} == {"t0"}
    assert len(report["damaged"]) == len(store.table)


def test_damage_outside_the_records_is_reported_too(
    directory: Path, segment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = segment.read_bytes()
    for content, what in (
        (whole[: len(whole) // 2], "cannot be opened"),
        (b"", "magic"),
        (bytes(len(whole)), "magic"),
        (whole[:-30] + bytes(30), "cannot be opened"),
    ):
        segment.write_bytes(content)
        status, report = verify(capsys, directory)
        assert status == 1
        assert any(what in item["what"] for item in report["damaged"])
    segment.write_bytes(whole)
    moved = segment.parent.parent / "elsewhere" / segment.name
    moved.parent.mkdir()
    segment.rename(moved)
    status, report = verify(capsys, directory)
    assert [item["what"] for item in report["damaged"]] == ["it belongs elsewhere"]


def test_an_open_segment_is_unfinished_and_a_foreign_file_is_a_note(
    store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    store.append("t", 0, TOKENS)
    (store.root / "runs" / "README").write_text("hello")
    status, report = verify(capsys, store.root)
    assert (status, report["unfinished"], report["records"]) == (0, 1, len(store.table))
    assert report["notes"] == ["no segment, file=README"]


def test_a_place_without_anything_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        command([str(tmp_path)])
    (tmp_path / "runs").mkdir()
    with pytest.raises(InvalidRequest, match="nothing is stored"):
        command([str(tmp_path)])
