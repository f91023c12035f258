"""Decide what of a chunk is new: attempts, duplicates, conflicts. Reads the catalog, changes nothing.

    attempt older than the newest            StaleAttempt
    attempt sealed, rows not yet there       Sealed; stored if the disk lost rows of the attempt after its seal
    rows there, same bytes                   duplicate, not stored again; but stored again if another server may have
                                             released them meanwhile
    rows there, other bytes                  Conflict
    rows there, but damaged on the disk      stored anew, of a sealed attempt only if the record is the same by its
                                             checksum: the writer has them, we have not
    span partly there                        the rest is cut out and stored

A chunk is admitted whole or not at all. Rows are compared by checksum when spans agree and byte by byte otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from trace_store.attempt import Attempt, Holding
from trace_store.catalog import Partition
from trace_store.checksum import record_checksum, trajectory_seed
from trace_store.chunk import Chunk, RecordGroup, RecordView, iterate_records
from trace_store.errors import Conflict, DataLoss, InvalidRequest, Sealed, StaleAttempt
from trace_store.intervals import gaps
from trace_store.record import Site


class Stored(Protocol):
    """Looks at stored records, by segment number and index row; ``stored.StoredRecords`` on a volume."""

    def is_safe(self, number: int) -> bool:
        """Whether nobody but this server can have released what is in a segment."""

    def is_whole(self) -> bool:
        """Whether all segments are known, so that a sealed row which is not there is lost and not just elsewhere."""

    def read(self, number: int, row: int) -> tuple[memoryview, memoryview, memoryview]:
        """Codes, uncompressed scales and tensor scales, verified. Raises DataLoss, StorageFailed."""


@dataclass(frozen=True)
class Admission:
    """What to write (None: nothing) and how many records were there already."""

    chunk: Chunk | None
    duplicates: int


def check_attempt_state(partition: Partition, trajectory: str, attempt: int) -> Attempt | None:
    """The attempt if it has rows, None if it is new.

    Raises:
        StaleAttempt: a newer attempt exists.
    """
    entry = partition.trajectories.get(trajectory)
    newest = entry.newest if entry is not None else None
    if newest is not None and attempt < newest.number:
        raise StaleAttempt(
            f"a newer attempt exists, trajectory={trajectory!r} attempt={attempt} newest={newest.number}"
        )
    return entry.find(attempt) if entry is not None else None


def admit(partition: Partition, chunk: Chunk, stored: Stored) -> Admission:
    """Sort a checked chunk into new and known records; see the module docstring.

    Raises:
        StaleAttempt, Sealed, Conflict: nothing of the chunk may be stored.
        StorageFailed: stored rows cannot be looked at now.
        InvalidRequest: the chunk names a row twice.
    """
    _refuse_doubled_rows(chunk)
    attempts = [check_attempt_state(partition, g.trajectory, g.attempt) for g in chunk.groups]
    overlaps = [
        list(attempt.overlapping(group.start, group.stop)) if attempt is not None else []
        for group, attempt in zip(chunk.groups, attempts, strict=True)
    ]
    for group, attempt, known in zip(chunk.groups, attempts, overlaps, strict=True):
        if not known:
            _check_open(attempt, group, stored)
    if not any(overlaps):
        return Admission(chunk, 0)
    return _sort_records(partition, chunk, attempts, overlaps, stored)


def _sort_records(
    partition: Partition,
    chunk: Chunk,
    attempts: list[Attempt | None],
    overlaps: list[list[Holding]],
    stored: Stored,
) -> Admission:
    pieces: list[tuple[RecordGroup, bytes, bytes, bytes]] = []
    duplicates = 0
    positions = {id(group): position for position, group in enumerate(chunk.groups)}
    for record in iterate_records(chunk, partition.run.sites):
        group = record.group
        position = positions[id(group)]
        number = group.sites[record.position]
        known = [holding for holding in overlaps[position] if number in holding.sites]
        good: list[tuple[int, int]] = []
        for holding in reversed(known):
            # What was stored anew is good; the damaged copy that it replaced need not be read for each retry.
            needed = gaps(good, max(group.start, holding.start), min(group.stop, holding.stop))
            if needed and _is_stored(partition, record, holding, stored, attempts[position]):
                good.append((holding.start, holding.stop))
        missing = gaps(good, group.start, group.stop)
        if not missing:
            duplicates += 1
            continue
        if gaps([(h.start, h.stop) for h in known], group.start, group.stop):
            _check_open(attempts[position], group, stored)
        pieces.extend(_cut(partition, record, low, high) for low, high in missing)
    if not pieces:
        return Admission(None, duplicates)
    kept = Chunk(
        tuple(piece[0] for piece in pieces),
        *(
            memoryview(b"".join(parts))
            for parts in ([p[1] for p in pieces], [p[2] for p in pieces], [p[3] for p in pieces])
        ),
    )
    return Admission(kept, duplicates)


def _is_stored(
    partition: Partition, record: RecordView, holding: Holding, stored: Stored, attempt: Attempt | None
) -> bool:
    """Whether a holding has the record's rows where they overlap, for good; False if it was damaged or may be released.

    Raises:
        Conflict: it has other rows, or damaged ones of which nobody can tell what they were.
    """
    group = record.group
    number = group.sites[record.position]
    row = holding.first_row + holding.sites.index(number)
    stored_row = partition.segments[holding.segment].index.rows[row]
    same_span = (holding.start, holding.stop) == (group.start, group.stop)
    same = same_span and int(stored_row["checksum"]) == group.checksums[record.position]
    safe = stored.is_safe(holding.segment)
    if same and not safe:
        return False
    low, high = max(group.start, holding.start), min(group.stop, holding.stop)
    site = partition.run.sites[number]
    try:
        theirs = _rows(site, *stored.read(holding.segment, row), holding.start, holding.stop, low, high)
    except DataLoss:
        # The checksum outlives its bytes: what is surely another record must not take the place of the lost one, and
        # in a sealed attempt only what is surely the same.
        comparable = int(stored_row["policy_version"]) == group.policy_version
        comparable &= int(stored_row["tensor_bytes"]) == record.tensor_scales.nbytes
        sealed = attempt is not None and attempt.sealed is not None
        if same or not (sealed or (same_span and comparable)):
            return False
        raise Conflict(
            f"rows are damaged on the disk, send their record again as it was or write a new attempt,"
            f" trajectory={group.trajectory!r} attempt={group.attempt} site={site.name}"
            f" tokens=[{holding.start}, {holding.stop})"
        ) from None
    ours = _rows(site, record.codes, record.scales, record.tensor_scales, group.start, group.stop, low, high)
    if ours != theirs:
        raise Conflict(
            f"rows were written before with other bytes, trajectory={group.trajectory!r} attempt={group.attempt}"
            f" site={site.name} tokens=[{low}, {high})"
        )
    return safe


def _rows(
    site: Site,
    codes: memoryview,
    scales: memoryview,
    tensor_scales: memoryview,
    start: int,
    stop: int,
    low: int,
    high: int,
) -> tuple[bytes, bytes, bytes]:
    """Bytes of tokens [low, high) of a record over [start, stop); one tensor scale a token."""
    first, last = low - start, high - start
    tensor = np.frombuffer(tensor_scales, "<f4")
    per_token = np.broadcast_to(tensor, stop - start) if tensor.size == 1 else tensor
    return (
        bytes(codes[first * site.code_bytes : last * site.code_bytes]),
        bytes(scales[first * site.scale_bytes : last * site.scale_bytes]),
        per_token[first:last].tobytes(),
    )


def _cut(partition: Partition, record: RecordView, low: int, high: int) -> tuple[RecordGroup, bytes, bytes, bytes]:
    """One record over [low, high) of another, with its own checksum."""
    group, position = record.group, record.position
    number = group.sites[position]
    codes, scales, tensor = _rows(
        partition.run.sites[number],
        record.codes,
        record.scales,
        record.tensor_scales,
        group.start,
        group.stop,
        low,
        high,
    )
    if not group.scale_per_token[position]:
        tensor = bytes(record.tensor_scales)
    seed = trajectory_seed(partition.run.name, partition.name, group.trajectory)
    checksum = record_checksum(seed, group.attempt, group.policy_version, number, low, high, codes, scales, tensor)
    cut = replace(
        group,
        start=low,
        stop=high,
        sites=(number,),
        scale_per_token=(group.scale_per_token[position],),
        checksums=(checksum,),
    )
    return cut, codes, scales, tensor


def _refuse_doubled_rows(chunk: Chunk) -> None:
    if len(chunk.groups) == 1:
        return
    seen: dict[str, list[RecordGroup]] = {}
    for group in chunk.groups:
        for other in seen.setdefault(group.trajectory, []):
            same_rows = group.start < other.stop and other.start < group.stop and set(group.sites) & set(other.sites)
            if same_rows or group.attempt != other.attempt:
                raise InvalidRequest(
                    f"a message names a row twice or mixes attempts, trajectory={group.trajectory!r}"
                    f" tokens=[{group.start}, {group.stop})",
                    argument="groups",
                )
        seen[group.trajectory].append(group)


def _check_open(attempt: Attempt | None, group: RecordGroup, stored: Stored) -> None:
    """Refuse new rows of a sealed attempt, unless they may be those that a disk failure took from it."""
    if attempt is None or attempt.sealed is None:
        return
    if attempt.damaged and group.stop <= attempt.sealed[0] and stored.is_whole():
        return
    raise Sealed(
        f"the attempt is sealed and takes no new rows, trajectory={group.trajectory!r} attempt={group.attempt}"
        f" tokens=[{group.start}, {group.stop})"
    )
