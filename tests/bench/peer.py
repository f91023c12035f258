"""What the peers share: a server program of its own process, and a path that is one call to it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from trace_client.bench.measure import Sample, timed


class ServerProgram:
    """A Python program that prints the port it serves and then runs until it is killed."""

    def __init__(self, source: str) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.pid, self.port = self._process.pid, int(self._process.stdout.readline())

    def close(self) -> None:
        """Kill it; again does nothing."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()


class Transfer:
    """A path that moves ``size`` bytes by one call of ``action``."""

    def __init__(
        self, name: str, direction: str, size: int, action: Callable[[], object], program: ServerProgram
    ) -> None:
        self.name, self.direction = name, direction
        self._size, self._action, self._program = size, action, program

    def run(self, turn: int) -> Sample:
        del turn
        return timed(self._size, self._action, self._program.pid)

    def close(self) -> None:
        self._program.close()
