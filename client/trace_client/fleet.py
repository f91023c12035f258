"""Several servers that share one object store, behind one client.

    writes      go to the first healthy endpoint; when it goes away the caller hears Unavailable once, and the next
                call goes to the next one
    reads       go to the server that a receipt names, or that had the trajectory before; else to the first healthy
                one, and what that one misses is asked of each other endpoint once
    register    to every endpoint that answers; one is enough
    release     to every endpoint that answers

An endpoint that did not answer is left alone for DOWN_S, then tried again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import grpc

from trace_client.channel import CONNECT_TIMEOUT_S, Channel
from trace_store.errors import DeadlineExceeded, InvalidRequest, NotFound, TraceStoreError, Unavailable, Unsupported
from trace_store.v1 import trace_store_service_pb2 as service_pb2

DOWN_S = 5.0
"""How long an endpoint that went away is not asked; a server restarts in less."""

OTHERS_WAIT_S = 1.0
"""At connect: longest wait for the other endpoints once one has answered."""

STATUS_TIMEOUT_S = 5.0

ENDPOINTS_MAX = 64

Answer = TypeVar("Answer")

GONE = (Unavailable, DeadlineExceeded)


class Endpoint:
    """One server of a fleet. ``server`` is its name, empty until it answered."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.server = ""
        self.down_until = 0.0

    @property
    def healthy(self) -> bool:
        return time.monotonic() >= self.down_until

    def mark_down(self) -> None:
        self.down_until = time.monotonic() + DOWN_S

    def ask_name(self) -> None:
        """Learn the server's name. Raises TraceStoreError."""
        if not self.server:
            request = service_pb2.StatusRequest()
            self.server = str(self.channel.call("Status", request, timeout_s=STATUS_TIMEOUT_S).server)


class Fleet:
    """The endpoints in the caller's order. Thread-safe."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        if not 1 <= len(channels) <= ENDPOINTS_MAX:
            raise InvalidRequest(f"1 to {ENDPOINTS_MAX} endpoints, got={len(channels)}", argument="target")
        self.endpoints = [Endpoint(channel) for channel in channels]

    def connect(self) -> None:
        """Wait until one endpoint answers, and a moment longer for the others.

        Raises:
            Unavailable: none does.
            TraceStoreError: the first error of one that answers, such as Unauthenticated.
        """
        limit = time.monotonic() + CONNECT_TIMEOUT_S
        waiting = {endpoint: endpoint.channel.ready_future() for endpoint in self.endpoints}
        ready: list[Endpoint] = []
        while waiting and time.monotonic() < limit:
            for endpoint, future in list(waiting.items()):
                try:
                    future.result(timeout=0.02)
                except grpc.FutureTimeoutError:
                    continue
                del waiting[endpoint]
                ready.append(endpoint)
                if len(ready) == 1:
                    limit = min(limit, time.monotonic() + OTHERS_WAIT_S)
        for endpoint, future in waiting.items():
            future.cancel()
            endpoint.mark_down()
        if not ready:
            targets = ",".join(endpoint.channel.target for endpoint in self.endpoints)
            raise Unavailable(f"no server answers, targets={targets} waited_s={CONNECT_TIMEOUT_S:g}")
        self._meet(ready)

    def _meet(self, ready: Sequence[Endpoint]) -> None:
        """Ask servers, side by side, for their names and what the path to them is; those that hang are marked down.

        Raises:
            TraceStoreError: none answers, or one refuses.
        """

        def meet(endpoint: Endpoint) -> TraceStoreError | None:
            try:
                endpoint.ask_name()
            except GONE as error:  # connected, and hangs
                return error
            with suppress(*GONE, Unsupported):
                endpoint.channel.arenas.probe()
            return None

        with ThreadPoolExecutor(len(ready)) as pool:
            failures = list(pool.map(meet, ready))
        for endpoint, failure in zip(ready, failures, strict=True):
            if failure is not None:
                endpoint.mark_down()
        if None not in failures:
            raise next(failure for failure in failures if failure is not None)

    def away(self) -> list[str]:
        """Targets that did not answer lately."""
        return [endpoint.channel.target for endpoint in self.endpoints if not endpoint.healthy]

    def in_order(self, first: Endpoint | None = None) -> list[Endpoint]:
        """Healthy endpoints, ``first`` in front, in the caller's order; all of them when none is healthy."""
        healthy = [endpoint for endpoint in self.endpoints if endpoint.healthy] or list(self.endpoints)
        if first is not None and first in healthy:
            healthy.remove(first)
            healthy.insert(0, first)
        return healthy

    def named(self, server: str) -> Endpoint | None:
        """The endpoint of a server by its name; None if unknown or not unique."""
        found = [endpoint for endpoint in self.endpoints if endpoint.server == server]
        return found[0] if len(found) == 1 else None

    def first(self, call: Callable[[Channel], Answer]) -> Answer:
        """Answer of the first endpoint that has one; NotFound of one is asked of the others too.

        Raises:
            TraceStoreError: of the last one, when none has an answer; any other error at once.
        """
        failure: TraceStoreError | None = None
        for endpoint in self.in_order():
            try:
                return call(endpoint.channel)
            except GONE as error:
                endpoint.mark_down()
                failure = failure or error
            except NotFound as error:
                failure = error
        raise failure or Unavailable("no server answers")

    def each(self, call: Callable[[Channel], Answer]) -> list[Answer]:
        """Answers of all endpoints that are there, in the caller's order, asked side by side; the others are marked
        down.

        Raises:
            TraceStoreError: an endpoint refused, or none answers.
        """
        endpoints = self.in_order()
        answers: list[Answer] = []
        failure: TraceStoreError | None = None
        with ThreadPoolExecutor(len(endpoints)) as pool:
            futures = [(endpoint, pool.submit(call, endpoint.channel)) for endpoint in endpoints]
            for endpoint, future in futures:
                try:
                    answers.append(future.result())
                except GONE as error:
                    endpoint.mark_down()
                    failure = failure or error
        if not answers:
            raise failure or Unavailable("no server answers")
        return answers

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.channel.close()


def split_targets(target: Any) -> list[str]:
    """Endpoints of a comma-separated string or a sequence of strings. Raises InvalidRequest."""
    parts = target.split(",") if isinstance(target, str) else list(target) if isinstance(target, Sequence) else []
    names = [part.strip() if isinstance(part, str) else "" for part in parts]
    if not names or not all(names):
        raise InvalidRequest(
            f"target must be host:port, unix:/path or several of them, got={target!r}", argument="target"
        )
    if len(set(names)) != len(names):
        raise InvalidRequest(f"an endpoint is named twice, got={target!r}", argument="target")
    return names


def merged(listings: Sequence[Iterator[Any]], name: Callable[[Any], str]) -> Iterator[Any]:
    """Rows of several listings sorted by name, one row a name: that of the server that has most records of it."""
    rows: dict[str, Any] = {}
    for listing in listings:
        for row in listing:
            known = rows.get(name(row))
            if known is None or (row.sealed, row.records) > (known.sealed, known.records):
                rows[name(row)] = row
    yield from (rows[key] for key in sorted(rows))
