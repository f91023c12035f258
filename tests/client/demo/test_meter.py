"""The relay counts both directions and passes bytes on unchanged."""

from __future__ import annotations

import socket
import threading
from typing import Any

import trace_client
from trace_client.demo.meter import Meter
from trace_store import Site


def test_bytes_of_both_directions_are_counted() -> None:
    sent = bytes(range(256)) * 1000
    with socket.create_server(("127.0.0.1", 0)) as listener:
        received = bytearray()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                while part := connection.recv(1 << 16):
                    received.extend(part)
                connection.sendall(b"four")

        thread = threading.Thread(target=answer)
        thread.start()
        with Meter(f"127.0.0.1:{listener.getsockname()[1]}") as meter:
            host, _, port = meter.target.rpartition(":")
            with socket.create_connection((host, int(port))) as client:
                client.sendall(sent)
                client.shutdown(socket.SHUT_WR)
                assert client.recv(16) == b"four"
            thread.join()
            assert (meter.sent, meter.received) == (len(sent), 4)
    assert bytes(received) == sent


def test_a_client_works_through_it(server: Any, rows: Any) -> None:
    site = Site(0, "k", 64)
    with Meter(server.address) as meter, trace_client.connect(meter.target, arena="off") as client:
        client.register("metered", [site])
        with client.writer("metered", "step") as writer:
            before = meter.sent
            writer.append("a", 0, {site: rows(site, 500)})
            writer.flush()
            payload = 500 * (site.code_bytes + site.scale_bytes + 4)
            assert payload < meter.sent - before < payload + 2000
