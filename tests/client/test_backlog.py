"""What a writer keeps while its server is away: nothing is forgotten, nothing is called durable that is not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np
import pytest

import trace_client
from trace_client import channel as channel_module
from trace_client import stream as stream_module
from trace_client import writer as writer_module
from trace_client.recorder import Recorder
from trace_store import Site
from trace_store.errors import DeadlineExceeded, TraceStoreError, Unavailable
from trace_store.limits import FRAME_BYTES_MAX
from trace_store.v1 import trace_store_service_pb2 as service_pb2

AWAY = (Unavailable, DeadlineExceeded)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers that look for their server for a moment only."""
    monkeypatch.setattr(writer_module, "RESUME_TIMEOUT_S", 0.2)
    monkeypatch.setattr(channel_module, "RECONNECT_WAIT_S", 0.2)


@pytest.fixture(params=["auto", "off"])
def lost(request: pytest.FixtureRequest, new_server: Any, sites: Any, impatient: None, records: Any) -> Iterator[Any]:
    """(server, client, writer): the server was killed with appends to a, b, c and d under way; tokens 0 to 4 of a are
    stored."""
    server = new_server().start()
    with trace_client.connect(server.address, arena=request.param) as client:
        client.register("r", sites)
        writer = client.writer("r", "p")
        writer.append("a", 0, records(4, seed=0))
        writer.flush()
        server.pause()
        for number, name in enumerate("abcd"):
            writer.append(name, 4 * (name == "a"), records(4, seed=number + 1))
        server.kill()
        yield server, client, writer


def comes_back(server: Any, client: Any) -> None:
    server.start()
    client._channel.wait_ready()


def assert_stored(client: Any, records: Any) -> None:
    batch = client.reader("r", "p").read(
        [("a", 0, 8, 0), ("b", 0, 4, 8), ("c", 0, 4, 12), ("d", 0, 4, 16)], include_open=True
    )
    assert batch.missing == []
    for site in batch.planes:
        expected = b"".join(records(4, seed=number)[site][0].tobytes() for number in range(5))
        assert batch.planes[site].tobytes() == expected


@pytest.mark.parametrize("last", ["flush", "close"])
def test_a_flush_fails_until_everything_is_stored(lost: Any, records: Any, last: str) -> None:
    server, client, writer = lost
    for _ in range(3):
        with pytest.raises(Unavailable) as caught:
            getattr(writer, last)()
        assert caught.value.retryable
    comes_back(server, client)
    getattr(writer, last)()
    assert writer.stored + writer.duplicates == 5 * 4
    assert_stored(client, records)


def test_the_error_says_what_is_kept_and_what_to_do(lost: Any) -> None:
    writer = lost[2]
    with pytest.raises(Unavailable, match=r"the next call of the writer .* sends them again") as caught:
        writer.flush()
    assert "requests=4 trajectories=4: 'a','b','c',..." in str(caught.value)
    assert "'d'" not in str(caught.value)


def test_an_append_that_failed_is_repeated_and_nothing_else(lost: Any, records: Any) -> None:
    server, client, writer = lost
    for call in (writer.flush, lambda: writer.append("e", 0, records(4, seed=9))):
        with pytest.raises(Unavailable):
            call()
    comes_back(server, client)
    writer.append("e", 0, records(4, seed=9))
    for name in "bcde":
        assert writer.seal(name, tokens=5, prompt_tokens=0).holes == ()
    assert writer.seal("a", tokens=9, prompt_tokens=0).holes == ()
    assert_stored(client, records)
    writer.close()


def test_a_seal_fails_until_the_rows_are_stored(lost: Any) -> None:
    server, client, writer = lost
    for _ in range(2):
        with pytest.raises(Unavailable):
            writer.seal("b", tokens=5, prompt_tokens=0, allow_holes=True)
    comes_back(server, client)
    assert writer.seal("b", tokens=5, prompt_tokens=0).holes == ()


def test_a_hang_keeps_them_too(
    new_server: Any, sites: Any, records: Any, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = new_server().start()
    with trace_client.connect(server.address, arena="off") as client:
        client.register("r", sites)
        writer = client.writer("r", "p")
        writer.append("t", 0, records(4))
        writer.flush()
        server.pause()
        with monkeypatch.context() as patch:
            patch.setattr(stream_module, "ANSWER_TIMEOUT_S", 0.2)
            writer.append("t", 4, records(4, seed=1))
            for _ in range(2):
                with pytest.raises(AWAY, match="requests=1"):
                    writer.flush()
        server.resume()
        writer.flush()
        assert client.status()["records"] == 2 * len(sites)


def test_a_writer_closed_without_its_answers_never_says_that_all_is_well(lost: Any) -> None:
    _, client, writer = lost
    client.close()
    for call in (writer.close, writer.flush, writer.close):
        with pytest.raises(TraceStoreError):
            call()


def test_a_recorder_goes_on_after_an_outage(new_server: Any, impatient: None) -> None:
    site = Site(2, "moe_in", 128, form="full")
    server = new_server().start()
    codes = np.random.default_rng(3).integers(0, 16, (64, 128), np.uint8)
    scales = np.random.default_rng(4).integers(0, 100, (64, site.scale_bytes), np.uint8)
    with trace_client.connect(server.address) as client:
        client.register("r", [site])
        writer = client.writer("r", "p")
        recorder = Recorder(writer, [site], span_tokens=8)

        def record(start: int, stop: int) -> None:
            part = slice(start, stop)
            recorder.record(site, ["t"] * (stop - start), list(range(start, stop)), codes[part], scales[part], 1.0)

        record(0, 16)
        writer.flush()
        server.pause()
        record(16, 32)  # handed to the writer, which gets no answer
        server.kill()
        for call in (writer.flush, lambda: record(32, 48)):
            with pytest.raises(Unavailable):
                call()
        comes_back(server, client)
        record(48, 64)
        assert recorder.finish("t", tokens=65, prompt_tokens=0).holes == ()
        batch = client.reader("r", "p").read([("t", 0, 64)])
        assert batch.missing == []
        assert batch.scales[site].tobytes() == scales.tobytes()


class Breaking(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Gives credit on every append stream and breaks it at the first request; all else goes to a real server."""

    def __init__(self, behind: str) -> None:
        self.streams = 0
        limit = [("grpc.max_receive_message_length", FRAME_BYTES_MAX)]
        self.channel = grpc.insecure_channel(behind, limit)

    def service(self, details: Any) -> Any:
        if details.method.endswith("/Append"):
            return grpc.stream_stream_rpc_method_handler(self._append)
        call = self.channel.unary_unary(details.method)
        return grpc.unary_unary_rpc_method_handler(lambda request, context: call(request))

    def _append(self, requests: Any, context: Any) -> Iterator[bytes]:
        self.streams += 1
        next(requests)
        yield service_pb2.AppendResponse(credit_bytes=1 << 20).SerializeToString()
        next(requests)
        context.abort(grpc.StatusCode.UNAVAILABLE, "broken by a proxy")


@pytest.fixture
def breaking(server: Any) -> Iterator[tuple[Breaking, str]]:
    handler = Breaking(server.address)
    proxy = grpc.server(futures.ThreadPoolExecutor(8), handlers=[handler])
    port = proxy.add_insecure_port("127.0.0.1:0")
    proxy.start()
    yield handler, f"127.0.0.1:{port}"
    proxy.stop(None).wait()
    handler.channel.close()


def test_a_server_that_breaks_every_stream_is_given_up(
    breaking: tuple[Breaking, str], run: str, records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "RESUME_TIMEOUT_S", 1.0)
    handler, target = breaking
    with trace_client.connect(target, arena="off") as client:
        writer = client.writer(run, "p")
        writer.append("t", 0, records(4))
        with pytest.raises(Unavailable, match="broken by a proxy"):
            writer.flush()
        assert 2 < handler.streams < 30, "one every 0.1 s, not one after the other"


class TestFleet:
    """Several servers; these two share no object store, so that one knows only what it was sent."""

    @pytest.fixture
    def two(self, new_server: Any, sites: Any) -> Iterator[tuple[list[Any], Any]]:
        servers = [new_server().start() for _ in range(2)]
        with trace_client.connect([server.address for server in servers]) as fleet:
            fleet.register("r", sites)
            yield servers, fleet

    def test_the_next_server_gets_what_had_no_answer(self, two: Any, records: Any) -> None:
        servers, fleet = two
        writer = fleet.writer("r", "p")
        writer.append("stays", 0, records(4))
        writer.flush()
        servers[0].pause()
        for number, name in enumerate("bcd"):
            writer.append(name, 0, records(4, seed=number))
        servers[0].kill()
        with pytest.raises(Unavailable, match="requests=3"):
            writer.flush()
        writer.flush()
        assert writer.stored == 4 * 4
        with trace_client.connect(servers[1].address) as second:
            assert [row.name for row in second.list("r", "p")] == ["b", "c", "d"]
        for name in "bcd":
            assert writer.seal(name, tokens=5, prompt_tokens=0).holes == ()
        writer.close()
        assert writer.stored == 4 * 4, "counts outlive the stream"

    def test_a_server_that_is_back_is_found_while_all_count_as_away(self, two: Any, records: Any) -> None:
        servers, fleet = two
        writer = fleet.writer("r", "p")
        writer.append("a", 0, records(4))
        writer.flush()
        servers[0].kill()
        with pytest.raises(Unavailable):
            writer.seal("a", tokens=5, prompt_tokens=0)
        writer.append("b", 0, records(4))
        writer.flush()
        writer.close()
        for endpoint in fleet._fleet.endpoints:
            endpoint.mark_down()
        writer.append("b", 4, records(4, seed=1))
        assert writer.seal("b", tokens=9, prompt_tokens=0).holes == ()

    def test_an_error_in_the_block_is_the_callers_own(self, two: Any, records: Any) -> None:
        servers, fleet = two
        writer = fleet.writer("r", "p")

        def block() -> None:
            with writer:
                writer.append("a", 0, records(4))
                writer.flush()
                servers[0].pause()
                writer.append("a", 4, records(4, seed=1))
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            block()
        assert fleet._fleet.endpoints[0].healthy, "nothing was waited for"

    def test_a_failover_under_threads_is_heard_once_by_each(self, two: Any, records: Any) -> None:
        servers, fleet = two
        writer = fleet.writer("r", "p")
        writer.append("first", 0, records(4))
        writer.flush()
        heard = [0] * 8
        started, killed = threading.Barrier(9, timeout=60), threading.Barrier(9, timeout=60)

        def work(number: int) -> None:
            for step in range(12):
                if step == 3:
                    started.wait()
                    killed.wait()
                try:
                    writer.append(f"{number}-{step}", 0, records(4, seed=step))
                    writer.flush()
                except Unavailable:
                    heard[number] += 1

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        started.wait()
        servers[0].kill()
        killed.wait()
        for thread in threads:
            thread.join(60)
        assert max(heard) <= 1
        assert [endpoint.healthy for endpoint in fleet._fleet.endpoints][1], "the one that works is not given up"
        writer.flush()
        names = {row.name for row in _list_of(servers[1])}
        assert {f"{number}-{step}" for number in range(8) for step in range(4, 12)} <= names

    def test_a_close_that_failed_goes_to_the_next_server(self, two: Any, records: Any) -> None:
        servers, fleet = two
        writer = fleet.writer("r", "p")
        writer.append("a", 0, records(4))
        writer.flush()
        servers[0].pause()
        writer.append("b", 0, records(4))
        servers[0].kill()
        with pytest.raises(Unavailable):
            writer.close()
        writer.close()
        with trace_client.connect(servers[1].address) as second:
            assert [row.name for row in second.list("r", "p")] == ["b"]

    def test_threads_that_share_a_writer_lose_nothing_in_a_failover(self, two: Any, records: Any) -> None:
        servers, fleet = two
        writer = fleet.writer("r", "p")
        writer.append("first", 0, records(4))
        writer.flush()
        halfway = threading.Barrier(5, timeout=60)

        def work(name: str) -> None:
            for step in range(40):
                if step == 10:
                    halfway.wait()
                while True:
                    try:
                        writer.append(f"{name}-{step}", 0, records(4, seed=step))
                        break
                    except Unavailable:
                        pass

        threads = [threading.Thread(target=work, args=(f"t{number}",)) for number in range(4)]
        for thread in threads:
            thread.start()
        halfway.wait()
        servers[0].kill()
        for thread in threads:
            thread.join(60)
        while True:
            try:
                writer.flush()
                break
            except Unavailable:
                pass
        acknowledged = {row.name for row in _list_of(servers[1])}
        servers[0].start()
        acknowledged |= {row.name for row in _list_of(servers[0])}
        wanted = {f"t{number}-{step}" for number in range(4) for step in range(40)}
        assert wanted <= acknowledged


def _list_of(server: Any) -> list[Any]:
    with trace_client.connect(server.address) as client:
        return list(client.list("r", "p"))
