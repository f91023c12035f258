"""Segments in local files, by positioned reads.

Nothing here maps the file: a failing disk under a mapping kills the process with SIGBUS, a failing ``pread`` is an
error that only costs the rows it was for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trace_store.errors import StorageFailed
from trace_store.segment.schema import SEALED_SUFFIX
from trace_store.storage.base import Range, ReadShape

LOCAL_SHAPE = ReadShape(run_bytes_max=4 << 20, gap_bytes_max=64 << 10, remote=False)


class LocalSource:
    """An open file. Unlinking or renaming it does not disturb the reader."""

    shape = LOCAL_SHAPE

    def __init__(self, path: str | os.PathLike[str], name: str) -> None:
        """Open for reading.

        Raises:
            StorageFailed: gone, or too many files are open.
        """
        self.name = name
        self.descriptor = open_descriptor(path, name)

    @classmethod
    def of(cls, descriptor: int, name: str) -> LocalSource:
        """Over a descriptor, which the source closes."""
        source = cls.__new__(cls)
        source.name, source.descriptor = name, descriptor
        return source

    def size(self) -> int:
        try:
            return os.fstat(self.descriptor).st_size
        except OSError as error:
            raise StorageFailed(f"a segment cannot be read, segment={self.name} cause={error.strerror}") from error

    def read_into(self, buffer: memoryview, offset: int) -> None:
        read_exactly(self.descriptor, buffer, offset, self.name)

    def read_ranges(self, ranges: Sequence[Range]) -> list[memoryview]:
        parts = []
        for start, stop in ranges:
            part = memoryview(bytearray(stop - start))
            self.read_into(part, start)
            parts.append(part)
        return parts

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def directory_identity(path: str | os.PathLike[str]) -> str:
    """Device and inode number of a directory, the same for every process of the host that sees it. Raises OSError."""
    found = os.stat(path)
    return f"{found.st_dev}:{found.st_ino}"


def open_descriptor(path: str | os.PathLike[str], name: str) -> int:
    """Open a segment for reading.

    Raises:
        StorageFailed: gone, or too many files are open.
    """
    try:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            # Sealed this moment: the file has its new name, the catalog will know in the next.
            return os.open(Path(path).with_suffix(SEALED_SUFFIX), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageFailed(f"a segment cannot be opened, segment={name} cause={error.strerror}") from error


def read_exactly(descriptor: int, buffer: memoryview, offset: int, name: str) -> None:
    """Fill ``buffer`` from ``offset``.

    Raises:
        StorageFailed: the disk failed, or the file ends too early.
    """
    done = 0
    while done < buffer.nbytes:
        try:
            count = os.preadv(descriptor, [buffer[done:]], offset + done)
        except OSError as error:
            raise StorageFailed(f"a segment cannot be read, segment={name} cause={error.strerror}") from error
        if count == 0:
            raise StorageFailed(f"a segment ends too early, segment={name} offset={offset + done}")
        done += count
