"""Pickling: a microbatch travels between processes with its own rows; what belongs to a connection says it cannot."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import trace_client
from trace_client.recorder import KVRecorder, Recorder
from trace_store import Site
from trace_store.errors import Unsupported

FIELDS = ("planes", "scales", "tensor_scales", "valid")


@pytest.fixture
def reader(client: Any, run: str, records: Any) -> Any:
    """Two trajectories of 20 tokens."""
    with client.writer(run, "p") as writer:
        for seed, name in enumerate(("a", "b")):
            writer.append(name, 0, records(20, seed=seed))
            writer.seal(name, tokens=21, prompt_tokens=0)
    return client.reader(run, "p")


def content(batch: trace_client.Microbatch) -> dict[str, list[tuple[Site, Any, tuple[int, ...], bytes]]]:
    """Every array by its bytes."""
    return {
        name: [(site, array.dtype, array.shape, array.tobytes()) for site, array in getattr(batch, name).items()]
        for name in FIELDS
    }


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_microbatch_comes_back_equal_and_independent(reader: Any, protocol: int) -> None:
    buffers = trace_client.Buffers()
    batch = reader.read([("a", 2, 9, 1), ("nobody", 0, 3, 8)], out=buffers)
    before = content(batch)
    back = pickle.loads(pickle.dumps(batch, protocol))
    assert content(back) == before
    for name in ("rows", "missing", "attempts", "versions", "layout"):
        assert getattr(back, name) == getattr(batch, name), name
    reader.read([("b", 0, 11)], out=buffers)  # what was read over the same memory does not reach it
    assert content(batch) != before
    assert content(back) == before
    site = back.layout.sites[0]
    back.planes[site][0] = 7
    back.valid[site][:] = False
    assert np.shares_memory(back.planes[site], back.memory)
    assert not back.all_valid[0].any()


def test_only_the_rows_of_the_microbatch_are_pickled(reader: Any, sites: Any) -> None:
    batch = reader.read([("a", 0, 1)], sites[:1])
    assert batch.memory.nbytes >= 1 << 20, "an arena is larger than a row of 44 bytes"
    assert len(pickle.dumps(batch)) < 2048


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
def test_a_copy_outlives_the_buffers(reader: Any, make: Callable[[Any], Any]) -> None:
    buffers = trace_client.Buffers()
    batch = reader.read([("a", 0, 8)], out=buffers)
    kept, before = make(batch), content(batch)
    reader.read([("b", 0, 8)], out=buffers)
    assert content(kept) == before


def test_what_the_caller_put_there_travels_as_it_is() -> None:
    site = Site(0, "k", 64)
    batch = trace_client.Buffers().microbatch([site], 3)
    batch.planes[site] = np.arange(5)
    batch.scales = {site: np.full((3, 4), 9, np.uint8)}
    back = pickle.loads(pickle.dumps(batch))
    assert back.planes[site].tolist() == [0, 1, 2, 3, 4]
    assert (back.scales[site] == 9).all()
    empty = pickle.loads(pickle.dumps(trace_client.Microbatch(2)))
    assert (empty.rows, empty.planes, empty.all_valid.shape) == (2, {}, (0, 0))


def send_one(pipe: Any, address: str, run: str) -> None:
    with trace_client.connect(address) as client:
        pipe.send(client.reader(run, "p").read([("a", 0, 20)]))
    pipe.close()


def test_a_worker_process_sends_its_microbatches(client: Any, run: str, reader: Any) -> None:
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    worker = context.Process(target=send_one, args=(sending, client._channel.target, run), daemon=True)
    worker.start()
    sending.close()
    assert receiving.poll(60)
    batch = receiving.recv()
    worker.join(30)
    assert content(batch) == content(reader.read([("a", 0, 20)]))


class Connected:
    """Everything that belongs to one connection, by name."""

    def __init__(self, client: Any, run: str, sites: Any) -> None:
        writer, reader = client.writer(run, "p"), client.reader(run, "p")
        self.all = {
            "client": client,
            "writer": writer,
            "reader": reader,
            "recorder": Recorder(writer, sites),
            "kv recorder": KVRecorder(writer, sites, cache=None),  # type: ignore[arg-type]
            "prefetch": reader.prefetch([]),
        }


NAMES = ("client", "writer", "reader", "recorder", "kv recorder", "prefetch")


@pytest.fixture(params=["one", "fleet"])
def connected(request: pytest.FixtureRequest, client: Any, run: str, sites: Any) -> Iterator[dict[str, Any]]:
    if request.param == "one":
        yield Connected(client, run, sites).all
        return
    target = client._channel.target
    with trace_client.connect([target, target.replace("127.0.0.1", "localhost")]) as fleet:
        yield Connected(fleet, run, sites).all


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", [pickle.dumps, copy.deepcopy, copy.copy])
def test_what_belongs_to_a_connection_says_what_to_do(connected: dict[str, Any], name: str, how: Any) -> None:
    with pytest.raises(Unsupported, match="connect in each process"):
        how(connected[name])


def test_buffers_in_use_say_so_too(reader: Any) -> None:
    buffers = trace_client.Buffers()
    reader.read([("a", 0, 1)], out=buffers)
    with pytest.raises(Unsupported, match="connect in each process"):
        pickle.dumps(buffers)
