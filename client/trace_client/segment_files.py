"""Reads of sealed segments by the client itself, in the data directory of a server on this host.

The server says which rows of which segments. What the client cannot open, read or verify there it asks of the server
again, which has other copies and knows what was released in the meantime.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trace_client.microbatch import Microbatch
from trace_store.record import Site
from trace_store.segment_directory import SegmentDirectory, StoredRows, Target


class SegmentFiles:
    """A data directory as reads use it. Thread-safe.

    Attributes:
        reason: one line for a person on how reads go.
    """

    def __init__(self, directory: Any) -> None:
        """Raises InvalidRequest where there is no data directory."""
        self._directory = SegmentDirectory(directory)
        self.path, self.identity = self._directory.path, self._directory.identity
        self.reason = f"the client reads sealed segments in {self.path}"

    def close(self) -> None:
        self._directory.close()

    def read(
        self, run: str, partition: str, table: tuple[Site, ...], batch: Microbatch, stored: Any
    ) -> tuple[StoredRows, list[int]]:
        """Read what a StoredPieces names into a microbatch, without touching ``valid``; its pieces, and the spans, by
        position in the request, of those that have to be asked for again.

        Raises:
            DataLoss: the server names rows beyond the request.
        """
        rows = StoredRows(
            *(
                np.array(column, np.int64)
                for column in (
                    stored.segment,
                    stored.index_rows,
                    stored.sites,
                    stored.skip,
                    stored.rows,
                    stored.dest_rows,
                )
            )
        )
        names = list(stored.segments)
        lost = self._directory.read(run, partition, table, names, rows, _target(batch, table))
        if lost:
            self.reason = (
                f"the client reads sealed segments in {self.path}; what it could not read or verify there came from"
                f" the server, last of run={run!r} partition={partition!r}"
            )
        return rows, [stored.spans[piece] for piece in lost]


def _target(batch: Microbatch, table: Sequence[Site]) -> Target:
    layout = batch.layout
    numbers = [table.index(site) for site in layout.sites]

    def by_number(offsets: Sequence[int]) -> Any:
        column = np.full(len(table), -1, np.int64)
        column[numbers] = offsets
        return column

    columns = (by_number(layout.codes), by_number(layout.scales), by_number(layout.tensors))
    return Target(batch.memory.data, layout.rows, columns)
