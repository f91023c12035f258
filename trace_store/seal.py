"""What a seal checks and writes. Pure but for reading the catalog."""

from __future__ import annotations

from typing import Protocol

from trace_store.admission import check_attempt_state
from trace_store.catalog import Partition, holes
from trace_store.checksum import RowKind
from trace_store.commands import SealCommand
from trace_store.errors import Conflict, Incomplete, InvalidRequest, StorageFailed
from trace_store.record import Receipt
from trace_store.segment.writer import ControlRow

_HOLES_SHOWN = 3


class Stored(Protocol):
    """What a seal asks of the storage behind a partition; ``stored.StoredRecords`` on a volume."""

    def is_safe(self, number: int) -> bool:
        """Whether nobody but this server can have released what is in a segment. A seal that somebody may have
        released is written again."""

    def doubt(self) -> str:
        """Why rows may be stored that the catalog lacks, or an empty string."""


def seal_attempt(
    partition: Partition, command: SealCommand, server: str, stored: Stored
) -> tuple[Receipt, ControlRow | None]:
    """The receipt of a seal, and the row to write; no row when the same seal was written before.

    Raises:
        StaleAttempt: a newer attempt exists.
        Conflict: the attempt is sealed with other counts.
        InvalidRequest: rows beyond ``tokens`` were recorded.
        Incomplete: rows are missing and ``allow_holes`` is not set; carries the holes.
        StorageFailed: the same, but they may be in an object store that cannot be asked: they are not called missing.
    """
    attempt = check_attempt_state(partition, command.trajectory, command.attempt)
    counts = (command.tokens, command.prompt_tokens)
    if attempt is not None and attempt.sealed is not None and attempt.sealed != counts:
        raise Conflict(
            f"the attempt is sealed with other counts, trajectory={command.trajectory!r} attempt={command.attempt}"
            f" tokens={attempt.sealed[0]} prompt_tokens={attempt.sealed[1]}"
        )
    if attempt is not None and attempt.stop_max > command.tokens:
        raise InvalidRequest(
            f"rows beyond the token count were recorded, trajectory={command.trajectory!r} tokens={command.tokens}"
            f" recorded={attempt.stop_max}",
            argument="tokens",
        )
    missing = holes(attempt, partition.run, *counts)
    named = tuple((partition.run.sites[site].name, start, stop) for site, start, stop in missing)
    if named and not command.allow_holes:
        shown = ", ".join(f"{name} [{start}, {stop})" for name, start, stop in named[:_HOLES_SHOWN])
        more = f" and {len(named) - _HOLES_SHOWN} more" if len(named) > _HOLES_SHOWN else ""
        doubt = stored.doubt()
        if doubt:
            raise StorageFailed(
                f"rows are not here: {shown}{more}, trajectory={command.trajectory!r}; they may be in the object store:"
                f" seal again once it answers, or append them again; {doubt}"
            )
        raise Incomplete(f"rows are missing: {shown}{more}, trajectory={command.trajectory!r}", holes=named)
    segments = attempt.segments() if attempt is not None else set()
    receipt = Receipt(
        run=partition.run.name,
        partition=partition.name,
        trajectory=command.trajectory,
        attempt=command.attempt,
        tokens=command.tokens,
        prompt_tokens=command.prompt_tokens,
        durability="synced",
        server=server,
        segments=tuple(sorted(partition.segments[number].path.stem for number in segments)),
        holes=named,
    )
    rows = attempt.rows() if attempt is not None else 0
    if attempt is not None and attempt.sealed is not None:
        if stored.is_safe(attempt.seal_segment):
            return receipt, None
        rows = attempt.sealed_rows  # what is lost of them stays known to be lost
    return receipt, (RowKind.SEAL, command.trajectory, command.attempt, command.prompt_tokens, command.tokens, rows)
