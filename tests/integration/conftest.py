"""Fixtures of the fault tests: processes to kill, file systems to break.

Where root, loop devices or a tool are missing a test skips with that reason; in CI that is a failure.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trace_store.testing.load import run_load

SHUTDOWN_IOCTL = 0x8004587D
"""FS_IOC_SHUTDOWN of ext4 and XFS; 2: without flushing the log, as if the power went."""


def need(condition: bool, reason: str) -> None:
    """Skip with a reason; in CI everything is installed, so there it is a failure."""
    if not condition:
        assert not os.environ.get("CI"), f"CI must run this test: {reason}"
        pytest.skip(reason)


def need_tools(*tools: str) -> None:
    for tool in tools:
        need(shutil.which(tool) is not None, f"{tool} is not installed")


def need_root() -> None:
    need(os.geteuid() == 0, "needs root")


class Child:
    """A function of ``trace_store.testing`` in a process of its own, forked from a warm server, and what it tells."""

    def __init__(self, target: Callable[..., None], root: Path, *arguments: Any, **options: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["trace_store.testing.load", "trace_store.testing.steps"])
        self._acks, sender = context.Pipe(duplex=False)
        self.messages: list[str] = []
        self.process = context.Process(target=target, args=(str(root), sender, *arguments), kwargs=options, daemon=True)
        self.process.start()
        sender.close()

    def receive(self) -> bool:
        """The next message; False at the end."""
        try:
            self.messages.append(self._acks.recv_bytes().decode())
        except (EOFError, OSError):
            return False
        return True

    def run_for(self, seconds: float) -> None:
        """Collect messages for a while."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._acks.poll(left) and not self.receive():
                return

    def run_until(self, **counts: int) -> None:
        """Collect messages until there are so many of each kind: ``run_until(append=2, failed=1)``."""
        seen = Counter(message.split()[0] for message in self.messages)
        while any(seen[kind] < count for kind, count in counts.items()):
            assert self.receive(), f"it ended, messages={dict(seen)}"
            seen[self.messages[-1].split()[0]] += 1

    def drain(self) -> None:
        """Collect what was told so far."""
        while self._acks.poll(0) and self.receive():
            pass

    def kill(self) -> list[str]:
        """SIGKILL; all messages, those still in the pipe included."""
        self.process.kill()
        return self.finish()

    def finish(self) -> list[str]:
        """Wait for the end; all messages."""
        while self.receive():
            pass
        self.process.join(60)
        return self.messages


@pytest.fixture
def spawn() -> Iterator[Callable[..., Child]]:
    """Starts a child."""
    started: list[Child] = []

    def start(target: Callable[..., None], root: Path, *arguments: Any, **options: Any) -> Child:
        started.append(Child(target, root, *arguments, **options))
        return started[-1]

    yield start
    for child in started:
        child.kill()


@pytest.fixture
def start_load(spawn: Callable[..., Child]) -> Callable[..., Child]:
    """Starts ``testing.load`` on a directory and waits until its engine is open."""

    def start(root: Path, partition: str, seed: int, **options: int) -> Child:
        load = spawn(run_load, root, partition, seed, **options)
        assert load.receive()
        assert load.messages == ["ready"]
        return load

    return start


class LoopDisk:
    """A loop-mounted file system of its own. Everything on it must be closed before it is unmounted."""

    def __init__(self, directory: Path, kind: str, size_mib: int) -> None:
        self.image, self.path = directory / f"{kind}.img", directory / f"{kind}-mount"
        self.path.mkdir()
        with open(self.image, "wb") as image:
            image.truncate(size_mib << 20)
        make = {
            "ext4": ["mkfs.ext4", "-qF"],
            "xfs": ["mkfs.xfs", "-qf"],
        }[kind]
        subprocess.run([*make, str(self.image)], check=True, capture_output=True)
        self.mount()

    def mount(self) -> None:
        subprocess.run(["mount", "-o", "loop", str(self.image), str(self.path)], check=True, capture_output=True)

    def unmount(self) -> None:
        for _ in range(100):
            if subprocess.run(["umount", str(self.path)], capture_output=True).returncode == 0:
                return
            time.sleep(0.05)
        raise AssertionError(f"cannot unmount {self.path}")

    def cut_power(self) -> None:
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, SHUTDOWN_IOCTL, struct.pack("I", 2))
        finally:
            os.close(descriptor)


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Callable[..., LoopDisk]]:
    made: list[LoopDisk] = []

    def make(kind: str, size_mib: int) -> LoopDisk:
        need_root()
        need_tools("mkfs.xfs" if kind == "xfs" else "mkfs.ext4", "mount")
        need(os.path.exists("/dev/loop-control"), "needs loop devices")
        made.append(LoopDisk(tmp_path, kind, size_mib))
        return made[-1]

    yield make
    for disk in made:
        if os.path.ismount(disk.path):
            disk.unmount()


@pytest.fixture
def make_tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    made: list[Path] = []

    def make(options: str) -> Path:
        need_root()
        path = tmp_path / f"tmpfs-{len(made)}"
        path.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
        made.append(path)
        return path

    yield make
    for path in made:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def strace() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a Python program with faults injected into its system calls."""
    need_tools("strace")

    def run(injections: list[str], *arguments: Any, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        calls = sorted({injection.partition(":")[0] for injection in injections})
        command = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={','.join(calls)}"]
        for injection in injections:
            command += ["-e", f"inject={injection}"]
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        command += [sys.executable, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)

    return run


@pytest.fixture
def tools() -> Callable[..., None]:
    """Skips where one of the named programs is missing."""
    return need_tools


@pytest.fixture
def chance() -> random.Random:
    return random.Random(20261130)
