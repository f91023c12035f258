"""The timer of an engine: carries out what ``retention`` decides and lets the object tier look for new segments.

Releases go through the writer's queue, in front of what waits there, so that deletion keeps pace with ingest. A clock
that jumps does not age anything: times come from the engine's clock, which is set once at start, and that one is not
believed blindly (``lifetime``). Partitions of a bucket are compared by the clock of the bucket alone
(``tier.bucket_clock``), and one that has local segments too is only old if it is old by both.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trace_store.attempt import Segment
from trace_store.catalog import Partition
from trace_store.gate import DiskGate
from trace_store.lifetime import PAUSE_SHARE_MAX, SAVE_S, Pause, age, save
from trace_store.retention import Limits, PartitionFacts, SegmentFacts, to_evict, to_release
from trace_store.tier.bucket_clock import BucketClock
from trace_store.tier.layout import Place, partition_place
from trace_store.tier.tier import ObjectTier
from trace_store.volume import Volume

log = logging.getLogger("trace_store.keeper")

TICK_S = 0.5
"""How often it looks by itself; appends that meet a filling disk call it, at most every TICK_PRESSED_S."""

TICK_PRESSED_S = 0.05

RULES = ("age", "count", "cap")


@dataclass
class RetentionCounts:
    """Partitions released since the start, by rule."""

    age: int = 0
    count: int = 0
    cap: int = 0


class Keeper:
    """One thread. ``release`` releases a partition of the catalog and calls back when that is done."""

    def __init__(
        self,
        volume: Volume,
        limits: Limits,
        gate: DiskGate,
        tier: ObjectTier | None,
        release: Callable[[Partition, Callable[[], None]], None],
        pauses: Sequence[Pause] = (),
    ) -> None:
        """``pauses``: times before this start in which no store ran (``lifetime``)."""
        self._pauses, self._saved_at = list(pauses), float("-inf")
        self._volume, self._limits, self._gate, self._tier, self._release = volume, limits, gate, tier, release
        self.counts = RetentionCounts()
        self._under_way: set[Place] = set()
        self._stop, self._wake = threading.Event(), threading.Event()
        gate.on_pressure = self._wake.set
        if limits.age_s is not None and pauses and pauses[-1][1] - pauses[-1][0] > PAUSE_SHARE_MAX * limits.age_s:
            log.warning(
                "by the clock the store stood still for %.0f s; of that %.0f s count for the age of partitions",
                pauses[-1][1] - pauses[-1][0],
                PAUSE_SHARE_MAX * limits.age_s,
            )
        self._thread = threading.Thread(target=self._run, name="trace-store-keep", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join()
        self._save()

    def _run(self) -> None:
        while not self._stop.wait(TICK_PRESSED_S):
            self._wake.wait(TICK_S - TICK_PRESSED_S)
            self._wake.clear()
            try:
                self.tick()
            except Exception:
                log.exception("retention failed, tried again")

    def tick(self) -> None:
        """Look once; also for tests."""
        if self._tier is not None:
            self._tier.tick()
        if self._volume.now() - self._saved_at >= SAVE_S:
            self._save()
        partitions, evictable, used = self._facts()
        # What is being deleted still fills the disk: a deletion that hangs must not let ingest run past the cap.
        self._gate.observe(used + self._volume.deleter.pending_bytes)
        wanted = to_release(self._limits, partitions, evictable=self._tier is not None)
        for place, rule in wanted:
            if place not in self._under_way:
                self._release_place(place, rule)
        if self._tier is not None and self._tier.joined:
            self._evict(self._tier, evictable, used)

    def _save(self) -> None:
        self._saved_at = self._volume.now()
        save(self._volume.root, self._saved_at, self._pauses)
        if self._tier is not None:
            self._tier.bucket_clock.save()

    def _facts(self) -> tuple[list[PartitionFacts[Place]], list[SegmentFacts[int]], int]:
        """Partitions of catalog and bucket, uploaded segments on the disk, and the bytes of all segments there."""
        facts: dict[Place, PartitionFacts[Place]] = {}
        segments: list[SegmentFacts[int]] = []
        self._segments: dict[int, Segment] = {}
        used = 0
        clock = self._tier.bucket_clock if self._tier is not None and self._tier.joined else None
        if self._tier is not None and clock is not None:
            for place, written in self._tier.view.written_at().items():
                facts[place] = PartitionFacts(place, place[0], written, 0, self._idle(clock.age, written))
        with self._volume.lock:
            for run in self._volume.runs.values():
                for partition in run.partitions.values():
                    used += partition.disk_bytes
                    found = facts.pop(partition_place(partition), None)
                    fact = self._local_facts(partition, found, clock) if partition.segments else found
                    if fact is not None:
                        facts[fact.key] = fact
                    for segment in partition.segments.values():
                        if self._tier is not None and self._tier.evictor.may_go(segment):
                            segments.append(SegmentFacts(segment.number, segment.read_at, segment.disk_bytes))
                            self._segments[segment.number] = segment
        return list(facts.values()), segments, used

    def _local_facts(
        self, partition: Partition, in_bucket: PartitionFacts[Place] | None, clock: BucketClock | None
    ) -> PartitionFacts[Place] | None:
        """A partition of the catalog; None while nobody can say how it compares with others. Wants the lock held."""
        now, idle = self._volume.now(), float("inf")
        sent = all(segment.uploaded for segment in partition.segments.values())
        place, written = partition_place(partition), partition.written_at
        if not (written or sent):
            written = now  # its first rows are being written
        if written:
            idle = self._idle(lambda at, limit: age(at, now, self._pauses, limit), written)
        if clock is None:
            return PartitionFacts(place, place[0], written, partition.disk_bytes, idle)
        times = [in_bucket.written_at] if in_bucket is not None else []
        if not sent:
            told = clock.of_local(place, written)
            if told is None:
                return None  # its upload will tell
            times.append(told)
        if not times:
            return None  # all of it is gone from the bucket: the follower finds out why
        newest = max(times)
        return PartitionFacts(place, place[0], newest, partition.disk_bytes, min(idle, self._idle(clock.age, newest)))

    def _idle(self, age_of: Callable[[float, float], float], written: float) -> float:
        """Seconds without a write, as they count for the rule of age."""
        return age_of(written, self._limits.age_s) if self._limits.age_s is not None else 0.0

    def _release_place(self, place: Place, rule: str) -> None:
        partition = self._find(place)
        setattr(self.counts, rule, getattr(self.counts, rule) + 1)
        log.info("retention releases a partition, rule=%s place=%s", rule, "/".join(place))
        if partition is not None:
            self._under_way.add(place)
            self._release(partition, lambda: self._under_way.discard(place))
        elif self._tier is not None:
            self._tier.release_place(place)

    def _find(self, place: Place) -> Partition | None:
        with self._volume.lock:
            for run in self._volume.runs.values():
                if run.directory.name == place[0]:
                    return next((p for p in run.partitions.values() if p.directory.name == place[1]), None)
        return None

    def _evict(self, tier: ObjectTier, evictable: list[SegmentFacts[int]], used: int) -> None:
        try:
            disk = os.statvfs(self._volume.root)
        except OSError:
            return
        free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        for number in to_evict(self._limits, used, free, size, evictable):
            tier.evictor.evict_soon(self._segments[number])
