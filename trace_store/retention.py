"""What to release, what to evict, and how hard to brake: pure decisions over facts, for the keeper to carry out.

Released without a caller's word, oldest write first, each rule only if it is set:
    age               partitions without a write for longer; by which clock, and how a pause of the store counts, say
                      ``lifetime`` and ``tier.bucket_clock``
    partitions kept   all but the newest N of a run
    disk cap          without an object store: the oldest of all until the disk holds CAP_TARGET of the cap; never the
                      newest of a run. With an object store uploaded segments are evicted instead, and nothing is lost.

Writes are slowed, then refused, as the free disk goes from the low mark to the minimum, and as the directory goes from
CAP_SLOW to all of its cap. Reads, seals and releases always go on.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from trace_store.errors import InvalidRequest

Key = TypeVar("Key", bound=Hashable)

CAP_START = 0.9
CAP_TARGET = 0.85
CAP_SLOW = 0.95

FREE_MIN_BYTES = 1 << 30
FREE_MIN_SHARE = 0.02
"""Default minimum of free disk: 1 GiB or 2 %, whichever is less. Below it writes are refused."""

FREE_LOW_BYTES = 4 << 30
FREE_LOW_SHARE = 0.05
"""Default low mark: 4 GiB or 5 %, whichever is less. Below it writes are slowed."""

SLOW_BYTES_PER_S = 32 << 20
"""Rate of appends just above the refusal; half-way it is twice this."""

AGE_S_MIN = 60.0
PARTITIONS_KEPT_MAX = 1_000_000
DISK_BYTES_MIN = 16 << 20


@dataclass(frozen=True)
class Limits:
    """Settings of retention and of the disk; None switches a rule off, or takes the default of a mark.

    Attributes:
        age_s: release partitions without a write for longer than this.
        partitions_kept: release all but this many newest partitions of a run.
        disk_bytes_max: cap on the bytes of segments in the data directory.
        free_min, free_low: marks on the free bytes of the file system.
    """

    age_s: float | None = None
    partitions_kept: int | None = None
    disk_bytes_max: int | None = None
    free_min: int | None = None
    free_low: int | None = None

    def __post_init__(self) -> None:
        if self.age_s is not None and not self.age_s >= AGE_S_MIN:
            raise InvalidRequest(f"retention age must be at least {AGE_S_MIN:g} s, got={self.age_s}", argument="age")
        if self.partitions_kept is not None and not 1 <= self.partitions_kept <= PARTITIONS_KEPT_MAX:
            raise InvalidRequest(
                f"partitions kept must be 1 to {PARTITIONS_KEPT_MAX}, got={self.partitions_kept}",
                argument="partitions_kept",
            )
        if self.disk_bytes_max is not None and self.disk_bytes_max < DISK_BYTES_MIN:
            raise InvalidRequest(
                f"disk cap must be at least {DISK_BYTES_MIN} bytes, got={self.disk_bytes_max}",
                argument="disk_bytes_max",
            )
        if None not in (self.free_min, self.free_low) and not 0 <= (self.free_min or 0) <= (self.free_low or 0):
            raise InvalidRequest(
                f"free disk marks must be 0 <= min <= low, got min={self.free_min} low={self.free_low}",
                argument="free_min",
            )

    def free_marks(self, disk_size: int) -> tuple[int, int]:
        """Minimum and low mark of free bytes on a file system of this size."""
        least = self.free_min if self.free_min is not None else min(FREE_MIN_BYTES, int(FREE_MIN_SHARE * disk_size))
        low = self.free_low if self.free_low is not None else min(FREE_LOW_BYTES, int(FREE_LOW_SHARE * disk_size))
        return least, max(low, least)


@dataclass(frozen=True)
class PartitionFacts(Generic[Key]):
    """A partition as retention sees it: last write in seconds on one clock, how long that is ago, bytes on the disk."""

    key: Key
    run: str
    written_at: float
    disk_bytes: int
    idle_s: float = 0.0


@dataclass(frozen=True)
class SegmentFacts(Generic[Key]):
    """An uploaded segment on the local disk."""

    key: Key
    read_at: float
    disk_bytes: int


def to_release(
    limits: Limits,
    partitions: Sequence[PartitionFacts[Key]],
    *,
    evictable: bool,
) -> list[tuple[Key, str]]:
    """Partitions to release and the rule that says so (``age``, ``count`` or ``cap``), oldest first.

    ``evictable``: the disk is a cache of an object store, so the cap is kept by eviction.
    """
    oldest_first = sorted(partitions, key=lambda facts: facts.written_at)
    reasons: dict[Key, str] = {}
    ranks: dict[str, int] = {}
    newest: set[Key] = set()
    for facts in reversed(oldest_first):
        rank = ranks[facts.run] = ranks.get(facts.run, 0) + 1
        if rank == 1:
            newest.add(facts.key)
        if limits.partitions_kept is not None and rank > limits.partitions_kept:
            reasons[facts.key] = "count"
        elif limits.age_s is not None and facts.idle_s > limits.age_s:
            reasons[facts.key] = "age"
    cap = limits.disk_bytes_max
    held = sum(facts.disk_bytes for facts in partitions if facts.key not in reasons)
    if cap is not None and not evictable and held > CAP_START * cap:
        for facts in oldest_first:
            if held <= CAP_TARGET * cap:
                break
            if facts.key not in reasons and facts.key not in newest:
                reasons[facts.key] = "cap"
                held -= facts.disk_bytes
    return [(facts.key, reasons[facts.key]) for facts in oldest_first if facts.key in reasons]


def to_evict(
    limits: Limits, used_bytes: int, free_bytes: int, disk_size: int, segments: Iterable[SegmentFacts[Key]]
) -> list[Key]:
    """Segments whose local copies go, least recently read first, to keep the cap and the low mark of free disk."""
    cap = limits.disk_bytes_max
    excess = 0
    if cap is not None and used_bytes > CAP_START * cap:
        excess = int(used_bytes - CAP_TARGET * cap)
    excess = max(excess, limits.free_marks(disk_size)[1] - free_bytes)
    chosen = []
    for facts in sorted(segments, key=lambda facts: facts.read_at) if excess > 0 else ():
        if excess <= 0:
            break
        chosen.append(facts.key)
        excess -= facts.disk_bytes
    return chosen


def pressure(limits: Limits, used_bytes: int, free_bytes: int, disk_size: int) -> float:
    """How near the disk is to full: 0 or less is fine, 1 or more refuses writes, between them writes are slowed."""
    least, low = limits.free_marks(disk_size)
    value = (low - free_bytes) / (low - least) if low > least else float(free_bytes < least)
    if limits.disk_bytes_max is not None:
        slow = CAP_SLOW * limits.disk_bytes_max
        value = max(value, (used_bytes - slow) / (limits.disk_bytes_max - slow))
    return value


def append_delay(value: float, payload_bytes: int) -> float:
    """Seconds that an append of this size waits under a pressure."""
    return min(max(value, 0.0), 1.0) * payload_bytes / SLOW_BYTES_PER_S
