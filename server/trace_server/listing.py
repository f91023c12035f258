"""Answers of List: runs, partitions of a run, trajectories of a partition, sorted by name, a thousand at a time."""

from __future__ import annotations

from typing import Any

from trace_store.attempt import Trajectory
from trace_store.catalog import Partition
from trace_store.engine import Engine
from trace_store.errors import NotFound
from trace_store.v1 import trace_store_service_pb2 as service_pb2

ENTRIES_MAX = 1000

Entry = service_pb2.ListResponse.Entry


def list_entries(engine: Engine, request: Any) -> Any:
    """ListResponse of a ListRequest. Raises NotFound."""
    with engine.catalog_lock:
        entries = _entries(engine, request)
    return service_pb2.ListResponse(entries=entries[:ENTRIES_MAX], more=len(entries) > ENTRIES_MAX)


def _entries(engine: Engine, request: Any) -> list[Any]:
    runs = {run.name: run for run in engine.snapshot_runs()}
    if not request.run:
        names = [name for name in sorted(runs) if name > request.after][: ENTRIES_MAX + 1]
        return [_sum(name, list(runs[name].partitions.values())) for name in names]
    if request.run not in runs:
        raise NotFound(f"unknown run, run={request.run!r}")
    partitions = runs[request.run].partitions
    if not request.partition:
        names = [name for name in sorted(partitions) if name > request.after][: ENTRIES_MAX + 1]
        return [_sum(name, [partitions[name]]) for name in names]
    if request.partition not in partitions:
        raise NotFound(f"unknown partition, run={request.run!r} partition={request.partition!r}")
    trajectories = partitions[request.partition].trajectories
    names = [name for name in sorted(trajectories) if name > request.after][: ENTRIES_MAX + 1]
    return [_trajectory(name, trajectories[name]) for name in names]


def _sum(name: str, partitions: list[Partition]) -> Any:
    segments = [segment for partition in partitions for segment in partition.segments.values()]
    return Entry(
        name=name,
        trajectories=sum(len(partition.trajectories) for partition in partitions),
        records=sum(segment.index.records for segment in segments),
        disk_bytes=sum(segment.disk_bytes for segment in segments),
    )


def _trajectory(name: str, entry: Trajectory) -> Any:
    newest = entry.newest
    visible = entry.sealed
    counts = visible.sealed if visible is not None and visible.sealed is not None else (0, 0)
    return Entry(
        name=name,
        records=newest.records() if newest is not None else 0,
        attempt=newest.number if newest is not None else 0,
        sealed=visible is not None,
        tokens=counts[0],
        prompt_tokens=counts[1],
    )
