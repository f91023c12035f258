"""What lies in a data directory or bucket, for a check of all of it: every file below ``runs``, read on demand.

A directory may be in use: what vanishes meanwhile was released, and an open segment may get its sealed name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trace_store.errors import InvalidRequest
from trace_store.naming import RELEASED_PREFIX
from trace_store.segment.schema import OPEN_SUFFIX, SEALED_SUFFIX
from trace_store.tier.marks import IDENTITY_FILE

RUNS = "runs"


@dataclass(frozen=True)
class StoredFile:
    """A file or object: path below ``runs``, bytes, and how to read it (None: it is gone; OSError: it cannot be read).

    ``problem``: why it is nothing that could be read, such as a symbolic link, which a server ignores.
    """

    path: str
    size: int
    read: Callable[[], bytearray | None]
    problem: str = ""

    @property
    def is_segment(self) -> bool:
        """Whether its name is that of a segment or manifest."""
        return self.path.endswith((SEALED_SUFFIX, OPEN_SUFFIX))


@dataclass(frozen=True)
class StoredPlace:
    """A data directory or bucket. ``files(below)`` lists it or one directory of it, sorted by path.

    ``partial``: a server's cache of a bucket, which may hold some segments only.
    """

    files: Callable[[str], list[StoredFile]]
    partial: bool = False


def open_place(place: str) -> StoredPlace:
    """A data directory, or ``s3://bucket/prefix``.

    Raises:
        InvalidRequest: no such directory.
        Unsupported: the object store cannot be used.
    """
    if "://" in place:
        from trace_store.storage.s3 import ObjectStore

        store = ObjectStore(place)
        return StoredPlace(lambda below: list(_objects(store, below)))
    root = Path(place)
    if not (root / RUNS).is_dir():
        raise InvalidRequest(f"no data directory of trace-store, path={root}", argument="place")
    return StoredPlace(lambda below: _directory(root / RUNS, below), (root / IDENTITY_FILE).exists())


def _objects(store: object, below: str) -> Iterator[StoredFile]:
    from trace_store.storage.base import SegmentGone
    from trace_store.storage.s3 import ObjectStore

    assert isinstance(store, ObjectStore)

    def read(key: str, size: int) -> bytearray | None:
        try:
            return bytearray(store.read(key, 0, size))
        except SegmentGone:
            return None

    for info in sorted(store.listing(f"{RUNS}/{below}".rstrip("/")), key=lambda info: info.key):
        path = info.key.removeprefix(f"{RUNS}/")
        yield StoredFile(path, info.size, lambda info=info: read(info.key, info.size))  # type: ignore[misc]


def _directory(runs: Path, below: str) -> list[StoredFile]:
    if below:
        return sorted(_entries(runs, runs / below, depth=len(Path(below).parts)), key=lambda file: file.path)
    return sorted(_entries(runs, runs, depth=0), key=lambda file: file.path)


def _entries(runs: Path, directory: Path, depth: int) -> Iterator[StoredFile]:
    """Files of a directory of runs (depth 0), of a run (1) or of a partition (2), as a server looks at them."""
    try:
        found = list(os.scandir(directory))
    except FileNotFoundError:
        return
    except OSError as error:
        yield _unreadable(runs, directory, f"cannot be listed: {error.strerror}")
        return
    for entry in found:
        path = Path(entry.path)
        if entry.name.startswith(RELEASED_PREFIX):
            continue
        named = entry.name.endswith((SEALED_SUFFIX, OPEN_SUFFIX))
        if entry.is_dir() and not named and depth < 2:  # a server follows links to directories too
            yield from _entries(runs, path, depth + 1)
        elif entry.is_file(follow_symlinks=False):
            yield _file(runs, path)
        else:
            what = "a symbolic link" if entry.is_symlink() else "a directory" if entry.is_dir() else "no regular file"
            yield _unreadable(runs, path, f"{what} under a segment's name, which a server ignores" if named else what)


def _file(runs: Path, path: Path) -> StoredFile:
    try:
        size = path.stat().st_size
    except OSError:
        size = 0  # reading it says what is wrong
    return StoredFile(path.relative_to(runs).as_posix(), size, lambda: _read(path))


def _unreadable(runs: Path, path: Path, problem: str) -> StoredFile:
    return StoredFile(path.relative_to(runs).as_posix(), 0, lambda: None, problem)


def _read(path: Path) -> bytearray | None:
    """The file's bytes; under its new name if it was sealed meanwhile, None if it was released."""
    for candidate in (path, path.with_suffix(SEALED_SUFFIX)):
        try:
            return bytearray(candidate.read_bytes())
        except FileNotFoundError:
            continue
    return None
