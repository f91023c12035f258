"""Arenas between real processes: who may attach one, what may be named in it, what becomes of it."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import trace_client
from tests.integration.bulk import wait_until
from trace_client.arena import Arena, Slabs
from trace_client.microbatch import Buffers
from trace_store import wire
from trace_store.chunk import RecordGroup
from trace_store.errors import InvalidRequest, Unsupported
from trace_store.v1 import record_pb2
from trace_store.v1 import trace_store_service_pb2 as service_pb2

SHM = Path("/dev/shm")


class Attach:
    """An AttachArena call by hand."""

    def __init__(self, channel: grpc.Channel, size: int = 1 << 20) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.call = channel.stream_stream(f"/{wire.SERVICE}/AttachArena")(iter(self._requests.get, None), timeout=20)
        self.send(size_bytes=size)

    def send(self, **fields: Any) -> None:
        self._requests.put(service_pb2.AttachArenaRequest(**fields).SerializeToString())

    def receive(self) -> Any:
        return service_pb2.AttachArenaResponse.FromString(next(self.call))

    def attach(self) -> bytes:
        offered = self.receive()
        self.send(secret=(SHM / offered.name).read_bytes()[:32])
        return bytes(self.receive().arena)

    def end(self) -> None:
        self._requests.put(None)


@pytest.fixture
def channel(server: Any) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as opened:
        yield opened


def refusal(call: Any) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    detail = dict(caught.value.trailing_metadata())[wire.ERROR_METADATA_KEY]
    return record_pb2.ErrorDetail.FromString(detail)


class TestAttach:
    def test_the_file_is_private_and_gone_once_attached(self, channel: grpc.Channel) -> None:
        attach = Attach(channel)
        offered = attach.receive()
        status = (SHM / offered.name).stat()
        assert (status.st_mode & 0o777, status.st_uid, offered.size_bytes) == (0o600, offered.owner_uid, 1 << 20)
        assert len(offered.name) >= len("trace-store-.arena") + 32
        attach.send(secret=(SHM / offered.name).read_bytes()[:32])
        assert len(attach.receive().arena) == 16
        assert not (SHM / offered.name).exists()
        attach.end()

    def test_without_the_secret_there_is_no_arena(self, channel: grpc.Channel) -> None:
        attach = Attach(channel)
        offered = attach.receive()
        attach.send(secret=bytes(32))
        assert refusal(attach.call).argument == "secret"
        assert not (SHM / offered.name).exists()

    def test_a_client_that_cannot_open_it_leaves_nothing(self, channel: grpc.Channel) -> None:
        attach = Attach(channel)
        offered = attach.receive()
        attach.end()
        with pytest.raises(StopIteration):
            next(attach.call)
        assert not (SHM / offered.name).exists()

    @pytest.mark.parametrize("size", [0, 4095, 1 << 40])
    def test_sizes_out_of_bounds(self, channel: grpc.Channel, size: int) -> None:
        assert refusal(Attach(channel, size).call).argument == "size_bytes"

    def test_more_than_the_server_shares(self, new_server: Any) -> None:
        server = new_server("--arena-mib", "8").start()
        with grpc.insecure_channel(server.address) as channel:
            attach = Attach(channel, 6 << 20)
            attach.attach()
            assert refusal(Attach(channel, 4 << 20).call).type == "Overloaded"
            attach.end()
            with pytest.raises(StopIteration):
                next(attach.call)
            Attach(channel, 4 << 20).attach()


class TestChoice:
    def test_same_host(self, server: Any) -> None:
        with trace_client.connect(server.address) as client:
            assert client.describe()["path"] == "arena"
            assert "/dev/shm" in client.describe()["reason"]

    def test_another_directory_is_as_good_as_another_host(
        self, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sites: Any, records: Any
    ) -> None:
        monkeypatch.setenv("TRACE_STORE_ARENA_DIR", str(tmp_path))
        with trace_client.connect(server.address) as client:
            assert client.describe()["path"] == "stream"
            assert "another host" in client.describe()["reason"]
            client.register("elsewhere", sites)
            writer = client.writer("elsewhere", "p")
            writer.append("t", 0, records(8))
            writer.seal("t", tokens=9, prompt_tokens=0)
            assert not client.reader("elsewhere", "p").read([("t", 0, 8)]).missing
        with pytest.raises(Unsupported, match="another host"):
            trace_client.connect(server.address, arena="required")

    def test_off_says_so(self, server: Any) -> None:
        with trace_client.connect(server.address, arena="off") as client:
            assert client.describe()["path"] == "stream"
            assert "'off'" in client.describe()["reason"]
        with pytest.raises(InvalidRequest, match="arena"):
            trace_client.connect(server.address, arena="maybe")

    def test_a_server_whose_memory_is_used_up(self, new_server: Any, sites: Any, records: Any) -> None:
        server = new_server("--arena-mib", "8").start()
        with trace_client.connect(server.address, arena_bytes=6 << 20) as client:
            client.register("r", sites)
            first = client.writer("r", "p")
            first.append("t", 0, records(8))
            assert client.describe()["path"] == "arena"
            second = client.writer("r", "p")
            second.append("u", 0, records(8))
            assert client.describe()["path"] == "stream"
            assert client.describe()["reads"] == "stream"
            assert "no memory left to share" in client.describe()["reason"]
            second.close()
            first.close()
            reader = client.reader("r", "p")

            def granted() -> bool:
                reader.read([("t", 0, 8)], out=Buffers())
                return client.describe()["path"] == "arena"

            wait_until(granted)  # as soon as the server took back what the writers had

    def test_a_server_that_shares_nothing(self, new_server: Any) -> None:
        server = new_server("--arena-dir", "").start()
        with trace_client.connect(server.address) as client:
            assert client.describe()["path"] == "stream"
            assert "shares no memory" in client.describe()["reason"]


class TestDescriptors:
    """What a client names is checked against the arena before it is looked at; the stream stays usable."""

    @pytest.fixture
    def stream(self, channel: grpc.Channel, run: str) -> Iterator[Any]:
        requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        requests.put(wire.append_open_frame(run, "p", "written"))
        call = channel.stream_stream(f"/{wire.SERVICE}/Append")(iter(requests.get, None), timeout=20)
        next(call)

        def ask(message: bytes) -> Any:
            requests.put(message)
            return service_pb2.AppendResponse.FromString(next(call))

        yield ask
        requests.put(None)

    GROUP = RecordGroup("t", 0, 0, 0, 1, (0,), (False,), (1,))

    @pytest.mark.parametrize(
        ("offset", "length"), [(1 << 20, 16), ((1 << 20) - 8, 16), (0, (1 << 20) + 1), (2**63, 16), (0, 2**40), (0, 0)]
    )
    def test_out_of_bounds(self, channel: grpc.Channel, stream: Any, offset: int, length: int) -> None:
        attach = Attach(channel)
        arena = attach.attach()
        answer = stream(wire.append_arena_frame(1, (self.GROUP,), arena, offset, length))
        assert answer.error.type == "InvalidRequest"
        assert answer.error.argument in ("arena", "payload")
        assert stream(wire.append_arena_frame(2, (self.GROUP,), arena, 0, 16)).error.type == "DataLoss"

    def test_unknown_dropped_and_doubled(self, channel: grpc.Channel, stream: Any) -> None:
        attach = Attach(channel)
        arena = attach.attach()
        assert stream(wire.append_arena_frame(1, (self.GROUP,), os.urandom(16), 0, 16)).error.argument == "arena"
        header = service_pb2.AppendHeader(sequence=2, arena=service_pb2.ArenaRange(arena=arena, length_bytes=16))
        both = service_pb2.AppendRequest(header=header, payload=b"x").SerializeToString()
        assert stream(both).error.argument == "arena"
        attach.end()
        with pytest.raises(StopIteration):
            next(attach.call)
        assert stream(wire.append_arena_frame(3, (self.GROUP,), arena, 0, 16)).error.argument == "arena"

    @pytest.mark.parametrize(
        ("changes", "argument"),
        [
            ({"rows": 3}, "target.rows"),
            ({"codes_offsets": [(1 << 20) - 8]}, "target.codes_offsets"),
            ({"scales_offsets": [2**62]}, "target.scales_offsets"),
            ({"tensor_scales_offsets": [3]}, "target.tensor_scales_offsets"),
            ({"codes_offsets": []}, "target.codes_offsets"),
            ({"rows": 2**62}, "target.codes_offsets"),
            ({"arena": b"0" * 16}, "arena"),
        ],
    )
    def test_read_targets(
        self, client: Any, channel: grpc.Channel, run: str, records: Any, changes: dict[str, Any], argument: str
    ) -> None:
        with client.writer(run, "p") as writer:
            writer.append("t", 0, records(4))
            writer.seal("t", tokens=5, prompt_tokens=0)
        attach = Attach(channel)  # lasts as long as its call
        target: dict[str, Any] = {"arena": attach.attach(), "rows": 4}
        target |= {name: [4096] for name in ("codes_offsets", "scales_offsets", "tensor_scales_offsets")}
        span = record_pb2.TokenSpan(trajectory="t", start=0, stop=4)
        request = service_pb2.ReadRequest(run=run, partition="p", spans=[span], sites=[0])
        request.target.CopyFrom(service_pb2.ReadTarget(**(target | changes)))
        assert refusal(channel.unary_stream(f"/{wire.SERVICE}/Read")(request.SerializeToString())).argument == argument


def test_half_filled_slabs_come_back(client: Any, run: str, records: Any) -> None:
    """Far more small appends than slabs, each flushed: every slab stays nearly empty and none is lost."""
    with client.writer(run, "p", "written") as writer:
        for start in range(0, 200, 2):
            writer.append("t", start, records(2, seed=start))
            writer.flush()
        writer.seal("t", tokens=201, prompt_tokens=0)
        stream = writer._stream
        wait_until(lambda: len(stream._slabs._free) >= len(stream._memory) // Slabs.SLAB_BYTES - 1)


def test_slabs_are_reused_last_in_first_out() -> None:
    slabs = Slabs(4 * Slabs.SLAB_BYTES)
    first = [slabs.take(Slabs.SLAB_BYTES) for _ in range(4)]
    assert sorted(first) == [number * Slabs.SLAB_BYTES for number in range(4)]
    assert slabs.take(1) is None
    slabs.give_back(first[1])
    assert slabs.take(10) == first[1]
    assert slabs.take(10) == first[1] + 64, "cut from one slab as long as it lasts"
    assert slabs.take(Slabs.SLAB_BYTES) is None


def test_reads_share_one_arena_as_long_as_nobody_looks(client: Any, run: str, records: Any, sites: Any) -> None:
    with client.writer(run, "p") as writer:
        for number in range(3):
            writer.append(f"t{number}", 0, records(4, seed=number))
            writer.seal(f"t{number}", tokens=5, prompt_tokens=0)
    reader = client.reader(run, "p")
    held = [reader.read([(f"t{number}", 0, 4)]) for number in range(3)]
    for number, batch in enumerate(held):
        assert (batch.planes[sites[0]] == records(4, seed=number)[sites[0]][0]).all(), "each has memory of its own"
    addresses = {batch.memory.ctypes.data for batch in held}
    del batch, held
    assert reader.read([("t0", 0, 4)]).memory.ctypes.data in addresses


def test_missing_rows_are_invalid_in_an_arena_too(client: Any, run: str, records: Any, sites: Any) -> None:
    with client.writer(run, "p") as writer:
        writer.append("t", 2, records(4))
        writer.seal("t", tokens=9, prompt_tokens=0, allow_holes=True)
    buffers = Buffers()
    reader = client.reader(run, "p")
    reader.read([("t", 2, 6), ("t", 3, 5, 4)], out=buffers)
    batch = reader.read([("t", 0, 8), ("nobody", 0, 2, 10)], out=buffers)
    for site in sites:
        assert batch.valid[site].tolist() == [False] * 2 + [True] * 4 + [False] * 6
        assert (batch.tensor_scales[site] == batch.tensor_scales[site]).tolist() == batch.valid[site].tolist()
    assert {rows.reason for rows in batch.missing} == {"not recorded", "unknown trajectory"}


def test_memory_of_a_read_after_a_restart_is_its_own(
    new_server: Any, records: Any, sites: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = new_server().start()
    with trace_client.connect(server.address) as client:
        client.register("r", sites)
        with client.writer("r", "p") as writer:
            for number in range(2):
                writer.append(f"t{number}", 0, records(4, seed=number))
                writer.seal(f"t{number}", tokens=5, prompt_tokens=0)
        reader = client.reader("r", "p")
        reader.read([("t0", 0, 4)])
        server.kill()
        server.start()
        client._channel.wait_ready()
        monkeypatch.setattr(Arena, "alive", True)  # the client has not heard of it yet
        first = reader.read([("t0", 0, 4)])
        client._channel.arenas.usable = False  # as when the server has no memory left to share
        second = reader.read([("t1", 0, 4)])
        for number, batch in enumerate((first, second)):
            assert (batch.planes[sites[0]] == records(4, seed=number)[sites[0]][0]).all()
