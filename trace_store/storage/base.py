"""Where the bytes of a segment are read from: the one interface that files and objects share.

A ``Source`` is one immutable segment, opened; it stays readable until it is closed, whatever happens to the segment
meanwhile. Its ``ReadShape`` says what reading costs there, so that the planner of reads joins ranges accordingly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from trace_store.errors import StorageFailed

Range = tuple[int, int]
"""Half-open byte range of a segment."""


class SegmentGone(StorageFailed):
    """The segment was released, here or by another server. Stays inside: a read reports its rows as released."""


@dataclass(frozen=True)
class ReadShape:
    """How ranges of a source are best read.

    Attributes:
        run_bytes_max: longest single read.
        gap_bytes_max: a hole up to this size is read over rather than asked for around.
        remote: whether a read is a round trip, so that a caller should name all ranges it needs in one call.
    """

    run_bytes_max: int
    gap_bytes_max: int
    remote: bool


class Source(Protocol):
    """An opened segment. Methods may be called from any thread, one at a time."""

    name: str
    shape: ReadShape

    @property
    def descriptor(self) -> int:
        """File descriptor when the bytes are on a local disk, else -1."""

    def size(self) -> int:
        """Bytes of the segment.

        Raises:
            StorageFailed: it cannot be asked.
        """

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset``.

        Raises:
            StorageFailed: the medium failed or the segment ends too early.
            SegmentGone: the segment was released, by this server or another one.
        """

    def read_ranges(self, ranges: Sequence[Range]) -> list[memoryview]:
        """Bytes of several ranges, in order; the same errors as ``read_into``."""

    def close(self) -> None:
        """Give back what the source holds. May be called twice."""
