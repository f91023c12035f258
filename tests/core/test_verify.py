"""``trace-store verify`` over a directory: nothing damaged goes unnamed, nothing good is called damaged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trace_store import Site
from trace_store.checksum import RowKind
from trace_store.errors import InvalidRequest
from trace_store.places import StoredPlace, open_place
from trace_store.segment.reader import open_sealed
from trace_store.segment.schema import SegmentHeader
from trace_store.segment.writer import SegmentWriter
from trace_store.testing.records import make_chunk
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


def test_a_segment_that_was_only_created_is_no_damage(directory: Path, segment: Path, capsys: Any) -> None:
    """A server killed before its first record batch leaves an empty file, which its next start removes."""
    segment.with_name("0000000009-00000000000000aa.open").touch()
    status, report = verify(capsys, directory)
    assert status == 0
    assert not report["damaged"]
    assert report["unfinished"] == 1


def test_a_place_without_anything_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        command([str(tmp_path)])
    (tmp_path / "runs").mkdir()
    with pytest.raises(InvalidRequest, match="nothing is stored"):
        command([str(tmp_path)])


@pytest.fixture
def two_segments(store: Any) -> tuple[Path, list[Path]]:
    """A closed data directory; trajectory t has half of its rows in each of two segments and its seal in the second."""
    store.append("t", 0, TOKENS)
    store.append("other", 0, TOKENS, partition="step-2")
    store.engine.roll().result(30)
    store.append("t", TOKENS, 2 * TOKENS)
    store.seal("t", 2 * TOKENS + 1)
    store.engine.close()
    return store.root, sorted(store.root.glob("runs/*/step-1-*/*.arrow"))


def test_a_deleted_segment_of_a_sealed_trajectory_is_missed(
    two_segments: tuple[Path, list[Path]], store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, paths = two_segments
    assert verify(capsys, directory)[0] == 0
    paths[0].unlink()
    status, report = verify(capsys, directory)
    (finding,) = report["damaged"]
    rows = TOKENS * len(store.table)
    assert (status, finding["trajectory"], finding["attempt"], finding["partition"]) == (1, "t", 0, "step-1")
    assert finding["what"] == f"rows are missing: {rows} of {2 * rows} that were sealed"
    (directory / "bucket").write_text("the directory is a cache, so segments may be in the bucket alone")
    status, report = verify(capsys, directory)
    assert (status, report["damaged"]) == (0, [])
    assert "attempts=1" in report["notes"][0]


def test_what_a_server_writes_during_the_check_is_not_missed(
    two_segments: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, paths = two_segments

    def too_early(place: str) -> StoredPlace:
        whole = open_place(place)
        return StoredPlace(
            lambda below: [file for file in whole.files(below) if below or not file.path.endswith(paths[0].name)]
        )

    monkeypatch.setattr("trace_store.verify.open_place", too_early)
    assert verify(capsys, directory)[0] == 0


def test_rows_that_a_release_took_or_that_were_stored_again_are_not_missed(
    store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("kept", "gone"):
        store.append(name, 0, TOKENS)
        store.seal(name, TOKENS + 1)
    store.engine.release("run", "step-1", ["gone"]).result(30)
    store.reopen()
    (path,) = store.segments()
    content = bytearray(path.read_bytes())
    content[content.index(bytes(store.chunk("kept", 0, TOKENS, sites=[0]).codes))] ^= 1
    path.write_bytes(content)
    assert store.append("kept", 0, TOKENS).stored == 1
    store.engine.close()
    status, report = verify(capsys, store.root)
    assert (status, report["damaged"]) == (0, [])
    (note,) = report["notes"]
    assert note.startswith("damaged records were stored again whole, records=1 segment=")
    assert path.name in note
    content[content.index(bytes(store.chunk("kept", 0, TOKENS, sites=[1]).codes))] ^= 1
    path.write_bytes(content)
    status, report = verify(capsys, store.root)  # another one that was not sent again
    assert (status, [item["site"] for item in report["damaged"]]) == (1, [store.table[1].name])


def test_the_healed_record_of_one_partition_speaks_for_no_other_one(
    store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for partition in ("step-1", "step-2"):
        store.append("t", 0, TOKENS, partition=partition)
        store.seal("t", TOKENS + 1, partition=partition)
    store.reopen()
    first, second = store.segments()
    assert first.name == second.name
    for path in (first, second):
        content = bytearray(path.read_bytes())
        content[content.index(bytes(store.chunk("t", 0, TOKENS, sites=[0]).codes))] ^= 1
        path.write_bytes(content)
    assert store.append("t", 0, TOKENS, partition="step-1").stored == 1
    store.engine.close()
    status, report = verify(capsys, store.root)
    assert (status, [item["partition"] for item in report["damaged"]]) == (1, ["step-2"])


@pytest.mark.parametrize("damaged", [False, True])
def test_two_copies_of_a_record_that_differ_are_named(
    damaged: bool, store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """No server stores that knowingly; an older one, or a file from a backup, may have brought it about."""
    store.append("t", 0, TOKENS)
    store.append("t", TOKENS, 2 * TOKENS)
    store.seal("t", 2 * TOKENS + 1)
    store.append("u", 0, TOKENS)
    store.engine.close()
    (path,) = store.segments()
    sequence, epoch = path.stem.split("-")
    writer = SegmentWriter(
        path.parent, f"{int(sequence) + 1:010}-{epoch}", SegmentHeader("run", "step-1", store.table, "test", 1)
    )
    writer.append_chunk(store.chunk("t", 0, TOKENS, sites=[2], seed=1))
    writer.append_chunk(store.chunk("t", TOKENS, 2 * TOKENS, sites=[1, 2]))  # the same again is no difference
    writer.append_chunk(store.chunk("u", 0, TOKENS, sites=[0], policy_version=1))  # cannot be compared by checksum
    writer.seal()
    writer.close()
    if damaged:
        content = bytearray(path.read_bytes())
        content[content.index(bytes(store.chunk("t", 0, TOKENS, sites=[2]).codes))] ^= 1
        path.write_bytes(content)
    status, report = verify(capsys, store.root)
    found = [(item["what"], item["trajectory"], item["site"], item["start"]) for item in report["damaged"]]
    site = store.table[2].name
    expected = [("record damaged", "t", site, 0)] if damaged else []
    assert (status, found) == (1, [*expected, ("two stored copies of a record differ", "t", site, 0)])


def test_links_and_directories_under_the_name_of_a_segment_are_reported(
    directory: Path, segment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = segment.rename(tmp_path / "elsewhere.arrow")
    segment.symlink_to(moved)
    (segment.parent / "0000000007-x.open").mkdir()
    (segment.parent / "0000000008-x.arrow").symlink_to(tmp_path / "nothing")
    (segment.parent / "notes").symlink_to(moved)
    status, report = verify(capsys, directory)
    assert status == 1
    assert [(Path(item["segment"]).name, item["what"].split(" under")[0]) for item in report["damaged"]] == [
        (segment.name, "a symbolic link"),
        ("0000000007-x.open", "a directory"),
        ("0000000008-x.arrow", "a symbolic link"),
    ]
    assert [note.rpartition("/")[2] for note in report["notes"]] == ["notes"]


def test_a_partition_on_another_disk_by_a_link_is_checked(
    directory: Path, segment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    segment.parent.rename(tmp_path / "other-disk")
    segment.parent.symlink_to(tmp_path / "other-disk")
    for _ in flipped(segment, segment.read_bytes().index(b"t1") + 40):
        status, report = verify(capsys, directory)
        assert (status, report["segments"]) == (1, 2)
    assert verify(capsys, directory)[0] == 0


def test_a_segment_of_another_site_table_is_named(store: Any, capsys: pytest.CaptureFixture[str]) -> None:
    store.append("t", 0, TOKENS)
    store.engine.close()
    place = store.segments()[0].parent
    other = (Site(0, "k", 128),)
    writer = SegmentWriter(place, "0000000009-other", SegmentHeader("run", "step-1", other, "test", 9))
    writer.append_chunk(make_chunk("run", "step-1", other, "u", 0, 4))
    writer.seal()
    writer.close()
    status, report = verify(capsys, store.root)
    assert status == 1
    assert [Path(item["segment"]).name for item in report["damaged"]] == ["0000000009-other.arrow"]
    assert "site table" in report["damaged"][0]["what"]
