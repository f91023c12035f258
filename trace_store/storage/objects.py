"""What a data directory asks of the object store behind it, and the note that it leaves for a release."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Protocol

from trace_store.attempt import Segment
from trace_store.catalog import Partition
from trace_store.naming import RELEASED_OBJECTS
from trace_store.storage.base import Source

log = logging.getLogger("trace_store.volume")


class Objects(Protocol):
    """What an object store behind the directory has to offer; ``trace_store.tier`` is one."""

    def source(self, partition: Partition, segment: Segment) -> Source:
        """A segment of the object store, opened. Wants the lock held; makes no request."""

    def drop_local(self, segment: Segment) -> int:
        """Serve a segment from the store only, which has just served it; makes no request. Bytes of the local file,
        which is removed soon."""

    def keys(self, partition: Partition) -> list[str]:
        """Objects of a partition and of its segments on their way there. Wants the lock held; makes no request."""

    def doubt(self, partition: Partition) -> str:
        """Why the store may hold segments of a partition that the catalog lacks, empty if it does not; makes no
        request."""

    def released(self, partition: Partition, directory: Path, keys: list[str]) -> None:
        """The partition was renamed to ``directory``: delete the objects, then the directory."""


def note_objects(directory: Path, keys: list[str]) -> None:
    """Leave in a partition's directory which objects go with it, so that a crash after the rename forgets none.

    A full disk must not stop a release: then the objects are deleted all the same, unless this process dies first.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / RELEASED_OBJECTS, "w", encoding="utf-8") as file:
            file.write("".join(f"{key}\n" for key in keys))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        log.error("objects to delete cannot be noted, directory=%s cause=%s", directory.name, error.strerror)
