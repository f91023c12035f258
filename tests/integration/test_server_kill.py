"""The whole product under kill -9: real server, real clients; every receipt that a client holds is kept."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import trace_client
from tests.integration.bulk import wait_until
from trace_store import Receipt
from trace_store.errors import TraceStoreError
from trace_store.testing.load import RUN, TABLE
from trace_store.testing.records import make_rows

ROUNDS = 2
ROLLOUTS = 3


def rollout(address: str, partition: str, number: int, receipts: list[Receipt]) -> None:
    """Write and seal trajectories until the server is gone."""
    chance = random.Random(number)
    try:
        with trace_client.connect(address) as client:
            client.register(RUN, TABLE)
            writer = client.writer(RUN, partition, durability=chance.choice(["memory", "written", "synced"]))
            for count in range(1_000_000):
                name, tokens, start = f"{number}-{count}", chance.randint(3, 60), 0
                while start < tokens - 1:
                    stop = min(start + chance.randint(1, 20), tokens - 1)
                    records = {s: make_rows(s, n, name, 0, start, stop) for n, s in enumerate(TABLE)}
                    writer.append(name, start, records)
                    start = stop
                receipts.append(writer.seal(name, tokens=tokens, prompt_tokens=0))
    except TraceStoreError:
        return  # what has no receipt is no promise


def kill_under_clients(server: Any, chance: random.Random, rounds: int) -> int:
    """Kill the server under its clients, start it again, read back every receipt. Receipts held."""
    held = 0
    for number in range(rounds):
        receipts: list[Receipt] = []
        server.start()
        arguments = [(server.address, f"p{number}", n, receipts) for n in range(ROLLOUTS)]
        threads = [threading.Thread(target=rollout, args=each, daemon=True) for each in arguments]
        for thread in threads:
            thread.start()
        wait_until(lambda receipts=receipts: len(receipts) > 1)  # with none there is nothing to check
        threading.Event().wait(chance.uniform(0.0, 0.7))
        server.kill()
        promised = list(receipts)
        server.start()
        with trace_client.connect(server.address) as client:
            reader = client.reader(RUN, f"p{number}")
            for receipt in promised:
                check(reader, receipt)
        server.kill()
        for thread in threads:
            thread.join(60)
        held += len(promised)
    return held


def check(reader: Any, receipt: Receipt) -> None:
    tokens = receipt.tokens - 1
    batch = reader.read([(receipt.trajectory, 0, tokens)])
    assert not batch.missing, (receipt, batch.missing)
    for number, site in enumerate(TABLE):
        planes, scales, tensor = make_rows(site, number, receipt.trajectory, 0, 0, tokens)
        assert batch.planes[site].reshape(tokens, -1).tobytes() == planes.tobytes(), receipt
        assert batch.scales[site].tobytes() == scales.tobytes(), receipt
        np.testing.assert_array_equal(batch.tensor_scales[site], tensor)


def test_receipts_survive_a_killed_server(
    new_server: Callable[..., Any], chance: random.Random, monkeypatch: Any
) -> None:
    monkeypatch.setattr("trace_client.writer.RESUME_TIMEOUT_S", 0.2)
    assert kill_under_clients(new_server(), chance, ROUNDS) > 3
