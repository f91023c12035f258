"""Read-ahead: bounded, in order, into reused buffers, and its thread ends with the loop however that ends."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from trace_client.microbatch import Buffers, Microbatch
from trace_client.prefetch import Prefetch
from trace_store import Site
from trace_store.errors import InvalidRequest, Unavailable

SITE = Site(0, "k", 64)


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether ``condition`` holds within 60 s."""
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "trace-client-prefetch"]


class Source:
    """Stands in for a reader: counts reads, remembers the buffers they got."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.reads: list[int] = []
        self.buffers: list[int] = []
        self.fails_at = fails_at

    def __call__(self, spans: int, buffers: Buffers) -> Microbatch:
        if spans == self.fails_at:
            raise Unavailable("the server is away")
        batch = buffers.microbatch((SITE,), 4)
        batch.planes[SITE].fill(spans)
        self.reads.append(spans)
        self.buffers.append(id(buffers))
        return batch


def test_order_depth_and_reuse() -> None:
    source = Source()
    seen = []
    for batch in Prefetch(source, range(10), depth=2, device="cpu"):
        value = int(batch.planes[SITE][0, 0, 0])
        assert eventually(lambda low=value: len(source.reads) == min(low + 3, 10)), "two are read ahead"
        assert (batch.planes[SITE] == value).all(), "reading ahead leaves the current microbatch alone"
        seen.append(value)
    assert seen == list(range(10))
    assert len(set(source.buffers)) == 3, "depth + 1 buffers"


def test_reading_ahead_is_bounded() -> None:
    source = Source()
    drawn: list[int] = []

    def endless() -> Iterator[int]:
        for number in range(1_000_000):
            drawn.append(number)
            yield number

    iterator = Prefetch(source, endless(), depth=3, device="cpu")
    assert eventually(lambda: len(drawn) == 5), "four buffers are full and the fifth microbatch waits for one"
    next(iterator)
    iterator.close()
    assert len(source.reads) == 4


@pytest.mark.parametrize("leave", ["break", "close", "drop", "exhaust", "error"])
def test_the_thread_ends_with_the_loop(leave: str) -> None:
    assert eventually(lambda: not prefetch_threads())
    iterator = Prefetch(Source(fails_at=3 if leave == "error" else None), range(6), depth=2, device="cpu")
    next(iterator)
    assert leave == "exhaust" or prefetch_threads()
    if leave == "break":
        for _ in iterator:
            break
    elif leave == "close":
        iterator.close()
        assert not prefetch_threads(), "close waits for the thread"
        assert list(iterator) == []
    elif leave == "exhaust":
        assert len(list(iterator)) == 5
    elif leave == "error":
        for _ in range(3):
            with pytest.raises(Unavailable):
                list(iterator)
    del iterator
    gc.collect()
    assert eventually(lambda: not prefetch_threads())


def test_errors_come_after_what_was_read_before_them() -> None:
    iterator = Prefetch(Source(fails_at=2), range(6), depth=4, device="cpu")
    assert [int(next(iterator).planes[SITE][0, 0, 0]) for _ in range(2)] == [0, 1]
    with pytest.raises(Unavailable, match="away"):
        next(iterator)


def test_a_loop_goes_on_where_the_server_is_back() -> None:
    source = Source(fails_at=2)
    iterator = Prefetch(source, range(5), depth=1, device="cpu")
    seen, failures = [], 0
    while len(seen) < 5:
        try:
            seen.append(int(next(iterator).planes[SITE][0, 0, 0]))
        except Unavailable:
            failures += 1
            if failures == 3:
                source.fails_at = None
    assert (seen, failures) == ([0, 1, 2, 3, 4], 3)
    assert list(iterator) == []


@pytest.mark.parametrize("error", [KeyError("no more prompts"), Unavailable("no more prompts")], ids=["any", "ours"])
def test_an_error_of_the_callers_iterator_comes_through(error: Exception) -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise error

    iterator = Prefetch(Source(), broken(), depth=1, device="cpu")
    next(iterator)
    for _ in range(2):  # it is no end of the data
        with pytest.raises(type(error), match="prompts"):
            next(iterator)
    iterator.close()
    assert list(iterator) == []


def test_what_is_no_iterable_is_refused_at_once() -> None:
    with pytest.raises(InvalidRequest) as caught:
        Prefetch(Source(), 5, 2, "cpu")  # type: ignore[arg-type]
    assert caught.value.argument == "microbatches"


def test_close_frees_a_loop_that_waits_on_another_thread() -> None:
    gate = threading.Event()

    def held() -> Iterator[int]:
        gate.wait(200)
        return iter(())

    class Held:
        def __iter__(self) -> Iterator[int]:
            return held()

    iterator = Prefetch(Source(), Held(), depth=1, device="cpu")
    results: list[list[Any]] = []
    consumer = threading.Thread(target=lambda: results.append(list(iterator)))
    consumer.start()
    closer = threading.Thread(target=iterator.close)
    closer.start()
    consumer.join(30)
    assert results == [[]]
    gate.set()
    closer.join(30)
    assert not closer.is_alive()


@pytest.mark.parametrize(
    ("argument", "depth", "device"), [("depth", 0, "cpu"), ("depth", 65, "cpu"), ("device", 2, "")]
)
def test_bad_arguments_are_named(argument: str, depth: int, device: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Prefetch(Source(), [], depth, device)
    assert caught.value.argument == argument
    assert eventually(lambda: not prefetch_threads())


def test_a_real_reader_prefetches_and_marks_missing_rows(client: Any, run: str, records: Any, sites: Any) -> None:
    with client.writer(run, "p") as writer:
        for number in range(4):
            writer.append(f"t{number}", 0, records(8, seed=number))
            writer.seal(f"t{number}", tokens=9, prompt_tokens=0)
    reader = client.reader(run, "p")
    microbatches = [[(f"t{number}", 0, 8), ("nobody", 0, 2, 8)] for number in range(4)]
    for number, batch in enumerate(reader.prefetch(microbatches, sites[:2], depth=2)):
        for site in sites[:2]:
            assert batch.planes[site][:8].tobytes() == records(8, seed=number)[site][0].tobytes()
            assert batch.valid[site].tolist() == [True] * 8 + [False] * 2
            assert np.isnan(batch.tensor_scales[site][8:]).all()
        assert {missing.reason for missing in batch.missing} == {"unknown trajectory"}
    assert number == 3


def test_a_bad_microbatch_is_raised_where_it_is_drawn(client: Any, run: str) -> None:
    iterator = client.reader(run, "p").prefetch([[("t", 3, 1)]])
    with pytest.raises(InvalidRequest) as caught:
        next(iterator)
    assert caught.value.argument == "span.stop"
