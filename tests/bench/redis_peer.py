"""Redis over a unix socket: values of one append, 16 in a pipeline, in memory and with an append-only file."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trace_client.bench.measure import Sample, timed

try:
    import redis
except ImportError:
    redis = None  # type: ignore[assignment]

PIPELINE = 16


def missing() -> str:
    """What is not installed, or an empty string."""
    if redis is None:
        return "the Python package redis is not installed"
    return "" if _program() else "redis-server is not installed"


def make(values: Sequence[bytes], directory: Path) -> list[Any]:
    memory = _Server(directory / "redis-memory", ())
    appendonly = _Server(directory / "redis-aof", ("--appendonly", "yes", "--appendfsync", "everysec"))
    return [
        _Set("Redis set, memory", memory, values),
        _Get("Redis get", memory, values),
        _Set("Redis set, AOF every second", appendonly, values),
    ]


def _program() -> str | None:
    return os.environ.get("REDIS_SERVER") or shutil.which("redis-server")


class _Server:
    def __init__(self, directory: Path, options: Sequence[str]) -> None:
        directory.mkdir()
        socket = directory / "socket"
        command = [str(_program()), "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(directory)]
        # Rewriting the append-only file in mid-run would be measured too.
        command += ["--auto-aof-rewrite-percentage", "0", *options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.pid = self._process.pid
        while not socket.exists():
            time.sleep(0.01)
        self.connection: Any = redis.Redis(unix_socket_path=str(socket))
        self.connection.ping()

    def close(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.wait()


class _Set:
    direction = "up"

    def __init__(self, name: str, server: _Server, values: Sequence[bytes]) -> None:
        self.name, self._server, self._values = name, server, values

    def run(self, turn: int) -> Sample:
        del turn
        return timed(sum(map(len, self._values)), self._write, self._server.pid)

    def close(self) -> None:
        self._server.close()

    def _write(self) -> None:
        pipeline = self._server.connection.pipeline(transaction=False)
        for number, value in enumerate(self._values):
            pipeline.set(str(number), value)
            if len(pipeline) == PIPELINE:
                pipeline.execute()
        pipeline.execute()


class _Get:
    name, direction = "", "down"

    def __init__(self, name: str, server: _Server, values: Sequence[bytes]) -> None:
        self.name, self._server, self._count = name, server, len(values)
        self._size = sum(map(len, values))
        _Set("", server, values).run(0)

    def run(self, turn: int) -> Sample:
        del turn
        return timed(self._size, self._read, self._server.pid)

    def close(self) -> None:
        self._server.close()

    def _read(self) -> None:
        received = 0
        pipeline = self._server.connection.pipeline(transaction=False)
        for number in range(self._count):
            pipeline.get(str(number))
            if len(pipeline) == PIPELINE:
                received += sum(map(len, pipeline.execute()))
        received += sum(map(len, pipeline.execute()))
        assert received == self._size
