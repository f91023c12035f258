"""A load that tells what it was promised, and the check that the promises were kept: for kill and power-cut tests.

``run_load`` belongs into a process that is killed; it sends one short message for each answer it got from the engine:

    ready                                    the engine is open
    append TRAJECTORY START STOP DURABILITY  these tokens are promised at all sites, at that durability
    seal TRAJECTORY TOKENS                   the trajectory is promised, synced
    failed ...                               the engine refused; allowed under faults
    wrong ...                                a read beside the writes gave other bytes or lost rows; never allowed

``broken_promises`` reads a directory's engine afterwards and returns one line for each promise that was not kept.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Protocol

from trace_store.engine import Engine
from trace_store.errors import TraceStoreError
from trace_store.planner import MissingReason
from trace_store.record import Site, TokenSpan
from trace_store.testing.reads import read_gathered, read_slices
from trace_store.testing.records import make_chunk, make_rows

RUN = "load"
TABLE = (Site(0, "k", 256), Site(0, "v", 256, form="full"), Site(1, "moe_in", 1024, form="b2"))
TOKENS_MAX = 40

REFUSED_PAUSE_S = 0.01


class Sender(Protocol):
    """The writing end of a pipe, such as ``multiprocessing.Pipe`` gives."""

    def send_bytes(self, message: bytes, /) -> None: ...


def run_load(
    root: str, acks: Sender, partition: str, seed: int, writers: int = 3, trajectories: int = 1_000_000
) -> None:
    """Write, seal, roll and read until killed, or until every writer has written ``trajectories``; then close."""
    lock = threading.Lock()

    def tell(message: str) -> None:
        with lock:
            acks.send_bytes(message.encode())

    engine = Engine(Path(root), server="load")
    engine.register(RUN, TABLE)
    tell("ready")
    sealed: list[tuple[str, int]] = []
    done = threading.Event()
    threads = [
        threading.Thread(target=_write, args=(engine, partition, f"{number}", seed, trajectories, tell, sealed))
        for number in range(writers)
    ]
    beside = [
        threading.Thread(target=_read, args=(engine, partition, seed, tell, sealed, done)),
        threading.Thread(target=_roll, args=(engine, seed, done)),
    ]
    for thread in threads + beside:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    for thread in beside:
        thread.join()
    engine.close()
    tell("closed")


def _write(
    engine: Engine,
    partition: str,
    writer: str,
    seed: int,
    trajectories: int,
    tell: Callable[[str], None],
    sealed: list[tuple[str, int]],
) -> None:
    chance = random.Random(f"{seed}/{writer}")
    for number in range(trajectories):
        name, tokens, start = f"{writer}-{number}", chance.randint(2, TOKENS_MAX), 0
        while start < tokens - 1:
            stop = min(start + chance.randint(1, 12), tokens - 1)
            durability = chance.choice(("memory", "written", "synced"))
            chunk = make_chunk(RUN, partition, TABLE, name, start, stop)
            try:
                engine.append(RUN, partition, chunk, durability).result()
            except TraceStoreError as error:
                tell(f"failed append {name} {start} {stop} {durability} {error!r}"[:500])
                time.sleep(REFUSED_PAUSE_S)
                continue  # an append is idempotent: the same rows again until they are taken
            if durability != "memory":
                tell(f"append {name} {start} {stop} {durability}")
            start = stop
        if chance.random() < 0.125:
            continue  # some are never finished
        try:
            engine.seal(RUN, partition, name, tokens=tokens, prompt_tokens=0).result()
        except TraceStoreError as error:
            tell(f"failed seal {name} {error!r}"[:500])
            continue
        tell(f"seal {name} {tokens}")
        sealed.append((name, tokens))


def _read(
    engine: Engine,
    partition: str,
    seed: int,
    tell: Callable[[str], None],
    sealed: list[tuple[str, int]],
    done: threading.Event,
) -> None:
    chance = random.Random(seed)
    while not done.wait(0.001):
        if sealed:
            name, tokens = chance.choice(sealed)
            for line in check_rows(engine, partition, name, 0, tokens - 1, include_open=False):
                refused = line.startswith("read refused") or MissingReason.STORAGE_FAILED.name in line
                tell(f"{'failed' if refused else 'wrong'} {line}"[:500])


def _roll(engine: Engine, seed: int, done: threading.Event) -> None:
    chance = random.Random(seed)
    while not done.wait(chance.uniform(0.005, 0.1)):
        engine.roll().exception()


def check_rows(
    engine: Engine, partition: str, name: str, start: int, stop: int, *, include_open: bool, complete: bool = True
) -> list[str]:
    """Read tokens [start, stop) of a trajectory at every site: a line for each wrong or (``complete``) missing part."""
    lines = []
    span, sites = TokenSpan(name, start, stop), range(len(TABLE))
    wanted = [make_rows(site, number, name, 0, start, stop) for number, site in enumerate(TABLE)]
    for read in (read_slices, read_gathered):
        try:
            rows, missing = read(engine, RUN, partition, span, sites, include_open=include_open)
        except TraceStoreError as error:
            lines.append(f"read refused: {name} {error!r}")
            continue
        for (site, token), (codes, scales, tensor) in rows.items():
            want_codes, want_scales, want_tensor = (array[token - start] for array in wanted[site])
            if (codes, scales, tensor) != (want_codes.tobytes(), want_scales.tobytes(), float(want_tensor)):
                lines.append(f"other bytes: {name} site={site} token={token} {read.__name__}")
        if complete:
            lines.extend(f"missing: {name} site={g.site} tokens=[{g.start}, {g.stop}) {g.reason.name}" for g in missing)
    return lines


def broken_promises(
    engine: Engine, partition: str, messages: Iterable[str], durabilities: Collection[str] = ("written", "synced")
) -> list[str]:
    """What of the acknowledged work an engine does not give back, and every row that it gives back wrong.

    ``durabilities``: those that had to survive; after a power cut that is ``synced`` alone.
    """
    lines = []
    for message in messages:
        kind, *words = message.split()
        if kind == "wrong":
            lines.append(message)
        elif kind == "seal":
            lines.extend(check_rows(engine, partition, words[0], 0, int(words[1]) - 1, include_open=False))
        elif kind == "append" and words[3] in durabilities:
            lines.extend(check_rows(engine, partition, words[0], int(words[1]), int(words[2]), include_open=True))
    for run in engine.snapshot_runs():
        with engine.catalog_lock:
            names = list(run.partitions[partition].trajectories) if partition in run.partitions else []
        for name in names:
            lines.extend(check_rows(engine, partition, name, 0, TOKENS_MAX, include_open=True, complete=False))
    return lines


def count(messages: Iterable[str], kind: str) -> int:
    """How many messages of a kind there are."""
    return sum(message.split()[0] == kind for message in messages)
