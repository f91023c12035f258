"""The store's own paths: appends by durability, reads by span, each over shared memory and over the connection."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path as FilePath

import trace_client
from trace_client.bench.measure import Sample, timed
from trace_client.bench.records import Load, Pool
from trace_client.microbatch import Buffers

START_TIMEOUT_S = 60.0
DELETE_TIMEOUT_S = 10.0

SEAL_TIMEOUT_S = 60.0
"""Segments are sealed after 30 s without a row."""

RUN = "bench"

COMPRESSED_BYTES_PER_S = 40e6
"""Below the rate from which on the store keeps scales as they are."""


class ServerProcess:
    """A server of its own over a temporary data directory. ``pid`` and ``address`` while it runs."""

    def __init__(self, directory: FilePath) -> None:
        ready = directory / "ready"
        command = [sys.executable, "-m", "trace_server", "--data", str(directory / "data"), "--listen", "127.0.0.1:0"]
        command += ["--metrics", "", "--ready-file", str(ready), "--log-level", "error"]
        self._process = subprocess.Popen(command, env={**os.environ})
        limit = time.monotonic() + START_TIMEOUT_S
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError("the benchmark's server did not start")
            time.sleep(0.01)
        self.address, self.pid = ready.read_text().split("\n")[0], self._process.pid
        self.data = directory / "data"

    def files(self) -> int:
        """Files in the data directory."""
        return sum(len(names) for _, _, names in os.walk(self.data))

    def wait_deleted(self, files: int) -> None:
        """Wait until no more files are left than ``files``: deleting what was released goes on in the background."""
        limit = time.monotonic() + DELETE_TIMEOUT_S
        while self.files() > files and time.monotonic() < limit:
            time.sleep(0.01)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


class Append:
    """Append a load at one durability, until every message is answered."""

    direction = "up"

    def __init__(self, server: ServerProcess, arena: str, durability: str, load: Load, pool: Pool) -> None:
        self.name = self.name_of(arena, durability)
        self._server, self._load, self._pool, self._durability = server, load, pool, durability
        # At durability memory the arena takes the whole load: a burst. Once it is full the disk sets the pace.
        room = load.size + (64 << 20) if durability == "memory" and arena != "off" else 64 << 20
        self._client = trace_client.connect(server.address, arena=arena, arena_bytes=room)
        self._client.register(RUN, load.table)
        self._writer = self._client.writer(RUN, self.name, durability)

    @staticmethod
    def name_of(arena: str, durability: str) -> str:
        return f"append {durability}, {'arena' if arena != 'off' else 'gRPC'}"

    def run(self, turn: int) -> Sample:
        # Once before it is timed, as LocalWrite does, and for its reason.
        files = self._server.files()
        for warm in (True, False):
            name = f"{turn} warm" if warm else str(turn)
            _wait_idle(self._client)
            sample = timed(self._load.size, partial(self._append, name), self._server.pid)
            _wait_idle(self._client)
            self._client.release(RUN, self.name)
            self._server.wait_deleted(files)
        return sample

    def close(self) -> None:
        self._client.close()

    def _append(self, name: str) -> None:
        load, numbers = self._load, itertools.count()
        for trajectory in range(load.trajectories):
            for position in range(load.appends):
                self._writer.append(f"{name}/{trajectory}", position * load.tokens, self._pool[next(numbers)])
        self._writer.flush()


class Stored:
    """A sealed load to read from. ``compressed``: it came as slowly as a rollout's, so that the store took the time to
    compress its scales; else they are bytes that cannot be compressed."""

    def __init__(self, server: ServerProcess, load: Load, compressed: bool) -> None:
        self.partition = "compressed" if compressed else "raw"
        self.load = load
        pool = Pool(load, compressible=compressed)
        with trace_client.connect(server.address) as client:
            client.register(RUN, load.table)
            numbers = itertools.count()
            with client.writer(RUN, self.partition, "written") as writer:
                for trajectory in range(load.trajectories):
                    for position in range(load.appends):
                        writer.append(str(trajectory), position * load.tokens, pool[next(numbers)])
                        if compressed:
                            time.sleep(load.append_bytes / COMPRESSED_BYTES_PER_S)
                for trajectory in range(load.trajectories):
                    writer.seal(str(trajectory), tokens=load.tokens * load.appends + 1, prompt_tokens=0)

    @staticmethod
    def wait_sealed(server: ServerProcess) -> None:
        """Wait until no segment is open any more, which the store does with segments that get no row."""
        limit = time.monotonic() + SEAL_TIMEOUT_S
        while any(server.data.glob("runs/*/*/*.open")):
            if time.monotonic() > limit:
                raise RuntimeError("the benchmark's segments were not sealed")
            time.sleep(0.1)


class Read:
    """Read all of a sealed load into reused buffers, in spans of ``span`` tokens, one microbatch of 64 MiB a call."""

    direction = "down"

    MICROBATCH_BYTES = 64 << 20

    def __init__(self, server: ServerProcess, arena: str, stored: Stored, span: int, *, files: bool = False) -> None:
        self.name = self.name_of(arena, span, files=files, compressed=stored.partition == "compressed")
        self._server, self._load = server, stored.load
        data_dir = server.data if files else None
        self._client = trace_client.connect(server.address, arena=arena, data_dir=data_dir)
        self._reader = self._client.reader(RUN, stored.partition)
        self._buffers = Buffers()
        self._microbatches = self._plan(span)

    @staticmethod
    def name_of(arena: str, span: int, *, files: bool = False, compressed: bool = False) -> str:
        kind = "files" if files else "arena" if arena != "off" else "gRPC"
        return f"read spans of {span}, {kind}{', scales compressed' if compressed else ''}"

    def run(self, turn: int) -> Sample:
        del turn
        return timed(self._load.size, self._read, self._server.pid)

    def close(self) -> None:
        self._client.close()

    def _read(self) -> None:
        for spans in self._microbatches:
            batch = self._reader.read(spans, out=self._buffers)
            if batch.missing or not batch.all_valid.all():
                raise RuntimeError("the benchmark read what it had not written")

    def _plan(self, span: int) -> list[list[tuple[str, int, int, int]]]:
        load = self._load
        row_bytes = load.append_bytes // load.tokens
        length = load.tokens * load.appends
        microbatches: list[list[tuple[str, int, int, int]]] = [[]]
        row = 0
        for trajectory in range(load.trajectories):
            for start in range(0, length, span):
                if row * row_bytes >= self.MICROBATCH_BYTES:
                    microbatches.append([])
                    row = 0
                microbatches[-1].append((str(trajectory), start, min(start + span, length), row))
                row += min(span, length - start)
        return microbatches


def _wait_idle(client: trace_client.Client) -> None:
    while client.status()["queued_bytes"]:
        time.sleep(0.01)


def temporary_directory(parent: FilePath | None) -> tempfile.TemporaryDirectory[str]:
    """Where server data and local files go: on the disk to be measured."""
    return tempfile.TemporaryDirectory(prefix="trace-store-bench-", dir=parent)
