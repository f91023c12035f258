"""Reads of sealed segments by the client, in the server's data directory: the same bytes, and nothing beyond it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trace_client
from tests.integration.bulk import open_segments
from trace_client.microbatch import Buffers
from trace_client.segment_files import SegmentFiles
from trace_store.errors import InvalidRequest
from trace_store.segment.reader import open_sealed
from trace_store.segment_directory import SegmentDirectory
from trace_store.v1 import trace_store_service_pb2 as service_pb2

TRAJECTORIES, TOKENS = 6, 40


@pytest.fixture
def filled(new_server: Callable[..., Any], records: Any, sites: Any) -> Any:
    """A server with a sealed segment of four trajectories and an open one of two more; the last lacks rows."""
    server = new_server().start()
    for first, last in ((0, 4), (4, TRAJECTORIES)):
        with trace_client.connect(server.address) as client:
            client.register("r", sites)
            with client.writer("r", "p", "written") as writer:
                for number in range(first, last):
                    for start in range(0, TOKENS, 8):
                        if number < 5 or start:
                            writer.append(f"t{number}", start, records(8, seed=100 * number + start))
                    writer.seal(f"t{number}", tokens=TOKENS + 1, prompt_tokens=0, allow_holes=True)
        if first == 0:
            assert server.terminate() == 0
            server.start()
    return server


def segments(server: Any) -> list[Path]:
    return sorted(path for path in server.data.glob("runs/*/*/*.arrow") if "manifest" not in path.name)


def random_spans(chance: random.Random) -> list[tuple[str, int, int, int]]:
    """Spans with holes between their places, in any order."""
    spans, row = [], 0
    for _ in range(12):
        start = chance.randrange(TOKENS - 1)
        stop = chance.randrange(start + 1, TOKENS + 1)
        row += chance.randrange(3)
        spans.append((f"t{chance.randrange(TRAJECTORIES + 1)}", start, stop, row))
        row += stop - start
    chance.shuffle(spans)
    return spans


def assert_same(one: Any, other: Any) -> None:
    for site, valid in one.valid.items():
        assert (valid == other.valid[site]).all()
        assert (np.isnan(other.tensor_scales[site]) == ~valid).all()
        for rows in ("planes", "scales", "tensor_scales"):
            assert (getattr(one, rows)[site][valid] == getattr(other, rows)[site][valid]).all()
    assert set(one.missing) == set(other.missing)
    assert len(one.missing) == len(other.missing)


@pytest.fixture
def read_there(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Counts, for each answer that named stored rows: pieces, and pieces that had to be asked for again."""
    seen: list[tuple[int, int]] = []
    read = SegmentFiles.read

    def spy(self: SegmentFiles, *arguments: Any) -> Any:
        rows, again = read(self, *arguments)
        seen.append((len(rows.row), len(again)))
        return rows, again

    monkeypatch.setattr(SegmentFiles, "read", spy)
    return seen


@pytest.mark.parametrize("arena", ["required", "off"])
def test_random_reads_give_the_same_bytes_as_the_server(
    filled: Any, sites: Any, chance: random.Random, read_there: list[tuple[int, int]], arena: str
) -> None:
    with (
        trace_client.connect(filled.address, arena=arena) as plain,
        trace_client.connect(filled.address, arena=arena, data_dir=filled.data) as client,
    ):
        assert plain.describe()["reads"] == plain.describe()["path"]
        assert client.describe()["reads"] == "files"
        assert str(filled.data) in client.describe()["reads_reason"]
        there, here, buffers = client.reader("r", "p"), plain.reader("r", "p"), Buffers()
        before = open_segments(os.getpid())  # of servers that earlier tests ran in this process
        for _ in range(25):
            spans, chosen = random_spans(chance), chance.sample(sites, chance.randrange(1, len(sites) + 1))
            assert_same(here.read(spans, chosen), there.read(spans, chosen, out=buffers))
        assert sum(pieces for pieces, _ in read_there) > 500
        assert not any(again for _, again in read_there)
        assert open_segments(os.getpid()) <= before, "a released segment would stay on the disk"
        assert there.read([("t5", 8, 16)]).valid[sites[0]].all(), "the open segment comes from the server"


def flip(path: Path, row: int) -> str:
    """Flip a bit of the codes of a record; its trajectory."""
    index = open_sealed(path)[1]
    with open(path, "r+b") as file:
        file.seek(int(index.rows["codes_offset"][row]))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return index.trajectories[int(index.rows["trajectory"][row])]


@pytest.mark.parametrize("arena", ["required", "off"])
def test_a_flipped_bit_costs_the_rows_of_its_record(filled: Any, sites: Any, arena: str) -> None:
    spans = [(f"t{number}", 0, TOKENS, TOKENS * number) for number in range(4)]
    with trace_client.connect(filled.address, arena=arena, data_dir=filled.data) as client:
        before = client.reader("r", "p").read(spans)
        planes = {site: before.planes[site].copy() for site in sites}
        del before
        index = open_sealed(segments(filled)[0])[1]
        row = next(row for row in range(len(index)) if index.rows["site"][row] == 2 and index.rows["start"][row] == 16)
        name = flip(segments(filled)[0], row)
        batch = client.reader("r", "p").read(spans)
        assert "came from the server" in client.describe()["reads_reason"]
    assert [(m.trajectory, m.site, m.start, m.stop, m.reason) for m in batch.missing] == [
        (name, sites[2], 16, 24, "data loss")
    ]
    first = TOKENS * int(name[1:]) + 16
    for site in sites:
        valid = np.ones(4 * TOKENS, bool)
        valid[first : first + 8] = site != sites[2]
        assert (batch.valid[site] == valid).all()
        assert (batch.planes[site][valid] == planes[site][valid]).all()
        assert (np.isnan(batch.tensor_scales[site]) == ~valid).all()


def test_a_release_between_the_answer_and_the_read_is_said_to_be_one(
    filled: Any, sites: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = SegmentFiles.read
    with trace_client.connect(filled.address, data_dir=filled.data) as client:

        def late(self: SegmentFiles, *arguments: Any) -> Any:
            client.release("r", "p")
            return read(self, *arguments)

        monkeypatch.setattr(SegmentFiles, "read", late)
        batch = client.reader("r", "p").read([("t0", 0, TOKENS)])
    assert not any(batch.valid[site].any() for site in sites)
    assert {(rows.start, rows.stop) for rows in batch.missing} == {(0, TOKENS)}
    assert {rows.reason for rows in batch.missing} <= {"released", "unknown trajectory"}


def test_what_the_client_cannot_open_comes_from_the_server(
    filled: Any, monkeypatch: pytest.MonkeyPatch, read_there: list[tuple[int, int]]
) -> None:
    spans = [(f"t{number}", 3, TOKENS, TOKENS * number) for number in range(TRAJECTORIES)]
    with (
        trace_client.connect(filled.address) as plain,
        trace_client.connect(filled.address, data_dir=filled.data) as client,
    ):

        def refuse(*arguments: Any) -> Any:
            raise PermissionError(13, "permission denied")

        monkeypatch.setattr(SegmentDirectory, "_open", refuse)
        assert_same(plain.reader("r", "p").read(spans), client.reader("r", "p").read(spans))
        assert "came from the server" in client.describe()["reads_reason"]
    assert [pieces > 0 and again > 0 for pieces, again in read_there] == [True]


def test_every_partition_is_read_from_its_own_files(
    new_server: Callable[..., Any], sites: Any, records: Any, read_there: list[tuple[int, int]]
) -> None:
    """The first segments of all partitions have one name."""
    server = new_server().start()
    steps = [f"step-{number}" for number in range(3)]
    with trace_client.connect(server.address) as client:
        client.register("r", sites)
        for number, step in enumerate(steps):
            with client.writer("r", step) as writer:
                writer.append("t", 0, records(8, seed=number))
                writer.seal("t", tokens=9, prompt_tokens=0)
    assert server.terminate() == 0  # seals the open segments
    server.start()
    with trace_client.connect(server.address, data_dir=server.data) as client:
        for _ in range(2):
            for number, step in enumerate(steps):
                batch = client.reader("r", step).read([("t", 0, 8)])
                for site, (planes, _, _) in records(8, seed=number).items():
                    assert (batch.planes[site] == planes).all()
    assert len(read_there) == 6
    assert all(pieces > 0 and again == 0 for pieces, again in read_there)


def test_a_foreign_directory_is_refused(filled: Any, new_server: Callable[..., Any], tmp_path: Path) -> None:
    other = new_server().start()
    with pytest.raises(InvalidRequest, match="not the data directory of the server") as caught:
        trace_client.connect(filled.address, data_dir=other.data)
    assert caught.value.argument == "data_dir"
    with pytest.raises(InvalidRequest, match="no data directory") as caught:
        trace_client.connect(filled.address, data_dir=tmp_path / "nowhere")
    assert caught.value.argument == "data_dir"


def test_a_server_can_name_segments_of_the_partition_and_nothing_else(filled: Any, sites: Any) -> None:
    segment = segments(filled)[0]
    os.link(segment, segment.parents[1] / segment.name)
    (segment.parent / "linked.arrow").symlink_to(segment.name)
    buffers, files = Buffers(), SegmentFiles(filled.data)

    def is_read(name: str) -> bool:
        stored = service_pb2.StoredPieces(
            segments=[name], segment=[0], index_rows=[0], sites=[0], skip=[0], rows=[8], dest_rows=[0], spans=[0]
        )
        return not files.read("r", "p", sites, buffers.microbatch(sites, 8), stored)[1]

    assert is_read(segment.name)
    for name in ("../{0}", "{0}/../{0}", "/etc/passwd.arrow", "..", "", "{0}\0", "linked.arrow", "passwd", "./{0}"):
        assert not is_read(name.format(segment.name)), name
    files.close()
