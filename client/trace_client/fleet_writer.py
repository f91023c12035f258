"""Write to the first healthy server of a fleet.

A trajectory lives on one server until it is sealed and uploaded. When that server goes away before, what it held is
out of reach: append the trajectory again from its start, which goes to the next server, or leave it and seal it there
with ``allow_holes``. ``seal`` says which rows are missing. What no server answered is not among them: the
writer keeps it and sends it to the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from trace_client.backlog import Backlog
from trace_client.fleet import GONE, Endpoint, Fleet
from trace_client.fork import OfOneProcess
from trace_client.writer import Writer
from trace_store.errors import Unavailable
from trace_store.record import Receipt, Site, check_durability, check_name

Answer = TypeVar("Answer")


class FleetWriter(OfOneProcess):
    """Writer of one run and partition over several servers. Thread-safe; attributes as ``Writer``."""

    def __init__(self, fleet: Fleet, run: str, partition: str, durability: str, arena_bytes: int) -> None:
        self._fleet, self._arena_bytes = fleet, arena_bytes
        self.run, self.partition = check_name(run, "run"), check_name(partition, "partition")
        self.durability = check_durability(durability)
        self.sites: tuple[Site, ...] = fleet.first(lambda channel: channel.table(run))
        self._done = [0, 0, 0]
        self._lock = threading.Lock()
        self._backlog = Backlog()
        self._writer: Writer | None = None
        self._endpoint: Endpoint | None = None

    @property
    def server(self) -> str:
        """Name of the server that the next call goes to, as far as it is known."""
        return self._endpoint.server if self._endpoint is not None else ""

    @property
    def stored(self) -> int:
        return self._done[0] + (self._writer.stored if self._writer is not None else 0)

    @property
    def duplicates(self) -> int:
        return self._done[1] + (self._writer.duplicates if self._writer is not None else 0)

    @property
    def sent_bytes(self) -> int:
        return self._done[2] + (self._writer.sent_bytes if self._writer is not None else 0)

    def append(self, trajectory: str, start: int, records: Mapping[Site, tuple[Any, Any, Any]], **options: Any) -> None:
        """As ``Writer.append``."""
        self._call(lambda writer: writer.append(trajectory, start, records, **options))

    def flush(self) -> None:
        """As ``Writer.flush``."""
        self._call(lambda writer: writer.flush())

    def seal(self, trajectory: str, **options: Any) -> Receipt:
        """As ``Writer.seal``; Incomplete after a change of servers names what has to be appended again."""
        return self._call(lambda writer: writer.seal(trajectory, **options))

    def close(self) -> None:
        """Flush and end the stream. Raises as ``flush``, and can then be called again."""
        with self._lock:
            writer = self._writer
        if writer is not None or self._backlog.kept:
            self._call(lambda writer: writer.close())
        with self._lock:
            self._retire()

    def __enter__(self) -> FleetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._writer is not None:
            self._writer.__exit__(kind, value, traceback)

    def _call(self, call: Callable[[Writer], Answer]) -> Answer:
        tried: list[Endpoint | None] = []
        while True:
            with self._lock:
                fresh, writer = self._writer is None, self._writer or self._open(tried)
                tried.append(self._endpoint)
            try:
                return call(writer)
            except GONE:
                self._leave(writer)
                # A server that never had a thing of this writer's is left without a word, as long as there are others.
                if not fresh or len(tried) == len(self._fleet.endpoints):
                    raise

    def _open(self, tried: Sequence[Endpoint | None]) -> Writer:
        failure: Exception | None = None
        for endpoint in self._fleet.in_order():
            if endpoint in tried:
                continue
            try:
                # No resuming: there are other servers to go to.
                writer = Writer(
                    endpoint.channel,
                    self.run,
                    self.partition,
                    self.durability,
                    self._arena_bytes,
                    0.0,
                    self._backlog,
                )
                endpoint.ask_name()
            except (*GONE, LookupError) as error:
                if not isinstance(error, LookupError):
                    endpoint.mark_down()
                failure = error
                continue
            if writer.sites != self.sites:  # what is kept names sites by their numbers
                failure = Unavailable(f"a server has another site table of the run, target={endpoint.channel.target}")
                continue
            self._writer, self._endpoint = writer, endpoint
            return writer
        raise failure or Unavailable("no server answers")

    def _leave(self, writer: Writer) -> None:
        """Go on with another server, unless another thread did already."""
        with self._lock:
            if self._writer is not writer:
                return
            if self._endpoint is not None:
                self._endpoint.mark_down()
            writer.leave()
            self._retire()

    def _retire(self) -> None:
        """Drop the writer and keep its counts."""
        writer, self._writer = self._writer, None
        if writer is not None:
            for place, count in enumerate((writer.stored, writer.duplicates, writer.sent_bytes)):
                self._done[place] += count
