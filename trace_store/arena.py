"""What both ends of an arena agree on: where its file is, what it is called, and how big it may be.

An arena is a memory file that the server creates in a tmpfs directory and that server and client map. Its name is
unguessable and lives for the milliseconds until the client has opened it; then the server unlinks the file, so that
nobody else can ever open it and nothing is left behind when both ends are gone.
"""

from __future__ import annotations

import mmap
import os
import re
from contextlib import suppress
from pathlib import Path

ARENA_DIRECTORY_VARIABLE = "TRACE_STORE_ARENA_DIR"
"""Environment variable that moves the directory, for both ends alike."""

SECRET_BYTES = 32
"""First bytes of a new file. Sending them back proves that the client opened it."""

PAGE_BYTES = 4096

ARENA_BYTES_MAX = 16 << 30
"""Largest arena; what a server shares in all is its own bound."""

_POPULATE_STEP_BYTES = 2 << 20
"""1 ms of page tables: ``mmap`` with MAP_POPULATE holds the GIL for all of them, 270 ms for 512 MiB."""

_MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later."""

_NAME = re.compile(r"trace-store-[0-9a-f]{32}\.arena")


def arena_directory() -> Path:
    """The tmpfs directory of this process."""
    return Path(os.environ.get(ARENA_DIRECTORY_VARIABLE) or "/dev/shm")


def arena_name(token: str) -> str:
    """File name of a new arena; ``token`` is 32 random hexadecimal digits."""
    return f"trace-store-{token}.arena"


def is_arena_name(name: str) -> bool:
    """Whether a name is one of ours: no path, nothing that could lead elsewhere."""
    return _NAME.fullmatch(name) is not None


def map_arena(descriptor: int, size: int) -> mmap.mmap:
    """Map a file whose memory is reserved, and its pages ahead of their first use. Raises OSError."""
    mapping = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED)
    with suppress(OSError):  # an older kernel; then each page is mapped at its first use
        for start in range(0, size, _POPULATE_STEP_BYTES):
            mapping.madvise(_MADV_POPULATE_WRITE, start, min(_POPULATE_STEP_BYTES, size - start))
    return mapping
