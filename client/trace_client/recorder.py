"""Host-side capture: from a rollout's quantizer outputs to sealed trajectories.

    recorder = Recorder(writer, moe_sites)
    kv = KVRecorder(writer, kv_sites, cache)
    in every forward, after the quantizer of a site:
        recorder.record(site, trajectories, positions, codes, scales, tensor_scale)
    when a trajectory ends:
        kv.gather(trajectory, tokens=N)
        receipt = recorder.finish(trajectory, tokens=N, prompt_tokens=P)

A recorder copies what the quantizer wrote and never quantizes again. It packs rows into the form of their site, keeps
them until ``span_tokens`` consecutive tokens of a trajectory are complete at all its sites, and appends those as one
span. K and V need no hook in the forward: their codes lie in the FP4 cache, prefix hits included, and are gathered
once, before the engine frees the cache.

Rows of a trajectory come in rising position order at each site. A gap starts a new span and stays a hole. A position
that comes twice is refused: rejected draft tokens must not be recorded, and a trajectory that the engine executes again
(preemption, new weights) calls ``restart``, which moves it to the next attempt as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trace_client.fork import OfOneProcess
from trace_client.span_buffer import Bytes, OpenRows, Piece, Rows, Span, pack_codes, pieces, scale_rows
from trace_store import Receipt, Site
from trace_store.errors import InvalidRequest

__all__ = ["KVCache", "KVRecorder", "Recorder", "TrajectoryWriter"]

SPAN_TOKENS = 64
"""Tokens per append. 64 tokens at 20 sites of width 2048 in form b1 are one message of 490 KB."""

KV_SPAN_TOKENS = 1024
"""Tokens per append of gathered K and V, which are all there at once."""


class TrajectoryWriter(Protocol):
    """The two calls of ``client.writer`` that a recorder makes."""

    def append(
        self, trajectory: str, start: int, records: Any, *, attempt: int = 0, policy_version: int = 0
    ) -> Any: ...

    def seal(self, trajectory: str, *, tokens: int, prompt_tokens: int, attempt: int = 0) -> Receipt: ...


class KVCache(Protocol):
    """Read access to an FP4 KV cache, by trajectory."""

    def rows(self, site: Site, trajectory: str, start: int, stop: int) -> tuple[Bytes, Bytes, Any]:
        """Codes uint8 [T, W] (0 to 15), block scales uint8 [T, W / block], decode scale (scalar or [T]) of tokens
        [start, stop) at ``site``."""


class Recorder(OfOneProcess):
    """Capture of the sites that a forward pass quantizes, for a batch of trajectories at a time.

    Args:
        writer: what ``client.writer`` returned.
        sites: the sites that ``record`` will get; a span is appended once all of them have its rows.
        span_tokens: tokens per append; a crash of the rollout loses the rows of the spans that are not complete.
        policy_version: version of the weights that the rollout runs, stored with every row.
    """

    def __init__(
        self,
        writer: TrajectoryWriter,
        sites: Sequence[Site],
        *,
        span_tokens: int = SPAN_TOKENS,
        policy_version: int = 0,
    ) -> None:
        if span_tokens < 1:
            raise InvalidRequest(f"span_tokens must be 1 or more, got={span_tokens}", argument="span_tokens")
        self._writer = writer
        self._sites = tuple(sites)
        self._span_tokens = span_tokens
        self._policy_version = policy_version
        self._open: dict[str, OpenRows] = {}
        self._next: dict[tuple[str, Site], int] = {}
        self._attempts: dict[str, int] = {}

    def record(
        self,
        site: Site,
        trajectories: Sequence[str],
        positions: Sequence[int] | npt.NDArray[Any],
        codes: Bytes,
        scales: Bytes,
        tensor_scale: Any,
    ) -> None:
        """Take over the rows of one forward at one site.

        Args:
            site: one of the recorder's sites.
            trajectories: trajectory of each row; rows of one trajectory may follow each other or be interleaved.
            positions: token position of each row.
            codes: uint8 [rows, W], 0 to 15, as the quantizer wrote them. Only real rows: no padding of a graph.
            scales: uint8 [rows, W / block], linear order.
            tensor_scale: decode scale, a scalar or float32 [rows].

        Raises:
            InvalidRequest: an unknown site, a wrong shape, or a position that was recorded before; nothing is taken.
            TraceStoreError: an append failed. The rows were taken; the next call or ``finish`` sends them again, and
                the writer sends what had no answer. With several servers, what the one that went away had answered
                stays there: ``finish`` raises Incomplete, and ``restart`` begins anew.
        """
        if site not in self._sites:
            raise InvalidRequest(f"site is none of the recorder's, site={site.name}", argument="site")
        planes = pack_codes(site, codes)
        scale = scale_rows(tensor_scale, len(planes))
        for argument, entries in (("trajectories", trajectories), ("positions", positions)):
            if len(entries) != len(planes):
                raise InvalidRequest(
                    f"{argument} must have one entry per row of codes, entries={len(entries)} rows={len(planes)}",
                    argument=argument,
                )
        if scales.shape != (len(planes), site.scale_bytes):
            raise InvalidRequest(
                f"scales must have shape [{len(planes)}, {site.scale_bytes}], site={site.name} "
                f"shape={list(scales.shape)}",
                argument="scales",
            )
        cut = list(pieces(trajectories, positions))
        self._advance(site, cut)
        for trajectory, position, place in cut:
            self._take(site, trajectory, position, (planes[place], scales[place], scale[place]))
        for trajectory in dict.fromkeys(trajectories):
            self._append_whole(trajectory)

    def restart(self, trajectory: str) -> int:
        """Begin the trajectory's next attempt: drop rows not yet appended, take positions from the beginning.

        Returns:
            The new attempt. The store replaces the older attempt as a whole.
        """
        self._open.pop(trajectory, None)
        for site in self._sites:
            self._next.pop((trajectory, site), None)
        self._attempts[trajectory] = self.attempt(trajectory) + 1
        return self._attempts[trajectory]

    def attempt(self, trajectory: str) -> int:
        """Attempt under which the trajectory's rows are stored now."""
        return self._attempts.get(trajectory, 0)

    def finish(self, trajectory: str, *, tokens: int, prompt_tokens: int) -> Receipt:
        """Append what is left of the trajectory and seal it.

        Args:
            tokens: tokens of the trajectory, prompt and last sampled one included.
            prompt_tokens: tokens of the prompt.

        Returns:
            The server's receipt: everything recorded survives a power cut.
        """
        open_ = self._open.get(trajectory)
        if open_ is not None:
            for site in list(open_.spans):
                open_.close_span(site)
            for key in sorted(open_.complete):
                self._append(trajectory, open_, key)
        attempt = self.attempt(trajectory)
        receipt = self._writer.seal(trajectory, tokens=tokens, prompt_tokens=prompt_tokens, attempt=attempt)
        self._open.pop(trajectory, None)
        self._attempts.pop(trajectory, None)
        for site in self._sites:
            self._next.pop((trajectory, site), None)
        return receipt

    def _advance(self, site: Site, cut: Sequence[Piece]) -> None:
        """Move the site's next positions behind ``cut``, or refuse all of them."""
        following: dict[tuple[str, Site], int] = {}
        for trajectory, position, rows in cut:
            key = (trajectory, site)
            if position < following.get(key, self._next.get(key, 0)):
                raise InvalidRequest(
                    f"position was recorded before, trajectory={trajectory!r} site={site.name} position={position}; "
                    f"restart() begins a new attempt",
                    argument="positions",
                )
            following[key] = position + rows.stop - rows.start
        self._next.update(following)

    def _take(self, site: Site, trajectory: str, position: int, rows: Rows) -> None:
        open_ = self._open.setdefault(trajectory, OpenRows(self.attempt(trajectory)))
        count, done = len(rows[0]), 0
        while done < count:
            span = open_.spans.get(site)
            if span is None or span.stop != position + done:
                open_.close_span(site)
                span = open_.spans[site] = Span.empty(site, position + done, self._span_tokens)
            room = min(self._span_tokens - span.filled, count - done)
            span.take(rows, done, room)
            done += room
            if span.filled == self._span_tokens:
                open_.close_span(site)

    def _append_whole(self, trajectory: str) -> None:
        """Append the spans that every site has completed."""
        open_ = self._open[trajectory]
        for key in sorted(key for key, sites in open_.complete.items() if len(sites) == len(self._sites)):
            self._append(trajectory, open_, key)

    def _append(self, trajectory: str, open_: OpenRows, key: tuple[int, int]) -> None:
        self._writer.append(
            trajectory, key[0], open_.complete[key], attempt=open_.attempt, policy_version=self._policy_version
        )
        del open_.complete[key]


class KVRecorder(OfOneProcess):
    """Capture of K and V from an engine's FP4 cache when a trajectory ends.

    Args:
        writer: what ``client.writer`` returned; the same one as the ``Recorder`` of the trajectory.
        sites: K and V sites, all of them or those of this rank.
        cache: the FP4 cache.
        span_tokens: tokens per append.
        policy_version: version of the weights that the rollout runs.
    """

    def __init__(
        self,
        writer: TrajectoryWriter,
        sites: Sequence[Site],
        cache: KVCache,
        *,
        span_tokens: int = KV_SPAN_TOKENS,
        policy_version: int = 0,
    ) -> None:
        if span_tokens < 1:
            raise InvalidRequest(f"span_tokens must be 1 or more, got={span_tokens}", argument="span_tokens")
        self._writer = writer
        self._sites = tuple(sites)
        self._cache = cache
        self._span_tokens = span_tokens
        self._policy_version = policy_version

    def gather(self, trajectory: str, *, tokens: int, attempt: int = 0) -> int:
        """Append K and V of the trajectory, to be called before its seal and before the engine frees its cache.

        Args:
            tokens: tokens of the trajectory. The last one was sampled and never ran a forward, so ``tokens - 1`` rows
                exist.
            attempt: the attempt of the trajectory, ``recorder.attempt(trajectory)``.

        Returns:
            Rows appended per site.
        """
        rows = tokens - 1
        for start in range(0, rows, self._span_tokens):
            stop = min(start + self._span_tokens, rows)
            records = {site: self._packed(site, trajectory, start, stop) for site in self._sites}
            self._writer.append(trajectory, start, records, attempt=attempt, policy_version=self._policy_version)
        return rows

    def _packed(self, site: Site, trajectory: str, start: int, stop: int) -> Rows:
        codes, scales, tensor_scale = self._cache.rows(site, trajectory, start, stop)
        if len(codes) != stop - start:
            raise InvalidRequest(
                f"the cache gave another number of rows, site={site.name} rows={len(codes)} wanted={stop - start}",
                argument="cache",
            )
        return (
            pack_codes(site, codes),
            np.ascontiguousarray(scales),
            np.atleast_1d(np.asarray(tensor_scale, np.float32)),
        )
