"""Servers that share a bucket and no clock: nothing acknowledged is lost, mixed or brought back, whatever their order.

The order of two epochs' names is random in production, so each test of an order runs with both.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.tier.conftest import PARTITION, RUN, SITES, TABLE, Sidecar
from tests.tier.test_reading import damage, segment_keys
from trace_store import TokenSpan, shard
from trace_store.errors import Conflict, Incomplete, Sealed, StaleAttempt, StorageFailed
from trace_store.storage.s3 import ObjectStore
from trace_store.testing.reads import read_slices
from trace_store.testing.records import make_chunk, make_rows
from trace_store.tier import loading

Make = Callable[..., Sidecar]

EPOCHS = pytest.mark.parametrize(("low", "high"), [("1" * 16, "2" * 16), ("2" * 16, "1" * 16)], ids=["a<b", "b<a"])


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trace_store.tier.tier.RELIST_S", 0.0)


def append(server: Sidecar, trajectory: str, start: int, stop: int, *, seed: int = 0, attempt: int = 0) -> None:
    server.engine.register(RUN, TABLE)
    chunk = make_chunk(RUN, PARTITION, TABLE, trajectory, start, stop, seed=seed, attempt=attempt)
    server.engine.append(RUN, PARTITION, chunk).result(30)


def seal(server: Sidecar, trajectory: str, tokens: int, *, attempt: int = 0) -> Any:
    future = server.engine.seal(RUN, PARTITION, trajectory, tokens=tokens + 1, prompt_tokens=0, attempt=attempt)
    return future.result(30)


def write(server: Sidecar, trajectory: str, tokens: int = 8, *, seed: int = 0, attempt: int = 0) -> None:
    append(server, trajectory, 0, tokens, seed=seed, attempt=attempt)
    seal(server, trajectory, tokens, attempt=attempt)


def content(server: Sidecar, trajectory: str, tokens: int = 8) -> tuple[dict[Any, Any], set[str]]:
    """What a read of the visible attempt gives, and the reasons of what is missing."""
    server.engine.find(RUN)
    rows, missing = read_slices(server.engine, RUN, PARTITION, TokenSpan(trajectory, 0, tokens), SITES)
    return rows, {item.reason.name for item in missing}


def expected(trajectory: str, tokens: int = 8, *, seed: int = 0, attempt: int = 0) -> dict[Any, Any]:
    rows = {}
    for number in SITES:
        codes, scales, tensor = make_rows(TABLE[number], number, trajectory, attempt, 0, tokens, seed=seed)
        for token in range(tokens):
            rows[(number, token)] = (codes[token].tobytes(), scales[token].tobytes(), float(tensor[token]))
    return rows


def release(server: Sidecar, *trajectories: str) -> int:
    return server.engine.release(RUN, PARTITION, list(trajectories)).result(30)


def settle(*servers: Sidecar) -> None:
    """Everybody uploads, then everybody follows."""
    for server in servers:
        server.upload()
    for server in servers:
        server.tier.follow()


@EPOCHS
def test_what_is_written_after_a_release_stands_wherever_the_release_was_written(
    sidecar: Make, low: str, high: str
) -> None:
    first, second = sidecar("a", epoch=low), sidecar("b", epoch=high)
    write(first, "t", seed=1)
    first.upload()
    assert release(first, "t") == 1
    assert release(second, "t") == 1
    write(first, "t", seed=2)
    settle(first, second)
    first.engine.close()
    for server in (sidecar("a"), second, sidecar("c")):
        assert content(server, "t") == (expected("t", seed=2), set())


@EPOCHS
def test_a_newer_attempt_outlives_the_release_of_an_older_one(sidecar: Make, low: str, high: str) -> None:
    first, second = sidecar("a", epoch=low), sidecar("b", epoch=high)
    write(first, "t", attempt=0)
    first.upload()
    second.tier.ensure(second.tier.run(RUN), PARTITION)
    write(first, "t", attempt=1)  # the other server does not know of it
    assert release(second, "t") == 1
    settle(second, first)
    for server in (first, second, sidecar("c")):
        assert content(server, "t") == (expected("t", attempt=1), set())


@EPOCHS
def test_unsealed_rows_of_a_killed_server_do_not_mix_with_the_attempt_written_anew(
    sidecar: Make, low: str, high: str
) -> None:
    first, second = sidecar("a", epoch=low), sidecar("b", epoch=high)
    append(first, "t", 0, 4, seed=1)
    shutil.copytree(first.root, first.root.with_name("a-after-kill"))
    write(second, "t", seed=2)
    second.upload()
    again = sidecar("a-after-kill")
    assert content(again, "t") == (expected("t", seed=2), set())
    settle(again, second)
    for server in (again, second, sidecar("c")):
        assert content(server, "t") == (expected("t", seed=2), set())
    with pytest.raises(Sealed):
        append(again, "t", 8, 9)
    assert seal(again, "t", 8).attempt == 0


@EPOCHS
def test_two_seals_of_one_attempt_are_never_mixed(sidecar: Make, low: str, high: str) -> None:
    first, second = sidecar("a", epoch=low), sidecar("b", epoch=high)
    write(first, "t", seed=1)
    write(second, "t", seed=2)
    settle(first, second)
    found = content(first, "t")
    assert found in [(expected("t", seed=seed), set()) for seed in (1, 2)]
    for server in (second, sidecar("c")):
        assert content(server, "t") == found


def test_a_late_seal_of_an_older_attempt_does_not_hide_the_newer_one(sidecar: Make) -> None:
    first, second = sidecar("a"), sidecar("b")
    write(first, "t", attempt=1)
    write(second, "t", attempt=0)
    settle(first, second)
    for server in (first, second):
        assert content(server, "t") == (expected("t", attempt=1), set())


def test_an_open_newer_attempt_elsewhere_does_not_hide_the_sealed_one(sidecar: Make) -> None:
    first, second = sidecar("a"), sidecar("b")
    append(second, "t", 0, 4, attempt=1)
    write(first, "t", attempt=0)
    settle(first, second)
    for server in (first, second, sidecar("c")):
        assert content(server, "t") == (expected("t", attempt=0), set())


def test_prefill_and_decode_hosts_write_one_attempt(sidecar: Make) -> None:
    first, second = sidecar("a"), sidecar("b")
    append(first, "t", 0, 5)
    append(second, "t", 5, 8)
    with pytest.raises(Incomplete):
        seal(second, "t", 8)
    settle(first, second)
    seal(second, "t", 8)
    settle(first, second)
    first.engine.close()
    for server in (second, sidecar("a"), sidecar("c")):
        assert content(server, "t") == (expected("t"), set())


def test_rows_sent_to_both_servers_are_copies_if_equal_and_a_conflict_if_not(sidecar: Make) -> None:
    first, second = sidecar("a"), sidecar("b")
    append(first, "same", 0, 5)
    append(second, "same", 0, 8)
    append(first, "other", 0, 5, seed=1)
    append(second, "other", 0, 8, seed=2)
    settle(first, second)
    seal(second, "same", 8)
    with pytest.raises(Conflict, match="new attempt"):
        seal(second, "other", 8)
    write(second, "other", attempt=1)
    settle(first, second)
    for server in (first, second, sidecar("c")):
        assert content(server, "same") == (expected("same"), set())
        assert content(server, "other") == (expected("other", attempt=1), set())


@EPOCHS
@pytest.mark.parametrize("part", ["codes_offset", "scales_offset"])
def test_a_damaged_copy_is_no_conflict_with_the_whole_one(
    sidecar: Make, store: ObjectStore, low: str, high: str, part: str
) -> None:
    first, second = sidecar("a", epoch=low), sidecar("b", epoch=high)
    append(first, "t", 0, 5)
    first.upload()
    (segment,) = first.engine.snapshot_runs()[0].partitions[PARTITION].segments.values()
    append(second, "t", 0, 8)
    (key,) = segment_keys(store)
    damage(store, key, int(segment.index.rows[1][part]))
    second.tier.follow()
    seal(second, "t", 8)
    second.upload()
    for server in (second, sidecar("c")):
        assert content(server, "t") == (expected("t"), set())


def test_a_release_knows_what_was_uploaded_a_moment_ago(sidecar: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = sidecar("a"), sidecar("b")
    write(first, "known", seed=1)
    first.upload()
    monkeypatch.setattr("trace_store.tier.tier.RELIST_S", 60.0)
    assert content(second, "t")[1] == {"UNKNOWN_TRAJECTORY"}  # lists the partition; reads do so again in a minute
    write(first, "t", seed=1)
    first.upload()
    assert release(second, "t") == 1
    settle(second, first)
    assert content(first, "t")[1] == {"RELEASED"}


@EPOCHS
def test_a_seal_without_rows_does_not_hide_the_complete_one(sidecar: Make, low: str, high: str) -> None:
    """A client that failed over and gave up seals with holes what was sealed elsewhere."""
    first, second = sidecar("a", epoch=low), sidecar("b", epoch=high)
    write(first, "t")
    second.engine.register(RUN, TABLE)
    future = second.engine.seal(RUN, PARTITION, "t", tokens=9, prompt_tokens=0, allow_holes=True)
    assert future.result(30).holes
    settle(first, second)
    for server in (first, second, sidecar("c")):
        assert content(server, "t") == (expected("t"), set())


@pytest.mark.parametrize("moment", ["while it is compared", "before it is written"])
def test_rows_do_not_join_a_seal_that_arrives_while_they_are_admitted(
    sidecar: Make, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    first, second = sidecar("a"), sidecar("b")
    write(second, "t", seed=1)
    append(first, "other", 0, 1)
    writer, admit = first.engine._shard, shard.admit
    wrote = writer._write

    def arrive() -> None:
        monkeypatch.setattr(shard, "admit", admit)
        writer._write = wrote
        second.upload()
        first.tier.follow()

    def compare(*arguments: Any) -> Any:
        found = admit(*arguments)
        arrive()
        return found

    def store(*arguments: Any) -> None:
        arrive()
        wrote(*arguments)

    if moment == "before it is written":
        writer._write = store
        append(first, "t", 0, 8, seed=2)
    else:
        monkeypatch.setattr(shard, "admit", compare)
        with pytest.raises(Conflict):
            append(first, "t", 0, 8, seed=2)
    assert content(first, "t") == (expected("t", seed=1), set())
    settle(first, second)
    for server in (first, second, sidecar("c")):
        assert content(server, "t") == (expected("t", seed=1), set())


@pytest.mark.parametrize("of_partition", [True, False], ids=["partition", "trajectory"])
@pytest.mark.parametrize("writer", ["a", "b"])
def test_rows_sent_again_outlive_a_release_that_their_server_has_not_heard_of(
    sidecar: Make, of_partition: bool, writer: str
) -> None:
    """What another server may have released is no duplicate: the acknowledgement would stand on nothing."""
    first, second = sidecar("a"), sidecar("b")
    write(first if writer == "a" else second, "t")
    settle(first, second)
    assert content(second, "t") == (expected("t"), set())
    assert first.engine.release(RUN, PARTITION, None if of_partition else ["t"]).result(30) == 1
    assert first.engine._volume.deleter.drain(30)
    append(second, "t", 0, 8)  # it sees the old rows, which are the same
    seal(second, "t", 8)
    settle(first, second)
    second.tier.follow()
    for server in (first, second, sidecar("c")):
        assert content(server, "t") == (expected("t"), set())
    second.engine.close()
    assert content(sidecar("b"), "t") == (expected("t"), set())


def test_a_server_that_writes_hears_of_a_release(sidecar: Make) -> None:
    """Other rows in place of released ones are no conflict, once the stream's server has asked the bucket."""
    first, second = sidecar("a"), sidecar("b")
    write(first, "t", seed=1)
    first.upload()
    assert content(second, "t") == (expected("t", seed=1), set())
    first.engine.release(RUN, PARTITION).result(30)
    assert first.engine._volume.deleter.drain(30)
    second.engine.prepare(RUN, PARTITION)
    write(second, "t", seed=2)
    settle(first, second)
    for server in (first, second, sidecar("c")):
        assert content(server, "t") == (expected("t", seed=2), set())


def test_rows_that_could_not_be_loaded_are_not_taken_for_lost(sidecar: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other bytes in their place would be acknowledged, and served instead of theirs."""
    first, second = sidecar("a"), sidecar("b")
    append(first, "t", 0, 4)
    first.engine.roll().result(30)
    append(first, "t", 4, 8)
    seal(first, "t", 8)
    first.upload()
    second.engine.find(RUN)
    load = loading.load_segment

    def fail_once(store: Any, name: str, info: Any) -> Any:
        if name.startswith("0000000000-"):
            raise StorageFailed("one request timed out")
        return load(store, name, info)

    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_segment", fail_once)
        second.engine.prepare(RUN, PARTITION)
        with pytest.raises(Sealed):
            append(second, "t", 0, 4, seed=7)
    settle(first, second)
    for server in (first, second, sidecar("c")):
        assert content(server, "t") == (expected("t"), set())


def test_rows_that_arrive_while_copies_are_compared_are_compared_too(
    sidecar: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = sidecar("a"), sidecar("b")
    append(first, "t", 0, 8, seed=1)
    append(second, "t", 0, 4, seed=2)
    compare = shard.refuse_mixture

    def then_follow(*arguments: Any) -> None:
        monkeypatch.setattr(shard, "refuse_mixture", compare)
        compare(*arguments)
        second.upload()
        first.tier.follow()

    monkeypatch.setattr(shard, "refuse_mixture", then_follow)
    with pytest.raises(Conflict):
        seal(first, "t", 8)


@EPOCHS
def test_a_seal_does_not_take_in_rows_that_arrive_while_it_is_written(sidecar: Make, low: str, high: str) -> None:
    """Between its decision and its row, others' segments may be loaded by another thread."""
    first, second = sidecar("a", epoch=low), sidecar("b", epoch=high)
    append(first, "t", 0, 4, seed=1)
    first.upload()
    append(second, "t", 0, 8, seed=2)
    shard = second.engine._shard
    wrote = shard._write

    def load_first(*arguments: Any) -> None:
        shard._write = wrote
        second.tier.follow()
        wrote(*arguments)

    shard._write = load_first
    seal(second, "t", 8)
    assert content(second, "t") == (expected("t", seed=2), set())
    settle(first, second)
    for server in (first, second, sidecar("c")):
        assert content(server, "t") == (expected("t", seed=2), set())


class Machine(RuleBasedStateMachine):
    """Two servers, one client that talks to either, and restarts. Checked once all have seen everything, and by a third
    server that has nothing but the bucket."""

    make: Callable[[str], Sidecar]
    wipe: Callable[[], None]

    def __init__(self) -> None:
        super().__init__()
        type(self).wipe()
        self.servers = {name: type(self).make(name) for name in "ab"}
        self.acknowledged: list[tuple[int, int]] = []
        """Attempt and seed of every acknowledged seal since the last release of all servers."""
        self.seeds = 0

    @initialize()
    def start(self) -> None:
        write(self.servers["a"], "always", seed=7)

    def teardown(self) -> None:
        for server in self.servers.values():
            server.engine.close()

    @rule(
        name=st.sampled_from("ab"),
        attempt=st.sampled_from([0, 0, 1]),
        sealed=st.booleans(),
        length=st.sampled_from([3, 8]),
    )
    def write(self, name: str, attempt: int, sealed: bool, length: int) -> None:
        self.seeds += 1
        server = self.servers[name]
        try:
            append(server, "t", 0, 8 if sealed else length, seed=self.seeds, attempt=attempt)
            if sealed:
                seal(server, "t", 8, attempt=attempt)
                self.acknowledged.append((attempt, self.seeds))
        except (Conflict, Sealed, StaleAttempt):
            pass

    @rule()
    def release(self) -> None:
        for server in self.servers.values():
            server.engine.register(RUN, TABLE)
            release(server, "t")
        self.acknowledged = []

    @rule(name=st.sampled_from("ab"))
    def upload(self, name: str) -> None:
        self.servers[name].upload()

    @rule(name=st.sampled_from("ab"))
    def follow(self, name: str) -> None:
        self.servers[name].tier.follow()

    @rule(name=st.sampled_from("ab"))
    def restart(self, name: str) -> None:
        self.servers[name].engine.close()
        self.servers[name] = type(self).make(name)

    @rule()
    def check(self) -> None:
        for _ in range(2):
            settle(*self.servers.values())
        third = type(self).make("third")
        found = [content(server, "t") for server in (*self.servers.values(), third)]
        third.engine.close()
        rows, reasons = found[0]
        assert [other[0] for other in found] == [rows] * 3
        if not self.acknowledged:
            assert not rows, "nothing is visible that was released, or never sealed"
            return
        newest = max(attempt for attempt, _ in self.acknowledged)
        wholes = [expected("t", seed=seed, attempt=number) for number, seed in self.acknowledged if number == newest]
        assert (rows in wholes, reasons) == (True, set())

    @invariant()
    def an_untouched_trajectory_stays(self) -> None:
        assert content(self.servers["a"], "always") == (expected("always", seed=7), set())


def check_any_order(sidecar: Make, tmp_path: Path, store: ObjectStore, examples: int, steps: int) -> None:
    """Run the machine; its servers' directories and objects go before each example."""

    def wipe() -> None:
        store.delete([info.key for info in store.listing("")])
        for directory in tmp_path.iterdir():
            shutil.rmtree(directory)

    Machine.make, Machine.wipe = sidecar, wipe
    health = list(HealthCheck)
    options = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=health, database=None
    )
    run_state_machine_as_test(Machine, settings=options)


def test_any_order_of_operations(sidecar: Make, tmp_path: Path, store: ObjectStore) -> None:
    check_any_order(sidecar, tmp_path, store, 20, 20)
