"""What the shard can be asked to do. Each command carries the future that its caller waits on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from trace_store.catalog import Partition
from trace_store.chunk import Chunk
from trace_store.record import Receipt


@dataclass(frozen=True)
class AppendResult:
    """What became of a chunk: records stored, and records that were there before."""

    stored: int
    duplicates: int


@dataclass
class AppendCommand:
    """Store a chunk; answered at ``durability``. ``on_left_queue`` is called once its bytes need no memory any more.

    ``in_arena``: the bytes are in a client's arena, whose size bounds them.
    """

    partition: Partition
    chunk: Chunk
    durability: str
    on_left_queue: Callable[[], None] | None = None
    in_arena: bool = False
    future: Future[AppendResult] = field(default_factory=Future)

    @property
    def queue_bytes(self) -> int:
        return self.chunk.payload_bytes


@dataclass
class SealCommand:
    """Declare an attempt complete; answered when the seal and all rows before it are synced."""

    partition: Partition
    trajectory: str
    attempt: int
    tokens: int
    prompt_tokens: int
    allow_holes: bool
    future: Future[Receipt] = field(default_factory=Future)
    queue_bytes: int = 0


@dataclass
class ReleaseCommand:
    """Forget trajectories (None: the whole partition); answered when that is durable."""

    partition: Partition
    trajectories: tuple[str, ...] | None
    future: Future[int] = field(default_factory=Future)
    queue_bytes: int = 0


@dataclass
class RollCommand:
    """Seal every open segment; answered when they are immutable."""

    future: Future[None] = field(default_factory=Future)
    queue_bytes: int = 0


Command = AppendCommand | SealCommand | ReleaseCommand | RollCommand
