"""A server that goes away, comes back, or hangs, as calls see it: tried again for a moment, or told in time."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trace_client
from trace_client import arena as arena_module
from trace_client import channel as channel_module
from trace_client import writer as writer_module
from trace_store.errors import DeadlineExceeded, Unavailable


class Door:
    """A way to a server that can be shut: connections through it end, and there is nothing to connect to.

    Attributes:
        target: what to connect to.
    """

    def __init__(self, path: Path, address: str) -> None:
        self._path, self._behind = path, address.split(":")
        self.target = f"unix:{path}"
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def open(self) -> None:
        async def start() -> None:
            self._server = await asyncio.start_unix_server(self._pass, self._path)

        asyncio.run_coroutine_threadsafe(start(), self._loop).result(10)

    def shut(self) -> None:
        async def stop() -> None:
            self._server.close()
            self._path.unlink(missing_ok=True)
            for writer in self._writers:
                writer.transport.abort()

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(10)

    def end(self) -> None:
        self.shut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind = await asyncio.open_connection(*self._behind)
        self._writers |= {writer, behind}
        await asyncio.gather(self._copy(reader, behind), self._copy(behind_reader, writer))
        self._writers -= {writer, behind}

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


@pytest.fixture
def door(server: Any, tmp_path: Path) -> Iterator[Door]:
    made = Door(tmp_path / "door", server.address)
    made.open()
    yield made
    made.end()


@pytest.fixture
def sealed(client: Any, run: str, records: Any) -> str:
    """A run with a sealed trajectory t of 8 tokens in partition p."""
    with client.writer(run, "p") as writer:
        writer.append("t", 0, records(8))
        writer.seal("t", tokens=9, prompt_tokens=0)
    return run


def shut_for_long(door: Door, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shut the door and let the channel fail, so that it pauses between its connections."""
    door.shut()
    with monkeypatch.context() as patch:
        patch.setattr(channel_module, "RECONNECT_WAIT_S", 0.3)
        with pytest.raises(Unavailable):
            client.status()


def append_again(client: Any, run: str, records: Any) -> None:
    with client.writer(run, "p") as writer:
        writer.append("other", 0, records(8))


CALLS: dict[str, Callable[[Any, Any, str, Any], Any]] = {
    "status": lambda client, reader, run, records: client.status(),
    "listing": lambda client, reader, run, records: list(client.list(run)),
    "release": lambda client, reader, run, records: client.release(run, "nothing"),
    "read": lambda client, reader, run, records: reader.read([("t", 0, 8)]),
    "new reader": lambda client, reader, run, records: client.reader(run, "q").read([("t", 0, 8)]),
    "new writer": lambda client, reader, run, records: append_again(client, run, records),
}


@pytest.mark.parametrize("arena", ["auto", "off"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_finds_the_server_that_comes_back(
    door: Door, sealed: str, records: Any, monkeypatch: pytest.MonkeyPatch, call: str, arena: str
) -> None:
    with trace_client.connect(door.target, arena=arena) as client:
        reader = client.reader(sealed, "p")
        reader.read([("t", 0, 8)])
        shut_for_long(door, client, monkeypatch)
        monkeypatch.setattr(channel_module, "RECONNECT_WAIT_S", 30.0)
        back = threading.Timer(0.2, door.open)
        back.start()
        CALLS[call](client, reader, sealed, records)
        back.join()
        batch = reader.read([("t", 0, 8)])
        assert all(valid.all() for valid in batch.valid.values())


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_stays_away_is_told_within_the_wait(
    door: Door, sealed: str, records: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with trace_client.connect(door.target) as client:
        reader = client.reader(sealed, "p")
        shut_for_long(door, client, monkeypatch)
        started = time.monotonic()
        with pytest.raises(Unavailable) as caught:
            CALLS[call](client, reader, sealed, records)
        assert time.monotonic() - started < 5.0, "1 s, and room for a busy machine"
        assert caught.value.retryable
    assert 1.2 * channel_module.RECONNECT_BACKOFF_S < channel_module.RECONNECT_WAIT_S


def test_the_callers_deadline_ends_the_wait(
    door: Door, sealed: str, records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trace_client.connect(door.target) as client:
        reader = client.reader(sealed, "p")
        shut_for_long(door, client, monkeypatch)
        monkeypatch.setattr(channel_module, "RECONNECT_WAIT_S", 60.0)
        started = time.monotonic()
        with pytest.raises((Unavailable, DeadlineExceeded)):
            reader.read([("t", 0, 8)], timeout_s=0.2)
        assert time.monotonic() - started < 10.0


@pytest.mark.parametrize("call", CALLS)
def test_a_fleet_asks_the_next_server_at_once(
    door: Door, server: Any, sealed: str, records: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(channel_module, "RECONNECT_WAIT_S", 60.0)
    with trace_client.connect([door.target, server.address]) as client:
        reader = client.reader(sealed, "p")
        door.shut()
        started = time.monotonic()
        CALLS[call](client, reader, sealed, records)
        assert time.monotonic() - started < 10.0


class TestHanging:
    """A stopped server: its connections stay open, and nothing answers."""

    @pytest.mark.parametrize("arena", ["auto", "off"])
    def test_a_reads_deadline_bounds_the_whole_call(self, new_server: Any, sites: Any, arena: str) -> None:
        server = new_server().start()
        with trace_client.connect(server.address, arena=arena) as client:
            client.register("r", sites)
            reader = client.reader("r", "p")
            server.pause()
            started = time.monotonic()
            try:
                with pytest.raises(DeadlineExceeded, match=f"did not answer in time.*target={server.address}"):
                    reader.read([("t", 0, 8)], timeout_s=0.5)
                assert time.monotonic() - started < 5.0, "not the 10 s that shared memory may take"
            finally:
                server.resume()
            assert reader.read([("t", 0, 8)]).missing, "and it answers again"

    def test_a_read_that_had_no_time_left_for_its_rows_leaves_its_memory_to_the_next(
        self, client: Any, sealed: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reader = client.reader(sealed, "p")
        attached = []
        attach = arena_module.Arenas._attach

        def slow(self: Any, size: int, timeout_s: float) -> Any:
            attached.append(attach(self, size, 60.0))
            spent = time.monotonic() + timeout_s
            while time.monotonic() < spent:  # mapping it took all the time there was
                pass
            return attached[-1]

        monkeypatch.setattr(arena_module.Arenas, "_attach", slow)
        with pytest.raises(DeadlineExceeded):
            reader.read([("t", 0, 8)], timeout_s=0.05)
        assert reader.read([("t", 0, 8)]).missing == []
        assert len(attached) == 1

    def test_a_fleets_read_leaves_time_for_the_server_that_has_the_rows(
        self, new_server: Any, server: Any, sealed: str, sites: Any, records: Any
    ) -> None:
        hanging = new_server().start()
        with trace_client.connect([hanging.address, server.address]) as client:
            client.register(sealed, sites)
            reader = client.reader(sealed, "p")
            hanging.pause()
            started = time.monotonic()
            try:
                batch = reader.read([("t", 0, 8)], timeout_s=6.0)
                assert time.monotonic() - started < 12.0
            finally:
                hanging.resume()
            for site, (planes, _, _) in records(8).items():
                assert batch.planes[site].tobytes() == planes.tobytes()
            assert batch.missing == []

    def test_without_a_deadline_of_its_own_a_call_is_told(
        self, new_server: Any, sites: Any, records: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(channel_module, "PING_INTERVAL_S", 0.2)
        monkeypatch.setattr(channel_module, "PING_TIMEOUT_S", 1.0)
        monkeypatch.setattr(channel_module, "CONNECTION_TIMEOUT_S", 0.5)
        monkeypatch.setattr(writer_module, "RESUME_TIMEOUT_S", 0.1)
        server = new_server().start()
        with trace_client.connect(server.address) as client:
            client.register("r", sites)
            reader, writer = client.reader("r", "p"), client.writer("r", "p")
            writer.append("t", 0, records(4, seed=0))
            server.pause()
            try:
                for call in (writer.flush, client.status, lambda: reader.read([("t", 0, 4)])):
                    started = time.monotonic()
                    with pytest.raises(Unavailable) as caught:
                        call()
                    assert time.monotonic() - started < 20.0
                    assert caught.value.retryable
            finally:
                server.resume()
            monkeypatch.setattr(channel_module, "RECONNECT_WAIT_S", 30.0)
            writer.append("t", 0, records(4, seed=0))
            writer.seal("t", tokens=5, prompt_tokens=0)
            assert client.status()["records"] == 4


def test_the_door_is_one(door: Door, server: Any) -> None:
    """What the tests above stand on: a shut door refuses, an open one leads to the server."""
    with trace_client.connect(door.target) as client:
        assert client.status()["version"]
    door.shut()
    with socket.socket(socket.AF_UNIX) as knocking, pytest.raises(OSError):
        knocking.connect(door.target.removeprefix("unix:"))
    door.open()
