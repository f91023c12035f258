"""What the writer leaves on disk: a file for stock Arrow when sealed, a recoverable stream before."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from trace_store import Site
from trace_store.checksum import RowKind
from trace_store.errors import StorageFailed, StorageFull
from trace_store.segment import reserve
from trace_store.segment.align import ALIGN_BYTES
from trace_store.segment.heading import make_copy
from trace_store.segment.reader import open_sealed
from trace_store.segment.scan import scan_segment
from trace_store.segment.schema import COLUMNS, SegmentHeader, make_schema
from trace_store.segment.writer import SegmentWriter
from trace_store.testing.records import join_chunks, make_chunk

TABLE = (Site(0, "k", 2048), Site(0, "moe_in", 64, block=32, scale="e8m0", form="full"))
HEADER = SegmentHeader("run", "p", TABLE, "server", 7)


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    made = SegmentWriter(tmp_path, "0000000007-e", HEADER)
    yield made
    made.close()


def chunk(start: int, stop: int, trajectory: str = "t") -> Any:
    return make_chunk("run", "p", TABLE, trajectory, start, stop)


def test_stock_arrow_opens_a_sealed_segment(writer: SegmentWriter) -> None:
    made = join_chunks([chunk(0, 4), chunk(4, 9)])
    writer.append_chunk(made)
    writer.append_controls([(RowKind.SEAL, "t", 0, 2, 10, 18)])
    path = writer.seal()
    assert path.name == "0000000007-e.arrow"
    with pa.ipc.open_file(path) as file:
        table = file.read_all()
    table.validate(full=True)
    assert table.schema.names == [name for name, _ in COLUMNS]
    assert table["kind"].to_pylist() == [0, 0, 0, 0, 1, 3]
    assert b"".join(table["codes"].to_pylist()[:4]) == bytes(made.codes)
    assert table["tensor_scales"].to_pylist()[0] == bytes(made.tensor_scales[:16])
    assert 1 in table["scales_encoding"].to_pylist()


def test_the_index_of_a_sealed_segment_is_that_of_its_scan(writer: SegmentWriter) -> None:
    for number in range(5):
        writer.append_chunk(chunk(3 * number, 3 * number + 3, f"t{number % 2}"))
    writer.append_controls([(RowKind.RELEASE, "t1", 0, 0, 0, 0)])
    open_scan = scan_segment(writer.path)
    path = writer.seal()
    header, index = open_sealed(path)
    scan = scan_segment(path)
    assert header == HEADER
    for other in (open_scan.index, scan.index, writer.index):
        assert other.rows.tolist() == index.rows.tolist()
        assert other.trajectories[:2] == index.trajectories
    assert (scan.damage, scan.torn_bytes, open_scan.torn_bytes) == ([], 0, 0)
    content = path.read_bytes()
    row = index.rows[2]
    assert content[row["codes_offset"] :][: row["codes_bytes"]] == bytes(chunk(3, 6, "t1").codes)[: row["codes_bytes"]]


def test_a_failed_write_leaves_the_file_as_it_was(writer: SegmentWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.append_chunk(chunk(0, 4))
    before = writer.path.read_bytes()
    real = os.writev

    def fill_up(descriptor: int, parts: Any) -> int:
        if len(parts) > 1:
            return real(descriptor, parts[:1])
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", fill_up)
        with pytest.raises(StorageFull):
            writer.append_chunk(chunk(4, 8))
    assert writer.path.read_bytes() == before
    assert len(writer.index) == 2
    with pytest.raises(StorageFull):
        writer.append_chunk(chunk(4, 8))
    writer.sync()


def test_a_failed_sync_is_final(writer: SegmentWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.append_chunk(chunk(0, 4))

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(StorageFailed):
            writer.sync()
    for call in (writer.sync, writer.seal, lambda: writer.append_chunk(chunk(4, 8))):
        with pytest.raises(StorageFailed):
            call()


def test_fr26_the_order_is_write_sync_rename_sync_of_the_directory(
    writer: SegmentWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("writev", "fdatasync", "rename", "fsync"):
        real = getattr(os, name)

        def call(*arguments: Any, _name: str = name, _real: Any = real) -> Any:
            calls.append(_name)
            return _real(*arguments)

        monkeypatch.setattr(os, name, call)
    writer.append_chunk(chunk(0, 4))
    writer.seal()
    assert calls == ["writev", "writev", "fdatasync", "rename", "fsync"]


def test_a_segment_is_never_written_over(tmp_path: Path, writer: SegmentWriter) -> None:
    with pytest.raises(StorageFailed, match="file exists"):
        SegmentWriter(tmp_path, "0000000007-e", HEADER)


def test_short_or_incompressible_scales_stay_raw(writer: SegmentWriter) -> None:
    writer.append_chunk(chunk(0, 1))
    assert set(writer.index.rows["scales_encoding"].tolist()) == {0}


def test_room_is_reserved_behind_a_long_segment_and_given_back(writer: SegmentWriter) -> None:
    """The length never shows it, and a sealed segment takes no more blocks than its bytes do."""
    reserved = 0
    while not reserved and writer.written_bytes < 16 << 20:
        writer.append_chunk(chunk(writer.written_bytes, writer.written_bytes + 4_000), compress=False)
        status = os.stat(writer.path)
        assert status.st_size == writer.written_bytes
        reserved = max(0, status.st_blocks * 512 - status.st_size - (1 << 20))
    if not reserved:
        pytest.skip("the file system of the tests reserves nothing")
    path = writer.seal()
    status = os.stat(path)
    assert status.st_size == writer.written_bytes
    assert status.st_blocks * 512 < status.st_size + (64 << 10)


def test_a_short_segment_reserves_nothing(writer: SegmentWriter) -> None:
    writer.append_chunk(chunk(0, 1_000), compress=False)
    status = os.stat(writer.path)
    assert status.st_blocks * 512 < status.st_size + (64 << 10)


def test_where_nothing_can_be_reserved_writes_go_on(writer: SegmentWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def full(descriptor: int, offset: int, length: int) -> bool:
        tries.append(length)
        return False

    monkeypatch.setattr(reserve, "_fallocate", full)
    for start in range(0, 20_000, 4_000):
        writer.append_chunk(chunk(start, start + 4_000), compress=False)
    assert len(tries) == 1, "asked once a file"
    _, index = open_sealed(writer.seal())
    assert index.records == 10


@pytest.mark.parametrize("compress", [True, False])
def test_codes_start_where_copies_are_fast(writer: SegmentWriter, compress: bool) -> None:
    """At multiples of 64, whatever stands before them: names, numbers of records, controls, scales of any length."""
    with_copy = len(make_copy(make_schema(HEADER))) * 2  # header space of two batches belongs to the metadata's copy
    for number in range(200):
        writer.append_chunk(chunk(3 * number, 3 * number + 1 + number % 3, "t" * (1 + number % 7)), compress)
        if number % 5 == 0:
            writer.append_controls([(RowKind.KNOWN, "e" * (1 + number % 11), 0, 0, 1, 0)])
    records = writer.index.rows[writer.index.rows["kind"] == RowKind.RECORD]
    first_of_batch = records["codes_offset"][records["site"] == 0]
    assert len(first_of_batch) == 200
    assert (first_of_batch % ALIGN_BYTES != 0).sum() <= with_copy
