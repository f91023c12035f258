"""Turn appended arrays into messages: validated, cut by tokens, and copied once, to where they leave from.

All codes of a message are one ``np.concatenate`` into its memory, all scales another, and records are checksummed there
while the cache holds them: 0.14 CPU s/GiB, 0.11 of it the copy, where one record after another took 0.17.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trace_client.columns import Columns, SitePlan, build_columns, check_scales
from trace_store.checksum import group_checksums, trajectory_seed
from trace_store.chunk import RecordGroup
from trace_store.errors import InvalidRequest
from trace_store.limits import FRAME_BYTES, TOKENS_MAX
from trace_store.record import Site, check_attempt, check_int, check_name, has_nan_scale
from trace_store.shape import GroupShape, group_shape

PLANS_MAX = 64
"""Sets of sites that a writer knows; a rollout appends one or two."""


@dataclass(frozen=True)
class Append:
    """One validated append."""

    trajectory: str
    start: int
    columns: Columns


@dataclass(frozen=True)
class _Piece:
    """Sites [low, high) of an append, tokens [first, last): one group of a message."""

    low: int
    high: int
    first: int
    last: int
    shape: GroupShape


class Outgoing:
    """One message that is yet to be written to the memory it leaves from. ``size`` is its payload."""

    def __init__(self, append: Append, seed: int, attempt: int, policy_version: int) -> None:
        self._append, self._seed = append, seed
        self._attempt, self._policy_version = attempt, policy_version
        self._pieces: list[_Piece] = []
        self.trajectory, self.size = append.trajectory, 0

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, piece: _Piece) -> None:
        self._pieces.append(piece)
        self.size += piece.shape.code_bytes + piece.shape.scale_bytes + piece.shape.tensor_bytes

    def fill(self, target: npt.NDArray[np.uint8]) -> tuple[RecordGroup, ...]:
        """Write the payload to ``target``, which has its size, and say what it is.

        Raises:
            InvalidRequest: a block scale is NaN.
        """
        columns, pieces = self._append.columns, self._pieces
        scales_at = sum([piece.shape.code_bytes for piece in pieces])
        tensors_at = scales_at + sum([piece.shape.scale_bytes for piece in pieces])
        code, scale, tensor = 0, scales_at, tensors_at
        places = []
        for piece in pieces:
            span = (piece.low, piece.high, piece.first, piece.last)
            places.append((code, scale, tensor))
            code += columns.copy_codes(target[code:], *span)
            scale += columns.copy_scales(target[scale:], *span)
            tensor += columns.copy_tensors(target[tensor:], *span)
        if not columns.checked:
            part = target[scales_at:tensors_at]
            if any(has_nan_scale(part, kind) for kind in columns.plan.scale_types):
                check_scales(columns)  # names the site; without a NaN it was one type's number and another's NaN
        memory = target.data
        checksums = [self._checksums(piece, memory, *place) for piece, place in zip(pieces, places, strict=True)]
        return tuple([self._group(*each) for each in zip(pieces, checksums, strict=True)])

    def blank(self) -> tuple[RecordGroup, ...]:
        """What ``fill`` will return, with checksums of 0."""
        return tuple([self._group(piece, (0,) * (piece.high - piece.low)) for piece in self._pieces])

    def _checksums(self, piece: _Piece, memory: memoryview, code: int, scale: int, tensor: int) -> list[int]:
        shape = piece.shape
        start, stop = self._append.start + piece.first, self._append.start + piece.last
        return group_checksums(
            self._seed,
            self._attempt,
            self._policy_version,
            start,
            stop,
            shape.key_parts,
            shape.parts,
            memory[code : code + shape.code_bytes],
            memory[scale : scale + shape.scale_bytes],
            memory[tensor : tensor + shape.tensor_bytes],
        )

    def _group(self, piece: _Piece, checksums: Sequence[int]) -> RecordGroup:
        columns = self._append.columns
        return RecordGroup(
            self.trajectory,
            self._attempt,
            self._policy_version,
            self._append.start + piece.first,
            self._append.start + piece.last,
            columns.plan.numbers[piece.low : piece.high],
            columns.per_token[piece.low : piece.high],
            tuple(checksums),
        )


class Encoder:
    """Messages of one writer: run, partition and site table are fixed."""

    def __init__(self, run: str, partition: str, table: Sequence[Site]) -> None:
        self._run, self._partition, self._table = run, partition, table
        self._numbers = {site: number for number, site in enumerate(table)}
        self._seed: tuple[str, int] = ("", 0)
        self._plans: dict[tuple[Site, ...], SitePlan] = {}
        self._plan: SitePlan | None = None

    def take(self, trajectory: str, start: int, records: Mapping[Site, tuple[Any, Any, Any]]) -> Append:
        """Validate one append; block scales are looked at later, when they are copied.

        Raises:
            InvalidRequest: names the argument at fault.
        """
        if trajectory != self._seed[0]:
            check_name(trajectory, "trajectory")
        if not isinstance(records, Mapping) or not records:
            raise InvalidRequest("records must map a site to (planes, scales, tensor_scale)", argument="records")
        plan = self._plan_of(tuple(records))
        start = check_int(start, "start", 0, TOKENS_MAX)
        columns = build_columns(plan, start, list(records.values()))
        if start + columns.tokens > TOKENS_MAX:
            raise InvalidRequest(f"tokens end after {TOKENS_MAX}, tokens={columns.tokens}", argument="planes")
        return Append(trajectory, start, columns)

    def messages(
        self, append: Append, attempt: int, policy_version: int, message_bytes: int = FRAME_BYTES
    ) -> Iterator[Outgoing]:
        """Messages of up to ``message_bytes``. Records are cut at FRAME_BYTES in any case: a reader of a few tokens
        reads and verifies whole records.

        Raises:
            InvalidRequest: a block scale is NaN; no message was made.
        """
        check_attempt(attempt, policy_version)
        if self._seed[0] != append.trajectory:
            self._seed = (append.trajectory, trajectory_seed(self._run, self._partition, append.trajectory))
        columns = append.columns
        pieces = list(self._pieces(columns))
        if len(pieces) > 1 and not columns.checked:
            check_scales(columns)  # a later message must not fail when an earlier one is on its way
            append = replace(append, columns=replace(columns, checked=True))
        outgoing = Outgoing(append, self._seed[1], attempt, policy_version)
        for piece, size in pieces:
            if outgoing and outgoing.size + size > message_bytes:
                yield outgoing
                outgoing = Outgoing(append, self._seed[1], attempt, policy_version)
            outgoing.add(piece)
        yield outgoing

    def _pieces(self, columns: Columns) -> Iterator[tuple[_Piece, int]]:
        """Groups of an append, and the payload each counts for."""
        plan = columns.plan
        for low, high, row_bytes in plan.parts:
            numbers, per_token = plan.numbers[low:high], columns.per_token[low:high]
            step = max(1, FRAME_BYTES // row_bytes)
            for first in range(0, columns.tokens, step):
                last = min(first + step, columns.tokens)
                shape = group_shape(self._table, numbers, per_token, last - first)
                yield _Piece(low, high, first, last, shape), (last - first) * row_bytes

    def _plan_of(self, sites: tuple[Site, ...]) -> SitePlan:
        # The same objects every time: comparing them costs 0.3 us, hashing 20 sites costs 15.
        if self._plan is None or self._plan.given != sites:
            plan = self._plans.get(sites)
            if plan is None:
                if len(self._plans) >= PLANS_MAX:
                    self._plans.clear()
                plan = self._plans[sites] = SitePlan.of(sites, self._numbers)
            self._plan = plan
        return self._plan
