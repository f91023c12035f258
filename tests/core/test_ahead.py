"""Ranges of a remote source: joined, fetched ahead, and always the right bytes."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from trace_store.errors import StorageFailed
from trace_store.storage.ahead import ReadAhead
from trace_store.storage.base import Range, ReadShape
from trace_store.storage.prefetch import Prefetched, join_ranges

SHAPE = ReadShape(run_bytes_max=1000, gap_bytes_max=50, remote=True)
CONTENT = random.Random(1).randbytes(20_000)


class Remote:
    """A source that counts its round trips; ranges that touch ``broken`` fail."""

    name, shape, descriptor = "remote", SHAPE, -1

    def __init__(self, broken: range = range(0)) -> None:
        self.trips: list[list[Range]] = []
        self._broken = broken
        self.closed = False

    def size(self) -> int:
        return len(CONTENT)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        buffer[:] = self.read_ranges([(offset, offset + buffer.nbytes)])[0]

    def read_ranges(self, ranges: Sequence[Range]) -> list[memoryview]:
        self.trips.append(list(ranges))
        if any(start < self._broken.stop and stop > self._broken.start for start, stop in ranges):
            raise StorageFailed("broken, says the test")
        return [memoryview(CONTENT[start:stop]) for start, stop in ranges]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as running:
        yield running


@pytest.fixture(autouse=True)
def _small_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trace_store.storage.ahead.TRIP_BYTES", 2000)


def some_ranges(seed: int, count: int = 60) -> list[Range]:
    chance = random.Random(seed)
    starts = sorted(chance.randrange(len(CONTENT) - 600) for _ in range(count))
    return [(start, start + chance.choice([0, 1, 10, 100, 500])) for start in starts]


@pytest.mark.parametrize("seed", range(20))
def test_joined_ranges_cover_what_was_asked_for(seed: int) -> None:
    ranges = some_ranges(seed)
    joined = join_ranges(ranges, SHAPE)
    assert joined == sorted(joined)
    for start, stop in ranges:
        assert start == stop or any(low <= start < high for low, high in joined)
    assert all(high - low <= SHAPE.run_bytes_max for low, high in joined)
    assert len(joined) < len(ranges)


def test_near_ranges_become_one_and_far_ones_stay_apart() -> None:
    assert join_ranges([(0, 10), (60, 70), (121, 130)], SHAPE) == [(0, 70), (121, 130)]
    assert join_ranges([(0, 5000)], SHAPE) == [(0, 5000)]  # one record is never cut
    assert join_ranges([], SHAPE) == []


@pytest.mark.parametrize("seed", range(20))
def test_read_ahead_gives_the_bytes_in_any_order(seed: int, pool: ThreadPoolExecutor) -> None:
    ranges = some_ranges(seed)
    source = ReadAhead(Remote(), ranges, pool)
    for order in (ranges, random.Random(seed).sample(ranges, len(ranges))):
        parts = source.read_ranges(order)
        assert [bytes(part) for part in parts] == [CONTENT[start:stop] for start, stop in order]
    source.close()


def test_a_read_in_order_makes_few_trips_each_once(pool: ThreadPoolExecutor) -> None:
    ranges = [(start, start + 100) for start in range(0, 20_000, 100)]
    remote = Remote()
    source = ReadAhead(remote, ranges, pool)
    for low in range(0, len(ranges), 5):
        source.read_ranges(ranges[low : low + 5])
    assert len(remote.trips) == 10  # 20,000 bytes in trips of 2,000
    source.close()
    assert remote.closed


def test_the_trips_behind_are_on_their_way(pool: ThreadPoolExecutor) -> None:
    remote = Remote()
    source = ReadAhead(remote, [(start, start + 100) for start in range(0, 20_000, 100)], pool)
    source.read_ranges([(0, 100)])
    pool.shutdown(wait=True)
    assert sorted(trip[0][0] for trip in remote.trips) == [0, 2000, 4000]


def test_a_failed_trip_costs_its_own_ranges(pool: ThreadPoolExecutor) -> None:
    ranges = [(start, start + 100) for start in range(0, 20_000, 100)]
    source = ReadAhead(Remote(broken=range(5000, 5001)), ranges, pool)
    good = 0
    for start, stop in ranges:
        try:
            good += bytes(source.read_ranges([(start, stop)])[0]) == CONTENT[start:stop]
        except StorageFailed:
            assert 4000 <= start < 6000
    assert good == len(ranges) - 20


def test_two_threads_read_parts_of_one_plan(pool: ThreadPoolExecutor) -> None:
    ranges = [(start, start + 100) for start in range(0, 20_000, 100)]
    source = ReadAhead(Remote(), ranges, pool)
    wrong: list[Range] = []

    def work(part: list[Range]) -> None:
        for start, stop in part:
            if bytes(source.read_ranges([(start, stop)])[0]) != CONTENT[start:stop]:
                wrong.append((start, stop))

    threads = [threading.Thread(target=work, args=(part,)) for part in (ranges[:100], ranges[100:], ranges[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []


def test_prefetched_ranges_do_not_ask_again() -> None:
    remote = Remote()
    fetched = Prefetched(remote, [(100, 200), (5000, 5100)])
    buffer = memoryview(bytearray(50))
    fetched.read_into(buffer, 120)
    assert bytes(buffer) == CONTENT[120:170]
    with pytest.raises(StorageFailed, match="was not fetched"):
        fetched.read_into(buffer, 300)
    assert len(remote.trips) == 1
