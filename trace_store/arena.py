"""What both ends of an arena agree on: where its file is, what it is called, and how big it may be.

An arena is a memory file that the server creates in a tmpfs directory and that server and client map. Its name is
unguessable and lives for the milliseconds until the client has opened it; then the server unlinks the file, so that
nobody else can ever open it and nothing is left behind when both ends are gone.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

ARENA_DIRECTORY_VARIABLE = "TRACE_STORE_ARENA_DIR"
"""Environment variable that moves the directory, for both ends alike."""

SECRET_BYTES = 32
"""First bytes of a new file. Sending them back proves that the client opened it."""

PAGE_BYTES = 4096

ARENA_BYTES_MAX = 16 << 30
"""Largest arena; what a server shares in all is its own bound."""

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
