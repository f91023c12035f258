"""Two servers and a bucket under random kills and stops: what was acknowledged is in the bucket in the end.

After every round a server with an empty disk, which sees nothing but the bucket, must give every sealed trajectory of
all rounds byte for byte.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import trace_client
from tests.tier.conftest import S3Server, eventually, s3, s3_process, url
from trace_store import Site, TokenSpan
from trace_store.engine import Engine
from trace_store.errors import TraceStoreError
from trace_store.storage.s3 import ObjectStore
from trace_store.testing.records import make_rows

__all__ = ["s3", "s3_process", "url"]

RUN = "torture"
TABLE = (Site(0, "k", 64), Site(1, "moe_in", 256, form="b2"))
ROUNDS = 12
TOKENS = 24
PARTITIONS = 3


class Rollout(threading.Thread):
    """Writes trajectories to one server until told to stop; ``sealed`` lists those that it got a receipt for."""

    def __init__(self, server: Any, name: str) -> None:
        super().__init__(daemon=True)
        self._server, self._name = server, name
        self.sealed: list[tuple[str, str]] = []
        self.refused = 0
        self.stop = threading.Event()

    def run(self) -> None:
        number = 0
        while not self.stop.is_set():
            try:
                with trace_client.connect(self._server.address) as client:
                    client.register(RUN, TABLE)
                    while not self.stop.is_set():
                        number += 1
                        self._write(client, f"{self._name}-{number}", f"step-{number % PARTITIONS}")
            except TraceStoreError:
                self.refused += 1
                time.sleep(0.05)  # it is being restarted

    def _write(self, client: Any, trajectory: str, partition: str) -> None:
        with client.writer(RUN, partition, durability="written") as writer:
            for low in range(0, TOKENS, 8):
                writer.append(
                    trajectory, low, {site: rows(number, trajectory, low) for number, site in enumerate(TABLE)}
                )
            writer.seal(trajectory, tokens=TOKENS + 1, prompt_tokens=0)
        self.sealed.append((partition, trajectory))


def rows(number: int, trajectory: str, low: int) -> tuple[Any, Any, Any]:
    site = TABLE[number]
    codes, scales, tensors = make_rows(site, number, trajectory, 0, low, low + 8)
    return codes.reshape(8, *site.code_form.row_shape(site.width)), scales, tensors


def wrong(engine: Engine, partition: str, trajectory: str) -> str:
    """What a read of a whole trajectory gets wrong, or an empty string."""
    seen = 0
    with engine.read(RUN, partition, [TokenSpan(trajectory, 0, TOKENS)], range(len(TABLE))) as read:
        for piece in read:
            low, high = piece.dest_row, piece.dest_row + piece.rows
            expected = make_rows(TABLE[piece.site], piece.site, trajectory, 0, low, high)
            got = (piece.codes, piece.scales, piece.tensor_scales)
            if any(
                bytes(part) != np.ascontiguousarray(array).tobytes() for part, array in zip(got, expected, strict=True)
            ):
                return f"other bytes, site={piece.site} tokens=[{low}, {high})"
            seen += piece.rows
        if read.missing:
            return f"missing, {read.missing[0]}"
    return "" if seen == TOKENS * len(TABLE) else f"rows={seen}"


def is_idle(server: Any) -> bool:
    try:
        with trace_client.connect(server.address) as client:
            status = client.status()
    except TraceStoreError:
        return False
    return status["upload_queue_segments"] == 0 and not status["object_store_error"]


def test_random_kills_of_servers_and_store_lose_nothing(
    s3: S3Server, url: str, new_server: Callable[..., Any], tmp_path: Path, report: Callable[[str], None]
) -> None:
    chance = random.Random(7)
    servers = [new_server("--object-store", url, "--name", name).start() for name in ("a", "b")]
    sealed: list[tuple[str, str]] = []
    faults: dict[str, int] = {}
    for number in range(ROUNDS):
        rollouts = [Rollout(server, f"{name}{number}") for server, name in zip(servers, "ab", strict=True)]
        for rollout in rollouts:
            rollout.start()
        for _ in range(3):
            time.sleep(chance.uniform(0.1, 1.5))  # the moment of the fault
            fault = chance.choice(("server", "server", "store killed", "store stopped"))
            faults[fault] = faults.get(fault, 0) + 1
            if fault == "server":
                server = chance.choice(servers)
                server.kill()
                server.start()
            elif fault == "store killed":
                s3.kill()
                time.sleep(chance.uniform(0, 1))
                s3.start()
            else:
                s3.pause()
                time.sleep(chance.uniform(0, 3))
                s3.resume()
        for rollout in rollouts:
            rollout.stop.set()
        for rollout in rollouts:
            rollout.join(60)
            sealed.extend(rollout.sealed)
        time.sleep(3)  # the last open segments are rolled 2 s after their seals
        eventually(lambda: all(is_idle(server) for server in servers), "upload of everything", 120)
        reader = Engine(tmp_path / f"reader-{number}", "c", objects=ObjectStore(url))
        try:
            bad = [(item, what) for item in sealed if (what := wrong(reader, *item))]
        finally:
            reader.close()
        assert bad == []
    report(f"object tier: {len(sealed)} sealed trajectories over {ROUNDS} rounds with {faults}, 0 missing or wrong")
