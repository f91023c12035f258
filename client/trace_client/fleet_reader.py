"""Read from a fleet: each trajectory from the server that has it, found by receipt, by memory or by asking around."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trace_client.arena import Arena
from trace_client.channel import deadline_of, left
from trace_client.fleet import GONE, Endpoint, Fleet
from trace_client.fleet_merge import invalidate, merge, packed
from trace_client.fork import OfOneProcess
from trace_client.microbatch import (
    REASONS,
    Buffers,
    Microbatch,
    MissingRows,
    SpareBuffers,
    plan_layout,
    rows_of,
    view_microbatch,
)
from trace_client.prefetch import Prefetch
from trace_client.reader import READ_TIMEOUT_S, Reader, Span, check_filters, check_out, check_sites, check_spans
from trace_store.errors import DeadlineExceeded, InvalidRequest, TraceStoreError, Unavailable, Unsupported
from trace_store.record import Receipt, Site, TokenSpan, check_name

REMEMBERED_MAX = 100_000
"""Trajectories whose server is remembered, of one reader; then it starts anew."""

SPARED_S = 20.0
"""What a server leaves of a read's time to the others that could be asked instead, half of the time at most. One that
hangs is noticed by then."""

UNREACHABLE = "server unreachable"
"""Reason of rows that no server that answers knows, while one does not answer."""

SUPERSEDED = "superseded by a newer attempt"
"""Reason of rows whose receipt names an older attempt than the visible one."""

_NUMBERS = {text: number for number, text in REASONS.items()}
_UNKNOWN, _NOT_UPLOADED = REASONS[1], REASONS[8]
_ASK_ELSEWHERE = {REASONS[number] for number in (1, 2, 4, 7, 8)}
_TELLING = [SUPERSEDED, *(REASONS[number] for number in (4, 7, 6, 5, 3, 8, 2, 1))]
"""Reasons, the most telling first: what one server knows of a trajectory says more than that another has not got it."""


class _ArenaLost(Exception):
    """A read into shared memory broke off: the server may still be writing there."""


@dataclass(frozen=True)
class _Shared:
    """Memory that a read lands in, and the server that it is shared with."""

    endpoint: Endpoint
    arena: Arena


class FleetReader(OfOneProcess):
    """Reader of one run and partition over several servers. Thread-safe."""

    def __init__(self, fleet: Fleet, run: str, partition: str, receipts: Iterable[Receipt] = ()) -> None:
        self._fleet = fleet
        self.run, self.partition = check_name(run, "run"), check_name(partition, "partition")
        self.sites: tuple[Site, ...] = fleet.first(lambda channel: channel.table(run))
        ours = [receipt for receipt in receipts if (receipt.run, receipt.partition) == (run, partition)]
        self._servers = {receipt.trajectory: receipt.server for receipt in ours}
        self._attempts = {receipt.trajectory: receipt.attempt for receipt in ours}
        self._homes: dict[str, Endpoint] = {}
        self._readers: dict[int, Reader] = {}
        self._spare = SpareBuffers()

    def read(
        self,
        spans: Sequence[Span],
        sites: Sequence[Site] | None = None,
        *,
        out: Buffers | None = None,
        include_open: bool = False,
        policy_version_min: int = 0,
        timeout_s: float = READ_TIMEOUT_S,
    ) -> Microbatch:
        """As ``Reader.read``; where a server of the fleet is on this host, through memory that is shared with it.

        Rows that their server had sealed and not uploaded when it went away are missing with reason ``not uploaded``
        if a receipt says that they existed, else ``server unreachable``. A trajectory with a receipt is read as the
        attempt that it names, and no other.

        Raises:
            InvalidRequest: names the argument.
            Unavailable: no server answers.
            DeadlineExceeded: ``timeout_s`` bounds the whole call; it ended while a server was still to be asked.
        """
        deadline = deadline_of(timeout_s)
        wanted = check_spans(spans)
        check_out(out)
        chosen = check_sites(sites, self.sites)
        check_filters(include_open, policy_version_min)
        options = {"include_open": include_open, "policy_version_min": policy_version_min, "deadline": deadline}
        layout = plan_layout(chosen, rows_of(wanted))
        buffers = out if out is not None else self._spare.take()
        shared = self._share(buffers, layout.size, wanted, deadline)
        if shared is not None:
            batch = view_microbatch(shared.arena.array(), layout)
            if out is None:
                self._spare.give_back_after(batch.memory, buffers)
            try:
                return self._read(batch, wanted, chosen, options, shared)
            except _ArenaLost:
                buffers.drop_arena()
            except BaseException:
                buffers.drop_arena()
                raise
            buffers = out if out is not None else Buffers()  # spare ones go back when that batch is gone
        batch = view_microbatch(buffers.memory(layout.size), layout)
        if out is None:
            self._spare.give_back_after(batch.memory, buffers)
        return self._read(batch, wanted, chosen, options, None)

    def _read(
        self,
        batch: Microbatch,
        wanted: Sequence[TokenSpan],
        chosen: tuple[Site, ...],
        options: dict[str, Any],
        shared: _Shared | None,
    ) -> Microbatch:
        """Ask one server after another until nothing is open. Raises _ArenaLost: all of it has to be read again."""
        asked: dict[int, list[Endpoint]] = {number: [] for number in range(len(wanted))}
        reasons: dict[str, set[str]] = {}
        answered: set[str] = set()
        open_spans = set(asked)
        failure: TraceStoreError | None = None
        while groups := self._groups(wanted, open_spans, asked):
            for endpoint, numbers in groups:
                for number in numbers:
                    asked[number].append(endpoint)
                if not left(options["deadline"]):
                    away = "".join(f", did not answer: target={target}" for target in self._fleet.away())
                    raise DeadlineExceeded(f"the read's time ended before every server was asked{away}") from failure
                others = [other for other in self._fleet.in_order() if any(other not in asked[n] for n in numbers)]
                limited = {**options, "deadline": _shared_time(options["deadline"], alone=not others)}
                asked_now = [wanted[number] for number in numbers]
                again = not answered.isdisjoint(span.trajectory for span in asked_now)
                try:
                    arena = shared.arena if shared is not None and shared.endpoint is endpoint else None
                    part = self._fill(endpoint, batch, asked_now, chosen, limited, again=again, arena=arena)
                except GONE as error:
                    endpoint.mark_down()
                    failure = error
                    if arena is not None and not again:
                        raise _ArenaLost from error
                    if not again:
                        invalidate(batch, asked_now)
                    continue
                answered.update(span.trajectory for span in asked_now)
                elsewhere = self._refuse_others(batch, asked_now, reasons)
                open_spans -= self._settle(endpoint, numbers, wanted, part, reasons, elsewhere)
        if failure is not None and not any(endpoint.healthy for endpoint in self._fleet.endpoints):
            raise failure
        self._report(batch, wanted, chosen, reasons)
        return batch

    def _share(self, buffers: Buffers, size: int, wanted: Sequence[TokenSpan], deadline: float) -> _Shared | None:
        """Memory that is shared with the server that is asked for most spans, of those on this host."""
        everything = set(range(len(wanted)))
        groups = self._groups(wanted, everything, {number: [] for number in everything})
        for endpoint, _ in sorted(groups, key=lambda group: -len(group[1])):
            try:
                arena = buffers.arena(endpoint.channel.arenas, size, left(_shared_time(deadline, alone=False)))
            except GONE:
                endpoint.mark_down()
            except Unsupported:
                pass  # arena="required" is for writes; a server of a fleet may be anywhere
            else:
                if arena is not None:
                    return _Shared(endpoint, arena)
        return None

    def prefetch(
        self,
        microbatches: Iterable[Sequence[Span]],
        sites: Sequence[Site] | None = None,
        *,
        depth: int = 2,
        device: str = "cpu",
        **read_options: Any,
    ) -> Prefetch:
        """As ``Reader.prefetch``."""
        return Prefetch(
            lambda spans, buffers: self.read(spans, sites, out=buffers, **read_options), microbatches, depth, device
        )

    def _groups(
        self, wanted: Sequence[TokenSpan], numbers: set[int], asked: dict[int, list[Endpoint]]
    ) -> list[tuple[Endpoint, list[int]]]:
        """Open spans by the endpoint to ask next; those that every endpoint was asked for are left out."""
        groups: dict[int, tuple[Endpoint, list[int]]] = {}
        for number in sorted(numbers):
            name = wanted[number].trajectory
            home = self._homes.get(name) or self._fleet.named(self._servers.get(name, ""))
            following = next((e for e in self._fleet.in_order(home) if e not in asked[number]), None)
            if following is not None:
                groups.setdefault(id(following), (following, []))[1].append(number)
        return list(groups.values())

    def _fill(
        self,
        endpoint: Endpoint,
        batch: Microbatch,
        spans: list[TokenSpan],
        sites: tuple[Site, ...],
        options: dict[str, Any],
        *,
        again: bool,
        arena: Arena | None,
    ) -> list[MissingRows]:
        """Read spans from one server; ``again``: another one has answered for them and may have left rows. ``arena``:
        the memory of the batch, shared with this server."""
        reader = self._readers.get(id(endpoint))
        if reader is None:
            try:
                endpoint.channel.table(self.run, left(options["deadline"]))  # kept, and the reader's as well
                reader = self._readers[id(endpoint)] = Reader(endpoint.channel, self.run, self.partition)
            except LookupError:  # this server does not know the run
                return [
                    MissingRows(span.trajectory, site, span.start, span.stop, _UNKNOWN)
                    for span in spans
                    for site in sites
                ]
        if reader.sites != self.sites:
            raise Unavailable(f"a server has another site table of the run, target={endpoint.channel.target}")
        if not again:
            batch.missing.clear()
            try:
                reader.fill(batch, spans, arena=arena, **options)
            except InvalidRequest as error:
                if arena is not None and error.argument == "arena":
                    raise _ArenaLost from error  # the server was restarted
                raise
            return list(batch.missing)
        others = packed(spans)
        other = Buffers().microbatch(sites, rows_of(others))
        reader.fill(other, others, **options)
        merge(batch, spans, other, others)
        return other.missing

    def _refuse_others(self, batch: Microbatch, spans: Sequence[TokenSpan], reasons: dict[str, set[str]]) -> set[str]:
        """Take back rows of another attempt than a trajectory's receipt names: they are of other tokens. Returns those
        of which another server may have the right one."""
        elsewhere = set()
        for name in {span.trajectory for span in spans}.intersection(self._attempts, batch.attempts):
            older = batch.attempts[name] < self._attempts[name]
            if batch.attempts[name] != self._attempts[name]:
                reasons.setdefault(name, set()).add(_NOT_UPLOADED if older else SUPERSEDED)
                invalidate(batch, [span for span in spans if span.trajectory == name])
                if older:
                    elsewhere.add(name)
        return elsewhere

    def _settle(
        self,
        endpoint: Endpoint,
        numbers: list[int],
        wanted: Sequence[TokenSpan],
        missing: list[MissingRows],
        reasons: dict[str, set[str]],
        elsewhere: set[str],
    ) -> set[int]:
        """Spans that need not be asked elsewhere; remembers who had them."""
        for rows in missing:
            reasons.setdefault(rows.trajectory, set()).add(rows.reason)
            if rows.reason in _ASK_ELSEWHERE:
                elsewhere.add(rows.trajectory)
        settled = {number for number in numbers if wanted[number].trajectory not in elsewhere}
        if len(self._homes) > REMEMBERED_MAX:
            self._homes.clear()
        self._homes.update((wanted[number].trajectory, endpoint) for number in settled)
        return settled

    def _report(
        self, batch: Microbatch, wanted: Sequence[TokenSpan], sites: tuple[Site, ...], reasons: dict[str, set[str]]
    ) -> None:
        """List the rows that no server delivered, from the validity of the rows themselves."""
        batch.missing.clear()
        away = self._fleet.away()
        for span in wanted:
            seen = reasons.get(span.trajectory, {_UNKNOWN} if away else set())
            if not seen:
                continue
            reason = next((text for text in _TELLING if text in seen), min(seen))
            if reason in (REASONS[1], REASONS[2]) and away:
                sealed = span.trajectory in self._servers
                reason = _NOT_UPLOADED if sealed else UNREACHABLE if reason == _UNKNOWN else reason
            for site in sites:
                valid = batch.valid[site][span.dest_row : span.dest_row + span.tokens]
                for low, high in _false_runs(np.asarray(valid)):
                    batch.missing.append(
                        MissingRows(span.trajectory, site, span.start + low, span.start + high, reason)
                    )


def _shared_time(deadline: float, *, alone: bool) -> float:
    """When one server must have answered; ``alone``: no other could be asked instead."""
    spare = left(deadline)
    return deadline if alone else time.monotonic() + spare - min(spare / 2, SPARED_S)


def _false_runs(valid: np.ndarray) -> list[tuple[int, int]]:
    """Half-open runs of False."""
    edges = np.flatnonzero(np.diff(np.concatenate(([True], valid, [True])).astype(np.int8)))
    return [(int(low), int(high)) for low, high in edges.reshape(-1, 2)]
