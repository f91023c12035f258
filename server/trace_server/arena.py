"""Arenas: memory that clients on this host share with the server, in place of payloads in messages.

States of an arena: offered (file exists, one page, waits for the client's proof) -> attached (file unlinked, memory
reserved, ranges of it may be named) -> dropped (call or connection ended). A dropped arena's memory goes back to the
system when the last command that uses it is done.

A range is checked against its arena before a byte of it is looked at. A client writes only into arenas it attached: ids
are 128 random bits, file names too, and the file is gone once it is attached.
"""

from __future__ import annotations

import hmac
import os
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trace_store.arena import ARENA_BYTES_MAX, PAGE_BYTES, SECRET_BYTES, arena_name, is_arena_name, map_arena
from trace_store.errors import InvalidRequest, Overloaded, Unsupported
from trace_store.limits import FRAME_BYTES_MAX

ATTACH_TIMEOUT_S = 10.0
"""A client that does not show the secret by then gets no arena."""

STALE_AFTER_S = 60.0


@dataclass
class Arena:
    """One arena; ``view`` is set once it is attached."""

    id: bytes
    path: Path
    size: int
    secret: bytes
    descriptor: int
    view: memoryview | None = None


class Arenas:
    """All arenas of a server. ``directory`` None: the server shares no memory.

    Methods that touch files block; call them on a worker thread.
    """

    def __init__(self, directory: Path | None, bytes_max: int | None = None) -> None:
        self._directory = directory if directory is not None and directory.is_dir() else None
        self._attached: dict[bytes, Arena] = {}
        self.shared_bytes = 0
        self.bytes_max = bytes_max if bytes_max is not None else _half_of(self._directory)
        if self._directory is not None:
            _remove_stale(self._directory)

    def offer(self, size: int) -> Arena:
        """Create the file of a new arena.

        Raises:
            Unsupported: no memory is shared here.
            Overloaded: all of it is in use.
            InvalidRequest: the size is out of bounds.
        """
        if self._directory is None:
            raise Unsupported("the server shares no memory; it has no arena directory")
        if not PAGE_BYTES <= size <= ARENA_BYTES_MAX:
            raise InvalidRequest(
                f"size_bytes must be in [{PAGE_BYTES}, {ARENA_BYTES_MAX}], got={size}", argument="size_bytes"
            )
        size = -(-size // PAGE_BYTES) * PAGE_BYTES
        if self.shared_bytes + size > self.bytes_max:
            raise Overloaded(
                f"no memory left to share, wanted_bytes={size} shared_bytes={self.shared_bytes}"
                f" bytes_max={self.bytes_max}"
            )
        path = self._directory / arena_name(secrets.token_hex(16))
        secret = secrets.token_bytes(SECRET_BYTES)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise Unsupported(f"the server cannot share memory, cause={error.strerror}") from error
        self.shared_bytes += size
        arena = Arena(secrets.token_bytes(16), path, size, secret, descriptor)
        try:
            os.pwrite(descriptor, secret, 0)
        except OSError as error:
            self.drop(arena)
            raise Overloaded(f"no memory left to share, cause={error.strerror}") from error
        return arena

    def attach(self, arena: Arena, secret: bytes) -> None:
        """Reserve the memory of an offered arena whose client proved that it opened the file.

        Raises:
            InvalidRequest: wrong secret.
            Overloaded: the tmpfs is full.
        """
        arena.path.unlink(missing_ok=True)
        if not hmac.compare_digest(secret, arena.secret):
            raise InvalidRequest("wrong secret, the arena's file was not opened", argument="secret")
        try:
            # Reserved, not sparse: a page that the tmpfs cannot deliver would kill either process with SIGBUS.
            os.posix_fallocate(arena.descriptor, 0, arena.size)
            mapping = map_arena(arena.descriptor, arena.size)
        except OSError as error:
            raise Overloaded(f"no memory left to share, wanted_bytes={arena.size} cause={error.strerror}") from error
        mapping[:SECRET_BYTES] = bytes(SECRET_BYTES)
        arena.view = memoryview(mapping)
        self._attached[arena.id] = arena

    def drop(self, arena: Arena) -> None:
        """Forget an arena. Ranges in use stay mapped until they are done with. Does not block."""
        if arena.descriptor < 0:
            return
        self._attached.pop(arena.id, None)
        arena.path.unlink(missing_ok=True)
        os.close(arena.descriptor)
        view, arena.descriptor, arena.view = arena.view, -1, None
        self.shared_bytes -= arena.size
        if view is not None:
            # Unmapping takes 0.3 s a GiB, which the event loop cannot spare.
            threading.Thread(target=view.release, name="trace-store-unmap", daemon=True).start()

    def range(self, named: Any) -> memoryview:
        """Bytes of an ArenaRange.

        Raises:
            InvalidRequest: unknown arena, or the range leaves it.
        """
        view = self.whole(named.arena)
        start, length = named.offset_bytes, named.length_bytes
        if length > FRAME_BYTES_MAX or start + length > view.nbytes:
            raise InvalidRequest(
                f"range is outside its arena or longer than {FRAME_BYTES_MAX} bytes,"
                f" offset={start} length={length} arena_bytes={view.nbytes}",
                argument="arena",
            )
        return view[start : start + length]

    def whole(self, arena: bytes) -> memoryview:
        """All bytes of an attached arena, in a view that outlives its end. Raises InvalidRequest."""
        found = self._attached.get(arena)
        if found is None or found.view is None:
            raise InvalidRequest("unknown arena; attach one, it lasts as long as its call", argument="arena")
        return found.view[:]  # ``drop`` releases the arena's own


def _half_of(directory: Path | None) -> int:
    """Half of a tmpfs: the rest of the host needs the other one, and a full tmpfs kills who touches it."""
    if directory is None:
        return 0
    status = os.statvfs(directory)
    return status.f_frsize * status.f_blocks // 2


def _remove_stale(directory: Path) -> None:
    """Remove files that a killed server left between offer and attach."""
    for path in directory.glob("trace-store-*.arena"):
        try:
            status = path.lstat()
            if (
                is_arena_name(path.name)
                and status.st_uid == os.getuid()
                and time.time() - status.st_mtime > STALE_AFTER_S
            ):
                path.unlink()
        except OSError:
            continue  # another server removed it, or it is not ours
