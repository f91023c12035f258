"""Physical limits that the paths are judged against: one core's memcpy, loopback TCP, a local file made durable."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path as FilePath

import numpy as np

from trace_client.bench.measure import Sample, timed

CHUNK_BYTES = 1 << 20

SYNC_BYTES = 16 << 20
"""Bytes between two fdatasync calls of the local writer; group commit of the store covers about as much."""

_SINK = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
buffer = bytearray(1 << 20)
while True:
    connection, _ = listener.accept()
    while connection.recv_into(buffer):
        pass
    connection.sendall(b"k")
    connection.close()
"""


class Memcpy:
    """Copy ``size`` bytes between two touched buffers with one core."""

    name, direction = "memcpy, one core", "local"

    def __init__(self, size: int) -> None:
        self._source, self._target = np.ones(size, np.uint8), np.zeros(size, np.uint8)

    def run(self, turn: int) -> Sample:
        del turn
        return timed(self._source.nbytes, lambda: np.copyto(self._target, self._source))

    def close(self) -> None:
        self._source = self._target = np.zeros(0, np.uint8)


class RawTcp:
    """Send ``size`` bytes in 1 MiB pieces to another process, until it says that it has them."""

    name, direction = "raw TCP, loopback", "up"

    def __init__(self, size: int) -> None:
        self._pieces = size // CHUNK_BYTES
        self._payload = os.urandom(CHUNK_BYTES)
        self._sink = subprocess.Popen([sys.executable, "-c", _SINK], stdout=subprocess.PIPE, text=True)
        assert self._sink.stdout is not None
        self._port = int(self._sink.stdout.readline())

    def run(self, turn: int) -> Sample:
        del turn
        return timed(self._pieces * CHUNK_BYTES, self._send, self._sink.pid)

    def close(self) -> None:
        self._sink.kill()
        self._sink.wait()
        assert self._sink.stdout is not None
        self._sink.stdout.close()

    def _send(self) -> None:
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            for _ in range(self._pieces):
                connection.sendall(self._payload)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)


class LocalWrite:
    """Append the same bytes to a file and make them durable: fdatasync on a second thread each 16 MiB, and at the end.

    This is the best that a plain program does here: it was 1.6x one fdatasync at the end. Each run writes and deletes
    the file once before it is timed. Pages that a virtual machine has never used cost 2 to 3 CPU s/GiB at their first
    touch, and beside other programs the kernel hands out such ones; those just freed come first.
    """

    name, direction = "local write + fdatasync", "up"

    def __init__(self, directory: FilePath, payload: Sequence[bytes]) -> None:
        self._path, self._payload = directory / "local-write", payload

    def run(self, turn: int) -> Sample:
        del turn
        self._write()
        self._path.unlink()
        sample = timed(sum(map(len, self._payload)), self._write)
        self._path.unlink()
        return sample

    def close(self) -> None:
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        wanted = threading.Semaphore(0)
        ended = False

        def sync() -> None:
            while not ended:
                wanted.acquire()
                os.fdatasync(descriptor)

        syncer = threading.Thread(target=sync)
        syncer.start()
        unsynced = 0
        for piece in self._payload:
            os.write(descriptor, piece)
            unsynced += len(piece)
            if unsynced >= SYNC_BYTES:
                unsynced = 0
                wanted.release()
        ended = True
        wanted.release()
        syncer.join()
        os.fdatasync(descriptor)
        os.close(descriptor)
