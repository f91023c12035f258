"""Two servers on one bucket behind fleet clients, killed at random: failover, release and rewriting under one name.

A trajectory that could not be sealed is written again with other bytes under the same attempt, so that a mixture of two
tries is seen. A server with an empty disk must give exactly one of the tries that may have been sealed last, whole.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trace_client
from tests.tier.conftest import QUICK, eventually, s3, s3_process, sidecar, store, url
from tests.tier.test_several_servers import check_any_order
from tests.torture.test_tier import PARTITIONS, RUN, TABLE, TOKENS, is_idle
from trace_store import TokenSpan
from trace_store.engine import Engine
from trace_store.errors import Conflict, Sealed, StaleAttempt, TraceStoreError
from trace_store.storage.s3 import ObjectStore
from trace_store.testing.reads import Rows, read_slices
from trace_store.testing.records import make_rows

__all__ = ["s3", "s3_process", "sidecar", "store", "url"]

ROUNDS = 12
WRITERS = 3
EXAMPLES, STEPS = 250, 30


def tokens_of(trajectory: str, seed: int, low: int, high: int) -> list[tuple[Any, Any, Any]]:
    """Rows of tokens [low, high) at each site."""
    return [make_rows(site, number, trajectory, 0, low, high, seed=seed) for number, site in enumerate(TABLE)]


def content(trajectory: str, seed: int) -> Rows:
    """What a read must give for one try."""
    return {
        (number, token): (codes[token].tobytes(), scales[token].tobytes(), float(tensors[token]))
        for number, (codes, scales, tensors) in enumerate(tokens_of(trajectory, seed, 0, TOKENS))
        for token in range(TOKENS)
    }


class Rollout(threading.Thread):
    """Writes trajectories through a fleet client; each is sealed at last, some are released and written again.

    ``outcome``: by partition and trajectory, the tries of the highest sealed attempt that may be what is visible.
    """

    def __init__(self, targets: list[str], name: str, chance: random.Random) -> None:
        super().__init__(daemon=True)
        self._targets, self._name, self._chance = targets, name, chance
        self.outcome: dict[tuple[str, str], set[int]] = {}
        self.failovers = self.releases = 0
        self.stop = threading.Event()

    def run(self) -> None:
        number = 0
        while not self.stop.is_set():
            try:
                with trace_client.connect(self._targets) as client:
                    client.register(RUN, TABLE)
                    while not self.stop.is_set():
                        number += 1
                        self._trajectory(client, f"step-{number % PARTITIONS}", f"{self._name}-{number}")
            except TraceStoreError:
                time.sleep(0.05)  # both are being restarted

    def _trajectory(self, client: Any, partition: str, trajectory: str) -> None:
        seed = self._write(client, partition, trajectory, 0)
        if self._chance.random() < 0.25 and client.release(RUN, partition, [trajectory]) >= 0:
            reached = all(endpoint.healthy for endpoint in client._fleet.endpoints)
            self.outcome.pop((partition, trajectory), None)
            self.releases += 1
            if reached:
                self._write(client, partition, trajectory, seed + 1)

    def _write(self, client: Any, partition: str, trajectory: str, seed: int) -> int:
        """Write until a seal is acknowledged; the next free seed."""
        attempt, tried = 0, set()
        while not self.stop.is_set():
            seed += 1
            try:
                with client.writer(RUN, partition, durability="written") as writer:
                    for low in range(0, TOKENS, 8):
                        rows = zip(TABLE, tokens_of(trajectory, seed, low, low + 8), strict=True)
                        part = {s: (c.reshape(8, *s.code_form.row_shape(s.width)), b, t) for s, (c, b, t) in rows}
                        writer.append(trajectory, low, part, attempt=attempt)
                    tried.add(seed)
                    writer.seal(trajectory, tokens=TOKENS + 1, prompt_tokens=0, attempt=attempt)
                self.outcome[(partition, trajectory)] = set(tried)
                break
            except (Conflict, Sealed, StaleAttempt):
                attempt, tried = attempt + 1, set()
            except TraceStoreError:
                self.failovers += 1
        return seed


def wrong(engine: Engine, partition: str, trajectory: str, seeds: set[int]) -> str:
    """What a read of a whole trajectory gets wrong, or an empty string."""
    rows, missing = read_slices(engine, RUN, partition, TokenSpan(trajectory, 0, TOKENS), range(len(TABLE)))
    if missing:
        return f"missing, {missing[0]}"
    return "" if any(rows == content(trajectory, seed) for seed in seeds) else f"none of the tries {sorted(seeds)}"


def test_failover_release_and_rewriting_under_kills(
    url: str, new_server: Callable[..., Any], tmp_path: Path, report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trace_client.writer.RESUME_TIMEOUT_S", 0.2)
    chance = random.Random(11)
    servers = [new_server("--object-store", url, "--name", name).start() for name in ("a", "b")]
    expected: dict[tuple[str, str], set[int]] = {}
    kills = failovers = releases = 0
    for number in range(ROUNDS):
        addresses = [server.address for server in servers]
        rollouts = [
            Rollout(addresses[:: 1 - 2 * (n % 2)], f"w{n}r{number}", random.Random(number * WRITERS + n))
            for n in range(WRITERS)
        ]
        for rollout in rollouts:
            rollout.start()
        for _ in range(3):
            time.sleep(chance.uniform(0.3, 2.0))  # the moment of the kill
            server = chance.choice(servers)
            server.kill()
            time.sleep(chance.uniform(0, 1.0))  # clients fail over meanwhile
            server.start()
            kills += 1
        for rollout in rollouts:
            rollout.stop.set()
        for rollout in rollouts:
            rollout.join(60)
            expected.update(rollout.outcome)
            failovers, releases = failovers + rollout.failovers, releases + rollout.releases
        time.sleep(3)  # the last open segments are rolled 2 s after their seals
        eventually(lambda: all(is_idle(server) for server in servers), "upload of everything", 120)
        reader = Engine(tmp_path / f"reader-{number}", "c", objects=ObjectStore(url, QUICK))
        try:
            reader.find(RUN)
            bad = [(item, what) for item, seeds in expected.items() if (what := wrong(reader, *item, seeds))]
        finally:
            reader.close()
        assert bad == []
    assert min(failovers, releases) > 0
    report(
        f"fleet: {len(expected)} trajectories sealed over {ROUNDS} rounds, kills={kills} failed tries={failovers}"
        f" released and written again={releases}, 0 missing, wrong or mixed"
    )


def test_any_order_of_operations_at_length(sidecar: Any, tmp_path: Path, store: ObjectStore, report: Any) -> None:
    check_any_order(sidecar, tmp_path, store, EXAMPLES, STEPS)
    report(f"two servers in any order: {EXAMPLES} runs of up to {STEPS} operations, 0 differences")
