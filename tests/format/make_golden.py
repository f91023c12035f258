"""Write the golden segments of format version 1: ``python tests/format/make_golden.py DIRECTORY``.

The committed files under ``golden/`` never change; a new format version adds files. Bytes differ between pyarrow and
zstd releases (padding of flatbuffers, choice of matches), so tests compare what the files say, not their bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from trace_store.checksum import RowKind, record_checksum, trajectory_seed
from trace_store.chunk import Chunk, RecordGroup
from trace_store.record import Site
from trace_store.segment.schema import SegmentHeader
from trace_store.segment.writer import ControlRow, SegmentWriter
from trace_store.testing.records import join_chunks, make_chunk

SMALL_TABLE = (Site(0, "moe_in", 16),)
TABLE = (
    Site(0, "k", 64, form="b1"),
    Site(0, "v", 64, form="b2"),
    Site(1, "moe_in", 64, form="b3"),
    Site(2, "moe_in", 4096, form="full", quantizer="fi-exact"),
    Site(3, "moe_in", 64, block=32, scale="e8m0"),
)


def small(directory: Path) -> None:
    """One record of one token, and its seal."""
    writer = SegmentWriter(directory, "small", SegmentHeader("run", "step", SMALL_TABLE, "server", 0))
    codes, scales, tensor = bytes([0b01000001, 0b10000000]), b"\x38", np.float32([0.5]).tobytes()
    checksum = record_checksum(trajectory_seed("run", "step", "t"), 0, 7, 0, 0, 1, codes, scales, tensor)
    group = RecordGroup("t", 0, 7, 0, 1, (0,), (False,), (checksum,))
    writer.append_chunk(Chunk((group,), *map(memoryview, (codes, scales, tensor))))
    writer.append_controls([(RowKind.SEAL, "t", 0, 0, 2, 1)])
    writer.seal()
    writer.close()


def _write_all(writer: SegmentWriter) -> None:
    def chunk(trajectory: str, start: int, stop: int, attempt: int = 0, version: int = 3) -> Chunk:
        return make_chunk("run é", "step/1", TABLE, trajectory, start, stop, attempt=attempt, policy_version=version)

    writer.append_chunk(join_chunks([chunk("a", 0, 5), chunk("b/ü", 0, 3)]))
    writer.append_chunk(chunk("a", 5, 9, version=4))
    known = (RowKind.KNOWN, "0123456789abcdef", 0, 2, 4, 0)
    writer.append_controls([known, (RowKind.SEAL, "a", 0, 2, 10, 9 * len(TABLE))])
    writer.append_chunk(chunk("b/ü", 0, 2, attempt=1))
    writer.append_controls([(RowKind.SEAL, "b/ü", 1, 0, 3, 2 * len(TABLE))])
    writer.append_chunk(chunk("gone", 0, 2))
    writer.append_controls([(RowKind.RELEASE, "gone", 0, 0, 0, 0)])
    writer.append_chunk(chunk("unsealed", 4, 6))


def forms(directory: Path) -> None:
    """Every form, both scale types, raw and compressed scales, several trajectories, attempts, a seal, a release."""
    writer = SegmentWriter(directory, "forms", SegmentHeader("run é", "step/1", TABLE, "server", 5))
    _write_all(writer)
    writer.seal()
    writer.close()


def unfinished(directory: Path) -> None:
    """The same rows in a segment that a crash left open, its last record batch torn."""
    writer = SegmentWriter(directory, "unfinished", SegmentHeader("run é", "step/1", TABLE, "server", 6), ".crashed")
    _write_all(writer)
    writer.close()
    content = writer.path.read_bytes()
    writer.path.write_bytes(content[:-100])


def copied(directory: Path) -> None:
    """The same rows in an open segment, one bit of its site table bad: the copy of the metadata says what it was."""
    writer = SegmentWriter(directory, "copied", SegmentHeader("run é", "step/1", TABLE, "server", 6), ".crashed")
    _write_all(writer)
    writer.close()
    content = bytearray(writer.path.read_bytes())
    content[content.index(b'"width":') + 9] ^= 1
    writer.path.write_bytes(content)


def manifest(directory: Path) -> None:
    """A registration."""
    writer = SegmentWriter(directory, "manifest", SegmentHeader("run é", "", TABLE, "server", 0))
    writer.seal()
    writer.close()


def several(directory: Path) -> None:
    """Three servers that know little of each other: unsealed rows, a seal, releases, in an order that names hide."""

    def write(name: str, server: str, *steps: Chunk | list[ControlRow]) -> None:
        header = SegmentHeader("run", "step", SMALL_TABLE, server, int(name[:10]))
        writer = SegmentWriter(directory / "several", name, header)
        for step in steps:
            if isinstance(step, Chunk):
                writer.append_chunk(step)
            else:
                writer.append_controls(step)
        writer.seal()
        writer.close()

    def chunk(trajectory: str, stop: int, seed: int) -> Chunk:
        return make_chunk("run", "step", SMALL_TABLE, trajectory, 0, stop, seed=seed)

    (directory / "several").mkdir(exist_ok=True)
    seal, release, known = RowKind.SEAL, RowKind.RELEASE, RowKind.KNOWN
    write("0000000000-aa", "a", chunk("cut", 3, 1), chunk("gone", 2, 1), [(seal, "gone", 0, 0, 3, 2)])
    write("0000000000-bb", "b", chunk("cut", 5, 2), chunk("anew", 2, 1), [(seal, "cut", 0, 0, 6, 5)])
    known_by_c = [(known, "aa", 0, 0, 1, 0), (known, "bb", 0, 0, 1, 0)]
    write("0000000001-cc", "c", [*known_by_c, (release, "gone", 0, 0, 0, 0), (release, "anew", 0, 0, 0, 0)])
    write("0000000001-bb", "b", chunk("anew", 4, 3), [(seal, "anew", 0, 0, 5, 4)])
    # After a release of the partition, which knew one of its segments: each segment that is written anew says so.
    write("0000000001-ee", "d", chunk("whole", 3, 4), [(seal, "whole", 0, 0, 4, 3)])
    anew = [(known, "ee", 0, 1, 2, 0), (release, "", 0, 0, 0, 0)]
    write("0000000002-dd", "d", anew, chunk("whole", 2, 5), [(seal, "whole", 0, 0, 3, 2)])
    write("0000000003-dd", "d", anew, chunk("next", 2, 6), [(seal, "next", 0, 0, 3, 2)])


def make_all(directory: Path) -> None:
    for make in (small, forms, unfinished, copied, manifest, several):
        make(directory)


if __name__ == "__main__":
    make_all(Path(sys.argv[1]))
