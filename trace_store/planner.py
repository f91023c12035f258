"""Plan a read: requested spans and sites -> record pieces with their places, and what is missing. Pure, no I/O.

The plan is columns, not objects: a microbatch of a thousand spans and sixty sites is sixty thousand pieces.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trace_store.attempt import Attempt
from trace_store.catalog import Partition, gaps
from trace_store.record import TokenSpan

Column = npt.NDArray[np.int64]


class MissingReason(enum.IntEnum):
    """Why rows are missing; the numbers are those of the wire."""

    UNKNOWN_TRAJECTORY = 1
    NOT_SEALED = 2
    NOT_RECORDED = 3
    DATA_LOSS = 4
    STALE = 5
    RELEASED = 6
    STORAGE_FAILED = 7
    NOT_UPLOADED = 8


@dataclass(frozen=True)
class Missing:
    """Tokens [start, stop) of a site that request span ``span`` does not get."""

    span: int
    site: int
    start: int
    stop: int
    reason: MissingReason


@dataclass(frozen=True)
class ReadPlan:
    """Pieces as columns: rows [skip, skip + rows) of index row ``row`` in ``segment``, for ``dest_row`` of ``site``."""

    segment: Column
    row: Column
    site: Column
    skip: Column
    rows: Column
    dest_row: Column
    span: Column
    missing: tuple[Missing, ...]


def plan_read(
    partition: Partition | None,
    spans: Sequence[TokenSpan],
    sites: Sequence[int],
    *,
    include_open: bool,
    policy_version_min: int,
) -> ReadPlan:
    """Plan the rows of ``spans`` at ``sites``; wants the engine's lock held."""
    pieces: list[npt.NDArray[np.int64]] = []
    missing: list[Missing] = []
    selections: dict[tuple[int, ...], tuple[Column, Column]] = {}
    for number, span in enumerate(spans):
        found = _find(partition, span.trajectory, include_open)
        if isinstance(found, MissingReason):
            missing.extend(Missing(number, site, span.start, span.stop, found) for site in sites)
            continue
        holdings = list(found.overlapping(span.start, span.stop))
        gap_count = len(missing)
        _plan_span(number, span, holdings, sites, selections, pieces, missing)
        if len(missing) > gap_count and found.damaged:
            # Recovery dropped rows that were there at the seal: nobody can tell any more which of the gaps they are.
            missing[gap_count:] = [replace(gap, reason=MissingReason.DATA_LOSS) for gap in missing[gap_count:]]
    table = np.concatenate(pieces, axis=1) if pieces else np.zeros((7, 0), np.int64)
    plan = _plan(table, tuple(missing))
    if policy_version_min and partition is not None:
        return _drop_stale(plan, partition, spans, policy_version_min)
    return plan


def _plan(columns: npt.NDArray[np.int64], missing: tuple[Missing, ...]) -> ReadPlan:
    segment, row, site, skip, rows, dest_row, span = columns
    return ReadPlan(segment, row, site, skip, rows, dest_row, span, missing)


def _find(partition: Partition | None, trajectory: str, include_open: bool) -> Attempt | MissingReason:
    entry = partition.trajectories.get(trajectory) if partition is not None else None
    if entry is None:
        released = partition is not None and trajectory in partition.released
        return MissingReason.RELEASED if released else MissingReason.UNKNOWN_TRAJECTORY
    visible = entry.newest if include_open else entry.sealed
    return visible if visible is not None else MissingReason.NOT_SEALED


def _plan_span(
    number: int,
    span: TokenSpan,
    holdings: list,  # type: ignore[type-arg]
    sites: Sequence[int],
    selections: dict[tuple[int, ...], tuple[Column, Column]],
    pieces: list[npt.NDArray[np.int64]],
    missing: list[Missing],
) -> None:
    held: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for holding in holdings:
        if holding.sites not in selections:
            selections[holding.sites] = _select(holding.sites, sites)
        offsets, chosen = selections[holding.sites]
        earlier = held.setdefault(holding.sites, [])
        low, high = max(span.start, holding.start), min(span.stop, holding.stop)
        # A rewrite after a disk error may leave a record twice; the first one serves.
        for first, last in gaps(earlier, low, high):
            piece = np.empty((7, len(chosen)), np.int64)
            piece[0], piece[1], piece[2] = holding.segment, holding.first_row + offsets, chosen
            piece[3], piece[4] = first - holding.start, last - first
            piece[5], piece[6] = span.dest_row + first - span.start, number
            pieces.append(piece)
            earlier.append((first, last))
    if len(held) == 1:
        group, spans = next(iter(held.items()))
        # The usual span: one site set that has all wanted sites, and no gaps. Sixty sites need not be looked at.
        if len(selections[group][1]) == len(sites) and not gaps(spans, span.start, span.stop):
            return
    _find_gaps(number, span, held, sites, missing)


def _find_gaps(
    number: int,
    span: TokenSpan,
    held: dict[tuple[int, ...], list[tuple[int, int]]],
    sites: Sequence[int],
    missing: list[Missing],
) -> None:
    members = [(set(group), spans) for group, spans in held.items()]
    known: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    for site in sites:
        pattern = tuple(site in group for group, _ in members)
        if pattern not in known:
            spans = [
                item for inside, (_, held_spans) in zip(pattern, members, strict=True) if inside for item in held_spans
            ]
            known[pattern] = gaps(spans, span.start, span.stop)
        missing.extend(Missing(number, site, low, high, MissingReason.NOT_RECORDED) for low, high in known[pattern])


def _select(held: tuple[int, ...], wanted: Sequence[int]) -> tuple[Column, Column]:
    """Offsets within a group's rows of the wanted sites it has, and those sites."""
    place = {site: offset for offset, site in enumerate(held)}
    chosen = [site for site in wanted if site in place]
    return np.array([place[site] for site in chosen], np.int64), np.array(chosen, np.int64)


def _drop_stale(plan: ReadPlan, partition: Partition, spans: Sequence[TokenSpan], version_min: int) -> ReadPlan:
    versions = np.zeros(len(plan.row), np.uint64)
    for segment in np.unique(plan.segment):
        chosen = plan.segment == segment
        versions[chosen] = partition.segments[int(segment)].index.rows["policy_version"][plan.row[chosen]]
    fresh = versions >= np.uint64(version_min)
    stale = []
    for position in np.flatnonzero(~fresh):
        span = spans[int(plan.span[position])]
        start = span.start + int(plan.dest_row[position]) - span.dest_row
        stop = start + int(plan.rows[position])
        stale.append(Missing(int(plan.span[position]), int(plan.site[position]), start, stop, MissingReason.STALE))
    columns = np.stack((plan.segment, plan.row, plan.site, plan.skip, plan.rows, plan.dest_row, plan.span))
    return _plan(columns[:, fresh], plan.missing + tuple(stale))
