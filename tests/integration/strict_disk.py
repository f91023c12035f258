"""A disk that keeps no more than POSIX promises, for power cuts that real file systems are too kind for.

ext4 and XFS write a new directory entry together with the file's first fdatasync; no file system is obliged to. Here a
directory's entries are durable as they were at its last fsync, and a file's bytes as they were at its own last one.
Rows, names and deletions that were not synced are gone after the cut, all of them: the worst that may happen.
"""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest


class StrictDisk:
    """Watches fsync and fdatasync of this process below ``root``; ``cut(target)`` writes what a power cut would leave.

    What is there at the beginning is durable, but for files named in ``unsynced``: of those only the name is.
    """

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, unsynced: tuple[Path, ...] = ()) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._entries: dict[int, dict[str, tuple[int, bool]]] = {}
        self._contents: dict[int, bytes] = {}
        self._held: dict[int, int] = {}
        self.syncs = 0
        for directory, _, files in os.walk(root):
            self._note_directory(Path(directory))
            for name in files:
                path = Path(directory) / name
                if path not in unsynced:
                    self._contents[path.stat().st_ino] = path.read_bytes()
        self._fsync, self._fdatasync = os.fsync, os.fdatasync
        patch.setattr(os, "fsync", lambda descriptor: self._sync(self._fsync, descriptor))
        patch.setattr(os, "fdatasync", lambda descriptor: self._sync(self._fdatasync, descriptor))

    def close(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def cut(self, target: Path) -> Path:
        """The tree after a power cut now."""
        with self._lock:
            self._write(self.root.stat().st_ino, target)
        return target

    def _sync(self, sync: object, descriptor: int) -> None:
        assert callable(sync)
        with self._lock:
            sync(descriptor)
            found = os.fstat(descriptor)
            # An inode number must not be used again by a file that was never synced.
            if found.st_ino not in self._held:
                self._held[found.st_ino] = os.dup(descriptor)
            if stat.S_ISDIR(found.st_mode):
                self._note_directory(descriptor)
            else:
                self._contents[found.st_ino] = os.pread(descriptor, found.st_size, 0)
            self.syncs += 1

    def _note_directory(self, directory: Path | int) -> None:
        with os.scandir(directory) as entries:
            found = {entry.name: (entry.inode(), entry.is_dir(follow_symlinks=False)) for entry in entries}
        self._entries[os.stat(directory).st_ino] = found

    def _write(self, inode: int, target: Path) -> None:
        target.mkdir()
        for name, (child, is_directory) in self._entries.get(inode, {}).items():
            if is_directory:
                self._write(child, target / name)
            else:
                (target / name).write_bytes(self._contents.get(child, b""))
