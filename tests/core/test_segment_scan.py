"""Scales in and out of zstd, and rows that do not fit what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import zstandard

from trace_store import Site
from trace_store.checksum import RowKind
from trace_store.errors import DataLoss
from trace_store.segment.index import ROW, SegmentIndex
from trace_store.segment.messages import MAGIC
from trace_store.segment.scan import decode_scales, scan_segment, verify_row
from trace_store.segment.schema import ENCODING_RAW, ENCODING_ZSTD, SegmentHeader, make_schema
from trace_store.segment.writer import SegmentWriter
from trace_store.testing.records import make_chunk

TABLE = (Site(0, "k", 2048), Site(0, "v", 64))
HEADER = SegmentHeader("run", "p", TABLE, "s", 0)
RAW = bytes(range(64)) * 16


def frame(content: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(content)


def test_scales_come_back() -> None:
    assert bytes(decode_scales(ENCODING_RAW, RAW, 1024)) == RAW
    assert bytes(decode_scales(ENCODING_ZSTD, frame(RAW), 1024)) == RAW


@pytest.mark.parametrize(
    ("encoding", "stored"),
    [
        (ENCODING_RAW, RAW[:-1]),
        (ENCODING_ZSTD, frame(RAW[:512]) + frame(RAW[512:])),
        (ENCODING_ZSTD, frame(RAW) + frame(b"")),
        (ENCODING_ZSTD, frame(RAW) + b"x"),
        (ENCODING_ZSTD, frame(RAW, write_content_size=False)),
        (ENCODING_ZSTD, zstandard.ZstdCompressor().compressobj().compress(RAW)),
        (ENCODING_ZSTD, frame(RAW)[: len(frame(RAW)) // 2]),
        (ENCODING_ZSTD, frame(RAW + b"x")),
        (ENCODING_ZSTD, b""),
        (ENCODING_ZSTD, RAW),
        (2, RAW),
    ],
)
def test_fr25_anything_but_one_whole_frame_of_the_right_size_is_damage(encoding: int, stored: bytes) -> None:
    with pytest.raises(DataLoss):
        decode_scales(encoding, stored, 1024)


def test_a_frame_that_claims_a_huge_size_is_refused_before_memory_is_taken() -> None:
    huge = bytearray(frame(bytes(300)))
    assert huge[4] & 0xC0 == 0x40  # two bytes of content size
    huge[5:7] = b"\xff\xff"
    with pytest.raises(DataLoss, match="another size"):
        decode_scales(ENCODING_ZSTD, bytes(huge), 300)


@pytest.mark.parametrize("field", ["kind", "attempt", "policy_version", "site", "start", "stop", "checksum"])
def test_a_row_under_another_key_is_damage(field: str, tmp_path: Path) -> None:
    chunk = make_chunk("run", "p", TABLE, "t", 0, 4, sites=[1])
    row = np.zeros(1, ROW)[0]
    row["stop"], row["checksum"], row["site"] = 4, chunk.groups[0].checksums[0], 1
    parts = (chunk.codes, chunk.scales, chunk.tensor_scales)
    verify_row(HEADER, row, "t", *parts)
    with pytest.raises(DataLoss):
        verify_row(HEADER, row, "u", *parts)
    row[field] += 1
    with pytest.raises(DataLoss):
        verify_row(HEADER, row, "t", *parts)


def test_a_compressed_or_nullable_batch_is_not_taken_for_ours(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, "0", HEADER)
    writer.append_chunk(make_chunk("run", "p", TABLE, "t", 0, 64))
    writer.close()
    scan = scan_segment(writer.path)
    batch = scan.batches[0].replace_schema_metadata(make_schema(HEADER).metadata)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    nulls = pa.RecordBatch.from_arrays(
        [pa.nulls(2, column.type) if position == 7 else column[:2] for position, column in enumerate(batch.columns)],
        schema=batch.schema,
    )
    for number, (other, how) in enumerate(((batch, options), (nulls, pa.ipc.IpcWriteOptions()))):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema, options=how) as stream:
            stream.write_batch(other)
        path = tmp_path / f"{number}.open"
        path.write_bytes(MAGIC + bytes(sink.getvalue()))
        found = scan_segment(path)
        assert len(found.index) == 0
        assert len(found.damage) >= 1


def test_an_index_comes_back_from_its_bytes() -> None:
    index = SegmentIndex()
    for number in range(200):
        row = np.zeros(1, ROW)
        row["trajectory"], row["start"], row["checksum"] = (
            index.trajectory_number(f"t{number % 7}"),
            number,
            2**63 + number,
        )
        index.extend(row)
    index.seal()
    again = SegmentIndex.from_bytes(index.to_bytes(), "s", 1000)
    assert again.rows.tolist() == index.rows.tolist()
    assert again.trajectories == index.trajectories == [f"t{number}" for number in range(7)]


def test_a_zeroed_message_length_is_no_end_of_stream(tmp_path: Path) -> None:
    """Marker and four zero bytes also end a stream; only a footer behind them says that they do."""
    writer = SegmentWriter(tmp_path, "segment", HEADER)
    starts = []
    for name in ("a", "b", "c"):
        starts.append(writer.written_bytes)
        writer.append_controls([(RowKind.SEAL, name, 0, 0, 1, 0)])
    writer.close()
    content = bytearray(writer.path.read_bytes())
    content[starts[1] + 4 : starts[1] + 8] = bytes(4)
    writer.path.write_bytes(content)
    scan = scan_segment(writer.path)
    kept = [scan.index.trajectories[number] for number in scan.index.rows["trajectory"]]
    assert kept == ["a", "c"]
    assert len(scan.damage) == 1
