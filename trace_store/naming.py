"""Names of directories and segments: one-to-one, short, and unable to leave the data directory.

A run or partition name of up to 512 bytes becomes ``slug-digest``: up to 40 harmless characters for people, then 32 hex
digits of SHA-256 of the whole name. Only the digest tells names apart; the true name stands in every segment.
"""

from __future__ import annotations

import hashlib
import re

MANIFEST_PREFIX = "manifest-"
"""A run's registration, a segment without records in the run's own directory."""

RELEASED_PREFIX = ".released-"
"""A partition's directory is renamed to this before its files are deleted, so that a crash never leaves half of it."""

RELEASED_OBJECTS = "objects"
"""File in such a directory: keys of the objects that are to be deleted first, one a line."""

_SLUG_CHARACTERS_MAX = 40


def directory_name(name: str) -> str:
    """Directory of a run or partition."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:_SLUG_CHARACTERS_MAX]
    return f"{slug or 'x'}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def segment_name(sequence: int, epoch: str) -> str:
    """Segment stem: order within the partition, then the writer's epoch, unique among all writers."""
    return f"{sequence:010d}-{epoch}"


def parse_segment_name(stem: str) -> tuple[int, str]:
    """Sequence and epoch of a segment stem; a name that is none of ours counts as an epoch of its own."""
    sequence, _, epoch = stem.partition("-")
    return (int(sequence), epoch) if sequence.isascii() and sequence.isdigit() else (0, stem)
