"""Read guidance records of one partition, by microbatch. Reading never consumes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any

import grpc
import numpy as np

from trace_client.arena import Arena
from trace_client.channel import Channel, deadline_of, left, remaining
from trace_client.fork import OfOneProcess
from trace_client.microbatch import (
    REASONS,
    Buffers,
    Layout,
    Microbatch,
    MissingRows,
    SpareBuffers,
    place,
    plan_layout,
    rows_of,
    view_microbatch,
)
from trace_client.prefetch import Prefetch
from trace_store import wire
from trace_store.errors import DataLoss, DeadlineExceeded, InvalidRequest
from trace_store.limits import POLICY_VERSION_MAX, SPANS_MAX
from trace_store.record import Site, TokenSpan, check_int, check_name
from trace_store.segment_directory import StoredRows
from trace_store.v1 import record_pb2
from trace_store.v1 import trace_store_service_pb2 as service_pb2

READ_TIMEOUT_S = 300.0
"""Deadline of one read: 30 GB at 0.1 GB/s. A stalled reader is cut off by it."""

Span = TokenSpan | tuple[str, int, int] | tuple[str, int, int, int]


class Reader(OfOneProcess):
    """Reader of one run and partition. Thread-safe."""

    def __init__(self, channel: Channel, run: str, partition: str) -> None:
        self._channel = channel
        self.run, self.partition = check_name(run, "run"), check_name(partition, "partition")
        self.sites: tuple[Site, ...] = channel.table(run)
        self._numbers = {site: number for number, site in enumerate(self.sites)}
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
        """Read token spans at some sites.

        Args:
            spans: (trajectory, start, stop[, dest_row]) with half-open tokens; the rows of a span land from dest_row
                on, 0 if left out. Rows that no span names stay invalid (padding).
            sites: sites of the run, None for all.
            out: buffers to reuse; what an earlier read returned over them changes. Without them the reader reuses its
                own, once nothing refers to what it read into them.
            include_open: also read attempts that are not sealed.
            policy_version_min: rows of older weights count as missing.
            timeout_s: bounds the whole call.

        Raises:
            InvalidRequest: names the argument.
            Unavailable: the server is not there, see ``trace_client.connect``; repeat the read.
            DeadlineExceeded: not done within ``timeout_s``; repeat the read.
        """
        deadline = deadline_of(timeout_s)
        self._channel.check_usable()
        wanted = check_spans(spans)
        check_out(out)
        chosen = check_sites(sites, self.sites)
        check_filters(include_open, policy_version_min)
        layout = plan_layout(chosen, rows_of(wanted))
        options: dict[str, Any] = {
            "include_open": include_open,
            "policy_version_min": policy_version_min,
            "deadline": deadline,
        }
        return self._channel.reconnecting(lambda: self._read(wanted, layout, out, options), deadline)

    def _read(
        self, wanted: Sequence[TokenSpan], layout: Layout, out: Buffers | None, options: dict[str, Any]
    ) -> Microbatch:
        """A checked read, once."""
        buffers = out if out is not None else self._spare.take()
        arenas, deadline, target = self._channel.arenas, options["deadline"], self._channel.target
        arena = buffers.arena(arenas, layout.size, remaining(deadline, target))
        if not left(deadline):
            if out is None:
                self._spare.give_back(buffers)  # with its arena: the next read need not attach one
            raise DeadlineExceeded(f"the server did not answer in time, {arenas.reason}, target={target}")
        if arena is not None:
            batch = view_microbatch(arena.array(), layout)
            if out is None:
                self._spare.give_back_after(batch.memory, buffers)
            try:
                self.fill(batch, wanted, arena=arena, **options)
                return batch
            except BaseException as error:
                buffers.drop_arena()
                if not (isinstance(error, InvalidRequest) and error.argument == "arena"):
                    raise
            # The server was restarted and knows the arena no more. Spare buffers go back when this batch is gone.
            buffers = out if out is not None else Buffers()
        batch = view_microbatch(buffers.memory(layout.size), layout)
        if out is None:
            self._spare.give_back_after(batch.memory, buffers)
        self.fill(batch, wanted, **options)
        return batch

    def fill(
        self,
        batch: Microbatch,
        wanted: Sequence[TokenSpan],
        *,
        deadline: float,
        include_open: bool = False,
        policy_version_min: int = 0,
        arena: Arena | None = None,
    ) -> None:
        """Read checked spans at the sites of a microbatch into it; rows that it does not deliver are left as they are.

        Args:
            deadline: when to give up, by the monotonic clock.
            arena: the memory of the microbatch, if it is shared with this server, which then puts the rows there.

        Raises:
            InvalidRequest: with argument ``arena``: the server does not know it.
            Unavailable, DeadlineExceeded: some rows may have arrived; ``valid`` says which. An arena must not be used
                any more, the server may still be writing there.
        """
        options = {
            "include_open": include_open,
            "policy_version_min": policy_version_min,
            "deadline": deadline,
        }
        if arena is not None:
            self._fill_arena(batch, wanted, arena, options)
            return
        named = self._fill(batch, wanted, batch.layout.sites, options, self._channel.files(left(deadline)) is not None)
        positions = self._positions(batch)
        again: set[int] = set()
        for stored in named:
            rows, failed = self._read_stored(batch, stored)
            columns = (rows.site.tolist(), rows.dest_row.tolist(), rows.rows.tolist())
            for site, start, count in zip(*columns, strict=True):
                batch.all_valid[positions[site], start : start + count] = True
            again.update(failed)
        self._fill_again(batch, wanted, again, options)

    def _fill(
        self,
        batch: Microbatch,
        wanted: Sequence[TokenSpan],
        sites: Sequence[Site],
        options: dict[str, Any],
        name_stored: bool,
    ) -> list[Any]:
        """Place what the server sends; returns what it names in its data directory instead."""
        request = self._request(wanted, sites, options, name_stored)
        positions = self._positions(batch)
        named = []
        for message in self._messages(request, options["deadline"]):
            header, payload = wire.parse_read(message)
            try:
                slices = [positions[number] for number in header.sites]
            except KeyError:
                raise DataLoss("a read message names a site that was not asked for") from None
            place(batch, slices, header.dest_rows, header.rows, payload)
            self._note(batch, wanted, header)
            if header.HasField("stored"):
                named.append(header.stored)
        return named

    def _read_stored(self, batch: Microbatch, stored: Any) -> tuple[StoredRows, list[int]]:
        files = self._channel.files()
        assert files is not None
        return files.read(self.run, self.partition, self.sites, batch, stored)

    def _fill_again(
        self, batch: Microbatch, wanted: Sequence[TokenSpan], again: set[int], options: dict[str, Any]
    ) -> None:
        """Ask the server for what could not be read in its data directory: it has other copies, or knows why not.

        For whole trajectories: a newer attempt may have been sealed meanwhile, and rows of two must not mix.
        """
        names = {wanted[number].trajectory for number in again}
        spans = [span for span in wanted if span.trajectory in names]
        for span in spans:
            rows = slice(span.dest_row, span.dest_row + span.tokens)
            batch.all_valid[:, rows] = False
            for tensors in batch.tensor_scales.values():
                tensors[rows] = np.nan
        batch.missing[:] = [rows for rows in batch.missing if rows.trajectory not in names]
        if spans:
            self._fill(batch, spans, batch.layout.sites, options, False)

    def _fill_arena(
        self, batch: Microbatch, wanted: Sequence[TokenSpan], arena: Arena, options: dict[str, Any]
    ) -> None:
        """Let the server put the rows where they belong."""
        layout = batch.layout
        files = self._channel.files(left(options["deadline"]))
        request = self._request(wanted, layout.sites, options, files is not None)
        target = request.target
        target.arena, target.rows = arena.id, layout.rows
        target.codes_offsets.extend(layout.codes)
        target.scales_offsets.extend(layout.scales)
        target.tensor_scales_offsets.extend(layout.tensors)
        headers = [wire.parse_read(message)[0] for message in self._messages(request, options["deadline"])]
        for span in wanted:
            batch.all_valid[:, span.dest_row : span.dest_row + span.tokens] = True
        positions = self._positions(batch)
        again: set[int] = set()
        for header in headers:
            if header.HasField("stored"):
                again.update(self._read_stored(batch, header.stored)[1])
            for missing in header.missing:
                shift = wanted[missing.span].dest_row - wanted[missing.span].start
                rows = slice(missing.start + shift, missing.stop + shift)
                batch.all_valid[positions[missing.site], rows] = False
                batch.tensor_scales[self.sites[missing.site]][rows] = np.nan
            self._note(batch, wanted, header)
        self._fill_again(batch, wanted, again, options)

    def _positions(self, batch: Microbatch) -> dict[int, int]:
        """Position in the microbatch by number of the site."""
        return {self._numbers[site]: position for position, site in enumerate(batch.layout.sites)}

    def _request(
        self, wanted: Sequence[TokenSpan], sites: Sequence[Site], options: dict[str, Any], name_stored: bool
    ) -> Any:
        return service_pb2.ReadRequest(
            run=self.run,
            partition=self.partition,
            spans=[_span_to_wire(span) for span in wanted],
            sites=[self._numbers[site] for site in sites],
            include_open=options["include_open"],
            policy_version_min=options["policy_version_min"],
            name_stored=name_stored,
        )

    def _messages(self, request: Any, deadline: float) -> Iterator[bytes]:
        try:
            yield from self._channel.read_stream(request, remaining(deadline, self._channel.target))
        except grpc.RpcError as error:
            raise self._channel.error(error, self.sites, deadline) from None

    def _note(self, batch: Microbatch, wanted: Sequence[TokenSpan], header: Any) -> None:
        """Take over what is missing and which attempts were read."""
        batch.missing.extend(self._missing(wanted, header))
        for span, attempt, version in zip(wanted, header.attempts, header.versions, strict=False):
            if attempt:
                batch.attempts[span.trajectory], batch.versions[span.trajectory] = attempt - 1, version

    def _missing(self, spans: Sequence[TokenSpan], header: Any) -> Iterator[MissingRows]:
        for missing in header.missing:
            reason = REASONS.get(missing.reason, f"reason {missing.reason}")
            trajectory, site = spans[missing.span].trajectory, self.sites[missing.site]
            yield MissingRows(trajectory, site, missing.start, missing.stop, reason)

    def prefetch(
        self,
        microbatches: Iterable[Sequence[Span]],
        sites: Sequence[Site] | None = None,
        *,
        depth: int = 2,
        device: str = "cpu",
        **read_options: Any,
    ) -> Prefetch:
        """Read microbatches ahead on a thread, at most ``depth`` of them, into ``depth + 1`` reused buffers.

        Args:
            device: ``cpu`` gives NumPy arrays; a torch device such as ``cuda`` gives torch tensors there, copied from
                pinned memory on a stream of their own and ready on the current stream.

        A microbatch stays valid until the next one is drawn. Dropping the iterator, as leaving the loop does, stops the
        thread; ``close()`` also waits for it. After Unavailable, DeadlineExceeded or another retryable error ``next``
        reads the same microbatch again.
        """
        return Prefetch(
            lambda spans, buffers: self.read(spans, sites, out=buffers, **read_options), microbatches, depth, device
        )


def check_sites(sites: object, table: tuple[Site, ...]) -> tuple[Site, ...]:
    """Sites of a read, all of ``table`` for None. Raises InvalidRequest."""
    if sites is None:
        return table
    if isinstance(sites, Site) or not isinstance(sites, Iterable):
        raise InvalidRequest(f"sites must be a sequence of Site, got={sites!r}", argument="sites")
    chosen, known = tuple(sites), set(table)
    for site in chosen:
        if not isinstance(site, Site) or site not in known:
            raise InvalidRequest(f"the run has no such site, site={site}", argument="sites")
    if len(set(chosen)) != len(chosen):
        raise InvalidRequest("a site is named twice", argument="sites")
    return chosen


def check_filters(include_open: object, policy_version_min: object) -> None:
    """Raises InvalidRequest."""
    if not isinstance(include_open, (bool, np.bool_)):
        raise InvalidRequest(f"include_open must be a bool, got={include_open!r}", argument="include_open")
    check_int(policy_version_min, "policy_version_min", 0, POLICY_VERSION_MAX)


def check_out(out: object) -> None:
    """Raises InvalidRequest for what is not memory to read into."""
    if out is not None and not isinstance(out, Buffers):
        raise InvalidRequest(
            "out must be trace_client.Buffers(), made once and given to every read that reuses it, or None;"
            f" arrays come back in the Microbatch, got={type(out).__name__}",
            argument="out",
        )


def check_spans(spans: object) -> list[TokenSpan]:
    """Validated spans of one read.

    Raises:
        InvalidRequest: a span is malformed, there are too many, or two want the same destination row.
    """
    if isinstance(spans, (str, bytes)) or not isinstance(spans, Iterable):
        raise InvalidRequest(f"spans must be a sequence of spans, got={spans!r}", argument="spans")
    wanted = [check_span(span) for span in spans]
    if len(wanted) > SPANS_MAX:
        raise InvalidRequest(f"a read has at most {SPANS_MAX} spans, got={len(wanted)}", argument="spans")
    by_row = sorted(wanted, key=attrgetter("dest_row"))
    for span, following in pairwise(by_row):
        if span.dest_row + span.tokens > following.dest_row:
            raise InvalidRequest(
                f"two spans land on the same row, row={following.dest_row} trajectories={span.trajectory!r},"
                f"{following.trajectory!r}",
                argument="span.dest_row",
            )
    return wanted


def check_span(span: Any) -> TokenSpan:
    """A validated span. Raises InvalidRequest."""
    if isinstance(span, TokenSpan):
        return span
    if not isinstance(span, (tuple, list)) or len(span) not in (3, 4):
        raise InvalidRequest(f"a span is (trajectory, start, stop[, dest_row]), got={span!r}", argument="spans")
    return TokenSpan(*span)


def _span_to_wire(span: TokenSpan) -> Any:
    return record_pb2.TokenSpan(trajectory=span.trajectory, start=span.start, stop=span.stop, dest_row=span.dest_row)
