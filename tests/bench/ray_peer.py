"""Ray's object store, and TransferQueue, where they are installed: the data planes that RL frameworks bring along.

Ray keeps values in shared memory of the node and ``get`` maps them; the copy into a reused buffer is what a trainer
does with them. TransferQueue has one storage unit and takes 16 values a call. Their servers' CPU is not measured.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from trace_client.bench.measure import Sample, timed

BATCH = 16

ROOM = 2
"""Loads that Ray's shared memory has room for: one that is read, one that is written."""


def missing() -> str:
    """What is not installed, or an empty string."""
    return "" if find_spec("ray") else "the Python package ray is not installed"


def make(values: Sequence[bytes], directory: Path) -> list[Any]:
    del directory  # Ray's sockets need a short path
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    size = sum(map(len, values))
    ray.init(
        num_cpus=4,  # actors of TransferQueue ask for some
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=ROOM * size + (256 << 20),
        _node_ip_address="127.0.0.1",
    )
    paths: list[Any] = [_Put(ray, values), _Get(ray, values)]
    if find_spec("transfer_queue"):
        queue = _Queue(values)
        paths += [_QueuePut(queue), _QueueGet(queue)]
    return paths


class _Put:
    name, direction = "Ray put", "up"

    def __init__(self, ray: Any, values: Sequence[bytes]) -> None:
        self._ray, self._values = ray, [np.frombuffer(value, np.uint8) for value in values]

    def run(self, turn: int) -> Sample:
        del turn
        # The references are dropped at once, and with them the values.
        return timed(sum(value.nbytes for value in self._values), self.write)

    def close(self) -> None:
        self._ray.shutdown()

    def write(self) -> list[Any]:
        return [self._ray.put(value) for value in self._values]


class _Get:
    name, direction = "Ray get", "down"

    def __init__(self, ray: Any, values: Sequence[bytes]) -> None:
        self._ray, self._references = ray, _Put(ray, values).write()
        self._size = sum(map(len, values))
        self._buffer = np.zeros(max(map(len, values)), np.uint8)

    def run(self, turn: int) -> Sample:
        del turn
        return timed(self._size, self._read)

    def close(self) -> None:
        self._references = []

    def _read(self) -> None:
        received = 0
        for reference in self._references:
            value = self._ray.get(reference)
            self._buffer[: value.nbytes] = value
            received += value.nbytes
        assert received == self._size


class _Queue:
    """A TransferQueue with one storage unit, and the values as tensors of one length."""

    def __init__(self, values: Sequence[bytes]) -> None:
        import torch
        import transfer_queue
        from omegaconf import OmegaConf

        transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
        self.queue, self.size = transfer_queue, sum(map(len, values))
        self.values = torch.frombuffer(bytearray(b"".join(values)), dtype=torch.uint8).reshape(len(values), -1)
        self.keys = [str(number) for number in range(len(values))]

    def write(self, partition: str) -> None:
        from tensordict import TensorDict

        for low in range(0, len(self.keys), BATCH):
            part = self.values[low : low + BATCH]
            fields = TensorDict({"value": part}, batch_size=len(part))
            self.queue.kv_batch_put(self.keys[low : low + BATCH], partition, fields)


class _QueuePut:
    name, direction = "TransferQueue put", "up"

    def __init__(self, queue: _Queue) -> None:
        self._queue = queue

    def run(self, turn: int) -> Sample:
        partition = f"put {turn}"
        sample = timed(self._queue.size, lambda: self._queue.write(partition))
        self._queue.queue.kv_clear(self._queue.keys, partition)
        return sample

    def close(self) -> None:
        self._queue.queue.close()


class _QueueGet:
    name, direction = "TransferQueue get", "down"

    def __init__(self, queue: _Queue) -> None:
        self._queue = queue
        queue.write("get")

    def run(self, turn: int) -> Sample:
        del turn
        return timed(self._queue.size, self._read)

    def close(self) -> None:
        pass

    def _read(self) -> None:
        keys, received = self._queue.keys, 0
        for low in range(0, len(keys), BATCH):
            batch = self._queue.queue.kv_batch_get(keys[low : low + BATCH], "get")
            received += sum(value.numel() for value in batch["value"])
        assert received == self._queue.size
