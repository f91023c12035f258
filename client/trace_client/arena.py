"""Arenas of a client: memory files that it shares with a server on the same host.

The server creates the file; the client opens it by the name it is told, in the tmpfs directory that both ends are set
to, and only if it is a plain file of the size and owner that the server said. An arena belongs to one append stream or
one set of read buffers and ends with it, so that no two users can disturb each other.
"""

from __future__ import annotations

import mmap
import os
import queue
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import grpc
import numpy as np
import numpy.typing as npt

from trace_client import fork
from trace_store.arena import ARENA_BYTES_MAX, PAGE_BYTES, SECRET_BYTES, arena_directory, is_arena_name, map_arena
from trace_store.errors import DeadlineExceeded, InvalidRequest, TraceStoreError, Unavailable, Unsupported
from trace_store.record import check_int
from trace_store.v1 import trace_store_service_pb2 as service_pb2

ATTACH_TIMEOUT_S = 10.0
"""Longest wait for an arena; reserving 1 GiB took 0.6 s on a small virtual machine."""

MODES = ("auto", "off", "required")


class Arena:
    """An attached arena. Its memory stays valid as long as something refers to it, its use to the server until
    ``close``, which dropping the object does too."""

    def __init__(
        self, call: Any, outgoing: queue.SimpleQueue[bytes | None], mapping: mmap.mmap, identity: bytes
    ) -> None:
        self._call, self._outgoing = call, outgoing
        self._mapping = mapping
        self.id, self.size = identity, len(mapping)

    @property
    def alive(self) -> bool:
        """Whether the server still knows it."""
        return bool(self._call.is_active())

    def array(self) -> npt.NDArray[np.uint8]:
        """The memory as a new array object."""
        return np.frombuffer(self._mapping, np.uint8)

    def close(self) -> None:
        self._outgoing.put(None)
        self._call.cancel()

    def __reduce__(self) -> NoReturn:
        fork.refuse_pickling("memory that is shared with a server")

    def __del__(self) -> None:
        self._outgoing.put(None)


class Arenas:
    """Attaches arenas, or knows why not.

    Attributes:
        mode: ``auto``, ``off`` or ``required``.
        reason: one line for a person on why the path is what it is.
        usable: whether arenas work with this server, so that it is worth asking for one.
        granted: whether the last one that was asked for was had.
    """

    def __init__(
        self, open_call: Callable[[Iterable[bytes]], Any], error: Callable[[Any], TraceStoreError], mode: str
    ) -> None:
        if mode not in MODES:
            raise InvalidRequest(f"arena must be one of {MODES}, got={mode!r}", argument="arena")
        self._open_call, self._error = open_call, error
        self.mode, self.usable, self.granted = mode, mode != "off", False
        self.reason = "arena='off' was asked for" if mode == "off" else "not tried yet"

    def probe(self) -> None:
        """Attach a page, to know at connect what the path will be.

        Raises:
            Unsupported: arenas do not work, and the mode is ``required``.
        """
        arena = self.attach(PAGE_BYTES)
        if arena is not None:
            arena.close()

    def attach(self, size: int, timeout_s: float = ATTACH_TIMEOUT_S) -> Arena | None:
        """A new arena of ``size`` bytes or a little more; None where the stream must carry the bytes.

        Args:
            timeout_s: longest wait, ATTACH_TIMEOUT_S at most.

        Raises:
            Unsupported: there is none, and the mode is ``required``.
            Unavailable: the server went away.
        """
        if not self.usable:
            return None
        check_int(size, "arena_bytes", PAGE_BYTES, ARENA_BYTES_MAX)
        try:
            arena = self._attach(size, min(timeout_s, ATTACH_TIMEOUT_S))
        except Unavailable:
            raise  # the server is away; that says nothing about arenas
        except TraceStoreError as error:
            self.reason, self.granted = f"no arena: {error}", False
            # A server that is merely out of memory may have some for the next caller.
            self.usable = error.retryable or self.mode == "required"
            if self.mode == "required":
                raise Unsupported(f"arena='required' and {self.reason}") from error
            return None
        self.reason, self.granted = f"server and client share memory in {arena_directory()}", True
        return arena

    def _attach(self, size: int, timeout_s: float) -> Arena:
        outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        outgoing.put(service_pb2.AttachArenaRequest(size_bytes=size).SerializeToString())
        call = self._open_call(_drawn(outgoing))
        timer = threading.Timer(timeout_s, call.cancel)
        timer.start()
        try:
            offered = service_pb2.AttachArenaResponse.FromString(next(call))
            descriptor = _open(offered)
            try:
                secret = os.pread(descriptor, SECRET_BYTES, 0)
                outgoing.put(service_pb2.AttachArenaRequest(secret=secret).SerializeToString())
                attached = service_pb2.AttachArenaResponse.FromString(next(call))
                mapping = map_arena(descriptor, offered.size_bytes)
            finally:
                os.close(descriptor)
            return Arena(call, outgoing, mapping, attached.arena)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.CANCELLED:
                raise DeadlineExceeded(f"no arena within {timeout_s:.3g} s") from None
            raise self._error(error) from None
        except StopIteration:
            raise Unsupported("the server ended the call") from None
        except OSError as error:
            raise Unsupported(f"the memory cannot be mapped, cause={error.strerror}") from None
        finally:
            timer.cancel()
            if "mapping" not in locals():
                outgoing.put(None)


def _drawn(outgoing: queue.SimpleQueue[bytes | None]) -> Iterator[bytes]:
    while (message := outgoing.get()) is not None:
        yield message


def _open(offered: Any) -> int:
    """Descriptor of an offered file.

    Raises:
        Unsupported: it is not here, or not what the server said.
    """
    if not is_arena_name(offered.name):
        raise Unsupported(f"the server named no arena file, name={offered.name!r}")
    path = arena_directory() / offered.name
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Unsupported(
            f"the server's file is not in {path.parent}: another host, or a container without the server's tmpfs"
        ) from None
    except OSError as error:
        raise Unsupported(
            f"the server's file cannot be opened, directory={path.parent} cause={error.strerror}"
        ) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != offered.owner_uid:
        os.close(descriptor)
        raise Unsupported(f"the file in {path.parent} is not the server's")
    return descriptor


class Slabs:
    """Memory of one append stream, given out in ranges and taken back as the server is done with them.

    Ranges are cut one after another from a slab, slabs are reused last in first out: a stream that is seldom behind
    keeps to one or two slabs, and to the cache.
    """

    SLAB_BYTES = 4 << 20
    """Largest range. 4 MiB with several in flight carried 3.9 GB/s, 1 MiB 1.7."""

    _ALIGNMENT = 64

    def __init__(self, size: int) -> None:
        self._free = list(range(0, size - self.SLAB_BYTES + 1, self.SLAB_BYTES))
        self._ranges: dict[int, int] = {}
        self._current = self._used = -1

    def take(self, size: int) -> int | None:
        """Offset of ``size`` free bytes, at most SLAB_BYTES; None while there are none."""
        if self._current < 0 or self._used + size > self.SLAB_BYTES:
            if not self._free:
                return None
            self._leave_current()
            self._current, self._used = self._free.pop(), 0
        offset = self._current + self._used
        self._used += -(-size // self._ALIGNMENT) * self._ALIGNMENT
        self._ranges[self._current] = self._ranges.get(self._current, 0) + 1
        return offset

    def give_back(self, offset: int) -> None:
        """The range at ``offset`` is free again."""
        slab = offset // self.SLAB_BYTES * self.SLAB_BYTES
        self._ranges[slab] -= 1
        if self._ranges[slab]:
            return
        del self._ranges[slab]
        if slab == self._current:
            self._used = 0
        else:
            self._free.append(slab)

    def _leave_current(self) -> None:
        if self._current >= 0 and self._current not in self._ranges:
            self._free.append(self._current)
        self._current = -1
