"""Refuse to seal an attempt of which two servers stored different bytes for one row.

Each server compares what it is sent with what it knows; two that did not know of each other can both accept rows of one
attempt. Once one of them sees the other's rows, equal ones are copies, and different ones are a conflict.
"""

from __future__ import annotations

import numpy as np

from trace_store.admission import Stored
from trace_store.attempt import Attempt, Holding
from trace_store.catalog import Partition
from trace_store.errors import Conflict, DataLoss


def refuse_mixture(partition: Partition, trajectory: str, number: int, stored: Stored) -> None:
    """Compare the rows of an unsealed attempt that epochs hold twice; reads nothing where there are none.

    Raises:
        Conflict: they differ; names the first place.
        StorageFailed: they cannot be read.
    """
    entry = partition.trajectories.get(trajectory)
    attempt = entry.find(number) if entry is not None else None
    if attempt is None or attempt.sealed is not None or not _has_copies(partition, attempt):
        return
    for one in attempt.overlapping(0, attempt.stop_max):
        for other in attempt.overlapping(one.start, one.stop):
            if _epoch(partition, one) >= _epoch(partition, other):
                continue
            low, high = max(one.start, other.start), min(one.stop, other.stop)
            for site in sorted(set(one.sites) & set(other.sites)):
                if _differ(partition, one, other, site, (low, high), stored):
                    raise Conflict(
                        f"two servers hold different rows, write a new attempt, trajectory={trajectory!r}"
                        f" attempt={number} site={partition.run.sites[site].name} tokens=[{low}, {high})"
                    )


def _has_copies(partition: Partition, attempt: Attempt) -> bool:
    epochs = {partition.segments[segment].epoch for segment in attempt.segments()}
    return len(epochs) > 1 and attempt.rows() < attempt.stored_rows()


def _epoch(partition: Partition, holding: Holding) -> str:
    return partition.segments[holding.segment].epoch


def _differ(
    partition: Partition, one: Holding, other: Holding, site: int, span: tuple[int, int], stored: Stored
) -> bool:
    try:
        return _token_rows(partition, one, site, span, stored) != _token_rows(partition, other, site, span, stored)
    except DataLoss:
        return False  # the copy that is whole serves


def _token_rows(
    partition: Partition, holding: Holding, number: int, span: tuple[int, int], stored: Stored
) -> tuple[bytes, bytes, bytes]:
    """Codes, scales and tensor scales of tokens [low, high) of a stored record."""
    site = partition.run.sites[number]
    codes, scales, tensor = stored.read(holding.segment, holding.first_row + holding.sites.index(number))
    first, last = span[0] - holding.start, span[1] - holding.start
    factors = np.frombuffer(tensor, "<f4")
    per_token = np.broadcast_to(factors, holding.stop - holding.start) if factors.size == 1 else factors
    return (
        bytes(codes[first * site.code_bytes : last * site.code_bytes]),
        bytes(scales[first * site.scale_bytes : last * site.scale_bytes]),
        per_token[first:last].tobytes(),
    )
