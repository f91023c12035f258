"""The engine's usage for a scrape: fresh if it comes at once, else the last one and its age.

Counting waits for the catalog's lock, which a registration holds over a sync and a release over a rename, and it asks
the file system how full it is. A scrape does not wait for a disk.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from threading import Lock

from trace_store.engine import Engine, Usage

USAGE_WAIT_S = 0.04
"""A scrape is to be answered within 0.1 s."""


class LastUsage:
    """Asks on a thread of its own, one question at a time. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pool = ThreadPoolExecutor(1, "trace-store-usage")
        self._lock = Lock()
        self._asked: Future[Usage] | None = None
        self._last: Usage | None = None
        self._last_at = 0.0

    def get(self) -> tuple[Usage, float]:
        """Usage and its age in seconds. Waits for the very first one. Raises OSError."""
        with self._lock:
            if self._asked is None:
                self._asked = self._pool.submit(self._engine.usage)
            asked, last, last_at = self._asked, self._last, self._last_at
        try:
            found = asked.result(None if last is None else USAGE_WAIT_S)
        except TimeoutError:
            assert last is not None
            return last, time.monotonic() - last_at
        except BaseException:
            self._forget(asked)
            raise
        self._forget(asked)
        with self._lock:
            self._last, self._last_at = found, time.monotonic()
        return found, 0.0

    def _forget(self, asked: Future[Usage]) -> None:
        with self._lock:
            if self._asked is asked:
                self._asked = None
