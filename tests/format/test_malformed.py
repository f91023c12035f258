"""One test per malformation of FORMAT.md section 9, named there."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard

from trace_store import Site, TokenSpan
from trace_store.errors import FormatError
from trace_store.planner import MissingReason
from trace_store.segment.heading import make_copy
from trace_store.segment.reader import open_sealed
from trace_store.segment.scan import Scan, scan_content, scan_segment
from trace_store.segment.schema import SegmentHeader, UnknownVersion, make_schema, metadata_checksum
from trace_store.segment.writer import SegmentWriter
from trace_store.testing.records import make_chunk

RECORDS = 30
ROWS = RECORDS + 4
"""Rows of forms.arrow without its index: the records, a known row, two seals, a release."""


@pytest.fixture
def content(golden: Path) -> bytearray:
    return bytearray((golden / "forms.arrow").read_bytes())


@pytest.fixture
def table(golden: Path) -> Any:
    return pa.ipc.open_file(golden / "forms.arrow").read_all()


@pytest.fixture
def put(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(raw: bytes) -> Path:
        path = tmp_path / "0000000005-x.arrow"
        path.write_bytes(raw)
        return path

    return write


def refused(path: Path, kind: type[FormatError] = FormatError) -> None:
    """Neither the index nor a scan opens it."""
    with pytest.raises(kind):
        open_sealed(path)
    with pytest.raises(kind):
        scan_segment(path)


def scanned(path: Path, rows: int) -> Scan:
    """The index does not open it, a scan finds so many rows."""
    with pytest.raises(FormatError):
        open_sealed(path)
    scan = scan_segment(path)
    assert len(scan.index) == rows
    return scan


def kept(path: Path, rows: int) -> Scan:
    """A scan finds so many rows; what it drops, a reader by the index gets as DataLoss (test_index_offset_wrong)."""
    scan = scan_segment(path)
    assert len(scan.index) == rows
    return scan


def rewritten(as_file: Any, table: Any, change: Callable[[list[dict[str, Any]]], None], **options: Any) -> Path:
    """The golden rows with a change, one record batch a row, as stock Arrow writes them."""
    rows = table.to_pylist()
    change(rows)
    batches = [pa.RecordBatch.from_pylist([row], schema=table.schema) for row in rows]
    return Path(as_file("changed.arrow", table.schema, batches, **options))


def with_metadata(as_file: Any, table: Any, change: dict[str, str | None], checksum: bool = True) -> Path:
    metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    metadata.update({key: value for key, value in change.items() if value is not None})
    metadata = {key: value for key, value in metadata.items() if change.get(key, "") is not None}
    if checksum:
        metadata["trace_store.checksum"] = metadata_checksum(metadata)
    schema = table.schema.with_metadata(metadata)
    return Path(as_file("changed.arrow", schema, table.cast(schema).to_batches()))


# -- the file


def test_no_magic(content: bytearray, put: Any) -> None:
    content[:8] = b"PARQUET1"
    content[-6:] = b"PARQUE"
    refused(put(content))


@pytest.mark.parametrize("flips", [1, 2])
def test_magic_damaged(golden: Path, put: Any, flips: int) -> None:
    content = bytearray((golden / "unfinished.crashed").read_bytes())
    whole = scan_segment(put(bytes(content)))
    content[4] ^= 1
    content[6] ^= flips - 1
    scan = scan_segment(put(bytes(content)))
    assert len(scan.index) == len(whole.index) > 0
    assert scan.damage == ["the magic in front is damaged"]
    content[0] ^= 1
    content[1] ^= flips - 1
    if flips == 2:
        refused(put(bytes(content)))


def test_zeros(put: Any) -> None:
    refused(put(bytes(10_000)))


def test_empty(put: Any) -> None:
    refused(put(b""))


@pytest.mark.parametrize("kept", [8, 12, 16, 40, 500])
def test_schema_cut(content: bytearray, put: Any, kept: int) -> None:
    refused(put(content[:kept]))


def open_segment(directory: Path) -> SegmentWriter:
    """Records of three trajectories behind each other, 40 KiB each, never sealed."""
    table = (Site(0, "k", 64), Site(1, "moe_in", 2048, form="full"))
    writer = SegmentWriter(directory, "0000000000-ab", SegmentHeader("run", "step/1", table, "server", 0))
    for name in "abc":
        writer.append_chunk(make_chunk("run", "step/1", table, name, 0, 40), compress=False)
    writer.close()
    return writer


def test_schema_flipped(tmp_path: Path) -> None:
    """One bad bit costs nothing, wherever it is in front of the first record batch."""
    writer = open_segment(tmp_path)
    content = writer.path.read_bytes()
    first = 16 + int.from_bytes(content[12:16], "little")
    whole = scan_content(bytearray(content), "whole", [])
    assert (len(whole.index), whole.damage) == (6, [])
    chance = random.Random(first)
    length = [(byte, bit) for byte in range(8, 16) for bit in range(8)]
    anywhere = [(chance.randrange(first), chance.randrange(8)) for _ in range(500)]
    for byte, bit in length + anywhere:
        changed = bytearray(content)
        changed[byte] ^= 1 << bit
        scan = scan_content(changed, "flipped", [])
        assert scan.header == writer.header, (byte, bit)
        assert scan.index.rows.tolist() == whole.index.rows.tolist(), (byte, bit)
        assert scan.torn_bytes == 0


@pytest.mark.parametrize("lost", [16, 700, 4096, 64 << 10])
def test_front_lost(tmp_path: Path, lost: int) -> None:
    """What lies behind a part that the disk cannot read is not lost with it."""
    writer = open_segment(tmp_path)
    content = bytearray(writer.path.read_bytes())
    content[:lost] = bytes(lost)
    scan = scan_content(content, "lost", [])
    assert scan.header == writer.header
    rows = writer.index.rows
    behind = rows["checksum"][rows["codes_offset"] >= lost].tolist()
    assert scan.index.rows["checksum"].tolist()[-len(behind) :] == behind != []
    assert scan.damage


def test_copy_flipped(tmp_path: Path) -> None:
    """A copy that is not whole is not believed; the one behind it may be."""
    writer = open_segment(tmp_path)
    content = bytearray(writer.path.read_bytes())
    content[40:60] = bytes(20)
    ((_, copy),) = make_copy(make_schema(writer.header)).items()
    assert content.count(copy) == 2
    for left in (1, 0):
        content[content.index(copy) + 30] ^= 1
        if left:
            assert scan_content(bytearray(content), "first", []).header == writer.header
    with pytest.raises(FormatError):
        scan_content(content, "both", [])


def test_foreign_arrow_file(as_file: Any) -> None:
    schema = pa.schema([("x", pa.int32())])
    refused(as_file("x.arrow", schema, [pa.record_batch([pa.array([1], pa.int32())], schema=schema)]))


def test_unknown_version(as_file: Any, table: Any) -> None:
    refused(with_metadata(as_file, table, {"trace_store.format": "3"}), UnknownVersion)


@pytest.mark.parametrize("key", ["format", "run", "partition", "server", "sequence", "sites"])
def test_metadata_flipped(as_file: Any, table: Any, key: str) -> None:
    key = f"trace_store.{key}"
    value = table.schema.metadata[key.encode()].decode()
    path = with_metadata(as_file, table, {key: chr(ord(value[0]) ^ 1) + value[1:]}, checksum=False)
    refused(path)
    with pytest.raises(FormatError, match="checksum"):
        scan_segment(path)


@pytest.mark.parametrize("key", ["format", "run", "partition", "server", "sequence", "sites", "checksum"])
def test_metadata_missing(as_file: Any, table: Any, key: str) -> None:
    refused(with_metadata(as_file, table, {f"trace_store.{key}": None}, checksum=key != "checksum"))


@pytest.mark.parametrize(
    "change", [{"form": "b9"}, {"width": 63}, {"block": 8}, {"scale": "fp8"}, {"extra": 1}, {"layer": -1}]
)
def test_site_table_invalid(as_file: Any, table: Any, change: dict[str, Any]) -> None:
    sites = json.loads(table.schema.metadata[b"trace_store.sites"])
    sites[0].update(change)
    refused(with_metadata(as_file, table, {"trace_store.sites": json.dumps(sites)}))
    refused(with_metadata(as_file, table, {"trace_store.sites": "{"}))
    refused(with_metadata(as_file, table, {"trace_store.sites": "[]"}))


def test_column_missing(as_file: Any, table: Any) -> None:
    for changed in (table.drop_columns(["site"]), table.rename_columns(["x", *table.schema.names[1:]])):
        changed = changed.replace_schema_metadata(table.schema.metadata)
        refused(as_file("changed.arrow", changed.schema, changed.to_batches()))


def test_column_type(as_file: Any, table: Any) -> None:
    changed = table.set_column(2, pa.field("attempt", pa.int64(), nullable=False), table["attempt"].cast(pa.int64()))
    refused(as_file("changed.arrow", changed.schema, changed.to_batches()))


# -- index and footer


def test_no_index(as_file: Any, table: Any) -> None:
    scan = scanned(rewritten(as_file, table, lambda rows: rows.pop()), ROWS)
    assert scan.damage == []
    with pytest.raises(FormatError):
        open_sealed(as_file("empty.arrow", table.schema, []))


def test_index_flipped(content: bytearray, table: Any, put: Any) -> None:
    place = content.index(table["codes"][-1].as_py())
    content[place + 3000] ^= 16
    scan = scanned(put(content), ROWS)
    assert len(scan.damage) == 1


def test_row_after_index(as_file: Any, table: Any) -> None:
    scanned(rewritten(as_file, table, lambda rows: rows.append(rows[0])), ROWS + 1)


def test_index_malformed(as_file: Any, table: Any, reader: Any) -> None:
    def with_blob(blob: bytes) -> Path:
        def change(rows: list[dict[str, Any]]) -> None:
            rows[-1]["codes"] = blob
            rows[-1]["checksum"] = checksum_of(reader, table, rows[-1])

        return rewritten(as_file, table, change)

    index = pa.ipc.open_stream(table["codes"][-1].as_py()).read_all()
    wild = pa.DictionaryArray.from_arrays(pa.array([9] * len(index), pa.int32()), pa.array(["a"]), safe=False)
    position = index.schema.get_field_index("trajectory")
    for other in (
        b"",
        b"no arrow stream",
        stream(index.drop_columns(["checksum"])),
        stream(index.set_column(position, "trajectory", wild)),
        stream(index.set_column(0, "kind", pa.array(["x"] * len(index)))),
    ):
        scanned(with_blob(other), ROWS)


@pytest.mark.parametrize("cut", [1, 6, 10, 100, 1200])
def test_footer_cut(content: bytearray, put: Any, cut: int) -> None:
    scan = scanned(put(content[:-cut]), ROWS)
    assert scan.damage == []


def test_footer_flipped(content: bytearray, put: Any) -> None:
    size = int.from_bytes(content[-10:-6], "little")
    for place in range(len(content) - size - 10, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 64
        path = put(changed)
        try:
            _, index = open_sealed(path)
        except FormatError:
            index = scan_segment(path).index
        assert len(index) == ROWS, place


# -- record batches and rows


def test_batch_header_flipped(content: bytearray, put: Any) -> None:
    start = content.index(b"\xff\xff\xff\xff", 16)
    for place in range(start, start + 64, 3):
        changed = bytearray(content)
        changed[place] ^= 0xFF
        scan = scan_segment(put(changed))
        assert ROWS - 10 <= len(scan.index) <= ROWS


@pytest.mark.parametrize("column", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
def test_row_flipped(as_file: Any, table: Any, column: int) -> None:
    name = table.schema.names[column]

    def change(rows: list[dict[str, Any]]) -> None:
        value = rows[3][name]
        if isinstance(value, bytes):
            rows[3][name] = bytes([value[0] ^ 4]) + value[1:]
        elif isinstance(value, str):
            rows[3][name] = "b"
        else:
            rows[3][name] = value ^ 1

    scan = kept(rewritten(as_file, table, change), ROWS - 1)
    assert len([line for line in scan.damage if "checksum" in line or "scales" in line]) == 1


def checksum_of(reader: Any, table: Any, row: dict[str, Any]) -> int:
    """A matching checksum for a changed row, by trying the independent reader's rule."""
    segment = reader.Segment({key.decode(): value.decode() for key, value in table.schema.metadata.items()}, [])
    found: list[int] = []

    class Any_(int):
        def __eq__(self, other: object) -> bool:
            found.append(int(other))  # type: ignore[call-overload]
            return True

        __hash__ = int.__hash__

    reader.verifies(segment, {**row, "checksum": Any_(0)})
    return found[0]


def stream(table: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


@pytest.mark.parametrize("case", ["longer", "two frames", "no size", "unknown", "cut"])
def test_scales_encoding(as_file: Any, table: Any, reader: Any, case: str) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        row = rows[3]
        raw = reader.decode_scales(row)
        pack = zstandard.ZstdCompressor(level=1)
        row["scales_encoding"] = 2 if case == "unknown" else 1
        row["scales"] = {
            "longer": pack.compress(raw + b"\0"),
            "two frames": pack.compress(raw[:100]) + pack.compress(raw[100:]),
            "no size": zstandard.ZstdCompressor(level=1, write_content_size=False).compress(raw),
            "unknown": raw,
            "cut": pack.compress(raw)[:-1],
        }[case]

    scan = kept(rewritten(as_file, table, change), ROWS - 1)
    assert len(scan.damage) == 1


def with_row(as_file: Any, table: Any, reader: Any, change: dict[str, Any]) -> Path:
    """A row that differs and has a checksum that fits."""

    def apply(rows: list[dict[str, Any]]) -> None:
        rows[0].update(change)
        rows[0]["checksum"] = checksum_of(reader, table, rows[0])

    return rewritten(as_file, table, apply)


def test_codes_size(as_file: Any, table: Any, reader: Any) -> None:
    codes = table["codes"][0].as_py()
    for other in (codes[:-1], codes + b"\0", b""):
        kept(with_row(as_file, table, reader, {"codes": other}), ROWS - 1)
    kept(with_row(as_file, table, reader, {"tensor_scales": bytes(8)}), ROWS - 1)


def test_site_unknown(as_file: Any, table: Any, reader: Any) -> None:
    for number in (5, 2**32 - 1):
        kept(with_row(as_file, table, reader, {"site": number}), ROWS - 1)


def test_span_empty(as_file: Any, table: Any, reader: Any) -> None:
    empty = {"codes": b"", "scales": b"", "tensor_scales": bytes(4), "scales_encoding": 0}
    for start, stop in ((3, 3), (4, 3)):
        kept(with_row(as_file, table, reader, {"start": start, "stop": stop, **empty}), ROWS - 1)


def test_nulls(as_file: Any, table: Any) -> None:
    schema = pa.schema([field.with_nullable(True) for field in table.schema], metadata=table.schema.metadata)
    rows = table.to_pylist()
    for position, name in enumerate(("codes", "trajectory", "checksum", "tensor_scales")):
        rows[position][name] = None
    batches = [pa.RecordBatch.from_pylist([row], schema=schema) for row in rows]
    scan = kept(as_file("nulls.arrow", schema, batches), ROWS - 4)
    assert len(scan.damage) == 4


def test_compressed_body(as_file: Any, table: Any) -> None:
    scan = scan_segment(rewritten(as_file, table, lambda rows: None, compression="zstd"))
    assert len(scan.index) < RECORDS
    assert scan.damage


def with_index(as_file: Any, table: Any, reader: Any, golden: Path, change: Callable[[Any], None]) -> Path:
    """The golden file, every row in its place, with a changed index that verifies."""
    source = pa.ipc.open_file(golden / "forms.arrow")
    batches = [source.get_batch(number) for number in range(source.num_record_batches)]
    index = pa.ipc.open_stream(table["codes"][-1].as_py()).read_all()
    entries = index.to_pylist()
    change(entries)
    row = batches[-1].to_pylist()[0]
    row["codes"] = stream(pa.Table.from_pylist(entries, schema=index.schema).combine_chunks())
    row["checksum"] = checksum_of(reader, table, row)
    return Path(as_file("index.arrow", table.schema, [*batches[:-1], pa.RecordBatch.from_pylist([row], table.schema)]))


@pytest.mark.parametrize(
    "change",
    [{"codes_offset": 2**40}, {"codes_offset": 2**64 - 8}, {"scales_bytes": 2**31}, {"tensor_bytes": 2**32 - 1}],
)
def test_index_offset_outside(as_file: Any, table: Any, reader: Any, golden: Path, change: dict[str, int]) -> None:
    scanned(with_index(as_file, table, reader, golden, lambda entries: entries[1].update(change)), ROWS)


def test_index_offset_wrong(as_file: Any, table: Any, reader: Any, open_engine: Any, golden: Path) -> None:
    def change(entries: list[dict[str, Any]]) -> None:
        entries[0]["codes_offset"] += 8
        entries[1]["scales_offset"] = 8
        entries[2]["tensor_bytes"] = 4
        entries[3]["codes_bytes"] -= 1

    engine = open_engine({"0000000005-a.arrow": with_index(as_file, table, reader, golden, change)})
    with engine.read("run é", "step/1", [TokenSpan("a", 0, 9)], range(5)) as read:
        delivered = {(piece.site, piece.dest_row) for piece in read}
        reasons = {(gap.site, gap.start, gap.stop): gap.reason for gap in read.missing}
    assert reasons == {(site, 0, 5): MissingReason.DATA_LOSS for site in range(4)}
    assert delivered == {(4, 0), *((site, 5) for site in range(5))}


def test_every_malformation_of_the_page_has_its_test_and_every_test_its_line() -> None:
    page = (Path(__file__).parents[2] / "trace_store" / "FORMAT.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page.split("## 9.")[1].split("## 10.")[0]))
    here = {name for name in globals() if name.startswith("test_") and not name.startswith("test_every")}
    assert named == here
