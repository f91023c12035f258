"""The engine as its callers see it: attempts, holes, conflicts, visibility, release, restart."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from trace_store import TokenSpan
from trace_store.errors import (
    Conflict,
    DataLoss,
    Incomplete,
    InvalidRequest,
    NotFound,
    SchemaMismatch,
    Sealed,
    StaleAttempt,
    StorageFailed,
    Unavailable,
)
from trace_store.planner import MissingReason
from trace_store.record import Site
from trace_store.testing.records import join_chunks

K, V, MOE1, MOE2 = range(4)


def test_what_was_sealed_is_read_back_after_a_restart(store: Any) -> None:
    store.append("t", 0, 40)
    store.append("t", 40, 99)
    receipt = store.seal("t", 100)
    assert receipt.durability == "synced"
    assert receipt.segments
    assert not receipt.holes
    assert store.check("t", 3, 97) == []
    store.reopen()
    assert store.check("t", 0, 99) == []


@pytest.mark.parametrize("durability", ["memory", "written", "synced"])
def test_every_durability_answers(store: Any, durability: str) -> None:
    assert store.append("t", 0, 8, durability=durability).stored == 4
    store.seal("t", 9)
    assert store.check("t", 0, 8) == []


def test_an_unsealed_trajectory_is_not_visible_unless_asked_for(store: Any) -> None:
    store.append("t", 0, 8)
    assert store.reasons("t", 0, 8) == {MissingReason.NOT_SEALED}
    assert store.check("t", 0, 8, include_open=True) == []


def test_missing_rows_say_why(store: Any) -> None:
    store.append("t", 0, 8)
    store.append("t", 8, 9, sites=[K, V])
    store.seal("t", 10, allow_holes=True)
    assert store.reasons("unknown", 0, 4) == {MissingReason.UNKNOWN_TRAJECTORY}
    assert {(gap.site, gap.start, gap.stop, gap.reason) for gap in store.check("t", 0, 12)} == {
        *((site, 9, 12, MissingReason.NOT_RECORDED) for site in (K, V)),
        *((site, 8, 12, MissingReason.NOT_RECORDED) for site in (MOE1, MOE2)),
    }


def test_rows_of_an_older_policy_than_asked_for_are_stale(store: Any) -> None:
    store.append("t", 0, 4, policy_version=6)
    store.append("t", 4, 8, policy_version=7)
    store.seal("t", 9)
    missing = store.check("t", 0, 8, policy_version_min=7)
    assert {(gap.start, gap.stop, gap.reason) for gap in missing} == {(0, 4, MissingReason.STALE)}


# -- seals


def test_a_seal_lists_the_holes_of_every_site(store: Any) -> None:
    store.append("t", 0, 10, sites=[K, V])
    store.append("t", 4, 7, sites=[MOE1, MOE2])
    store.append("t", 8, 10, sites=[MOE1, MOE2])
    with pytest.raises(Incomplete) as caught:
        store.seal("t", 12, prompt_tokens=4)
    assert set(caught.value.holes) == {
        ("0/k", 10, 11),
        ("0/v", 10, 11),
        *((name, low, high) for name in ("1/moe_in", "2/moe_in") for low, high in ((7, 8), (10, 11))),
    }
    receipt = store.seal("t", 12, prompt_tokens=4, allow_holes=True)
    assert set(receipt.holes) == set(caught.value.holes)


def test_only_k_and_v_are_expected_of_the_prompt_and_nothing_of_the_last_token(store: Any) -> None:
    store.append("t", 0, 9, sites=[K, V])
    store.append("t", 5, 9, sites=[MOE1, MOE2])
    assert store.seal("t", 10, prompt_tokens=5).holes == ()


def test_a_repeated_seal_gives_the_same_receipt_and_another_count_is_a_conflict(store: Any) -> None:
    store.append("t", 0, 9)
    first = store.seal("t", 10)
    assert store.seal("t", 10) == first
    store.reopen()
    assert store.seal("t", 10) == first
    with pytest.raises(Conflict):
        store.seal("t", 11, allow_holes=True)


def test_a_seal_below_recorded_rows_is_refused(store: Any) -> None:
    store.append("t", 0, 9)
    with pytest.raises(InvalidRequest, match="beyond the token count"):
        store.seal("t", 8)


def test_a_sealed_attempt_takes_duplicates_and_nothing_new(store: Any) -> None:
    store.append("t", 0, 9)
    store.seal("t", 10)
    assert store.append("t", 2, 9).duplicates == 4
    with pytest.raises(Sealed):
        store.append("t", 9, 10)
    with pytest.raises(Sealed):
        store.append("t", 5, 10)


# -- idempotence and conflicts


def test_fr10_rows_that_a_prefix_hit_did_not_record_are_missing_and_never_zeros(store: Any) -> None:
    store.append("first", 0, 40)
    store.seal("first", 41, prompt_tokens=30)
    store.append("second", 24, 40)  # the engine computed nothing before its cached prefix ended
    with pytest.raises(Incomplete, match=r"0/k \[0, 24\)"):
        store.seal("second", 41, prompt_tokens=30)
    store.seal("second", 41, prompt_tokens=30, allow_holes=True)
    missing = store.check("second", 0, 40)
    assert {(gap.start, gap.stop, gap.reason) for gap in missing} == {(0, 24, MissingReason.NOT_RECORDED)}


def test_fr11_rows_of_one_request_never_appear_under_another(store: Any) -> None:
    store.append("a", 0, 8)
    store.append("b", 4, 8)
    store.seal("a", 9)
    store.seal("b", 9, allow_holes=True)
    assert {(gap.start, gap.stop) for gap in store.check("b", 0, 8)} == {(0, 4)}
    # Rows of a sent under the name of b do not match their checksum.
    stolen = store.chunk("a", 0, 4)
    group = dataclasses.replace(stolen.groups[0], trajectory="b")
    with pytest.raises(DataLoss):
        store.engine.append("run", "step-1", dataclasses.replace(stolen, groups=(group,))).result(30)


def test_fr12_a_batch_of_two_ranks_keeps_each_row_under_its_trajectory(store: Any) -> None:
    both = join_chunks([store.chunk("rank0", 0, 3), store.chunk("rank1", 0, 5), store.chunk("one", 0, 1)])
    store.engine.append("run", "step-1", both, "synced").result(30)
    for name, tokens in (("rank0", 3), ("rank1", 5), ("one", 1)):
        store.seal(name, tokens + 1)
        gaps = store.check(name, 0, 8)
        assert {(gap.start, gap.stop) for gap in gaps} == {(tokens, 8)}


def test_fr13_an_overlap_after_a_resume_is_stored_once(store: Any) -> None:
    store.append("t", 0, 120)
    result = store.append("t", 0, 200)
    assert (result.stored, result.duplicates) == (4, 0)
    store.seal("t", 201)
    assert store.check("t", 0, 200) == []
    assert store.engine.usage().records == 8
    store.append("u", 0, 120)
    with pytest.raises(Conflict, match=r"tokens=\[0, 120\)"):
        store.append("u", 0, 200, seed=1)


def test_fr14_a_late_message_of_an_older_attempt_is_refused_and_changes_nothing(store: Any) -> None:
    store.append("t", 0, 6)
    store.append("t", 0, 4, attempt=1)
    with pytest.raises(StaleAttempt):
        store.append("t", 6, 9)
    store.append("t", 4, 9, attempt=1)
    store.seal("t", 10, attempt=1)
    with pytest.raises(StaleAttempt):
        store.seal("t", 10)
    for _ in range(2):
        assert store.check("t", 0, 9, attempt=1) == []
        store.reopen()


def test_fr14_a_late_message_answered_from_memory_does_not_poison_the_newer_attempt(store: Any) -> None:
    store.append("t", 0, 4, attempt=1)
    store.append("t", 0, 4, attempt=0, durability="memory")
    store.append("t", 4, 9, attempt=1)
    store.seal("t", 10, attempt=1)
    assert store.check("t", 0, 9, attempt=1) == []


def test_a_newer_attempt_replaces_the_older_one_only_when_it_is_sealed(store: Any) -> None:
    store.append("t", 0, 9)
    store.seal("t", 10)
    store.append("t", 0, 4, attempt=3)
    for _ in range(2):
        assert store.check("t", 0, 9) == []
        assert {(gap.start, gap.stop) for gap in store.check("t", 0, 9, attempt=3, include_open=True)} == {(4, 9)}
        store.reopen()
    store.seal("t", 5, attempt=3)
    for _ in range(2):
        missing = store.check("t", 0, 9, attempt=3)
        assert {(gap.start, gap.stop, gap.reason) for gap in missing} == {(4, 9, MissingReason.NOT_RECORDED)}
        store.reopen()


def test_an_attempt_begun_before_the_last_seal_is_durable_does_not_hide_that_seal(store: Any) -> None:
    futures: list[Future[Any]] = [
        store.engine.append("run", "step-1", store.chunk("t", 0, 9), "written"),
        store.engine.seal("run", "step-1", "t", tokens=10, prompt_tokens=0),
        store.engine.append("run", "step-1", store.chunk("t", 0, 3, attempt=1), "written"),
    ]
    for future in futures:
        future.result(30)
    assert store.check("t", 0, 9) == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_fr15_spans_come_in_any_order(store: Any, order: tuple[int, ...]) -> None:
    spans = [(0, 20), (20, 40), (40, 60)]
    for position in order:
        store.append("t", *spans[position])
        if position != order[-1]:
            with pytest.raises(Incomplete):
                store.seal("t", 61)
    store.seal("t", 61)
    assert store.check("t", 5, 55) == []
    assert store.append("t", 0, 60).duplicates == 4


def test_fr16_two_ranks_write_their_sites_and_neither_overwrites_the_other(store: Any) -> None:
    store.append("t", 0, 9, sites=[K, V])
    store.append("t", 0, 9, sites=[MOE1, MOE2])
    with pytest.raises(Conflict, match="site=0/k"):
        store.append("t", 0, 9, seed=5)
    store.seal("t", 10)
    assert store.check("t", 0, 9) == []


def test_fr24_a_repeated_append_is_answered_as_a_duplicate(store: Any) -> None:
    store.append("t", 0, 9)
    assert store.append("t", 0, 9) == type(store.append("t", 0, 9))(0, 4)
    store.reopen()
    assert store.append("t", 0, 9).duplicates == 4
    assert store.engine.usage().records == 4


def test_prefill_and_decode_hosts_write_one_trajectory_at_the_same_time(store: Any) -> None:
    errors: list[BaseException] = []

    def write(first: int, last: int) -> None:
        try:
            for start in range(first, last, 4):
                store.append("t", start, min(start + 4, last), durability="written")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=span) for span in ((0, 50), (50, 99))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    store.seal("t", 100)
    assert store.check("t", 0, 99) == []


def test_a_chunk_is_stored_whole_or_not_at_all(store: Any) -> None:
    store.append("b", 0, 4)
    mixed = join_chunks([store.chunk("a", 0, 4), store.chunk("b", 0, 4, seed=1)])
    with pytest.raises(Conflict):
        store.engine.append("run", "step-1", mixed).result(30)
    assert store.reasons("a", 0, 4, include_open=True) == {MissingReason.UNKNOWN_TRAJECTORY}


def test_a_record_damaged_on_its_way_is_refused(store: Any) -> None:
    chunk = store.chunk("t", 0, 4)
    codes = bytearray(chunk.codes)
    codes[7] ^= 1
    damaged = type(chunk)(chunk.groups, memoryview(bytes(codes)), chunk.scales, chunk.tensor_scales)
    with pytest.raises(DataLoss, match="on arrival"):
        store.engine.append("run", "step-1", damaged).result(30)
    assert store.reasons("t", 0, 4, include_open=True) == {MissingReason.UNKNOWN_TRAJECTORY}


def test_an_error_behind_a_memory_append_is_raised_by_the_next_seal(store: Any) -> None:
    store.append("t", 0, 4)
    assert store.append("t", 0, 4, seed=1, durability="memory").stored == 4
    with pytest.raises(Conflict):
        store.seal("t", 5)
    store.seal("t", 5)


def test_a_caller_that_gives_up_does_not_stop_the_store(store: Any) -> None:
    future = store.engine.append("run", "step-1", store.chunk("t", 0, 4), "synced")
    future.cancel()
    store.append("t", 4, 8)
    store.seal("t", 9)
    assert store.check("t", 0, 8) == []


# -- reads beside writes and releases


def test_fr27_a_read_beside_a_writer_sees_whole_committed_rows_only(store: Any) -> None:
    stop = threading.Event()
    errors: list[BaseException] = []

    def write() -> None:
        try:
            for start in range(0, 400, 2):
                store.append("t", start, start + 2, durability="written")
                if start % 100 == 98:
                    store.engine.roll().result(30)
        except BaseException as error:
            errors.append(error)
        finally:
            stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = 0
    while not stop.is_set():
        missing = store.check("t", 0, 400, include_open=True)
        assert {gap.stop for gap in missing} <= {400}
        first = min((gap.start for gap in missing), default=400)
        assert first >= seen
        seen = first
    writer.join()
    assert not errors
    assert store.check("t", 0, 400, include_open=True) == []


def test_a_reader_keeps_what_it_reads_while_the_partition_is_released(store: Any) -> None:
    store.append("t", 0, 9)
    store.seal("t", 10)
    with store.engine.read("run", "step-1", [TokenSpan("t", 0, 9)], [K]) as read:
        assert store.engine.release("run", "step-1").result(30) == 1
        pieces = list(read)
        assert [piece.rows for piece in pieces] == [9]
        assert read.missing == []
    assert store.reasons("t", 0, 9) == {MissingReason.RELEASED}


def test_a_release_keeps_its_place_among_queued_appends(store: Any) -> None:
    engine = store.engine
    futures: list[Future[Any]] = [
        engine.append("run", "step-1", store.chunk("old", 0, 9), "synced"),
        engine.release("run", "step-1"),
        engine.append("run", "step-1", store.chunk("middle", 0, 9), "written"),
        engine.release("run", "step-1"),
        engine.append("run", "step-1", store.chunk("new", 0, 9), "synced"),
    ]
    assert [futures[1].result(30), futures[3].result(30)] == [1, 1]
    futures[4].result(30)
    for _ in range(2):
        assert store.reasons("old", 0, 9, include_open=True) == {MissingReason.UNKNOWN_TRAJECTORY}
        assert store.reasons("middle", 0, 9, include_open=True) == {MissingReason.UNKNOWN_TRAJECTORY}
        assert store.check("new", 0, 9, include_open=True) == []
        store.reopen()


def test_a_released_trajectory_stays_released_and_may_come_again(store: Any) -> None:
    store.append("t", 0, 9)
    store.seal("t", 10)
    store.append("u", 0, 9)
    assert store.engine.release("run", "step-1", ["t", "nobody"]).result(30) == 1
    for _ in range(2):
        assert store.reasons("t", 0, 9) == {MissingReason.RELEASED}
        assert store.check("u", 0, 9, include_open=True) == []
        store.reopen()
    store.append("t", 0, 9, seed=3)
    store.seal("t", 10)
    for _ in range(2):
        assert store.check("t", 0, 9, seed=3) == []
        store.reopen()


def test_a_release_of_nothing_is_nothing(store: Any) -> None:
    assert store.engine.release("run", "never").result(30) == 0
    assert store.engine.release("run", "never", ["t"]).result(30) == 0


# -- runs and arguments


def test_registering_again_is_idempotent_and_another_table_is_a_mismatch(store: Any) -> None:
    assert store.engine.register("run", store.engine.sites("run")) is False
    with pytest.raises(SchemaMismatch):
        store.engine.register("run", [Site(0, "k", 128)])
    with pytest.raises(NotFound):
        store.engine.sites("other")
    with pytest.raises(NotFound):
        store.engine.append("other", "p", store.chunk("t", 0, 1))


@pytest.mark.parametrize("sites", [[0, 0], [4], [-1]])
def test_a_read_of_unknown_or_repeated_sites_is_refused(store: Any, sites: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="sites"):
        store.engine.read("run", "step-1", [TokenSpan("t", 0, 1)], sites)


def test_two_engines_do_not_share_a_directory_and_a_closed_one_takes_nothing(store: Any, open_store: Any) -> None:
    with pytest.raises(StorageFailed, match="another process"):
        open_store(store.root)
    store.engine.close()
    with pytest.raises(Unavailable):
        store.append("t", 0, 1)
    open_store(store.root)


# -- names


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/../b", "a//b", "a\0b", "a\n", "x" * 513, "\ud800"])
def test_fr29_names_that_could_leave_the_root_are_refused(store: Any, name: str) -> None:
    for call in (
        lambda: store.engine.register(name, store.engine.sites("run")),
        lambda: store.engine.append("run", name, store.chunk("t", 0, 1)),
        lambda: store.engine.seal("run", "step-1", name, tokens=1, prompt_tokens=0),
        lambda: store.engine.read("run", name, [], []),
        lambda: store.engine.release("run", name),
        lambda: TokenSpan(name, 0, 1),
    ):
        with pytest.raises(InvalidRequest):
            call()


def test_fr29_names_that_look_alike_are_different_trajectories_and_partitions(store: Any) -> None:
    names = ["a/b", "a-SEP-b", "a-b", "a_b", "A-b", "e\u0301", "\u00e9", ".released-x", "manifest-x", "x" * 512]
    for seed, name in enumerate(names):
        store.append(name, 0, 3, partition=name, seed=seed)
        store.seal(name, 4, partition=name)
    for _ in range(2):
        for seed, name in enumerate(names):
            assert store.check(name, 0, 3, partition=name, seed=seed) == []
            assert store.reasons(names[seed - 1], 0, 3, partition=name) == {MissingReason.UNKNOWN_TRAJECTORY}
        store.reopen()
    inside = {path.resolve() for path in store.root.parent.rglob("*")}
    assert all(path.is_relative_to(store.root) for path in inside)


def test_a_read_that_names_more_than_a_plan_may_hold_is_refused(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trace_store.engine.SPAN_SITES_MAX", 4)
    spans = [TokenSpan(f"t{number}", 0, 1, number) for number in range(3)]
    store.append("t0", 0, 1)
    assert len(store.engine.read("run", "p", spans[:2], (0, 1)).missing) == 4
    with pytest.raises(InvalidRequest, match="split it") as caught:
        store.engine.read("run", "p", spans, (0, 1))
    assert caught.value.argument == "spans"


def test_a_trajectory_that_is_not_there_costs_a_plan_one_entry(store: Any) -> None:
    """The catalog is locked while a plan is made: a microbatch of a mistyped partition must not hold up the writers."""
    store.append("t", 0, 4)
    spans = [TokenSpan(f"unknown {number}", 0, 4, 4 * number) for number in range(50)]
    with store.engine.read("run", "step-1", spans, (0, 1, 2)) as read:
        assert len(read.not_found) == 50
        assert {(item.span, item.site) for item in read.missing} == {(s, site) for s in range(50) for site in (0, 1, 2)}
