"""Deletions, on threads of their own: a stuck one blocks neither the store nor the others.

Whoever asks has already made the thing invisible, so nobody waits. A failed job is tried again until it succeeds or the
store closes; what is left then is found by name at the next start.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

log = logging.getLogger("trace_store.delete")

THREADS_MAX = 8
"""As many deletions may hang before others wait for them."""

RETRY_FIRST_S = 1.0
RETRY_MAX_S = 60.0


@dataclass(order=True)
class _Job:
    """``size``: bytes that the disk gets back."""

    due: float
    order: int
    name: str = field(compare=False)
    work: Callable[[], None] = field(compare=False)
    size: int = field(compare=False)
    tries: int = field(compare=False, default=0)


class Deleter:
    """A queue of jobs and up to THREADS_MAX threads, started when needed. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, threads_max: int = THREADS_MAX) -> None:
        self._clock, self._threads_max = clock, threads_max
        self._wake = threading.Condition()
        self._jobs: list[_Job] = []
        self.pending_bytes = 0
        """What the disk gets back once every job is done."""
        self._order = itertools.count()
        self._threads = self._busy = 0
        self._closing = False

    @property
    def pending(self) -> int:
        """Jobs that are not done."""
        return len(self._jobs) + self._busy

    def submit(self, name: str, work: Callable[[], None], size: int = 0) -> None:
        """Run ``work`` soon; OSError and StorageFailed mean: again later."""
        with self._wake:
            self.pending_bytes += size
            self._push(_Job(self._clock(), next(self._order), name, work, size))
            if self._threads - self._busy < len(self._jobs) and self._threads < self._threads_max:
                self._threads += 1
                threading.Thread(target=self._work, name="trace-store-delete", daemon=True).start()

    def drain(self, timeout_s: float) -> bool:
        """Wait until every job is done; False when that takes longer."""
        with self._wake:
            return self._wake.wait_for(lambda: not self.pending, timeout_s)

    def close(self) -> None:
        """Start no more jobs. Those that hang are left behind."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()

    def _push(self, job: _Job) -> None:
        heapq.heappush(self._jobs, job)
        self._wake.notify()

    def _work(self) -> None:
        while True:
            with self._wake:
                while not self._closing and (not self._jobs or self._jobs[0].due > self._clock()):
                    self._wake.wait(self._jobs[0].due - self._clock() if self._jobs else None)
                if self._closing:
                    self._threads -= 1
                    return
                job = heapq.heappop(self._jobs)
                self._busy += 1
            failed = self._run(job)
            with self._wake:
                self._busy -= 1
                if failed:
                    job.due = self._clock() + min(RETRY_FIRST_S * 2**job.tries, RETRY_MAX_S)
                    job.tries += 1
                    self._push(job)
                else:
                    self.pending_bytes -= job.size
                self._wake.notify_all()

    def _run(self, job: _Job) -> bool:
        try:
            job.work()
        except OSError as error:
            log.warning("not deleted yet, tried again, name=%s: %s", job.name, error)
            return True
        except Exception:
            log.exception("deletion given up, name=%s", job.name)
        return False
