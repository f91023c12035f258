"""Say more exactly why rows are missing, from what is known beyond one partition's catalog. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from trace_store.attempt import Attempt
from trace_store.catalog import Partition, Run
from trace_store.planner import Missing, MissingReason
from trace_store.record import TokenSpan


def explain(
    missing: Iterable[Missing],
    spans: Sequence[TokenSpan],
    run: Run,
    partition_name: str,
    *,
    unreadable: bool,
) -> tuple[Missing, ...]:
    """``missing`` with better reasons; wants the engine's lock held.

        unknown trajectory     released, if its partition was and nothing was written to it since; storage failed, if
                               the bucket could not be asked
        not sealed             not uploaded, if another server writes it: its seal is not in the bucket
        data loss              not uploaded, if rows that were there at the seal are not in the bucket

    ``unreadable``: a part of the partition is in the object store and could not be read.
    """
    partition = run.partitions.get(partition_name)
    released = partition_name in run.released and (partition is None or not partition.segments)
    result = []
    for item in missing:
        entry = partition.trajectories.get(spans[item.span].trajectory) if partition is not None else None
        reason = item.reason
        if reason == MissingReason.UNKNOWN_TRAJECTORY:
            if unreadable:
                reason = MissingReason.STORAGE_FAILED
            elif released:
                reason = MissingReason.RELEASED
        elif entry is None or partition is None:
            pass
        elif reason == MissingReason.NOT_SEALED and _is_foreign(partition, entry.newest):
            reason = MissingReason.STORAGE_FAILED if unreadable else MissingReason.NOT_UPLOADED
        elif reason == MissingReason.DATA_LOSS and entry.sealed is not None and entry.sealed.damaged:
            if unreadable:
                reason = MissingReason.STORAGE_FAILED
            elif _is_foreign(partition, entry.sealed):
                reason = MissingReason.NOT_UPLOADED
        result.append(item if reason == item.reason else replace(item, reason=reason))
    return tuple(result)


def _is_foreign(partition: Partition, attempt: Attempt | None) -> bool:
    """Whether another server wrote every row of an attempt that is known here."""
    if attempt is None:
        return False
    segments = attempt.segments()
    return bool(segments) and all(partition.segments[number].foreign for number in segments)
