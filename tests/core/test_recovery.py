"""Start-up on directories that crashes, power cuts and people left behind."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trace_store import Site, TokenSpan
from trace_store.checksum import record_checksum, trajectory_seed
from trace_store.chunk import Chunk, RecordGroup
from trace_store.engine import Engine
from trace_store.errors import Incomplete, StorageFailed
from trace_store.planner import MissingReason
from trace_store.recovery import RECOVERING_SUFFIX
from trace_store.segment import scan, schema
from trace_store.segment.reader import open_sealed
from trace_store.segment.writer import SegmentWriter


def crash(store: Any, target: Path) -> Path:
    """What a process kill leaves: a copy of the directory while the engine is open."""
    shutil.copytree(store.root, target, ignore=shutil.ignore_patterns("*.partial"))
    return target


def set_aside(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "set-aside").iterdir()) if (root / "set-aside").exists() else []


def test_an_open_segment_is_sealed_after_a_crash(store: Any, open_store: Any, tmp_path: Path) -> None:
    store.append("t", 0, 9)
    store.seal("t", 10)
    store.append("u", 0, 5)
    again = open_store(crash(store, tmp_path / "copy"))
    assert [len(again.segments(suffix)) for suffix in (".open", ".arrow")] == [0, 1]
    open_sealed(again.segments()[0])
    assert again.check("t", 0, 9) == []
    assert again.check("u", 0, 5, include_open=True) == []
    assert set_aside(again.root) == []


def test_a_tail_torn_at_any_byte_costs_only_the_record_batch_it_tears(
    store: Any, open_store: Any, tmp_path: Path
) -> None:
    ends = []
    for start in range(0, 6, 2):
        store.append("t", start, start + 2, durability="written")
        ends.append(store.segments(".open")[0].stat().st_size)
    size = ends[-1]
    for cut in [*range(0, size, 97), ends[0] - 1, ends[0], ends[0] + 1, ends[1], size - 1]:
        root = crash(store, tmp_path / f"cut-{cut}")
        segment = next((root / "runs").rglob("0*.open"))
        os.truncate(segment, cut)
        again = open_store(root)
        whole = 2 * sum(end <= cut for end in ends)
        gaps = again.check("t", 0, 6, include_open=True)
        assert {(gap.start, gap.stop) for gap in gaps} == ({(whole, 6)} if whole < 6 else set()), cut
        again.append("t", 0, 6)
        again.engine.close()


def test_fr26_a_zeroed_tail_and_a_zeroed_file(
    store: Any, open_store: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.append("t", 0, 4)
    end = store.segments(".open")[0].stat().st_size
    store.append("t", 4, 8)
    tail = crash(store, tmp_path / "tail")
    segment = next((tail / "runs").rglob("0*.open"))
    content = segment.read_bytes()
    segment.write_bytes(content[:end] + bytes(len(content) - end))
    again = open_store(tail)
    assert {(gap.start, gap.stop) for gap in again.check("t", 0, 8, include_open=True)} == {(4, 8)}
    zeroed = crash(store, tmp_path / "zeroed")
    segment = next((zeroed / "runs").rglob("0*.open"))
    segment.write_bytes(bytes(len(content)))
    (segment.parent / ("9" + segment.name[1:])).write_bytes(b"")
    with caplog.at_level(logging.ERROR):
        again = open_store(zeroed)
    assert len(set_aside(zeroed)) == 1
    assert "no Arrow magic" in caplog.text
    again.append("t", 0, 8)


def test_a_hole_in_the_middle_costs_its_own_rows_and_is_reported_as_loss(
    store: Any, open_store: Any, tmp_path: Path
) -> None:
    ends = [0]
    for start in range(0, 9, 3):
        store.append("t", start, start + 3)
        ends.append(store.segments(".open")[0].stat().st_size)
    store.seal("t", 10)
    root = crash(store, tmp_path / "copy")
    segment = next((root / "runs").rglob("0*.open"))
    with open(segment, "r+b") as file:
        file.seek(ends[1])
        file.write(bytes(ends[2] - ends[1]))
    again = open_store(root)
    gaps = again.check("t", 0, 9)
    assert {(gap.start, gap.stop, gap.reason) for gap in gaps} == {(3, 6, MissingReason.DATA_LOSS)}
    assert len(set_aside(root)) == 1
    # The client that did not hear of its seal repeats it, sends what is missing, and is done.
    with pytest.raises(Incomplete):
        again.seal("t", 10)
    again.append("t", 0, 9)
    again.seal("t", 10)
    assert again.check("t", 0, 9) == []
    again.reopen()
    assert again.check("t", 0, 9) == []


def test_codes_full_of_markers_do_not_slow_or_fool_the_search_for_the_next_batch(tmp_path: Path) -> None:
    site = Site(0, "moe_in", 32768, form="full")
    writer = SegmentWriter(tmp_path, "0", schema.SegmentHeader("run", "p", (site,), "s", 0))
    ends = []
    for start in range(3):
        codes, scales, tensor = b"\xff" * 16384 * 64, bytes(2048 * 64), b"\0\0\x80?"
        span = (start * 64, start * 64 + 64)
        checksum = record_checksum(trajectory_seed("run", "p", "t"), 0, 0, 0, *span, codes, scales, tensor)
        group = RecordGroup("t", 0, 0, *span, (0,), (False,), (checksum,))
        writer.append_chunk(Chunk((group,), *map(memoryview, (codes, scales, tensor))))
        ends.append(writer.written_bytes)
    writer.close()
    with open(writer.path, "r+b") as file:
        file.seek(ends[0])
        file.write(bytes(8))
    found = scan.scan_segment(writer.path)
    assert len(found.index) == 2
    assert len(found.damage) == 1


def test_a_rewrite_cut_short_at_any_step_is_done_again(store: Any, open_store: Any, tmp_path: Path) -> None:
    store.append("t", 0, 9)
    before, after = crash(store, tmp_path / "before"), crash(store, tmp_path / "after")
    open_store(after).engine.close()
    source = next((before / "runs").rglob("0*.open"))
    result = next((after / "runs").rglob("0*.arrow"))
    for name, left in {
        "half-written": {source.name: source, source.stem + RECOVERING_SUFFIX: source},
        "renamed": {source.name: source, result.name: result},
        "done": {result.name: result},
    }.items():
        root = crash(store, tmp_path / name)
        directory = next((root / "runs").rglob("0*.open")).parent
        next(directory.iterdir()).unlink()
        for target, origin in left.items():
            shutil.copy(origin, directory / target)
        again = open_store(root)
        assert [path.name for path in directory.iterdir()] == [result.name], name
        assert again.check("t", 0, 9, include_open=True) == []
        assert again.engine.usage().records == 4


def test_a_damaged_result_of_a_rewrite_does_not_cost_its_source(store: Any, open_store: Any, tmp_path: Path) -> None:
    store.append("t", 0, 9)
    root = crash(store, tmp_path / "copy")
    source = next((root / "runs").rglob("0*.open"))
    source.with_suffix(".arrow").write_bytes(bytes(4096))
    again = open_store(root)
    assert again.check("t", 0, 9, include_open=True) == []
    assert len(set_aside(root)) == 1


def test_a_sealed_segment_with_a_damaged_index_is_scanned(store: Any, tmp_path: Path) -> None:
    store.append("t", 0, 9)
    store.seal("t", 10)
    store.engine.close()
    path = store.segments()[0]
    content = bytearray(path.read_bytes())
    footer = int.from_bytes(content[-10:-6], "little")
    content[-10 - footer - 200] ^= 1
    path.write_bytes(content)
    store.reopen()
    assert store.check("t", 0, 9) == []
    assert len(set_aside(store.root)) == 1
    open_sealed(path)


@pytest.mark.parametrize("kept", [0, 4, 300, 2000])
def test_a_sealed_segment_cut_short_is_kept_aside_and_its_loss_is_seen(store: Any, kept: int) -> None:
    store.append("t", 0, 9)
    store.seal("t", 10)
    store.engine.close()
    os.truncate(store.segments()[0], kept)
    store.reopen()
    assert len(set_aside(store.root)) == 1
    assert store.check("t", 0, 9) != []
    store.append("t", 0, 9, attempt=1)
    store.seal("t", 10, attempt=1)
    assert store.check("t", 0, 9, attempt=1) == []


def test_a_sealed_segment_that_lost_its_end_keeps_the_rest_and_says_what_is_lost(store: Any) -> None:
    store.append("t", 0, 9)
    store.seal("t", 10)
    end = store.segments(".open")[0].stat().st_size
    store.append("u", 0, 9)
    store.seal("u", 10)
    store.engine.close()
    path = store.segments()[0]
    os.truncate(path, end + 100)
    store.reopen()
    assert len(set_aside(store.root)) == 1
    assert (store.root / "set-aside" / set_aside(store.root)[0]).stat().st_size == end + 100
    assert store.check("t", 0, 9) == []
    assert store.reasons("u", 0, 9) == {MissingReason.UNKNOWN_TRAJECTORY}


def test_foreign_files_are_set_aside_and_never_deleted(store: Any) -> None:
    store.append("t", 0, 9)
    store.seal("t", 10)
    store.engine.close()
    directory = store.segments()[0].parent
    for target in (
        directory / "notes.txt",
        directory / "0.arrow",
        directory.parent / "x.txt",
        store.root / "runs" / "y",
    ):
        target.write_text("hello")
    (store.root / "runs" / "lost+found").mkdir()
    store.reopen()
    assert len(set_aside(store.root)) == 4
    assert {(store.root / "set-aside" / name).read_text() for name in set_aside(store.root)} == {"hello"}
    assert store.check("t", 0, 9) == []


def test_a_segment_of_another_partition_is_set_aside(store: Any) -> None:
    store.append("t", 0, 9)
    store.append("t", 0, 9, partition="step-2", seed=1)
    store.engine.close()
    first, second = store.segments()
    shutil.copy(first, second.parent / first.name.replace("0000000000", "0000000007"))
    store.reopen()
    assert len(set_aside(store.root)) == 1
    parts = {
        p: store.reasons("t", 0, 9, partition=p, seed=s, include_open=True) for p, s in (("step-1", 0), ("step-2", 1))
    }
    assert parts == {"step-1": set(), "step-2": set()}


def test_a_segment_of_a_newer_version_stays_where_it_is(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store.append("t", 0, 9)
    with monkeypatch.context() as patch:
        newer = schema.make_schema
        patch.setattr("trace_store.segment.writer.make_schema", lambda header: newer(replace(header, version="3")))
        patch.setattr(schema, "READABLE_VERSIONS", ("2", "3"))
        store.append("u", 0, 9, partition="step-2")
        store.engine.close()
    store.reopen()
    assert set_aside(store.root) == []
    assert len(store.segments()) == 2
    assert store.check("t", 0, 9, include_open=True) == []
    assert store.reasons("u", 0, 9, partition="step-2") == {MissingReason.UNKNOWN_TRAJECTORY}


def test_a_damaged_manifest_costs_nothing_while_its_schema_is_readable(store: Any) -> None:
    store.engine.close()
    manifest = next((store.root / "runs").rglob("manifest-*"))
    content = bytearray(manifest.read_bytes())
    content[-20:] = bytes(20)
    manifest.write_bytes(content)
    store.reopen()
    assert len(store.engine.sites("run")) == 4


def test_a_flipped_site_table_is_not_believed(store: Any) -> None:
    store.append("t", 0, 9)
    store.seal("t", 10)
    store.engine.close()
    paths = (next((store.root / "runs").rglob("manifest-*")), store.segments()[0])
    for path in paths:
        content = path.read_bytes()
        assert content.count(b'"width":64') > 3
        path.write_bytes(content.replace(b'"width":64', b'"width":66'))
    store.reopen()
    assert store.check("t", 0, 9) == []  # the copy of it is
    store.engine.close()
    for path in paths:
        content = path.read_bytes().replace(b'"width":64', b'"width":66')
        path.write_bytes(content.replace(b"trace_store.copy", b"trace_store.cop "))
    store.reopen()
    assert len(set_aside(store.root)) == 3  # the segment as it was before its rows were copied, too
    assert store.engine.register("run", store.table) is True
    store.append("t", 0, 9)


def test_a_start_that_fails_gives_the_directory_back(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store.append("t", 0, 9)
    store.engine.close()
    with monkeypatch.context() as patch:

        def refuse(*_: Any) -> Any:
            raise PermissionError(13, "permission denied")

        patch.setattr(os, "scandir", refuse)
        with pytest.raises(StorageFailed, match="permission denied"):
            store.reopen()
    store.reopen()
    assert store.check("t", 0, 9, include_open=True) == []


def test_fr28_released_directories_left_by_a_crash_are_deleted(store: Any) -> None:
    store.append("t", 0, 9)
    store.engine.close()
    directory = store.segments()[0].parent
    directory.rename(directory.parent / ".released-x")
    store.reopen()
    assert store.reasons("t", 0, 9, include_open=True) == {MissingReason.UNKNOWN_TRAJECTORY}
    assert store.engine._volume.deleter.drain(30)  # a close starts no more deletions
    assert not (directory.parent / ".released-x").exists()


def test_an_unreadable_sector_costs_its_own_rows(store: Any, open_store: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(scan, "_READ_BYTES", 512)
    ends = [0]
    for start in range(0, 9, 3):
        store.append("t", start, start + 3)
        ends.append(store.segments(".open")[0].stat().st_size)
    root = crash(store, tmp_path / "copy")
    bad = (ends[1] + 511) // 512 * 512
    real = os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        if offset == bad:
            raise OSError(5, "input/output error")
        return real(descriptor, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        again = open_store(root)
    gaps = again.check("t", 0, 9, include_open=True)
    assert {(gap.start, gap.stop) for gap in gaps} <= {(3, 6)}
    assert gaps


def test_a_release_of_several_trajectories_survives_whole_or_not_at_all(tmp_path: Path) -> None:
    """A crash before its answer leaves all of them or none, wherever the write was cut."""
    engine = Engine(tmp_path / "store")
    engine.register("run", [Site(0, "k", 64)])
    for name in "ab":
        engine.seal("run", "p", name, tokens=1, prompt_tokens=0).result()
    segment = next((tmp_path / "store").rglob("0*.open"))
    before = segment.stat().st_size
    assert engine.release("run", "p", ["a", "b"]).result() == 2
    left = shutil.copytree(tmp_path / "store", tmp_path / "left")  # the store seals its idle segment after 30 s
    seen = set()
    for cut in range(before, segment.stat().st_size + 1, 8):
        copy = tmp_path / f"cut-{cut}"
        shutil.copytree(left, copy)
        os.truncate(copy / segment.relative_to(tmp_path / "store"), cut)
        again = Engine(copy)
        with again.read("run", "p", [TokenSpan("a", 0, 1), TokenSpan("b", 0, 1, 1)], [0]) as read:
            assert not list(read)
        again.close()
        seen.add(tuple(gap.reason.name for gap in read.missing))
    engine.close()
    assert seen == {("NOT_RECORDED", "NOT_RECORDED"), ("RELEASED", "RELEASED")}


def test_a_segment_under_another_ones_name_is_set_aside(store: Any) -> None:
    """Under a higher number its rows would look as if they were written after a release that knew them."""
    store.append("t", 0, 9)
    store.engine.release("run", "step-1", ["t"]).result(30)
    store.engine.close()
    (path,) = store.segments()
    shutil.copy(path, path.with_name(path.name.replace("0000000000", "0000000007")))
    store.reopen()
    assert len(set_aside(store.root)) == 1
    assert store.reasons("t", 0, 9, include_open=True) == {MissingReason.RELEASED}
