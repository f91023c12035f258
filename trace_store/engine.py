"""The engine: everything the store does, as one thread-safe object without network. The server and tests call this.

engine = Engine(Path("/data"))
engine.register("run", [Site(0, "moe_in", 2048)])
engine.append("run", "step-1", chunk, durability="synced").result()
receipt = engine.seal("run", "step-1", "t0", tokens=9, prompt_tokens=4).result()
with engine.read("run", "step-1", [TokenSpan("t0", 4, 8)], [0]) as read:
    for piece in read: ...
engine.close()
"""

from __future__ import annotations

import logging
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from trace_store.catalog import Partition, Run
from trace_store.chunk import Chunk
from trace_store.commands import AppendCommand, AppendResult, ReleaseCommand, RollCommand, SealCommand
from trace_store.errors import InvalidRequest, StorageFailed
from trace_store.explain import explain
from trace_store.fetch import OpenSegment, byte_ranges
from trace_store.gate import DiskGate
from trace_store.keeper import Keeper, RetentionCounts
from trace_store.lifetime import begin
from trace_store.limits import SPAN_SITES_MAX, SPANS_MAX, TOKENS_MAX
from trace_store.planner import MissingReason, ReadPlan, plan_read
from trace_store.read import Read
from trace_store.record import (
    Receipt,
    Site,
    TokenSpan,
    check_attempt,
    check_durability,
    check_int,
    check_name,
    check_site_table,
)
from trace_store.retention import Limits
from trace_store.shard import Shard
from trace_store.storage.ahead import ReadAhead
from trace_store.storage.s3 import ObjectStore
from trace_store.tier.tier import ObjectTier, TierStatus
from trace_store.volume import Volume

log = logging.getLogger("trace_store.engine")

_PERHAPS_ELSEWHERE = (MissingReason.UNKNOWN_TRAJECTORY, MissingReason.NOT_SEALED, MissingReason.NOT_UPLOADED)


@dataclass(frozen=True)
class Usage:
    """What the store holds and how it is."""

    runs: int
    partitions: int
    trajectories: int
    records: int
    disk_bytes: int
    disk_free_bytes: int
    queued_bytes: int
    write_refusal: str
    disk_state: str
    slowed_seconds: float
    appends_refused: int
    retention: RetentionCounts
    deletions_pending: int
    tier: TierStatus


class Engine:
    """One data directory, one process. ``server`` names it in receipts; clock and epoch are arguments for tests."""

    def __init__(
        self,
        root: Path,
        server: str = "",
        clock: Callable[[], float] = time.monotonic,
        epoch: Callable[[], str] = lambda: secrets.token_hex(8),
        *,
        limits: Limits | None = None,
        objects: ObjectStore | None = None,
    ) -> None:
        """Open or create the directory; with ``objects`` it becomes a cache of that object store.

        Raises:
            StorageFailed: the directory or the object store cannot be used.
            Unsupported: the object store lacks what is needed.
        """
        limits = limits or Limits()
        self._volume = Volume(Path(root), server or socket.gethostname(), epoch(), clock)
        lifetime = begin(Path(root), self._volume.now(), self._volume.newest_write())
        self._volume.set_time(lifetime.started)
        try:
            self._tier = ObjectTier(self._volume, objects, clock) if objects is not None else None
        except BaseException:
            self._volume.close()
            raise
        self._gate = DiskGate(Path(root), limits)
        if self._tier is not None:
            self._tier.cache.has_room = self._gate.has_room
        self._shard = Shard(self._volume, clock, self._gate, upload=objects is not None)
        self._keeper = Keeper(self._volume, limits, self._gate, self._tier, self._release_for_keeper, lifetime.pauses)
        self._closed = False

    @property
    def server(self) -> str:
        return self._volume.server

    @property
    def root(self) -> Path:
        """The data directory."""
        return self._volume.root

    def close(self) -> None:
        """Write and sync what was accepted, seal the open segments, give the directory back. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._keeper.close()
        self._shard.close()
        if self._tier is not None:
            self._tier.close()
        self._volume.close()

    def register(self, run: str, sites: Sequence[Site]) -> bool:
        """Create a run with its site table, durably; True if it is new. Raises SchemaMismatch."""
        check_name(run, "run")
        try:
            if self._tier is not None:
                self._tier.run(run)
        except StorageFailed as error:
            # A rollout does not wait for the object store. Two tables of one run would show when it is back: the
            # segments of the other one are ignored with an error in the log, and verify names them.
            log.warning("run registered without asking the object store, run=%r: %s", run, error)
        return self._volume.register(run, check_site_table(sites))

    def sites(self, run: str) -> tuple[Site, ...]:
        """Site table of a run that this server knows. Raises NotFound."""
        return self._volume.run(run).sites

    def find(self, run: str) -> tuple[Site, ...]:
        """Site table of a run, asked of the object store if need be. Raises NotFound, StorageFailed."""
        return self._find(run).sites

    def _find(self, run: str) -> Run:
        if self._tier is not None:
            self._tier.run(check_name(run, "run"))
        return self._volume.run(run)

    def append(
        self,
        run: str,
        partition: str,
        chunk: Chunk,
        durability: str = "synced",
        on_left_queue: Callable[[], None] | None = None,
        in_arena: bool = False,
    ) -> Future[AppendResult]:
        """Store a chunk; the future is done at ``durability``. Raises NotFound; the future raises the rest.

        ``in_arena``: the chunk's bytes are in memory that somebody else bounds, so the queue takes it at once.
        """
        check_durability(durability)
        command = AppendCommand(self._partition(run, partition), chunk, durability, on_left_queue, in_arena)
        self._shard.submit(command)
        return command.future

    def seal(
        self,
        run: str,
        partition: str,
        trajectory: str,
        *,
        tokens: int,
        prompt_tokens: int,
        attempt: int = 0,
        allow_holes: bool = False,
    ) -> Future[Receipt]:
        """Declare an attempt complete; the future is done when it is durable."""
        check_name(trajectory, "trajectory")
        check_attempt(attempt)
        check_int(tokens, "tokens", 1, TOKENS_MAX)
        check_int(prompt_tokens, "prompt_tokens", 0, tokens)
        command = SealCommand(self._partition(run, partition), trajectory, attempt, tokens, prompt_tokens, allow_holes)
        self._shard.submit(command)
        return command.future

    def read(
        self,
        run: str,
        partition: str,
        spans: Sequence[TokenSpan],
        sites: Sequence[int],
        *,
        include_open: bool = False,
        policy_version_min: int = 0,
    ) -> Read:
        """Start a read. The segments it needs are leased: a release meanwhile does not take them away.

        Raises:
            NotFound: unknown run.
            InvalidRequest: too many spans, unknown or repeated sites.
            StorageFailed: too many files are open.
        """
        known = self._find(run)
        check_name(partition, "partition")
        if len(spans) > SPANS_MAX:
            raise InvalidRequest(f"a read has at most {SPANS_MAX} spans, got={len(spans)}", argument="spans")
        if len(set(sites)) != len(sites) or any(not 0 <= site < len(known.sites) for site in sites):
            raise InvalidRequest(f"sites are repeated or unknown, sites={len(known.sites)}", argument="sites")

        if len(spans) * len(sites) > SPAN_SITES_MAX:
            raise InvalidRequest(
                f"spans times sites of a read are at most {SPAN_SITES_MAX}, split it,"
                f" spans={len(spans)} sites={len(sites)}",
                argument="spans",
            )

        def start(failure: str) -> Read:
            with self._volume.lock:
                found = known.partitions.get(partition)
                plan = plan_read(found, spans, sites, include_open=include_open, policy_version_min=policy_version_min)
                better = partial(explain, spans=spans, run=known, partition_name=partition, unreadable=bool(failure))
                plan = replace(plan, missing=better(plan.missing), absent=better(plan.absent))
                return self._lease(found, plan, spans, sites)

        if self._tier is None:
            return start("")
        read = start(self._tier.ensure(known, partition).failure)
        if any(item.reason in _PERHAPS_ELSEWHERE for item in read.not_found):
            read.close()
            read = start(self._tier.look_again(known, partition).failure)
        return read

    def release(self, run: str, partition: str, trajectories: Sequence[str] | None = None) -> Future[int]:
        """Forget trajectories, or the whole partition; the future gives how many were there, once that is durable.

        Raises:
            NotFound: unknown run.
            StorageFailed: they may be in an object store that does not answer; nothing is released.
        """
        names = None if trajectories is None else tuple(check_name(t, "trajectory") for t in trajectories)
        if self._tier is not None:
            seen = self._tier.look_now(self._find(run), check_name(partition, "partition"))
            # A release is of what is known, so that no clock has a part in it. What was not listed would come back with
            # the store, whenever that is. Objects go by name; which rows a trajectory has in one only its index says.
            if seen.failure and (names is not None or not seen.listed):
                raise StorageFailed(
                    f"nothing is released while the object store cannot say what it has: {seen.failure}"
                )
        command = ReleaseCommand(self._partition(run, partition), names)
        self._shard.submit(command)
        return command.future

    def _release_for_keeper(self, partition: Partition, done: Callable[[], None]) -> None:
        """Release what is known of a partition; retention does not wait for a store, and does it again for the rest."""
        command = ReleaseCommand(partition, None)
        command.future.add_done_callback(lambda future: done())
        self._shard.submit(command, urgent=True)

    def prepare(self, run: str, partition: str) -> None:
        """Before writes to a partition: learn what other servers have uploaded and released of it, so that their seals
        and newer attempts count here, and no more what is gone. Waits for the object store; does nothing without one.
        Raises NotFound, StorageFailed."""
        if self._tier is not None:
            self._tier.catch_up(self._find(run), self._partition(run, partition))

    def load_listing(self, run: str) -> None:
        """Before a listing: bring what the object store holds of a run, or the runs. Raises NotFound, StorageFailed."""
        if self._tier is None:
            return
        if run:
            self._tier.ensure_all(self._find(run))
        else:
            self._tier.find_runs()

    def roll(self) -> Future[None]:
        """Seal every open segment."""
        command = RollCommand()
        self._shard.submit(command)
        return command.future

    def usage(self) -> Usage:
        """Counts over the whole store. Walks the catalog under its lock: for status calls, not for hot paths."""
        with self._volume.lock:
            partitions = [p for run in self._volume.runs.values() for p in run.partitions.values()]
            segments = [segment for p in partitions for segment in p.segments.values()]
            return Usage(
                runs=len(self._volume.runs),
                partitions=len(partitions),
                trajectories=sum(len(p.trajectories) for p in partitions),
                records=sum(segment.index.records for segment in segments),
                disk_bytes=sum(segment.disk_bytes for segment in segments),
                disk_free_bytes=shutil.disk_usage(self._volume.root).free,
                queued_bytes=self._shard.queued_bytes,
                write_refusal=self._shard.refusal or ("the disk is full" if self._gate.state == "full" else ""),
                disk_state=self._gate.state,
                slowed_seconds=self._gate.slowed_s,
                appends_refused=self._gate.refused,
                retention=self._keeper.counts,
                deletions_pending=self._volume.deleter.pending,
                tier=self._tier.status() if self._tier is not None else TierStatus(),
            )

    @property
    def queued_bytes(self) -> int:
        return self._shard.queued_bytes

    def snapshot_runs(self) -> list[Run]:
        """Runs, by name. Their partitions may change; hold ``catalog_lock`` to walk them."""
        with self._volume.lock:
            return sorted(self._volume.runs.values(), key=lambda run: run.name)

    @property
    def catalog_lock(self) -> AbstractContextManager[bool]:
        return self._volume.lock

    def _partition(self, run: str, partition: str) -> Partition:
        return self._volume.partition(self._volume.run(run), check_name(partition, "partition"))

    def _ahead(self, segment: OpenSegment, plan: ReadPlan, number: int) -> OpenSegment:
        """The segment; one that is read over the network is read ahead of the plan."""
        if self._tier is None or not segment.source.shape.remote or number not in plan.segment:
            return segment
        rows = np.unique(plan.row[plan.segment == number])
        ranges = byte_ranges(segment.index.rows[rows])
        return replace(segment, source=ReadAhead(segment.source, ranges, self._tier.read_pool))

    def _lease(
        self, partition: Partition | None, plan: ReadPlan, spans: Sequence[TokenSpan], sites: Sequence[int]
    ) -> Read:
        """Open the segments of a plan. Wants the lock held."""
        if partition is None:
            return Read(plan, {}, spans, sites)
        leased: dict[int, OpenSegment] = {}
        spares: dict[int, OpenSegment] = {}
        wanted = set(plan.segment.tolist())
        doubles = set(plan.doubles.segment.tolist()) - wanted if plan.doubles is not None else set()
        for number in [*sorted(wanted), *sorted(doubles)]:
            try:
                leased[number] = self._ahead(self._volume.lease(partition, number), plan, number)
            except StorageFailed:
                if number in doubles:
                    continue
                for segment in leased.values():
                    segment.source.close()
                raise
            spare = self._volume.spare(partition, number)
            if spare is not None:
                spares[number] = spare

        def distrust(number: int) -> None:
            self._volume.distrust(partition, number)

        return Read(plan, leased, spans, sites, spares, distrust)
