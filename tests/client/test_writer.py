"""Appending and sealing against a real server: bad input, duplicates, conflicts, and a server that dies or hangs."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import trace_client
from trace_client import stream as stream_module
from trace_client import writer as writer_module
from trace_store import Site
from trace_store.errors import (
    Conflict,
    DeadlineExceeded,
    Incomplete,
    InvalidRequest,
    Sealed,
    StaleAttempt,
    Unavailable,
)

T = 4
K = Site(0, "k", 64)
MX = Site(2, "moe_in", 64, block=32, scale="e8m0", form="b2")
GOOD = (np.zeros((T, 1, 8), np.uint8), np.zeros((T, 4), np.uint8), np.ones(T, np.float32))
GOOD_MX = (np.zeros((T, 2, 8), np.uint8), np.zeros((T, 2), np.uint8), np.float32(1.0))


def replaced(position: int, value: Any, base: tuple[Any, ...] = GOOD) -> tuple[Any, ...]:
    return (*base[:position], value, *base[position + 1 :])


def with_byte(byte: int, base: tuple[Any, ...] = GOOD) -> tuple[Any, ...]:
    scales = base[1].copy()
    scales[-1, -1] = byte
    return replaced(1, scales, base)


BAD_RECORDS = {
    "planes of int8": ("planes", {K: replaced(0, GOOD[0].astype(np.int8))}),
    "planes of float": ("planes", {K: replaced(0, GOOD[0].astype(np.float32))}),
    "planes one byte short": ("planes", {K: replaced(0, GOOD[0][:, :, :7])}),
    "planes of two bits": ("planes", {K: replaced(0, np.zeros((T, 2, 8), np.uint8))}),
    "planes without tokens": ("planes", {K: replaced(0, GOOD[0][:0])}),
    "planes of no shape": ("planes", {K: replaced(0, np.uint8(1))}),
    "scales of int16": ("scales", {K: replaced(1, GOOD[1].astype(np.int16))}),
    "scales too wide": ("scales", {K: replaced(1, np.zeros((T, 5), np.uint8))}),
    "scales of other length": ("scales", {K: replaced(1, np.zeros((T + 1, 4), np.uint8))}),
    "scale E4M3 0x7F": ("scales", {K: with_byte(0x7F)}),
    "scale E4M3 0xFF": ("scales", {K: with_byte(0xFF)}),
    "scale E8M0 255": ("scales", {MX: with_byte(0xFF, GOOD_MX)}),
    "tensor scale inf": ("tensor_scale", {K: replaced(2, np.float32(np.inf))}),
    "tensor scale nan": ("tensor_scale", {K: replaced(2, np.full(T, np.nan, np.float32))}),
    "tensor scale negative": ("tensor_scale", {K: replaced(2, -1.0)}),
    "tensor scale too large for float32": ("tensor_scale", {K: replaced(2, 1e300)}),
    "tensor scale of other length": ("tensor_scale", {K: replaced(2, np.ones(T - 1, np.float32))}),
    "tensor scale of text": ("tensor_scale", {K: replaced(2, "1")}),
    "unknown site": ("site", {Site(9, "k", 64): GOOD}),
    "site of other width": ("site", {Site(0, "k", 128): GOOD}),
    "site by name": ("site", {"0/k": GOOD}),
    "two values": ("records", {K: GOOD[:2]}),
    "no records": ("records", {}),
    "no mapping": ("records", [GOOD]),
    "sites of other lengths": ("planes", {K: GOOD, Site(0, "v", 64): tuple(a[:2] for a in GOOD)}),
}


@pytest.mark.parametrize("case", BAD_RECORDS)
def test_bad_records_are_named_and_nothing_is_stored(client: Any, run: str, case: str) -> None:
    argument, bad = BAD_RECORDS[case]
    with client.writer(run, "p") as writer:
        with pytest.raises(InvalidRequest) as caught:
            writer.append("t", 0, bad)
        assert caught.value.argument == argument
        writer.flush()
        assert list(client.list(run)) == [], "nothing is stored"
        writer.append("t", 0, {K: GOOD, MX: GOOD_MX})
        writer.flush()
        assert writer.stored == 2, "the writer stays usable"


@pytest.mark.parametrize(
    ("argument", "start", "options"),
    [
        ("start", -1, {}),
        ("start", 1.0, {}),
        ("start", True, {}),
        ("start", 2**31, {}),
        ("planes", 2**31 - 3, {}),
        ("attempt", 0, {"attempt": -1}),
        ("attempt", 0, {"attempt": 2**31}),
        ("policy_version", 0, {"policy_version": -1}),
        ("policy_version", 0, {"policy_version": "7"}),
    ],
)
def test_bad_positions_are_named(client: Any, run: str, argument: str, start: Any, options: Any) -> None:
    with client.writer(run, "p") as writer:
        with pytest.raises(InvalidRequest) as caught:
            writer.append("t", start, {K: GOOD}, **options)
        assert caught.value.argument == argument
    assert list(client.list(run)) == []


@pytest.mark.parametrize("durability", ["", "fsync", None, 2])
def test_bad_durability_is_named(client: Any, run: str, durability: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.writer(run, "p", durability=durability)
    assert caught.value.argument == "durability"


@pytest.mark.parametrize("durability", ["memory", "written", "synced"])
def test_overlaps_are_duplicates_or_conflicts(client: Any, run: str, records: Any, durability: str) -> None:
    whole, part = records(8), records(8)
    other = {site: (planes ^ 1, scales, tensor) for site, (planes, scales, tensor) in whole.items()}
    first_half = {site: tuple(array[:4] for array in arrays) for site, arrays in part.items()}
    with client.writer(run, "p", durability) as writer:
        writer.append("t", 0, first_half)
        writer.append("t", 0, whole)
        writer.append("t", 0, whole)
        writer.flush()
        if durability != "memory":  # counted before the shard looked
            assert (writer.stored, writer.duplicates) == (8, 4)
        writer.append("t", 0, other)
        with pytest.raises(Conflict, match="trajectory='t'"):
            writer.seal("t", tokens=9, prompt_tokens=0)
        receipt = writer.seal("t", tokens=9, prompt_tokens=0)
    assert receipt.durability == "synced"
    batch = client.reader(run, "p").read([("t", 0, 8)])
    for site, (planes, _, tensor) in whole.items():
        assert batch.planes[site].tobytes() == planes.tobytes()
        assert batch.tensor_scales[site].tolist() == tensor.tolist()


def test_an_error_of_one_trajectory_leaves_the_others_alone(client: Any, run: str, records: Any) -> None:
    with client.writer(run, "p") as writer:
        writer.append("bad", 0, records(4, seed=1))
        writer.append("bad", 0, records(4, seed=2))
        writer.append("good", 0, records(4, seed=3))
        assert writer.seal("good", tokens=5, prompt_tokens=0).trajectory == "good"
        with pytest.raises(Conflict):
            writer.append("bad", 4, records(4, seed=4))
        writer.append("bad", 4, records(4, seed=4))
        writer.flush()


@pytest.mark.parametrize("last", ["flush", "close"])
def test_the_errors_of_several_trajectories_are_all_told(client: Any, run: str, records: Any, last: str) -> None:
    writer = client.writer(run, "p")
    names = [f"bad-{number}" for number in range(6)]
    for name in names:
        writer.append(name, 0, records(4, seed=1))
    writer.flush()
    for name in names:
        writer.append(name, 0, records(4, seed=2))
    writer.append("good", 0, records(4))
    with pytest.raises(Conflict) as caught:
        getattr(writer, last)()
    told = [caught.value, *caught.value.others]
    assert [type(error) for error in told] == [Conflict] * 6
    for name, error in zip(names, told, strict=True):
        assert f"'{name}'" in str(error), "each says which trajectory it is of"
        assert error is caught.value or error.others == ()
    assert "others=5: Conflict: " in str(caught.value), "seen in a traceback too"
    assert "'bad-3'" in str(caught.value)
    assert "'bad-4'" not in str(caught.value), "the text stays short"
    writer.flush()  # said once
    writer.close()


def test_attempts_replace_and_stale_ones_are_refused(client: Any, run: str, records: Any, sites: Any) -> None:
    with client.writer(run, "p") as writer:
        writer.append("t", 0, records(4, seed=1), attempt=1)
        writer.append("t", 0, records(6, seed=2), attempt=2)
        writer.append("t", 4, records(2, seed=3), attempt=1)
        with pytest.raises(StaleAttempt):
            writer.flush()
        with pytest.raises(StaleAttempt):
            writer.seal("t", tokens=5, prompt_tokens=0, attempt=1)
        writer.seal("t", tokens=7, prompt_tokens=0, attempt=2)
        writer.append("t", 6, records(1, seed=4), attempt=2)
        with pytest.raises(Sealed):
            writer.flush()
    batch = client.reader(run, "p").read([("t", 0, 6)])
    assert batch.planes[sites[0]].tobytes() == records(6, seed=2)[sites[0]][0].tobytes()


def test_a_seal_is_idempotent_and_finds_holes(client: Any, run: str, records: Any) -> None:
    with client.writer(run, "p") as writer:
        writer.append("t", 2, {site: rows for site, rows in records(3).items() if site.kind != "v"})
        with pytest.raises(Incomplete) as caught:
            writer.seal("t", tokens=7, prompt_tokens=2)
        holes = (("0/k", 0, 2), ("0/k", 5, 6), ("0/v", 0, 6), ("1/moe_in", 5, 6), ("2/moe_in", 5, 6))
        assert caught.value.holes == holes
        receipt = writer.seal("t", tokens=7, prompt_tokens=2, allow_holes=True)
        assert receipt.holes == holes
        assert receipt.segments
        assert writer.seal("t", tokens=7, prompt_tokens=2, allow_holes=True) == receipt
        with pytest.raises(Conflict, match="other counts"):
            writer.seal("t", tokens=8, prompt_tokens=2, allow_holes=True)
        writer.append("u", 0, records(9))
        with pytest.raises(InvalidRequest) as beyond:
            writer.seal("u", tokens=4, prompt_tokens=0)
        assert beyond.value.argument == "tokens"
        for tokens, prompt in ((0, 0), (-1, 0), (4, 5), (4, -1), (2.0, 1)):
            with pytest.raises(InvalidRequest):
                writer.seal("t", tokens=tokens, prompt_tokens=prompt)


def test_many_holes_still_arrive_as_incomplete(client: Any, run: str, records: Any) -> None:
    """Two thousand holes would not fit the metadata that gRPC lets through."""
    with client.writer(run, "p", durability="written") as writer:
        for start in range(0, 4000, 2):
            writer.append("t", start, {K: tuple(array[:1] for array in GOOD)})
        with pytest.raises(Incomplete, match="more") as caught:
            writer.seal("t", tokens=4001, prompt_tokens=0)
        assert 100 < len(caught.value.holes) <= 256
        assert caught.value.holes[0] == ("0/k", 1, 2)


def test_a_token_row_larger_than_a_frame_is_cut_by_sites(client: Any) -> None:
    table = [Site(layer, "moe_in", 65_536, form="full") for layer in range(40)]
    client.register("wide", table)
    random = np.random.default_rng(5)
    appended = {
        site: (
            random.integers(0, 256, (2, site.code_bytes), np.uint8),
            random.integers(0, 100, (2, site.scale_bytes), np.uint8),
            1.0,
        )
        for site in table
    }
    with client.writer("wide", "p") as writer:
        writer.append("t", 0, appended)
        writer.seal("t", tokens=3, prompt_tokens=0)
        assert writer.stored >= 40
    batch = client.reader("wide", "p").read([("t", 0, 2)])
    for site in table:
        assert batch.planes[site].tobytes() == appended[site][0].tobytes()


def test_ten_mebibytes_in_one_append_are_chunked(client: Any) -> None:
    site = Site(0, "moe_in", 4096, form="full")
    client.register("large", [site])
    planes = np.random.default_rng(1).integers(0, 256, (5120, 2048), np.uint8)
    with client.writer("large", "p") as writer:
        writer.append("t", 0, {site: (planes, np.zeros((5120, 256), np.uint8), 1.0)})
        writer.seal("t", tokens=5121, prompt_tokens=0)
    assert client.reader("large", "p").read([("t", 0, 5120)]).planes[site].tobytes() == planes.tobytes()


def test_strided_and_flat_arrays_are_stored_by_value(client: Any, run: str, rows: Any) -> None:
    planes, scales, tensor = rows(K, 8)
    with client.writer(run, "p") as writer:
        writer.append("strided", 0, {K: (planes[::2], scales[::2], tensor[::2])})
        writer.append("flat", 0, {K: (planes[::2].reshape(4, 8), scales[::2].copy(), tensor[::2].copy())})
        writer.flush()
    reader = client.reader(run, "p")
    one = reader.read([("strided", 0, 4)], [K], include_open=True)
    assert one.planes[K].tobytes() == planes[::2].tobytes()
    other = reader.read([("flat", 0, 4)], [K], include_open=True)
    for name in ("planes", "scales", "tensor_scales"):
        assert getattr(one, name)[K].tobytes() == getattr(other, name)[K].tobytes()


def test_threads_share_a_writer(client: Any, run: str, records: Any) -> None:
    def append(writer: Any, name: str) -> None:
        for start in range(0, 40, 4):
            writer.append(name, start, records(4, seed=start))
        writer.seal(name, tokens=41, prompt_tokens=0)

    with client.writer(run, "p") as writer:
        threads = [threading.Thread(target=append, args=(writer, f"t{number}")) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert writer.stored == 4 * 10 * 4
    assert all(entry.sealed for entry in client.list(run, "p"))


class TestServerGone:
    """A server that dies or hangs under a writer. What was not answered may or may not be stored; repeating tells."""

    def test_a_seal_waits_for_a_server_that_comes_back(self, new_server: Any, sites: Any, records: Any) -> None:
        server = new_server().start()
        with trace_client.connect(server.address) as client:
            client.register("r", sites)
            with client.writer("r", "p") as writer:
                writer.append("t", 0, records(8))
            sealer = client.writer("r", "p")  # without a stream, whose resumption would wait for the server
            server.kill()
            back = threading.Timer(0.3, server.start)
            back.start()
            assert sealer.seal("t", tokens=9, prompt_tokens=0).tokens == 9
            back.join()

    def test_killed_mid_append_repeated_append_counts_duplicates(
        self, new_server: Any, sites: Any, records: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writer_module, "RESUME_TIMEOUT_S", 0.2)  # the server stays away for longer
        server = new_server().start()
        with trace_client.connect(server.address) as client:
            client.register("r", sites)
            writer = client.writer("r", "p")
            writer.append("t", 0, records(64, seed=0))
            writer.flush()
            server.pause()  # what follows is on its way and unanswered
            for start in range(64, 512, 64):
                writer.append("t", start, records(64, seed=start))
            server.kill()
            with pytest.raises(Unavailable) as caught:
                writer.flush()
            assert caught.value.retryable
            server.start()
            client._channel.wait_ready()
            for start in range(0, 512, 64):
                writer.append("t", start, records(64, seed=start))
            writer.seal("t", tokens=513, prompt_tokens=0)
            assert writer.duplicates >= 4, "the flushed append is known"
            assert client.status()["records"] == 8 * 4, "no second copy"
            batch = client.reader("r", "p").read([("t", 0, 512)])
            expected = b"".join(records(64, seed=start)[sites[0]][0].tobytes() for start in range(0, 512, 64))
            assert batch.planes[sites[0]].tobytes() == expected

    def test_a_restart_between_appends_goes_unnoticed(self, new_server: Any, sites: Any, records: Any) -> None:
        server = new_server().start()
        with trace_client.connect(server.address) as client:
            client.register("r", sites)
            writer = client.writer("r", "p")
            writer.append("t", 0, records(4, seed=0))
            writer.flush()
            assert server.terminate() == 0
            server.start()
            client._channel.wait_ready()
            writer.append("t", 4, records(4, seed=1))
            writer.flush()
            server.kill()
            server.start()
            client._channel.wait_ready()
            assert writer.seal("t", tokens=9, prompt_tokens=0).tokens == 9

    def test_a_hang_is_a_deadline_and_the_retry_a_duplicate(
        self, new_server: Any, sites: Any, records: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = new_server().start()
        with trace_client.connect(server.address) as client:
            client.register("r", sites)
            writer = client.writer("r", "p")
            writer.append("t", 0, records(4, seed=0))
            writer.flush()
            server.pause()
            monkeypatch.setattr(stream_module, "ANSWER_TIMEOUT_S", 0.2)
            writer.append("t", 4, records(4, seed=1))
            with pytest.raises(DeadlineExceeded) as caught:
                writer.flush()
            assert caught.value.retryable
            server.resume()
            monkeypatch.setattr(stream_module, "ANSWER_TIMEOUT_S", 30)
            writer.append("t", 4, records(4, seed=1))
            writer.seal("t", tokens=9, prompt_tokens=0)
            assert client.status()["records"] == 8, "one copy, whether the first try arrived or not"

    def test_the_credit_bounds_what_is_on_its_way(self, new_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        site = Site(0, "moe_in", 8192, form="full")
        server = new_server().start()
        with trace_client.connect(server.address, arena="off") as client:
            client.register("r", [site])
            writer = client.writer("r", "p")
            rows = (np.zeros((1024, 4096), np.uint8), np.zeros((1024, 512), np.uint8), 1.0)
            writer.append("t", 0, {site: rows})
            writer.flush()
            server.pause()
            monkeypatch.setattr(stream_module, "ANSWER_TIMEOUT_S", 0.2)
            sent = writer.sent_bytes

            def append_for_ever() -> None:
                for start in range(1024, 1024 * 1024, 1024):
                    writer.append("t", start, {site: rows})

            with pytest.raises(DeadlineExceeded):
                append_for_ever()
            assert writer.sent_bytes - sent <= 32 << 20
            server.resume()


def test_short_messages_that_wait_go_together_where_the_server_takes_that() -> None:
    for batched, expected in ((False, [b"a", b"b", b"c"]), (True, [b"abc"])):
        requests = stream_module._Requests()
        requests.batched = batched
        for message in (b"a", b"b", b"c", None):
            requests.put(message)
        assert list(requests) == expected
    requests = stream_module._Requests()
    requests.batched = True
    long = bytes(stream_module.BATCH_BYTES_MAX)
    for message in (b"a", b"b", long, b"c", None):
        requests.put(message)
    assert list(requests) == [b"ab", long, b"c"]


def test_at_durability_memory_a_refused_append_costs_its_own_rows_and_the_seal_says_so(
    client: Any, run: str, sites: Any, records: Any
) -> None:
    writer = client.writer(run, "p", "memory")
    writer.append("t", 0, records(4, seed=0))
    writer.append("t", 0, records(4, seed=1))
    for start in range(4, 20, 4):
        writer.append("t", start, records(4, seed=start))
    writer.flush()
    with pytest.raises(Conflict):
        writer.seal("t", tokens=21, prompt_tokens=0)
    assert writer.seal("t", tokens=21, prompt_tokens=0).holes == ()
