"""A relay on the loopback interface that counts what a client and its server really exchange.

The client connects to ``Meter.target`` instead of the server; every byte of both directions passes through and is
counted, HTTP/2 and gRPC framing, acknowledgements and flow control included, TCP/IP headers not.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType

PIECE_BYTES = 1 << 16


class Meter:
    """Relay in front of ``host:port``. A context manager.

    Attributes:
        target: address to connect to.
        sent, received: bytes from clients to the server, and back.
    """

    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent = 0
        self.received = 0
        threading.Thread(target=self._accept, name="demo-meter", daemon=True).start()

    def close(self) -> None:
        """Stop accepting and end every relayed connection."""
        for connection in self._sockets:
            with suppress(OSError):  # a peer that has gone already needs no farewell
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
            except OSError:
                return
            for connection in (client, server):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets += [client, server]
            for source, sink, name in ((client, server, "sent"), (server, client, "received")):
                threading.Thread(target=self._pump, args=(source, sink, name), name="demo-meter", daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, counter: str) -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        try:
            while size := source.recv_into(buffer):
                # Counted before it is passed on, so that who has received bytes finds them counted. One thread adds to
                # each counter of a connection, and a demo's client has one connection.
                setattr(self, counter, getattr(self, counter) + size)
                sink.sendall(buffer[:size])
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the connection was closed under us, by a peer or by close()
