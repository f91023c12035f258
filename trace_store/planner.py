"""Plan a read: requested spans and sites -> record pieces with their places, and what is missing. Pure, no I/O.

The plan is columns, not objects: a microbatch of a thousand spans and sixty sites is sixty thousand pieces.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trace_store.attempt import Attempt, Holding, SiteSet
from trace_store.catalog import Partition
from trace_store.doubles import split_doubles
from trace_store.intervals import gaps
from trace_store.record import TokenSpan

Column = npt.NDArray[np.int64]

_Pieces = npt.NDArray[np.int64]
"""int64 [7, pieces]: the columns of a plan."""

_Selections = dict[tuple[SiteSet, SiteSet], tuple[Column, Column]]
"""Per sites of a group and those of them that a part is about: offsets within its rows, and sites, of the wanted."""


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


ALL_SITES = -1


@dataclass(frozen=True, slots=True)
class Missing:
    """Tokens [start, stop) of a site, or of ALL_SITES of the request, that request span ``span`` does not get."""

    span: int
    site: int
    start: int
    stop: int
    reason: MissingReason


@dataclass(frozen=True)
class ReadPlan:
    """Pieces as columns: rows [skip, skip + rows) of index row ``row`` in ``segment``, for ``dest_row`` of ``site``.

    ``doubles``: pieces for the same places that are served where those of the plan are damaged, best first.
    ``absent``: spans of which nothing is visible, for ALL_SITES: the lock is held while a plan is made, and a million
    entries would take a second.
    ``served``: for each span the number and version of the attempt that is read, None where none is visible.
    """

    segment: Column
    row: Column
    site: Column
    skip: Column
    rows: Column
    dest_row: Column
    span: Column
    missing: tuple[Missing, ...]
    doubles: ReadPlan | None = None
    absent: tuple[Missing, ...] = ()
    served: tuple[tuple[int, int] | None, ...] = ()


def plan_read(
    partition: Partition | None,
    spans: Sequence[TokenSpan],
    sites: Sequence[int],
    *,
    include_open: bool,
    policy_version_min: int,
) -> ReadPlan:
    """Plan the rows of ``spans`` at ``sites``; wants the engine's lock held."""
    pieces: list[_Pieces] = []
    doubles: list[_Pieces] = []
    missing: list[Missing] = []
    absent: list[Missing] = []
    selections: _Selections = {}
    served: list[tuple[int, int] | None] = []
    for number, span in enumerate(spans):
        found = _find(partition, span.trajectory, include_open)
        served.append(None if isinstance(found, MissingReason) else (found.number, found.version))
        if isinstance(found, MissingReason):
            absent.append(Missing(number, ALL_SITES, span.start, span.stop, found))
            continue
        holdings = list(found.overlapping(span.start, span.stop))
        gap_count = len(missing)
        _plan_span(number, span, holdings, sites, selections, pieces, doubles, missing)
        if len(missing) > gap_count and found.damaged:
            # Recovery dropped rows that were there at the seal: nobody can tell any more which of the gaps they are.
            missing[gap_count:] = [replace(gap, reason=MissingReason.DATA_LOSS) for gap in missing[gap_count:]]
    table = np.concatenate(pieces, axis=1) if pieces else np.zeros((7, 0), np.int64)
    others = _plan(np.concatenate(doubles, axis=1), ()) if doubles else None
    plan = _plan(table, tuple(missing), others)
    if policy_version_min and partition is not None:
        plan = _drop_stale(plan, partition, spans, policy_version_min)
    return replace(plan, absent=tuple(absent), served=tuple(served))


def _plan(columns: _Pieces, missing: tuple[Missing, ...], doubles: ReadPlan | None = None) -> ReadPlan:
    segment, row, site, skip, rows, dest_row, span = columns
    return ReadPlan(segment, row, site, skip, rows, dest_row, span, missing, doubles)


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
    holdings: list[Holding],
    sites: Sequence[int],
    selections: _Selections,
    pieces: list[_Pieces],
    doubles: list[_Pieces],
    missing: list[Missing],
) -> None:
    held: dict[SiteSet, list[tuple[int, int]]] = {}
    for holding in holdings:
        held.setdefault(holding.sites, []).append((max(span.start, holding.start), min(span.stop, holding.stop)))

    def piece(holding: Holding, sites_there: SiteSet, start: int, stop: int) -> _Pieces:
        key = (holding.sites, sites_there)
        if key not in selections:
            there = set(sites_there)
            selections[key] = _select(holding.sites, [site for site in sites if site in there])
        offsets, chosen = selections[key]
        made = np.empty((7, len(chosen)), np.int64)
        first, last = max(span.start, start), min(span.stop, stop)
        made[0], made[1], made[2] = holding.segment, holding.first_row + offsets, chosen
        made[3], made[4] = first - holding.start, last - first
        made[5], made[6] = span.dest_row + first - span.start, number
        return made

    single, copies = split_doubles(holdings)
    pieces.extend(piece(holding, holding.sites, holding.start, holding.stop) for holding in single)
    for part in copies:
        if part.start < span.stop and span.start < part.stop:
            first, *others = (piece(holding, part.sites, part.start, part.stop) for holding in part.holdings)
            pieces.append(first)
            doubles.extend(others)
    if len(held) == 1:
        group, spans = next(iter(held.items()))
        # The usual span: one site set that has all wanted sites, and no gaps. Sixty sites need not be looked at.
        if set(group).issuperset(sites) and not gaps(spans, span.start, span.stop):
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
    fresh = _is_fresh(plan, partition, version_min)
    stale = []
    for position in np.flatnonzero(~fresh):
        span = spans[int(plan.span[position])]
        start = span.start + int(plan.dest_row[position]) - span.dest_row
        stop = start + int(plan.rows[position])
        stale.append(Missing(int(plan.span[position]), int(plan.site[position]), start, stop, MissingReason.STALE))
    doubles = plan.doubles
    if doubles is not None:
        doubles = _plan(_columns(doubles)[:, _is_fresh(doubles, partition, version_min)], ())
    return _plan(_columns(plan)[:, fresh], plan.missing + tuple(stale), doubles)


def _is_fresh(plan: ReadPlan, partition: Partition, version_min: int) -> npt.NDArray[np.bool_]:
    versions = np.zeros(len(plan.row), np.uint64)
    for segment in np.unique(plan.segment):
        chosen = plan.segment == segment
        versions[chosen] = partition.segments[int(segment)].index.rows["policy_version"][plan.row[chosen]]
    fresh: npt.NDArray[np.bool_] = versions >= np.uint64(version_min)
    return fresh


def _columns(plan: ReadPlan) -> _Pieces:
    return np.stack((plan.segment, plan.row, plan.site, plan.skip, plan.rows, plan.dest_row, plan.span))
