"""Sealed segments in a data directory that another process serves: opened by name, read and verified row by row.

For a client that sees the directory of its server. The directories of run and partition follow from their names, the
name of a segment is one name, and no link is followed: nothing outside of the directory can be opened.

Segments are read, not mapped: a disk that fails under a mapping kills the process, a training run, by SIGBUS, a failed
read costs its rows. A file is open during a read only, so that released segments do not stay on the disk.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trace_store.errors import DataLoss, InvalidRequest, TraceStoreError
from trace_store.fetch import OpenSegment
from trace_store.gather.gather import gather
from trace_store.gather.places import Places, file_order, select
from trace_store.naming import directory_name
from trace_store.planner import ReadPlan
from trace_store.record import Site
from trace_store.segment.index import SegmentIndex
from trace_store.segment.reader import open_source
from trace_store.segment.schema import SEALED_SUFFIX, SegmentHeader
from trace_store.storage.local import LocalSource, directory_identity

INDEX_ROWS_KEPT_MAX = 1_000_000
"""Rows of parsed indexes that are kept, 74 MB; one segment more than that is kept alone."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Column = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StoredRows:
    """Pieces as columns: rows [skip, skip + rows) of index row ``row`` in the ``segment``-th of some segments, for
    ``dest_row`` of ``site``."""

    segment: Column
    row: Column
    site: Column
    skip: Column
    rows: Column
    dest_row: Column


@dataclass(frozen=True)
class Target:
    """Memory that rows land in: row r of a site is at its offset plus r times its row bytes.

    ``offsets``: of codes, scales and tensor scales, by site number; -1 for a site without room.
    """

    memory: memoryview
    rows: int
    offsets: tuple[Column, Column, Column]


class SegmentDirectory:
    """A data directory. Thread-safe. ``identity`` tells it from every other one of this host."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Raises InvalidRequest where there is none."""
        self.path = Path(directory)
        try:
            self.identity = directory_identity(self.path)
            self._runs = os.open(self.path / "runs", _DIRECTORY)
        except OSError as error:
            raise InvalidRequest(
                f"no data directory of a server can be read there, data_dir={self.path} cause={error.strerror}",
                argument="data_dir",
            ) from None
        self._lock = threading.Lock()
        self._indexes: OrderedDict[tuple[str, str, str], tuple[SegmentHeader, SegmentIndex]] = OrderedDict()
        """By run, partition and name: the first segments of all partitions have the same name."""

    def close(self) -> None:
        """Give the directory back. May be called twice."""
        descriptor, self._runs = self._runs, -1
        if descriptor >= 0:
            os.close(descriptor)

    def read(
        self,
        run: str,
        partition: str,
        table: tuple[Site, ...],
        names: Sequence[str],
        pieces: StoredRows,
        target: Target,
    ) -> list[int]:
        """Read pieces of the segments ``names`` into their places; positions of those that could not be read or
        verified, whose bytes are then undefined.

        Raises:
            DataLoss: a piece leaves the target.
        """
        plan = _checked_plan(pieces, len(names), target)
        with ExitStack() as stack:
            segments: dict[int, OpenSegment] = {}
            for number, name in enumerate(names):
                with suppress(OSError, TraceStoreError):
                    opened = self._open(run, partition, name)
                    stack.callback(opened.source.close)
                    if (opened.header.run, opened.header.partition, opened.header.sites) == (run, partition, table):
                        segments[number] = opened
            good = _known(plan, segments)
            usable = file_order(select(plan, np.flatnonzero(good)), segments)
            undelivered = gather(usable, segments, target.memory, _places(usable, table, target))
        lost: list[int] = np.flatnonzero(~good).tolist()
        return lost + [int(usable.span[item.position]) for item in undelivered]

    def _open(self, run: str, partition: str, name: str) -> OpenSegment:
        """Raises OSError, TraceStoreError."""
        if os.path.basename(name) != name or "\0" in name or not name.endswith(SEALED_SUFFIX):
            raise DataLoss(f"the server names no segment, name={name!r}")
        with ExitStack() as stack:
            place = self._runs
            for directory in (directory_name(run), directory_name(partition)):
                place = os.open(directory, _DIRECTORY, dir_fd=place)
                stack.callback(os.close, place)
            source = LocalSource.of(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place), name)
        try:
            header, index = self._index((run, partition, name), source)
        except BaseException:
            source.close()
            raise
        return OpenSegment(source, name, header, index)

    def _index(self, key: tuple[str, str, str], source: LocalSource) -> tuple[SegmentHeader, SegmentIndex]:
        """Header and index of a segment. Its name is used once in its partition, and its content never changes."""
        with self._lock:
            known = self._indexes.get(key)
            if known is not None:
                self._indexes.move_to_end(key)
                return known
        found = open_source(source)
        with self._lock:
            self._indexes[key] = found
            rows = sum(len(index) for _, index in self._indexes.values())
            while rows > INDEX_ROWS_KEPT_MAX and len(self._indexes) > 1:
                rows -= len(self._indexes.popitem(last=False)[1][1])
        return found


def _checked_plan(pieces: StoredRows, segments: int, target: Target) -> ReadPlan:
    """The pieces as a plan whose ``span`` is the position of the piece. Raises DataLoss."""
    columns = (pieces.segment, pieces.row, pieces.site, pieces.skip, pieces.rows, pieces.dest_row)
    count = len(pieces.row)
    if any(len(column) != count for column in columns):
        raise DataLoss("stored rows are named by columns of unequal length")
    if count:
        offsets = target.offsets[0]
        if pieces.site.max() >= len(offsets) or (offsets[pieces.site] < 0).any():
            raise DataLoss("stored rows are named of a site that was not asked for")
        if pieces.segment.max() >= segments or (pieces.dest_row + pieces.rows).max() > target.rows:
            raise DataLoss(f"stored rows are named beyond the request, rows={target.rows}")
    return ReadPlan(*columns, np.arange(count), ())


def _known(plan: ReadPlan, segments: Mapping[int, OpenSegment]) -> npt.NDArray[np.bool_]:
    """Which pieces are rows of records in segments that are open."""
    good = np.zeros(len(plan.row), np.bool_)
    for number, segment in segments.items():
        of_segment = np.flatnonzero(plan.segment == number)
        inside = of_segment[plan.row[of_segment] < len(segment.index)]
        rows = segment.index.rows[plan.row[inside]]
        tokens = rows["stop"].astype(np.int64) - rows["start"]
        good[inside] = plan.skip[inside] + plan.rows[inside] <= tokens
    return good


def _places(plan: ReadPlan, table: Sequence[Site], target: Target) -> Places:
    """Where in the target's memory each piece lands."""

    def column(offsets: Column, row_bytes: Sequence[int]) -> Column:
        return offsets[plan.site] + plan.dest_row * np.array(row_bytes, np.int64)[plan.site]

    codes, scales, tensors = target.offsets
    return Places(
        column(codes, [site.code_bytes for site in table]),
        column(scales, [site.scale_bytes for site in table]),
        column(tensors, [4] * len(table)),
    )
