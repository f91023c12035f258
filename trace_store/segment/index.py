"""Index of a segment: one fixed-width row per segment row, with the place of its bytes in the file.

It is what the catalog keeps in memory (74 bytes a record), what a sealed segment stores in its last row, and what a
scan of a damaged or unfinished segment rebuilds. Offsets are absolute byte positions in the segment file.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trace_store.checksum import RowKind
from trace_store.errors import FormatError

ROW = np.dtype(
    [
        ("kind", "u1"),
        ("scales_encoding", "u1"),
        ("trajectory", "<u4"),
        ("attempt", "<u4"),
        ("policy_version", "<u8"),
        ("site", "<u4"),
        ("start", "<u4"),
        ("stop", "<u4"),
        ("codes_offset", "<u8"),
        ("codes_bytes", "<u4"),
        ("scales_offset", "<u8"),
        ("scales_bytes", "<u4"),
        ("tensor_offset", "<u8"),
        ("tensor_bytes", "<u4"),
        ("checksum", "<u8"),
    ]
)
"""``trajectory`` is a position in ``SegmentIndex.trajectories``."""

_GROWTH_ROWS_MIN = 64


class SegmentIndex:
    """Growable index rows and the trajectory names they refer to. Not thread-safe; the shard's writer appends.

    Readers may hold ``rows`` of an earlier moment: growing makes a new array and never moves the old one.
    """

    def __init__(self) -> None:
        self._rows: npt.NDArray[np.void] = np.zeros(_GROWTH_ROWS_MIN, ROW)
        self._length = 0
        self.trajectories: list[str] = []
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return self._length

    @property
    def rows(self) -> npt.NDArray[np.void]:
        """Index rows in file order, dtype ``ROW``."""
        return self._rows[: self._length]

    def trajectory_number(self, name: str) -> int:
        """Number of a trajectory name, added when it is new."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.trajectories)
            self.trajectories.append(name)
        return number

    def extend(self, rows: npt.NDArray[np.void]) -> None:
        """Append index rows."""
        needed = self._length + len(rows)
        if needed > len(self._rows):
            grown = np.zeros(max(needed, 2 * len(self._rows)), ROW)
            grown[: self._length] = self.rows
            self._rows = grown
        self._rows[self._length : needed] = rows
        self._length = needed

    def seal(self) -> None:
        """Give back growth room; nothing is appended afterwards."""
        self._rows = self.rows.copy()
        self._numbers.clear()

    def to_bytes(self) -> bytes:
        """Serialize as an Arrow IPC stream of one table, zstd compressed, trajectory as a dictionary column."""
        arrays: list[pa.Array] = []
        for name in ROW.names or ():
            values = np.ascontiguousarray(self.rows[name])
            if name == "trajectory":
                # Not a cast by Arrow: the first one imports pyarrow.compute, 50 ms with the GIL held.
                numbers = pa.array(values.astype(np.int32))
                arrays.append(pa.DictionaryArray.from_arrays(numbers, pa.array(self.trajectories, pa.string())))
            else:
                arrays.append(pa.array(values))
        batch = pa.record_batch(arrays, names=list(ROW.names or ()))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
            stream.write_batch(batch)
        return bytes(sink.getvalue())

    @classmethod
    def from_bytes(cls, encoded: bytes | memoryview, segment: str, segment_bytes: int) -> SegmentIndex:
        """Parse what ``to_bytes`` wrote.

        Raises:
            FormatError: it is no index of a file of ``segment_bytes``: no offset or length is believed beyond that.
        """
        try:
            # One thread: handing fifteen short columns to a pool takes longer than to decompress them.
            options = pa.ipc.IpcReadOptions(use_threads=False)
            batch = pa.ipc.open_stream(pa.py_buffer(encoded), options=options).read_next_batch()
            rows = np.zeros(batch.num_rows, ROW)
            for name in ROW.names or ():
                column = batch.column(name)
                if name == "trajectory":
                    names = column.dictionary.to_pylist()
                    column = column.indices
                rows[name] = column.to_numpy(zero_copy_only=False)
            inside = not len(rows) or int(rows["trajectory"].max()) < len(names)
            for prefix in ("codes", "scales", "tensor"):
                ends = rows[f"{prefix}_offset"] + rows[f"{prefix}_bytes"].astype(np.uint64)
                inside = inside and not bool((ends > segment_bytes).any() or (ends < rows[f"{prefix}_offset"]).any())
            if not inside:
                raise ValueError("a row points outside the file or its names")
        except (pa.ArrowException, KeyError, ValueError, StopIteration, AttributeError) as error:
            raise FormatError(f"segment index is malformed, segment={segment} cause={error!r}") from error
        index = cls()
        index.trajectories = names
        index._rows, index._length = rows, len(rows)
        return index

    @property
    def records(self) -> int:
        """Rows that are guidance records."""
        return int(np.count_nonzero(self.rows["kind"] == RowKind.RECORD))
