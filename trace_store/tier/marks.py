"""What a data directory remembers of its bucket: which one it was, and which of its files were uploaded.

    ROOT/bucket        identity of the bucket
    file mode 0440     the segment was uploaded to it

Both are checked with the bucket before anything follows from them. A file that is marked and whose object is gone was
released by another server. A file without a mark and without an object is uploaded: either it never was, or it was and
the server was killed between the put and the mark (or never heard the put's answer), and another server released it
meanwhile. Nobody can tell these apart, and nothing may be lost: then the released rows are back, for all servers, until
they are released again. That takes a kill within the milliseconds in between, as a mark is synced before its upload
counts as done.

A note here that a put has begun would not tell them apart either, as a release leaves nothing in the bucket, and one of
the partition need not have known this segment. A second object per upload could, put before it and deleted with it by
whoever releases it: if that one was there and is not, so was the segment. That is two more requests a segment, and rows
that were acknowledged would hang on nobody else ever deleting such an object, also while a bucket is replaced. Rows
that come back are the lesser evil.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from trace_store.segment.schema import SEALED_SUFFIX
from trace_store.segment.writer import sync_directory
from trace_store.storage.s3 import ObjectStore
from trace_store.storage.selfcheck import bucket_identity

log = logging.getLogger("trace_store.tier")

UPLOADED_MODE = 0o440
PLAIN_MODE = 0o640
IDENTITY_FILE = "bucket"
BUCKET_CLOCK_FILE = "bucket-clock"


def mark_uploaded(path: Path) -> None:
    """Note on a file that the bucket has it, so that a power cut does not forget it. Waits for the disk."""
    if is_marked(path):
        return
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fchmod(descriptor, UPLOADED_MODE)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        log.debug("cannot mark a segment as uploaded, segment=%s cause=%s", path.name, error)


def is_marked(path: Path) -> bool:
    """Whether a file was uploaded to the bucket that the directory remembers."""
    try:
        return path.stat().st_mode & 0o777 == UPLOADED_MODE
    except OSError:
        return False


class BucketIdentity:
    """Which bucket this is. Raises StorageFailed when it cannot be asked at start."""

    def __init__(self, root: Path, store: ObjectStore) -> None:
        self._root, self._store = root, store
        self._identity = bucket_identity(store)
        path = root / IDENTITY_FILE
        known = path.read_text(encoding="utf-8").strip() if path.exists() else ""
        if known == self._identity:
            return
        if known:
            log.warning("the data directory was used with another bucket, everything is uploaded to this one")
        self._remember()

    def is_same(self) -> bool:
        """Whether the bucket is still the one that it was, and not an emptied one or another of its name.

        Raises:
            StorageFailed: it cannot be asked.
        """
        return bucket_identity(self._store) == self._identity

    def adopt(self) -> None:
        """From now on the bucket that is there is the one; no file counts as uploaded to it. Raises StorageFailed."""
        self._identity = bucket_identity(self._store)
        self._remember()

    def _remember(self) -> None:
        root, path = self._root, self._root / IDENTITY_FILE
        (root / BUCKET_CLOCK_FILE).unlink(missing_ok=True)
        # Marks of the other bucket must go first: a marked file without an object counts as released.
        for segment in root.glob(f"runs/*/*/*{SEALED_SUFFIX}"):
            if is_marked(segment):
                os.chmod(segment, PLAIN_MODE)
        partial = path.with_suffix(".partial")
        partial.write_text(f"{self._identity}\n", encoding="utf-8")
        partial.replace(path)
        sync_directory(root)
