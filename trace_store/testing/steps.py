"""A short life of a store whose system calls come in the same order every time, and kills at any of them.

    python -m trace_store.testing.steps DIRECTORY       as a program: prints acknowledgements as ``testing.load`` does

``run_steps`` does the same and may die on the way: ``Kill(number, where)`` sends SIGKILL to its own process at the n-th
call of those that change files, before it, after it, or, for a write, with a part of the bytes written.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trace_store.engine import Engine
from trace_store.errors import TraceStoreError
from trace_store.testing.load import RUN, TABLE, Sender
from trace_store.testing.records import make_chunk

CALLS = ("open", "writev", "fdatasync", "fsync", "rename", "link", "unlink", "mkdir", "rmdir", "ftruncate")

BEFORE, PART, AFTER = "before", "part", "after"


@dataclass(frozen=True)
class Kill:
    """Where to die: at call ``number``, counted from 0; -1 never."""

    number: int = -1
    where: str = BEFORE


def count_calls(kill: Kill) -> list[str]:
    """Replace ``os`` functions by ones that count and kill; returns the names of the calls so far, which grows."""
    made: list[str] = []

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            if name == "open" and not arguments[1] & os.O_CREAT:
                return real(*arguments, **more)
            made.append(name)
            here = len(made) - 1 == kill.number
            if here and kill.where == PART and name == "writev":
                whole = b"".join(arguments[1])
                os.write(arguments[0], whole[: len(whole) // 2])
            if here and kill.where != AFTER:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments, **more)
            if here:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in CALLS:
        setattr(os, name, wrap(name, getattr(os, name)))
    return made


def run_steps(root: str, acks: Sender, kill: Kill) -> None:
    """Live the life in this process, or die on the way. Tells acknowledgements, then ``calls NAME NAME ...``."""
    made = count_calls(kill)
    live(Path(root), lambda message: acks.send_bytes(message.encode()))
    acks.send_bytes(" ".join(["calls", *made]).encode())


def run_open(root: str, acks: Sender, kill: Kill) -> None:
    """Open, which recovers, and close."""
    made = count_calls(kill)
    Engine(Path(root), server="steps").close()
    acks.send_bytes(" ".join(["calls", *made]).encode())


def live(root: Path, tell: Callable[[str], None]) -> None:
    """Register, append, seal, roll, release a partition, seal, reopen, seal; every step waits for the one before."""
    engine = Engine(root, server="steps")
    engine.register(RUN, TABLE)
    tell("ready")

    def wait(message: str, future: Any) -> None:
        try:
            future.result(30)
        except TraceStoreError as error:
            message = f"failed {message} {error!r}"
        tell(message)

    def append(partition: str, name: str, start: int, stop: int, durability: str) -> None:
        chunk = make_chunk(RUN, partition, TABLE, name, start, stop)
        message = f"append {name} {start} {stop} {durability}" if partition == "p" else "other"
        wait(message, engine.append(RUN, partition, chunk, durability))

    append("p", "a", 0, 5, "written")
    append("p", "a", 5, 9, "synced")
    wait("seal a 10", engine.seal(RUN, "p", "a", tokens=10, prompt_tokens=0))
    append("q", "x", 0, 5, "synced")
    wait("roll", engine.roll())
    append("p", "b", 0, 7, "synced")
    wait("released", engine.release(RUN, "q"))
    append("p", "b", 7, 8, "written")
    wait("seal b 9", engine.seal(RUN, "p", "b", tokens=9, prompt_tokens=0))
    append("p", "c", 0, 3, "written")
    engine.close()
    engine = Engine(root, server="steps")
    append("p", "c", 3, 6, "synced")
    wait("seal c 7", engine.seal(RUN, "p", "c", tokens=7, prompt_tokens=0))
    engine.close()


def _print(message: str) -> None:
    print(message, flush=True)


if __name__ == "__main__":
    live(Path(sys.argv[1]), _print)
