"""The channel to a server: options, credentials, deadlines, and gRPC failures turned into errors of the tree.

A server that went away is looked for during RECONNECT_WAIT_S, since it may be back already. One that hangs is noticed
by its silence: while a call is under way gRPC pings its process each PING_INTERVAL_S, and when an answer takes longer
than PING_TIMEOUT_S every call ends as Unavailable. A process that merely waits for a slow disk, or whose Python code is
busy, answers pings, so that long waits stay legal.
"""

from __future__ import annotations

import math
import numbers
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc

from trace_client import fork
from trace_client.arena import Arenas
from trace_client.segment_files import SegmentFiles
from trace_store import wire
from trace_store.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    TraceStoreError,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from trace_store.limits import FRAME_BYTES_MAX, PING_INTERVAL_S
from trace_store.record import Site
from trace_store.v1 import record_pb2
from trace_store.v1 import trace_store_service_pb2 as service_pb2

CALL_TIMEOUT_S = 60.0
"""Deadline of a control call; a seal behind a full queue waits for the disk."""

TIMEOUT_S_MAX = 365 * 86_400.0
"""Longest deadline: gRPC takes one from 9.3e9 s on as one that has passed, and no call lasts a year."""

CONNECT_TIMEOUT_S = 10.0

CONNECTION_TIMEOUT_S = 5.0
"""Longest wait for one connection. Calls wait for it too, and the host may be gone; gRPC's own value is 20 s."""

PING_TIMEOUT_S = 10.0
"""Longest wait for the answer to a ping: a machine that is moved or starved of CPU for some seconds is not gone."""

RECONNECT_WAIT_S = 1.0
"""How long a call whose connection broke is tried again: a server that is back is found, one that is not is told."""

RECONNECT_BACKOFF_S = 0.5
"""Longest pause between two connections of a channel, with 20 % of chance on top: within RECONNECT_WAIT_S."""

RECONNECT_PAUSE_S = 0.05

MESSAGE_OVERHEAD_BYTES = 64 << 10

METADATA_BYTES_MAX = 64 << 10
"""Trailing metadata that the client accepts: an Incomplete names up to 256 holes, gRPC's own default is 8 KiB."""

_Answer = TypeVar("_Answer")

_BARE: dict[grpc.StatusCode, type[TraceStoreError]] = {
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.CANCELLED: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.NOT_FOUND: NotFound,
}

_HINTS: dict[type[TraceStoreError], str] = {
    Unavailable: "; the server went away or is not there, retrying is safe",
    DeadlineExceeded: "; the server did not answer in time, retrying is safe",
}


@dataclass(frozen=True)
class Tls:
    """TLS files of a client, PEM. ``ca`` None trusts the system's; certificate and key are for mutual TLS."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


class Channel(fork.OfOneProcess):
    """One gRPC channel and its stubs. Thread-safe. Bulk methods carry raw frames.

    Args:
        alone: there is no other server to go to, so that calls wait RECONNECT_WAIT_S for this one.
    """

    def __init__(
        self,
        target: str,
        tls: Tls | None,
        token: str | None,
        arena: str = "off",
        files: SegmentFiles | None = None,
        *,
        alone: bool = True,
    ) -> None:
        if not isinstance(target, str) or not _is_target(target):
            raise InvalidRequest(f"target must be host:port or unix:/path, got={target!r}", argument="target")
        fork.check_connect()
        self.target, self._alone = target, alone
        self._process, self._closed = os.getpid(), False
        self._metadata = (("authorization", f"Bearer {_check_token(token)}"),) if token else ()
        limit = FRAME_BYTES_MAX + MESSAGE_OVERHEAD_BYTES
        options = [
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", limit),
            ("grpc.max_metadata_size", METADATA_BYTES_MAX),
            ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
            # A proxy from the environment would catch calls to sidecars on this host.
            ("grpc.enable_http_proxy", 0),
            # A restarted server is found within a second, not after the default backoff of up to two minutes.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", int(1000 * RECONNECT_BACKOFF_S)),
            ("grpc.min_reconnect_backoff_ms", int(1000 * CONNECTION_TIMEOUT_S)),  # despite its name
            ("grpc.keepalive_time_ms", int(1000 * PING_INTERVAL_S)),
            ("grpc.keepalive_timeout_ms", int(1000 * PING_TIMEOUT_S)),
            ("grpc.http2.ping_timeout_ms", int(1000 * PING_TIMEOUT_S)),  # 60 s where only the other one is set
            ("grpc.http2.max_pings_without_data", 0),
        ]
        if tls is None:
            self._channel = grpc.insecure_channel(target, options)
        else:
            self._channel = grpc.secure_channel(target, _credentials(tls), options)
        self._offered_files, self._files_asked = files, False
        self._tables: dict[str, tuple[Site, ...]] = {}
        self._tables_lock = threading.Lock()
        prefix = f"/{wire.SERVICE}/"
        self._calls = {
            name: self._channel.unary_unary(
                prefix + name, lambda message: message.SerializeToString(), response.FromString
            )
            for name, response in (
                ("Register", service_pb2.RegisterResponse),
                ("DescribeRun", service_pb2.DescribeRunResponse),
                ("Seal", service_pb2.SealResponse),
                ("Release", service_pb2.ReleaseResponse),
                ("List", service_pb2.ListResponse),
                ("Status", service_pb2.StatusResponse),
            )
        }
        self._append = self._channel.stream_stream(prefix + "Append")
        self._attach_arena = self._channel.stream_stream(prefix + "AttachArena")
        self.arenas = Arenas(self._arena_call, self.error, arena)
        self._read = self._channel.unary_stream(prefix + "Read", lambda message: message.SerializeToString())

    def close(self) -> None:
        self._closed = True
        if os.getpid() != self._process:
            return  # in a forked child gRPC would hang here
        self._channel.close()
        if self._offered_files is not None:
            self._offered_files.close()

    def check_usable(self) -> None:
        """Raise what gRPC would answer with a hang or a stray ValueError.

        Raises:
            InvalidRequest: the client is closed.
            Unsupported: this process was forked after the client connected; gRPC's threads did not come along.
        """
        self.check_process()
        if self._closed:
            raise InvalidRequest("the client is closed", argument="client")

    def check_process(self) -> None:
        """Raises Unsupported in a process that was forked after the client connected."""
        fork.check_same_process(self._process)

    def ready_future(self) -> Any:
        """A gRPC future that is done once the channel is connected."""
        return grpc.channel_ready_future(self._channel)

    def wait_ready(self) -> None:
        """Wait for the connection.

        Raises:
            Unavailable: nothing answers at the target.
        """
        try:
            grpc.channel_ready_future(self._channel).result(timeout=CONNECT_TIMEOUT_S)
        except grpc.FutureTimeoutError:
            raise Unavailable(
                f"no server answers, target={self.target} waited_s={CONNECT_TIMEOUT_S:g};"
                " check that it runs, the address, that both ends use TLS or none, and that each accepts the other's"
                " certificate (http_proxy is not used)"
            ) from None

    def call(self, method: str, request: Any, table: Sequence[Site] = (), timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """A control call, made again when its connection broke: all of them may come twice. Raises the error that the
        server raised."""
        deadline = time.monotonic() + timeout_s

        def once() -> Any:
            self.check_usable()
            try:
                return self._calls[method](request, timeout=remaining(deadline, self.target), metadata=self._metadata)
            except grpc.RpcError as error:
                raise self.error(error, table, deadline) from None

        return self.reconnecting(once, deadline)

    def reconnecting(self, attempt: Callable[[], _Answer], deadline: float = math.inf) -> _Answer:
        """Result of an attempt that may be made twice; made again when the connection broke, for RECONNECT_WAIT_S.

        Raises:
            Unavailable: the server did not come back in that time, or there are others to go to.
        """
        until: float | None = None
        while True:
            try:
                return attempt()
            except Unavailable:
                now = time.monotonic()
                until = min(now + RECONNECT_WAIT_S, deadline) if until is None else until
                if not self._alone or now + RECONNECT_PAUSE_S > until:
                    raise
            time.sleep(RECONNECT_PAUSE_S)

    def append_stream(self, requests: Any) -> Any:
        """Open an Append stream; iterating it gives encoded AppendResponse messages."""
        return self._append(requests, metadata=self._metadata)

    def _arena_call(self, requests: Any) -> Any:
        self.check_usable()
        return self._attach_arena(requests, metadata=self._metadata)

    def read_stream(self, request: Any, timeout_s: float | None) -> Any:
        """Open a Read stream; iterating it gives frames."""
        self.check_usable()
        return self._read(request, metadata=self._metadata, timeout=timeout_s)

    def files(self, timeout_s: float = CALL_TIMEOUT_S) -> SegmentFiles | None:
        """The data directory that this client was given, if it is this server's. Raises TraceStoreError."""
        if self._offered_files is not None and not self._files_asked:
            identity = self.call("Status", service_pb2.StatusRequest(), timeout_s=timeout_s).data_directory
            if identity != self._offered_files.identity:
                self._offered_files = None
            self._files_asked = True
        return self._offered_files

    def table(self, run: str, timeout_s: float = CALL_TIMEOUT_S) -> tuple[Site, ...]:
        """Site table of a run, asked once."""
        with self._tables_lock:
            if run in self._tables:
                return self._tables[run]
        response = self.call("DescribeRun", service_pb2.DescribeRunRequest(run=run), timeout_s=timeout_s)
        table = tuple(wire.site_from_wire(site) for site in response.sites)
        with self._tables_lock:
            return self._tables.setdefault(run, table)

    def error(self, error: grpc.RpcError, table: Sequence[Site] = (), deadline: float = math.inf) -> TraceStoreError:
        """The typed error of a failed call; one that broke after its deadline may have been ended for that."""
        for key, value in _trailing(error):
            if key == wire.ERROR_METADATA_KEY:
                return wire.error_from_wire(record_pb2.ErrorDetail.FromString(value), table)
        code, details = error.code(), error.details() or ""
        if "larger than max" in details:
            return InvalidRequest(
                f"a message is over FRAME_BYTES_MAX={FRAME_BYTES_MAX}, split the call: {details}", argument="message"
            )
        # A killed server shows as one of these two, besides UNAVAILABLE.
        gone = code != grpc.StatusCode.DEADLINE_EXCEEDED and ("Stream removed" in details or "RST_STREAM" in details)
        kind = Unavailable if gone else _BARE.get(code, TraceStoreError)
        if kind is Unavailable and not left(deadline):
            kind = DeadlineExceeded
        return kind(f"call failed: {details}{_HINTS.get(kind, '')}, status={code.name} target={self.target}")


def deadline_of(timeout_s: Any) -> float:
    """When a call that starts now must end, by the monotonic clock; ``math.inf`` and whatever is over TIMEOUT_S_MAX
    mean TIMEOUT_S_MAX. Raises InvalidRequest."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, numbers.Real) or timeout_s != timeout_s:
        raise InvalidRequest(
            f"timeout_s must be a number of seconds, math.inf for no limit, got={timeout_s!r}", argument="timeout_s"
        )
    seconds: Any = timeout_s
    return time.monotonic() + float(min(max(seconds, 0), TIMEOUT_S_MAX))


def left(deadline: float) -> float:
    """Seconds until a deadline of the monotonic clock, 0 when it has passed."""
    return max(0.0, deadline - time.monotonic())


def remaining(deadline: float, target: str) -> float:
    """Seconds until a deadline of a call to ``target``. Raises DeadlineExceeded when it has passed: gRPC would send the
    call all the same."""
    seconds = left(deadline)
    if not seconds:
        raise DeadlineExceeded(f"the time was over before the server could be asked, target={target}")
    return seconds


def _trailing(error: Any) -> Sequence[tuple[str, bytes]]:
    read: Callable[[], Any] | None = getattr(error, "trailing_metadata", None)
    return (read() if read is not None else None) or ()


def _is_target(target: str) -> bool:
    """Whether it is unix:/path, or ends in a port."""
    host, _, port = target.rpartition(":")
    return target.startswith("unix:") or (host != "" and port.isascii() and port.isdecimal() and int(port) < 1 << 16)


def _check_token(token: object) -> str:
    if not isinstance(token, str) or not token.isascii() or not token.isprintable():
        raise InvalidRequest("token must be printable ASCII", argument="token")
    return token


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    if (tls.certificate is None) != (tls.key is None):
        raise InvalidRequest("tls.certificate and tls.key go together", argument="tls")

    def content(name: str, path: Path | None) -> bytes | None:
        try:
            return Path(path).read_bytes() if path is not None else None
        except OSError as error:
            raise InvalidRequest(
                f"tls.{name} cannot be read, path={path} cause={error.strerror}", argument=f"tls.{name}"
            ) from None

    return grpc.ssl_channel_credentials(
        content("ca", tls.ca), content("key", tls.key), content("certificate", tls.certificate)
    )
