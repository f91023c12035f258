"""An object store through obstore: ``s3://bucket/prefix`` or ``file:///directory``.

Segments are put in one request each, never as a multipart upload: a single put is atomic and conditional on every
backend that has conditional writes at all (Ceph ignores the condition on a multipart's completion), obstore cannot list
abandoned multipart uploads, and it is as fast (64 MiB to SeaweedFS on loopback: 0.36 s either way). So a killed upload
leaves nothing behind.

Endpoint, region and credentials come from the usual variables (AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, ...).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from trace_store.errors import InvalidRequest, StorageFailed, Unsupported
from trace_store.storage.base import Range, ReadShape, SegmentGone

OBJECT_SHAPE = ReadShape(run_bytes_max=8 << 20, gap_bytes_max=256 << 10, remote=True)
"""A request costs about as much as 256 KiB more of a running one (1 to 20 ms against 50 to 100 MB/s a connection)."""

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 15.0
"""A ranged read of 8 MiB needs 0.6 MB/s. A store that hangs costs a read this long, and its rows."""

WRITE_TIMEOUT_S = 120.0
"""A segment of 64 MiB needs 0.6 MB/s."""

READ_RETRIES = 4
"""Tries again within obstore and READ_TIMEOUT_S, for reads and listings only. Puts are retried by the uploader, which
checks first."""

PAUSE_S = 5.0
"""After a read without an answer, further reads fail at once for this long: a store that hangs must not hold every
thread of the server for READ_TIMEOUT_S each. An answer that says no, such as 503, is retried and no cause to pause."""

LIST_PAGE = 1000


class ObjectExists(StorageFailed):
    """A conditional create met an object of that name."""


class CredentialsRefused(StorageFailed):
    """The store does not let us in; waiting does not help."""


class OutcomeUnknown(StorageFailed):
    """A put that may have taken effect or not: no answer in time, a lost connection, a 5xx."""


@dataclass(frozen=True)
class ObjectInfo:
    """An object: key below the store's prefix, bytes, time of its last change in seconds since 1970."""

    key: str
    size: int
    modified: float


@dataclass(frozen=True)
class Timeouts:
    """Longest waits in seconds; smaller ones in tests."""

    connect: float = CONNECT_TIMEOUT_S
    read: float = READ_TIMEOUT_S
    write: float = WRITE_TIMEOUT_S


class ObjectStore:
    """One bucket and prefix. Thread-safe. Keys are relative to the prefix."""

    def __init__(self, url: str, timeouts: Timeouts | None = None) -> None:
        """Configure; no request is made.

        Raises:
            InvalidRequest: the URL is none of ours, or the configuration is incomplete.
            Unsupported: obstore is not installed.
        """
        self.url = url
        try:
            import obstore
        except ImportError:
            raise Unsupported("an object store needs obstore: pip install 'trace-store[s3]'") from None
        self._obstore = obstore
        timeouts = timeouts or Timeouts()
        self._paused_until = 0.0
        self._reads = _open(url, timeouts.connect, timeouts.read, READ_RETRIES)
        self._writes = _open(url, timeouts.connect, timeouts.write, 0)

    def put(self, key: str, data: bytes | memoryview, *, create: bool = True) -> None:
        """Store an object in one request; with ``create`` only if there is none of that name.

        Raises:
            ObjectExists: there is one.
            OutcomeUnknown: the object may be there or not.
            StorageFailed: the store refused; it is not there.
        """
        try:
            self._obstore.put(self._writes, key, data, mode="create" if create else "overwrite", use_multipart=False)
        except Exception as error:
            raise self._failure(error, "put", key) from None

    def head(self, key: str) -> ObjectInfo | None:
        """An object's size and time, None if there is none. Raises StorageFailed."""
        self._check_pause()
        try:
            return _info(self._obstore.head(self._reads, key))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._failure(error, "head", key) from None

    def read(self, key: str, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of an object, fewer if it is shorter.

        Raises:
            SegmentGone: no such object.
            StorageFailed: no answer.
        """
        self._check_pause()
        try:
            return memoryview(self._obstore.get_range(self._reads, key, start=start, end=stop)).cast("B")
        except Exception as error:
            raise self._failure(error, "read", key) from None

    def read_ranges(self, key: str, ranges: Sequence[Range]) -> list[memoryview]:
        """Bytes of several ranges, asked for together; the same errors as ``read``."""
        self._check_pause()
        starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
        try:
            parts = self._obstore.get_ranges(self._reads, key, starts=starts, ends=stops)
        except Exception as error:
            raise self._failure(error, "read", key) from None
        return [memoryview(part).cast("B") for part in parts]

    def listing(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with ``prefix``, a whole number of path parts. Raises StorageFailed."""
        self._check_pause()
        try:
            for page in self._obstore.list(self._reads, prefix or None, chunk_size=LIST_PAGE):
                yield from map(_info, page)
        except Exception as error:
            raise self._failure(error, "list", prefix) from None

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; one that is not there counts as deleted. Raises StorageFailed."""
        for low in range(0, len(keys), LIST_PAGE):
            try:
                self._obstore.delete(self._writes, list(keys[low : low + LIST_PAGE]))
            except FileNotFoundError:
                self._delete_one_by_one(keys[low : low + LIST_PAGE])
            except Exception as error:
                raise self._failure(error, "delete", keys[low]) from None

    def _delete_one_by_one(self, keys: Sequence[str]) -> None:
        """A directory as a store gives up at the first file that is not there."""
        for key in keys:
            try:
                self._obstore.delete(self._writes, key)
            except FileNotFoundError:
                continue
            except Exception as error:
                raise self._failure(error, "delete", key) from None

    def _check_pause(self) -> None:
        if time.monotonic() < self._paused_until:
            raise StorageFailed(f"the object store gave no answer within the last {PAUSE_S:g} s, store={self.url}")

    def _failure(self, error: Exception, action: str, key: str) -> StorageFailed:
        kinds = self._obstore.exceptions
        cause = " ".join(str(error).split("\n\n")[0].split())[:300]
        place = f"action={action} object={key} store={self.url}"
        if isinstance(error, FileNotFoundError):
            return SegmentGone(f"the object is not there, {place}")
        if isinstance(error, (kinds.AlreadyExistsError, kinds.PreconditionError)):
            return ObjectExists(f"an object of that name is there, {place}")
        refused = isinstance(error, (kinds.PermissionDeniedError, kinds.UnauthenticatedError))
        if refused or " 403 " in cause or " 401 " in cause:  # a refused listing has no class of its own
            return CredentialsRefused(f"the object store refuses the credentials, {place} cause={cause}")
        if action == "put":
            return OutcomeUnknown(f"the object store gave no clear answer, {place} cause={cause}")
        if action != "delete" and "status code" not in cause:  # one that answers, if only to say no, need not rest
            self._paused_until = time.monotonic() + PAUSE_S
        return StorageFailed(f"the object store failed, {place} cause={cause}")


class ObjectSource:
    """A segment in an object store, as a ``storage.base.Source``. Opening it costs no request."""

    shape = OBJECT_SHAPE
    descriptor = -1

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        name: str,
        size: int,
        on_read: Callable[[int], None] = lambda count: None,
    ) -> None:
        """``on_read`` hears the bytes of every read that succeeded."""
        self.name = name
        self._store, self._key, self._size, self._on_read = store, key, size, on_read

    def size(self) -> int:
        return self._size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        buffer[:] = self._whole(self._store.read(self._key, offset, offset + buffer.nbytes), buffer.nbytes, offset)
        self._on_read(buffer.nbytes)

    def read_ranges(self, ranges: Sequence[Range]) -> list[memoryview]:
        if not ranges:
            return []
        parts = self._store.read_ranges(self._key, ranges)
        whole = [self._whole(part, stop - start, start) for part, (start, stop) in zip(parts, ranges, strict=True)]
        self._on_read(sum(part.nbytes for part in whole))
        return whole

    def close(self) -> None:
        pass

    def _whole(self, part: memoryview, expected: int, offset: int) -> memoryview:
        if part.nbytes != expected:
            raise StorageFailed(f"a segment ends too early, segment={self.name} offset={offset + part.nbytes}")
        return part


def _open(url: str, connect_s: float, timeout_s: float, retries: int) -> Any:
    from obstore.store import LocalStore, S3Store

    if url.startswith("file://"):
        return LocalStore(url[len("file://") :], mkdir=True)
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if not url.startswith("s3://") or not bucket:
        raise InvalidRequest(f"object store must be s3://bucket/prefix or file:///directory, got={url}", argument="url")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    options: Any = {
        "connect_timeout": timedelta(seconds=connect_s),
        "timeout": timedelta(seconds=timeout_s),
        "allow_http": endpoint.startswith("http://"),
    }
    retry: Any = {
        "max_retries": retries,
        "retry_timeout": timedelta(seconds=timeout_s),
        "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=1), "base": 2},
    }
    settings: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
    if not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        settings["region"] = "us-east-1"
    try:
        return S3Store(bucket, prefix=prefix.strip("/") or None, client_options=options, retry_config=retry, **settings)
    except Exception as error:
        raise InvalidRequest(f"the object store cannot be configured, cause={error}", argument="url") from error


def _info(meta: Any) -> ObjectInfo:
    return ObjectInfo(meta["path"], int(meta["size"]), meta["last_modified"].timestamp())
