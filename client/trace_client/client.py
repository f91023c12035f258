"""Connect to a trace-store server.

client = trace_client.connect("127.0.0.1:7077")
client.register("run", sites)
writer = client.writer("run", "step-1")
reader = client.reader("run", "step-1")
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from trace_client.arena import Slabs
from trace_client.channel import Channel, Tls
from trace_client.fleet import STATUS_TIMEOUT_S, Fleet, merged, split_targets
from trace_client.fleet_reader import FleetReader
from trace_client.fleet_writer import FleetWriter
from trace_client.fork import OfOneProcess
from trace_client.reader import Reader
from trace_client.segment_files import SegmentFiles
from trace_client.writer import Writer
from trace_store import wire
from trace_store.arena import ARENA_BYTES_MAX
from trace_store.errors import InvalidRequest, NotFound
from trace_store.record import Receipt, Site, check_int, check_name, check_site_table
from trace_store.v1 import trace_store_service_pb2 as service_pb2

log = logging.getLogger("trace_client")

ARENA_BYTES = 64 << 20
"""Shared memory of a writer: 16 slabs, 0.1 s of disk at 0.6 GB/s."""

NO_FILES = "no data_dir was given, or it is another server's; all rows come from the server"


@dataclass(frozen=True)
class Listed:
    """One row of a listing; fields that do not apply are 0 or False."""

    name: str
    trajectories: int
    records: int
    disk_bytes: int
    attempt: int
    sealed: bool
    tokens: int
    prompt_tokens: int


class Client(OfOneProcess):
    """A connection to one server. Thread-safe; a context manager."""

    def __init__(self, channel: Channel, arena_bytes: int = ARENA_BYTES) -> None:
        self._channel, self._arena_bytes = channel, arena_bytes

    def describe(self) -> dict[str, str]:
        """How bytes travel: ``target``, ``path`` (``arena`` or ``stream``), ``reason``, the ``arena`` mode; for reads
        ``reads``, which is ``files`` where the client reads sealed segments itself, and ``reads_reason``.

        ``path`` and ``reason`` are of the last time that a writer or reader asked for shared memory: ``stream`` where
        it got none, although others may have theirs from before."""
        arenas, files = self._channel.arenas, self._channel.files()
        path = "arena" if arenas.usable and arenas.granted else "stream"
        return {
            "target": self._channel.target,
            "path": path,
            "reason": arenas.reason,
            "arena": arenas.mode,
            "reads": path if files is None else "files",
            "reads_reason": NO_FILES if files is None else files.reason,
        }

    def register(self, run: str, sites: Sequence[Site]) -> bool:
        """Create a run with its site table, durably. True if it is new; the same table again is fine.

        False also where the connection broke after the server had created it, and the call was made again.

        Raises:
            SchemaMismatch: the run has another table.
        """
        table = check_site_table(sites)
        request = service_pb2.RegisterRequest(run=check_name(run, "run"), sites=map(wire.site_to_wire, table))
        return bool(self._channel.call("Register", request).created)

    def sites(self, run: str) -> tuple[Site, ...]:
        """Site table of a run. Raises NotFound."""
        return self._channel.table(check_name(run, "run"))

    def writer(self, run: str, partition: str, durability: str = "synced") -> Writer:
        """A writer of one partition.

        Args:
            durability: what an answered append promises. ``memory``: the server has it, and will say at the seal if it
                could not store it; a read may miss it for a moment. ``written``: it is in a file, and survives the
                server. ``synced``: it survives a power cut.
        """
        return Writer(self._channel, run, partition, durability, self._arena_bytes)

    def reader(self, run: str, partition: str) -> Reader:
        """A reader of one partition."""
        return Reader(self._channel, run, partition)

    def release(self, run: str, partition: str, trajectories: Sequence[str] | None = None) -> int:
        """Forget a partition, or some of its trajectories, durably. Returns how many were there.

        0 also where the connection broke after the server had released them, and the call was made again."""
        if isinstance(trajectories, (str, bytes)):
            raise InvalidRequest("trajectories must be a sequence of names, got one string", argument="trajectories")
        names = None if trajectories is None else [check_name(name, "trajectories") for name in trajectories]
        request = service_pb2.ReleaseRequest(
            run=check_name(run, "run"), partition=check_name(partition, "partition"), trajectories=names or ()
        )
        if names is not None and not names:
            return 0  # an empty list on the wire means the whole partition
        return int(self._channel.call("Release", request).released)

    def list(self, run: str = "", partition: str = "") -> Iterator[Listed]:
        """Runs; or the partitions of a run; or the trajectories of a partition. Sorted by name."""
        for value, argument in ((run, "run"), (partition, "partition")):
            if value:
                check_name(value, argument)
        after = ""
        while True:
            request = service_pb2.ListRequest(run=run, partition=partition, after=after)
            response = self._channel.call("List", request)
            for entry in response.entries:
                yield Listed(**{name: getattr(entry, name) for name in Listed.__dataclass_fields__})
            if not response.more:
                return
            after = response.entries[-1].name

    def status(self) -> dict[str, Any]:
        """State of the server: name, version, counts, bytes, and why writes are refused (empty: they are not)."""
        response = self._channel.call("Status", service_pb2.StatusRequest())
        return {field.name: getattr(response, field.name) for field in response.DESCRIPTOR.fields}

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class FleetClient(Client):
    """A connection to several servers that share an object store (``trace_client.fleet``). Used like ``Client``."""

    def __init__(self, fleet: Fleet, arena_bytes: int = ARENA_BYTES) -> None:
        self._fleet, self._arena_bytes = fleet, arena_bytes

    def describe(self) -> dict[str, str]:
        """As ``Client.describe`` of the server that writes go to; ``reads`` is how they come from the server on this
        host, if there is one. From others they come over the connection. ``away`` names the endpoints that do not
        answer at present, as ``target`` does."""

        def ask(channel: Channel) -> dict[str, str]:
            channel.files(STATUS_TIMEOUT_S)
            return Client(channel).describe()

        found = self._fleet.each(ask)
        nearest = min(found, key=lambda one: ("files", "arena", "stream").index(one["reads"]))
        reads = nearest["reads_reason"] if nearest["reads"] == "files" else nearest["reason"]
        target = ",".join(endpoint.channel.target for endpoint in self._fleet.endpoints)
        away = ",".join(self._fleet.away())
        return {**found[0], "target": target, "away": away, "reads": nearest["reads"], "reads_reason": reads}

    def register(self, run: str, sites: Sequence[Site]) -> bool:
        """Create a run on every server that answers. True if it was new to one of them."""
        return any(self._fleet.each(lambda channel: Client(channel).register(run, sites)))

    def sites(self, run: str) -> tuple[Site, ...]:
        check_name(run, "run")
        return self._fleet.first(lambda channel: channel.table(run))

    def writer(self, run: str, partition: str, durability: str = "synced") -> FleetWriter:  # type: ignore[override]
        """A writer that uses the first healthy server."""
        return FleetWriter(self._fleet, run, partition, durability, self._arena_bytes)

    def reader(  # type: ignore[override]
        self, run: str, partition: str, receipts: Sequence[Receipt] = ()
    ) -> FleetReader:
        """A reader over all servers. Receipts tell it whom to ask, and what must exist."""
        return FleetReader(self._fleet, run, partition, receipts)

    def release(self, run: str, partition: str, trajectories: Sequence[str] | None = None) -> int:
        """Release on every server that answers. Returns the largest count of one of them.

        A server that is away keeps what it has not uploaded; a warning in the log names it: release again once it is
        back.
        """

        def call(channel: Channel) -> int:
            try:
                return Client(channel).release(run, partition, trajectories)
            except NotFound:
                return 0

        count = max(self._fleet.each(call))
        away = self._fleet.away()
        if away:
            log.warning(
                "not released on servers that are away, release again later, run=%r partition=%r targets=%s",
                run,
                partition,
                ",".join(away),
            )
        return count

    def list(self, run: str = "", partition: str = "") -> Iterator[Listed]:
        """What the servers that answer have, merged by name."""

        def call(channel: Channel) -> list[Listed]:
            try:
                return list(Client(channel).list(run, partition))
            except NotFound:
                return []

        return merged([iter(rows) for rows in self._fleet.each(call)], lambda row: str(row.name))

    def status(self) -> dict[str, Any]:
        """State of the first server that answers."""
        return self._fleet.first(lambda channel: Client(channel).status())

    def close(self) -> None:
        self._fleet.close()


def connect(
    target: str | Sequence[str],
    *,
    tls: Tls | None = None,
    token: str | None = None,
    arena: str = "auto",
    arena_bytes: int = ARENA_BYTES,
    data_dir: str | os.PathLike[str] | None = None,
) -> Client:
    """Connect to a server and wait until it answers; or to several that share an object store.

    What a call says when the server is not there, once connected:

    - It ended, and its port refuses: the call is tried again for 1 s, so that a restart goes unnoticed where it can be,
      then Unavailable. Appends and seals under way look for it for 30 s. With several servers the next one is asked at
      once instead.
    - It hangs (stopped, its host gone or cut off): Unavailable within 20 s, for appends and seals of a single server
      within 50 s; DeadlineExceeded when the ``timeout_s`` of a read ends before. A server that works and waits for a
      slow disk never counts as hung.

    Args:
        target: ``host:port`` or ``unix:/path``; a list of them, or a string with commas, for several servers.
        tls: None for plain text; ``Tls()`` trusts the system's authorities.
        token: bearer token, if the server wants one.
        arena: ``auto`` shares memory with a server on this host and sends bytes over the connection to any other;
            ``off`` always sends; ``required`` fails where memory cannot be shared. ``Client.describe`` tells.
        arena_bytes: shared memory of each writer. Appends of durability ``memory`` run at memory speed until it is
            full, and at the disk's from then on.
        data_dir: data directory of the server as this process sees it, where it may read it: sealed segments are then
            read there by the client, and the server is asked for the rest.

    Raises:
        InvalidRequest: data_dir is no data directory, or not that of a server that answers.
        Unavailable: nothing answers within 10 s.
        Unsupported: arena is ``required`` and cannot be had; says why.
    """
    check_int(arena_bytes, "arena_bytes", Slabs.SLAB_BYTES, ARENA_BYTES_MAX)
    targets = split_targets(target)
    if len(targets) > 1 or not isinstance(target, str):
        files = None if data_dir is None else SegmentFiles(data_dir)
        fleet = Fleet([Channel(name, tls, token, arena, files, alone=False) for name in targets])
        try:
            fleet.connect()
            if files is not None and not any(fleet.each(lambda channel: channel.files(STATUS_TIMEOUT_S))):
                raise _foreign(files, target)
        except BaseException:
            fleet.close()
            raise
        return FleetClient(fleet, arena_bytes)
    files = None if data_dir is None else SegmentFiles(data_dir)
    channel = Channel(targets[0], tls, token, arena, files)
    try:
        channel.wait_ready()
        channel.arenas.probe()
        if files is not None and channel.files() is None:
            raise _foreign(files, target)
    except BaseException:
        channel.close()
        raise
    return Client(channel, arena_bytes)


def _foreign(files: SegmentFiles, target: str | Sequence[str]) -> InvalidRequest:
    return InvalidRequest(
        f"not the data directory of the server, data_dir={files.path} target={target}; leave it out unless server and"
        " client see one file system of this host",
        argument="data_dir",
    )
