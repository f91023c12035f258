"""HTTP beside gRPC, for machines that watch: ``/metrics`` for Prometheus and ``/health`` for container engines.

``/health`` answers 200 ``serving`` or 503 with the reason, without a token or certificate. It asks the event loop that
serves gRPC, so a loop that hangs is unhealthy too.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from trace_store.errors import InvalidRequest, StorageFailed

DEFAULT_METRICS = "127.0.0.1:9464"

REQUEST_TIMEOUT_S = 10.0
"""A client that sends its request slower than this is dropped."""


class HttpServer:
    """Serves on threads of its own. ``health()`` gives an empty string, or why the server does not serve."""

    def __init__(self, address: str, registry: CollectorRegistry, health: Callable[[], str]) -> None:
        host, port = split_address(address, "metrics")
        self._health = health
        self._metrics: Any = make_wsgi_app(registry)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._server = _Server(host, port, family)
        except OSError as error:
            raise StorageFailed(f"cannot listen for metrics, address={address} cause={error.strerror}") from error
        self._server.set_app(self._answer)
        self.port = int(self._server.server_port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="trace-store-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            answer: Iterable[bytes] = self._metrics(environ, start_response)
            return answer
        status, text = "404 Not Found", "only /metrics and /health are here"
        if path == "/health":
            reason = self._health()
            status, text = ("503 Service Unavailable", reason) if reason else ("200 OK", "serving")
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]


def split_address(address: str, argument: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[ipv6]:port``. Raises InvalidRequest."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise InvalidRequest(f"an address is host:port, {argument}={address!r}", argument=argument)
    return host.removeprefix("[").removesuffix("]"), int(port)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, family: int) -> None:
        self.address_family = family
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own asks the resolver for the host's full name, which takes seconds where there is none.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_TIMEOUT_S

    def log_message(self, format: str, *arguments: Any) -> None:
        """A line for every scrape would bury the server's own."""
