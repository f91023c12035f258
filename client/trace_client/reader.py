"""Read guidance records of one partition, by microbatch. Reading never consumes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any

import grpc

from trace_client.channel import Channel
from trace_client.microbatch import REASONS, Buffers, Microbatch, MissingRows, place, rows_of
from trace_client.prefetch import Prefetch
from trace_store import wire
from trace_store.errors import InvalidRequest
from trace_store.limits import POLICY_VERSION_MAX, SPANS_MAX
from trace_store.record import Site, TokenSpan, check_int, check_name
from trace_store.v1 import record_pb2
from trace_store.v1 import trace_store_service_pb2 as service_pb2

READ_TIMEOUT_S = 300.0
"""Deadline of one read: 30 GB at 0.1 GB/s. A stalled reader is cut off by it."""

Span = TokenSpan | tuple[str, int, int] | tuple[str, int, int, int]


class Reader:
    """Reader of one run and partition. Thread-safe."""

    def __init__(self, channel: Channel, run: str, partition: str) -> None:
        self._channel = channel
        self.run, self.partition = check_name(run, "run"), check_name(partition, "partition")
        self.sites: tuple[Site, ...] = channel.table(run)
        self._numbers = {site: number for number, site in enumerate(self.sites)}

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
            out: buffers to reuse; what an earlier read returned over them changes.
            include_open: also read attempts that are not sealed.
            policy_version_min: rows of older weights count as missing.

        Raises:
            InvalidRequest: names the argument.
            Unavailable, DeadlineExceeded: repeat the read.
        """
        wanted = check_spans(spans)
        chosen = self.sites if sites is None else self._check_sites(sites)
        check_int(policy_version_min, "policy_version_min", 0, POLICY_VERSION_MAX)
        batch = (out or Buffers()).microbatch(chosen, rows_of(wanted))
        self.fill(batch, wanted, include_open=include_open, policy_version_min=policy_version_min, timeout_s=timeout_s)
        return batch

    def fill(
        self,
        batch: Microbatch,
        wanted: Sequence[TokenSpan],
        *,
        include_open: bool = False,
        policy_version_min: int = 0,
        timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        """Read checked spans at the sites of a microbatch into it; rows that it does not deliver are left as they are.

        Raises:
            Unavailable, DeadlineExceeded: some rows may have arrived; ``valid`` says which.
        """
        request = service_pb2.ReadRequest(
            run=self.run,
            partition=self.partition,
            spans=[_span_to_wire(span) for span in wanted],
            sites=[self._numbers[site] for site in batch.valid],
            include_open=include_open,
            policy_version_min=policy_version_min,
        )
        try:
            for message in self._channel.read_stream(request, timeout_s):
                self._take(batch, wanted, *wire.parse_read(message))
        except grpc.RpcError as error:
            raise self._channel.error(error, self.sites) from None

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
        thread; ``close()`` also waits for it.
        """
        return Prefetch(
            lambda spans, buffers: self.read(spans, sites, out=buffers, **read_options), microbatches, depth, device
        )

    def _check_sites(self, sites: object) -> tuple[Site, ...]:
        if isinstance(sites, Site) or not isinstance(sites, Iterable):
            raise InvalidRequest(f"sites must be a sequence of Site, got={sites!r}", argument="sites")
        chosen = tuple(sites)
        for site in chosen:
            if not isinstance(site, Site) or site not in self._numbers:
                raise InvalidRequest(f"the run has no such site, site={site}", argument="sites")
        if len(set(chosen)) != len(chosen):
            raise InvalidRequest("a site is named twice", argument="sites")
        return chosen

    def _take(self, batch: Microbatch, spans: Sequence[TokenSpan], header: Any, payload: memoryview) -> None:
        place(batch, [self.sites[number] for number in header.sites], header.dest_rows, header.rows, payload)
        for missing in header.missing:
            reason = REASONS.get(missing.reason, f"reason {missing.reason}")
            batch.missing.append(
                MissingRows(
                    spans[missing.span].trajectory, self.sites[missing.site], missing.start, missing.stop, reason
                )
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
