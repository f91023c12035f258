"""Join the bucket: at the start if it answers, else again and again until it does.

never seen by the directory     wait START_WAIT_S for it, then give up: nobody could say what the disk is a part of
seen before                     wait KNOWN_WAIT_S for an answer, then go on without it and join later
refuses the credentials, lacks what is needed     give up at once; at a later try it is an error in log and status
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from trace_store.errors import StorageFailed, TraceStoreError, Unsupported
from trace_store.storage.s3 import CredentialsRefused
from trace_store.storage.selfcheck import Capabilities

log = logging.getLogger("trace_store.tier")

START_WAIT_S = 30.0

KNOWN_WAIT_S = 5.0
"""A store that refuses connections says so at once; one that hangs holds a start up for this long."""


class Joining:
    """State of the one join. ``ask`` says what the backend can do, ``enter`` compares it with the disk.

    Attributes:
        done: whether the bucket is joined.
        failure: why the last try failed; empty once it is joined.
    """

    def __init__(self, ask: Callable[[], Capabilities], enter: Callable[[Capabilities], None]) -> None:
        self._ask, self._enter = ask, enter
        self._turn, self._entering = threading.Lock(), threading.Lock()
        self._closed = False
        self._failed_tries = 0
        self.done = False
        self.failure = "no answer yet"

    def begin(self, *, known: bool) -> None:
        """The first tries. ``known``: the directory was used with the bucket before.

        Raises:
            Unsupported, CredentialsRefused: waiting does not help.
            StorageFailed: no answer, and not ``known``.
        """
        if not known:
            self._wait_for_it()
            return
        answered, ended = threading.Event(), threading.Event()
        errors: list[Exception] = []

        def first() -> None:
            try:
                with self._turn:
                    self._join(answered.set)
            except Exception as error:
                self.failure = str(error)
                errors.append(error)
            finally:
                ended.set()
                answered.set()

        threading.Thread(target=first, name="trace-store-join", daemon=True).start()
        if answered.wait(KNOWN_WAIT_S):
            ended.wait()  # it answers: what it says decides, however long the comparison takes
        if errors and not _is_outage(errors[0]):
            raise errors[0]
        if not self.done:
            log.warning("object store not reached, serving from the disk until it answers: %s", self.failure)

    def try_again(self) -> None:
        """One more try, unless one is under way. Failures are logged and noted."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            self._join(lambda: None)
        except TraceStoreError as error:
            self.failure = str(error)
            self._failed_tries += 1
            if self._failed_tries & (self._failed_tries - 1) == 0:  # the 1st, 2nd, 4th, 8th: an outage may last hours
                log.warning("object store not joined yet, tries=%d: %s", self._failed_tries, error)
        finally:
            self._turn.release()

    def close(self) -> None:
        """No join enters anything after this; one that is entering is waited for."""
        with self._entering:
            self._closed = True

    def _wait_for_it(self) -> None:
        limit = time.monotonic() + START_WAIT_S
        while True:
            try:
                self._join(lambda: None)
                return
            except StorageFailed as error:
                if not _is_outage(error) or time.monotonic() >= limit:
                    raise
                log.warning("waiting for the object store: %s", error)
                time.sleep(1.0)

    def _join(self, answered: Callable[[], None]) -> None:
        capabilities = self._ask()
        answered()
        with self._entering:
            if not self._closed:
                self._enter(capabilities)
                self.failure, self.done = "", True


def _is_outage(error: Exception) -> bool:
    return isinstance(error, StorageFailed) and not isinstance(error, (CredentialsRefused, Unsupported))
