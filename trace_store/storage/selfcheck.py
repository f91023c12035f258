"""Try at start what the store relies on, on the real backend: nothing about it is assumed.

    put, read back, ranges, listing, deletion     needed; a backend without them is refused
    create-once                                   wanted; without it every upload asks for the name first

A backend that answers a range with the whole object would hand out wrong rows to a reader that trusted it, and turn
each small read into a large one.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from dataclasses import dataclass

from trace_store.errors import StorageFailed, Unsupported
from trace_store.storage.base import SegmentGone
from trace_store.storage.s3 import ObjectExists, ObjectStore

PROBE_BYTES = 64 << 10
PROBE_PREFIX = "probe"
IDENTITY_KEY = "trace-store-identity.json"


@dataclass(frozen=True)
class Capabilities:
    """What a backend was seen to do, and the time that it gave to an object a moment ago, in seconds since 1970."""

    create_once: bool
    time: float = 0.0


def check_backend(store: ObjectStore) -> Capabilities:
    """Put, create again, read ranges, list and delete one object of 64 KiB.

    Raises:
        Unsupported: the backend does not do what is needed; says what.
        StorageFailed: it cannot be reached, or refuses the credentials.
    """
    key = f"{PROBE_PREFIX}/{secrets.token_hex(8)}"
    try:
        capabilities = _try_everything(store, key)
    except (StorageFailed, Unsupported):
        with contextlib.suppress(StorageFailed):
            store.delete([key])
        raise
    store.delete([key])
    if store.head(key) is not None:
        raise Unsupported(f"the object store keeps what was deleted, store={store.url}")
    return capabilities


def _try_everything(store: ObjectStore, key: str) -> Capabilities:
    """What the backend does; raises for what is needed."""
    content = secrets.token_bytes(PROBE_BYTES)
    store.put(key, content)
    try:
        store.put(key, content[::-1])
        create_once = False
        content = content[::-1]
    except ObjectExists:
        create_once = True
    _check_ranges(store, key, content)
    listed = [item for item in store.listing(PROBE_PREFIX) if item.key == key]
    if [item.size for item in listed] != [PROBE_BYTES]:
        raise Unsupported(f"the object store does not list what was put, store={store.url}")
    return Capabilities(create_once, listed[0].modified)


def bucket_identity(store: ObjectStore) -> str:
    """Random name of this bucket and prefix, made when there is none: tells a new bucket from an emptied one.

    Raises:
        StorageFailed: no answer, or the object is not ours.
    """
    if store.head(IDENTITY_KEY) is None:
        with contextlib.suppress(ObjectExists):  # another server was first; its name counts
            store.put(IDENTITY_KEY, json.dumps({"identity": secrets.token_hex(16)}).encode())
    content = bytes(store.read(IDENTITY_KEY, 0, 4096))
    try:
        return str(json.loads(content)["identity"])
    except (ValueError, KeyError, TypeError):
        raise StorageFailed(f"the identity object is malformed, object={IDENTITY_KEY} store={store.url}") from None


def _check_ranges(store: ObjectStore, key: str, content: bytes) -> None:
    ranges = [(1000, 1100), (40_000, 41_000), (PROBE_BYTES - 10, PROBE_BYTES)]
    try:
        parts = [bytes(store.read(key, start, stop)) for start, stop in ranges]
        parts += [bytes(part) for part in store.read_ranges(key, ranges)]
    except SegmentGone:
        raise Unsupported(f"the object store does not serve what was put, store={store.url}") from None
    except StorageFailed as error:
        if "artial" in str(error) or "ange" in str(error):
            raise Unsupported(f"the object store does not answer ranges, store={store.url} cause={error}") from None
        raise
    if parts != [content[start:stop] for start, stop in ranges] * 2:
        raise Unsupported(f"the object store answers ranges with other bytes, store={store.url}")
