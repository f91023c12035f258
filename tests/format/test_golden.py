"""Golden segments: read by the engine, by stock Arrow and by a reader that knows FORMAT.md alone, with one result."""

from __future__ import annotations

import ast
import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard

from trace_store import codebook
from trace_store.engine import Engine
from trace_store.naming import directory_name
from trace_store.segment.reader import open_sealed
from trace_store.segment.scan import scan_segment
from trace_store.testing.records import make_rows

NAMES = ["a", "b/ü", "gone", "unsealed"]


def test_the_small_one_holds_what_the_hex_dump_says(golden: Path, reader: Any) -> None:
    rows = reader.read_segment(golden / "small.arrow").rows
    assert [row["kind"] for row in rows] == [0, 1, 3]
    assert (rows[0]["codes"], rows[0]["scales"], rows[0]["policy_version"]) == (b"\x41\x80", b"\x38", 7)
    assert rows[0]["checksum"] == 0xBB110A916BF7174C
    assert (rows[1]["start"], rows[1]["stop"], rows[1]["policy_version"]) == (0, 2, 1)
    page = (Path(__file__).parents[2] / "trace_store" / "FORMAT.md").read_text()
    content = (golden / "small.arrow").read_bytes()
    lines = [line for line in page.split("## 12.")[1].split("```")[1].splitlines() if line]
    for line in lines:
        shown = bytes.fromhex(line[10:57])
        assert content[int(line[:8], 16) :][: len(shown)] == shown, line
    assert len(lines) == 16


def test_the_worked_example_of_bit_packing_is_right() -> None:
    codes = np.array([[1, 0, 2, 0, 4, 0, 3, 0, 6, 8, 0, 0, 0, 0, 0, 15]], np.uint8)
    assert codebook.pack(codes, bits=3).tobytes().hex(" ") == "41 80 44 81 10 81"


def test_the_independent_reader_agrees_with_the_engine(
    golden: Path, reader: Any, open_engine: Any, read_all: Any
) -> None:
    segment = reader.read_segment(golden / "forms.arrow")
    assert segment.bad_rows == 0
    expected = reader.visible([segment])
    engine = open_engine({"0000000005-a.arrow": golden / "forms.arrow"})
    assert read_all(engine, NAMES, 20) == expected
    assert {key[0] for key in expected} == {"a", "b/ü"}
    assert len(expected) == 9 * 5 + 2 * 5
    for number, site in enumerate(engine.sites("run é")):
        codes, scales, tensor = make_rows(site, number, "b/ü", 1, 0, 2)
        assert expected[("b/ü", site.name, 1)] == (codes[1].tobytes(), scales[1].tobytes(), tensor[1])


def test_an_unfinished_segment_gives_all_but_the_torn_batch(
    golden: Path, reader: Any, open_engine: Any, read_all: Any
) -> None:
    segment = reader.read_segment(golden / "unfinished.crashed")
    expected = reader.visible([segment])
    engine = open_engine({"0000000006-a.open": golden / "unfinished.crashed"})
    assert read_all(engine, NAMES, 20) == expected == reader.visible([reader.read_segment(golden / "forms.arrow")])
    assert not [row for row in segment.rows if row["trajectory"] == "unsealed"]


def test_a_segment_whose_schema_is_damaged_says_what_it_is_in_a_copy(
    golden: Path, reader: Any, open_engine: Any, read_all: Any
) -> None:
    with pytest.raises(ValueError, match="checksum"):
        reader.read_segment(golden / "copied.crashed")
    engine = open_engine({"0000000006-a.open": golden / "copied.crashed"})
    assert read_all(engine, NAMES, 20) == reader.visible([reader.read_segment(golden / "forms.arrow")])
    (sealed,) = engine.root.rglob("0000000006-a.arrow")
    with pa.ipc.open_file(sealed) as file:
        batch = file.get_batch_with_custom_metadata(0)
        schema = file.schema
    packed = base64.b64decode(batch.custom_metadata[b"trace_store.copy"])
    copy = json.loads(zstandard.ZstdDecompressor().decompress(packed))
    assert {key.encode(): value.encode() for key, value in copy.items()} == schema.metadata


def test_records_are_found_through_the_index(golden: Path, reader: Any) -> None:
    rows = [row for row in reader.read_segment(golden / "forms.arrow").rows if row["kind"] == 0]
    assert reader.read_by_index(golden / "forms.arrow") == rows


def test_stock_arrow_opens_it(golden: Path) -> None:
    with pa.ipc.open_file(golden / "forms.arrow") as file:
        table = file.read_all()
    table.validate(full=True)
    assert set(table["scales_encoding"].to_pylist()) == {0, 1}
    assert table["kind"].to_pylist().count(0) == 30
    assert table["trajectory"].to_pylist()[0] == "a"


def test_a_manifest_registers_the_run(golden: Path, tmp_path: Path) -> None:
    directory = tmp_path / "data" / "runs" / directory_name("run é")
    directory.mkdir(parents=True)
    shutil.copy(golden / "manifest.arrow", directory / "manifest-a.arrow")
    engine = Engine(tmp_path / "data")
    assert [site.form for site in engine.sites("run é")] == ["b1", "b2", "b3", "full", "b1"]
    engine.close()


def test_the_independent_reader_agrees_on_what_several_servers_wrote(
    golden: Path, reader: Any, open_engine: Any, read_all: Any
) -> None:
    paths = sorted((golden / "several").iterdir())
    expected = reader.visible([reader.read_segment(path) for path in paths])
    engine = open_engine({path.name: path for path in paths}, "run", "step")
    assert read_all(engine, ["cut", "gone", "anew", "whole", "next"], 20, "run", "step") == expected
    site = engine.sites("run")[0]
    for name, tokens, seed in (("cut", 5, 2), ("anew", 4, 3), ("whole", 2, 5), ("next", 2, 6)):
        codes = make_rows(site, 0, name, 0, 0, tokens, seed=seed)[0]
        assert [expected.pop((name, site.name, n))[0] for n in range(tokens)] == [row.tobytes() for row in codes]
    assert expected == {}


def test_files_of_version_1_say_what_they_said(golden: Path, reader: Any, open_engine: Any, read_all: Any) -> None:
    """There a seal speaks of all rows with lower names, whoever wrote them."""
    old = golden / "version-1" / "forms.arrow"
    engine = open_engine({"0000000005-bb.arrow": old})
    segment = reader.read_segment(old)
    assert segment.metadata["trace_store.format"] == "1"
    assert read_all(engine, NAMES, 20) == reader.visible([segment])
    assert len(reader.visible([segment])) == 9 * 5 + 2 * 5


@pytest.mark.parametrize("name", ["small.arrow", "forms.arrow", "unfinished.crashed", "manifest.arrow"])
def test_todays_writer_says_the_same(name: str, golden: Path, tmp_path: Path, make_golden: Any, reader: Any) -> None:
    make_golden.make_all(tmp_path)
    old, new = reader.read_segment(golden / name), reader.read_segment(tmp_path / name)
    assert old.metadata == new.metadata

    def decoded(segment: Any) -> list[Any]:
        return [
            {**row, "scales": reader.decode_scales(row), "scales_encoding": None}
            for row in segment.rows
            if row["kind"] != 3
        ]

    assert decoded(old) == decoded(new)
    if name.endswith(".arrow"):
        assert open_sealed(golden / name)[0] == open_sealed(tmp_path / name)[0]
    assert scan_segment(golden / name).damage == []


def test_the_independent_reader_is_short_and_imports_nothing_of_ours() -> None:
    source = (Path(__file__).parent / "independent_reader.py").read_text()
    assert len(source.splitlines()) < 150
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not [name for name in names if name.startswith("trace_")]
