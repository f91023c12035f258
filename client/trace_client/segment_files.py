"""Sealed segments of a server on this host, read by the client itself in the server's data directory.

The server says which rows of which segments; the client opens them below the directory that its caller named and
nowhere else: the directories of run and partition follow from the names that were asked for, the name of a segment is
one name, and no link is followed. Every record is verified before its rows count. What cannot be opened, read or
verified is asked of the server again, which has other copies and knows what was released in the meantime.

Segments are read, not mapped: a disk that fails under a mapping kills the process, a training run, by SIGBUS, a failed
read costs its rows. A file is open during a read only, so that released segments do not stay on the disk.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trace_client.microbatch import Microbatch
from trace_store.errors import DataLoss, InvalidRequest, TraceStoreError
from trace_store.fetch import OpenSegment
from trace_store.gather import Places, file_order, gather, select
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

Piece = tuple[int, int]
"""Position of a span in the request, number of a site."""


class SegmentFiles:
    """A data directory. Thread-safe.

    Attributes:
        reason: one line for a person on how reads go.
    """

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
        self.reason = f"the client reads sealed segments in {self.path}"
        self._lock = threading.Lock()
        self._indexes: OrderedDict[str, tuple[SegmentHeader, SegmentIndex]] = OrderedDict()

    def close(self) -> None:
        """Give the directory back. May be called twice."""
        descriptor, self._runs = self._runs, -1
        if descriptor >= 0:
            os.close(descriptor)

    def read(
        self, run: str, partition: str, table: Sequence[Site], batch: Microbatch, stored: Any
    ) -> tuple[ReadPlan, set[Piece]]:
        """Read named pieces into a microbatch, without touching ``valid``; the pieces, and those to ask for again.

        Raises:
            DataLoss: the server names rows beyond the request.
        """
        plan = _plan(stored)
        positions = np.full(len(table), -1, np.int64)
        for position, site in enumerate(batch.layout.sites):
            positions[table.index(site)] = position
        _check(plan, positions, len(stored.segments), batch.layout.rows)
        with ExitStack() as stack:
            segments: dict[int, OpenSegment] = {}
            for number, name in enumerate(stored.segments):
                with suppress(OSError, TraceStoreError):
                    opened = self._open(run, partition, name)
                    stack.callback(opened.source.close)
                    if (opened.header.run, opened.header.partition, opened.header.sites) == (run, partition, table):
                        segments[number] = opened
            good = _known(plan, segments)
            lost = select(plan, np.flatnonzero(~good))
            again = set(zip(lost.span.tolist(), lost.site.tolist(), strict=True))
            usable = file_order(select(plan, np.flatnonzero(good)), segments)
            undelivered = gather(usable, segments, batch.memory.data, _places(usable, positions, table, batch))
            again |= {(int(usable.span[item.position]), int(usable.site[item.position])) for item in undelivered}
        if again:
            self.reason = (
                f"the client reads sealed segments in {self.path}; what it could not read or verify there came from"
                f" the server, last of run={run!r} partition={partition!r}"
            )
        return plan, again

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
            header, index = self._index(source)
        except BaseException:
            source.close()
            raise
        return OpenSegment(source, name, header, index)

    def _index(self, source: LocalSource) -> tuple[SegmentHeader, SegmentIndex]:
        """Header and index of a segment, whose name is unique for all time and whose content never changes."""
        with self._lock:
            known = self._indexes.get(source.name)
            if known is not None:
                self._indexes.move_to_end(source.name)
                return known
        found = open_source(source)
        with self._lock:
            self._indexes[source.name] = found
            rows = sum(len(index) for _, index in self._indexes.values())
            while rows > INDEX_ROWS_KEPT_MAX and len(self._indexes) > 1:
                rows -= len(self._indexes.popitem(last=False)[1][1])
        return found


def _plan(stored: Any) -> ReadPlan:
    segment, row, site, skip, rows, dest_row, span = (
        np.array(column, np.int64)
        for column in (
            stored.segment,
            stored.index_rows,
            stored.sites,
            stored.skip,
            stored.rows,
            stored.dest_rows,
            stored.spans,
        )
    )
    return ReadPlan(segment, row, site, skip, rows, dest_row, span, ())


def _check(plan: ReadPlan, positions: npt.NDArray[np.int64], segments: int, rows: int) -> None:
    counts = {len(column) for column in (plan.segment, plan.row, plan.site, plan.skip, plan.rows, plan.dest_row)}
    if len(counts) != 1 or len(plan.span) not in counts:
        raise DataLoss("a read message names stored rows by columns of unequal length")
    if not len(plan.row):
        return
    if plan.site.max() >= len(positions) or (positions[plan.site] < 0).any():
        raise DataLoss("a read message names a site that was not asked for")
    if plan.segment.max() >= segments or (plan.dest_row + plan.rows).max() > rows or plan.rows.min() < 1:
        raise DataLoss(f"a read message names rows beyond the request, rows={rows}")


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


def _places(plan: ReadPlan, positions: npt.NDArray[np.int64], table: Sequence[Site], batch: Microbatch) -> Places:
    """Where in the microbatch's memory each piece lands."""
    layout, position = batch.layout, positions[plan.site]

    def column(starts: Sequence[int], row_bytes: Sequence[int]) -> npt.NDArray[np.int64]:
        return np.array(starts, np.int64)[position] + plan.dest_row * np.array(row_bytes, np.int64)[plan.site]

    return Places(
        column(layout.codes, [site.code_bytes for site in table]),
        column(layout.scales, [site.scale_bytes for site in table]),
        column(layout.tensors, [4] * len(table)),
    )
