"""Build and run one server: engine, gRPC with health and reflection, metrics; and stop it without losing anything.

Start order: engine (recovers the directory), gRPC, metrics, then health says SERVING.
Stop order: health says NOT_SERVING, calls in flight finish within GRACE_S, the engine syncs and seals what it accepted.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hmac
import logging
import os
import signal
import socket
import stat
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from trace_server.arena import Arenas
from trace_server.http import HttpServer
from trace_server.metrics import Metrics
from trace_server.service import TraceStoreService
from trace_server.status import abort
from trace_store.arena import arena_directory
from trace_store.engine import Engine
from trace_store.errors import InvalidRequest, StorageFailed, Unauthenticated
from trace_store.limits import FRAME_BYTES_MAX, PING_INTERVAL_S
from trace_store.wire import SERVICE

log = logging.getLogger("trace_server")

GRACE_S = 5.0
"""Container engines kill ten seconds after SIGTERM; the other half is for the disk."""

HEALTH_TIMEOUT_S = 2.0
"""An event loop that does not answer within this is called hung."""

UNIX_PATH_BYTES_MAX = 100
"""sun_path holds 108 bytes; gRPC and Linux need a few of them."""

MESSAGE_OVERHEAD_BYTES = 64 << 10


@dataclass(frozen=True)
class Listen:
    """Where and how a server listens.

    Attributes:
        address: ``host:port`` (port 0: any free one) or ``unix:/path``.
        metrics_address: ``host:port`` of /metrics, or empty for none.
        token: bearer token that every call must carry, or empty.
        tls_certificate, tls_key: PEM files; both or none.
        tls_client_ca: PEM file; clients must then show a certificate that it signed.
        arena_directory: tmpfs directory for memory shared with clients on this host, None to share none.
        arena_bytes_max: what all arenas together may take; None is half of the tmpfs.
    """

    address: str
    metrics_address: str = ""
    token: str = ""
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    arena_directory: Path | None = field(default_factory=arena_directory)
    arena_bytes_max: int | None = None


class TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without the bearer token; health checks need none."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        given = dict(details.invocation_metadata).get("authorization", "")
        given_bytes = given.encode() if isinstance(given, str) else given
        if details.method.startswith("/grpc.health.v1.") or hmac.compare_digest(given_bytes, self._expected):
            return await continuation(details)
        return grpc.stream_stream_rpc_method_handler(_refuse_token)


async def _refuse_token(requests: Any, context: Any) -> Any:
    del requests
    await abort(context, Unauthenticated("the call carries no valid token; give the client token=..."))
    yield b""


class Server:
    """A running server. ``port`` is the bound port of a TCP address, 0 for a unix socket."""

    def __init__(self, engine: Engine, listen: Listen) -> None:
        self._engine, self._listen = engine, listen
        self._arenas = Arenas(listen.arena_directory, listen.arena_bytes_max)
        self._grpc: Any = None
        self._health: Any = None
        self._service: Any = None
        self._http: HttpServer | None = None
        self._socket_id: tuple[int, int] | None = None
        self._loop = asyncio.get_running_loop()
        self._serving = False
        self.port = 0
        self.metrics_port = 0

    async def start(self) -> None:
        """Bind and serve.

        Raises:
            StorageFailed, InvalidRequest: the address cannot be used; says why.
        """
        metrics = Metrics(self._engine)
        interceptors = [TokenCheck(self._listen.token)] if self._listen.token else []
        limit = FRAME_BYTES_MAX + MESSAGE_OVERHEAD_BYTES
        self._grpc = grpc.aio.server(
            interceptors=interceptors,
            options=[
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
                ("grpc.so_reuseport", 0),  # a second server on a taken port must fail, not share it
                ("grpc.http2.min_ping_interval_without_data_ms", int(500 * PING_INTERVAL_S)),
            ],
        )
        self._service = TraceStoreService(self._engine, metrics, self._arenas)
        self._grpc.add_generic_rpc_handlers((self._service.generic_handler(),))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)
        self.port = self._bind()
        await self._grpc.start()
        if self._listen.metrics_address:
            self._http = HttpServer(self._listen.metrics_address, metrics.registry, self._health_reason)
            self.metrics_port = self._http.port
        for name in ("", SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._serving = True

    async def stop(self) -> None:
        """Refuse new calls, let running ones finish, make everything accepted durable."""
        if self._service is None:
            return
        self._serving = False
        await self._health.enter_graceful_shutdown()
        self._service.stop_streams()
        await self._grpc.stop(GRACE_S)
        self._unlink_socket()
        await asyncio.to_thread(self._engine.close)
        if self._http is not None:
            await asyncio.to_thread(self._http.close)

    def _health_reason(self) -> str:
        """Why the server does not serve, or an empty string. Called on a thread of the HTTP server."""
        asked = asyncio.run_coroutine_threadsafe(self._state(), self._loop)
        try:
            return asked.result(HEALTH_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            return f"the event loop did not answer within {HEALTH_TIMEOUT_S:g} s"

    async def _state(self) -> str:
        return "" if self._serving else "starting or stopping"

    def _bind(self) -> int:
        address = self._listen.address
        path = Path(address[5:]) if address.startswith("unix:") else None
        if path is not None:
            prepare_unix_path(path)
        credentials = self._credentials()
        previous_umask = os.umask(0o077)
        try:
            if credentials is not None:
                port = self._grpc.add_secure_port(address, credentials)
            else:
                port = self._grpc.add_insecure_port(address)
        except RuntimeError as error:
            raise StorageFailed(
                f"cannot listen, address={address} cause={error}; is another server on it, or a TLS file no PEM?"
            ) from error
        finally:
            os.umask(previous_umask)
        if path is not None:
            found = path.stat()
            self._socket_id = (found.st_dev, found.st_ino)
            return 0
        return int(port)

    def _unlink_socket(self) -> None:
        """Remove our socket, unless another server has put its own in the place."""
        path = Path(self._listen.address[5:])
        with contextlib.suppress(OSError):
            found = path.stat()
            if (found.st_dev, found.st_ino) == self._socket_id:
                path.unlink()

    def _credentials(self) -> Any:
        listen = self._listen
        if listen.tls_certificate is None or listen.tls_key is None:
            return None
        ca = listen.tls_client_ca.read_bytes() if listen.tls_client_ca else None
        pair = (listen.tls_key.read_bytes(), listen.tls_certificate.read_bytes())
        return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)


def prepare_unix_path(path: Path) -> None:
    """Make room for a socket: a stale one is removed, a live one is left alone.

    Raises:
        InvalidRequest: the path is too long or holds something else than a socket.
        StorageFailed: a server answers on it.
    """
    if len(os.fsencode(path)) > UNIX_PATH_BYTES_MAX:
        raise InvalidRequest(
            f"socket path is longer than {UNIX_PATH_BYTES_MAX} bytes, path={path}; use a shorter directory",
            argument="listen",
        )
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise InvalidRequest(f"path exists and is no socket, path={path}", argument="listen")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise StorageFailed(f"the socket cannot be tried, path={path} cause={error.strerror}") from error
    raise StorageFailed(f"another server listens on the socket, path={path}")


async def serve(engine: Engine, listen: Listen, ready: Callable[[Server], None]) -> None:
    """Run until SIGTERM or SIGINT."""
    server = Server(engine, listen)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    try:
        await server.start()
        ready(server)
        await stopping.wait()
        log.info("stopping: finishing calls and syncing")
    finally:
        await server.stop()
    log.info("stopped")
