"""Keys of the bucket: the same tree as a data directory, below the store's prefix.

    runs/RUN/manifest-EPOCH.arrow               a registration
    runs/RUN/PARTITION/SEQUENCE-EPOCH.arrow     sealed segments; the epoch makes every name unique among all writers
    trace-store-identity.json                   random name of the bucket
    probe/*                                     objects of the start-up self-check, deleted at once

RUN and PARTITION are ``naming.directory_name`` of the names, so the place of a partition follows from its name.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from trace_store.catalog import Partition
from trace_store.naming import MANIFEST_PREFIX, directory_name
from trace_store.segment.schema import SEALED_SUFFIX

RUNS = "runs"

Place = tuple[str, str]
"""Directory names of a run and a partition; the partition is empty for the run's own files."""


def place_of(run: str, partition: str) -> Place:
    """Place of a partition by its names."""
    return directory_name(run), directory_name(partition)


def partition_place(partition: Partition) -> Place:
    """Place of a partition of the catalog."""
    return partition.run.directory.name, partition.directory.name


def place_prefix(place: Place) -> str:
    """Key prefix of a place, no slash at the end."""
    return "/".join((RUNS, *filter(None, place)))


def object_key(place: Place, name: str) -> str:
    """Key of a file of a place."""
    return f"{place_prefix(place)}/{name}"


def parse_key(key: str) -> tuple[Place, str] | None:
    """Place and file name of a segment's or manifest's key, None for any other object."""
    parts = PurePosixPath(key).parts
    if len(parts) not in (3, 4) or parts[0] != RUNS or not parts[-1].endswith(SEALED_SUFFIX):
        return None
    if (len(parts) == 3) != parts[-1].startswith(MANIFEST_PREFIX):
        return None
    return (parts[1], parts[2] if len(parts) == 4 else ""), parts[-1]
