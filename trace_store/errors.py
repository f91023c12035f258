"""Errors of trace-store: one tree, few leaves, each saying what the caller should do next.

    TraceStoreError
    |-- InvalidRequest        fix the argument that the message names; nothing was stored
    |   `-- SchemaMismatch    the run exists with another site table: use a new run name or the registered table
    |-- NotFound              unknown run, partition or trajectory: register or write it first
    |-- Conflict              the same rows were written before with other bytes: use a new attempt
    |-- StaleAttempt          a newer attempt of the trajectory exists: drop the message
    |-- Sealed                the trajectory is sealed: use a new attempt
    |-- Incomplete            seal found holes (see ``holes``): append them, or seal with ``allow_holes``
    |-- StorageFull           no room on the disk: release partitions, then retry
    |-- StorageFailed         the disk refused an operation (read-only, I/O error): alert; reads go on
    |-- DataLoss              stored bytes do not match their checksum: alert; the rows count as missing
    |   `-- FormatError       a file is not a valid segment
    |-- Unavailable           the server cannot be reached or went away: retry, an append is idempotent
    |-- Overloaded            a named bound was reached: slow down, then retry
    |-- DeadlineExceeded      no answer in time; the outcome is unknown: retry, an append is idempotent
    |-- Unauthenticated       wrong or missing token
    `-- Unsupported           this server, build or device lacks the feature that the message names

Messages are lower case and end in ``key=value`` pairs. The gRPC status of each class is one table in
``trace_server.status``; the client raises the same class again.
"""

from __future__ import annotations


class TraceStoreError(Exception):
    """Base of every error that this product raises on purpose.

    Attributes:
        retryable: whether the same call may succeed later.
        others: errors of the same call that are not of this one's making, such as those of other trajectories in a
            flush. The text names the first OTHERS_SHOWN of them.
    """

    OTHERS_SHOWN = 3

    retryable: bool = False
    others: tuple[TraceStoreError, ...] = ()

    def __str__(self) -> str:
        if not self.others:
            return super().__str__()
        shown = "; ".join(f"{type(error).__name__}: {error}" for error in self.others[: self.OTHERS_SHOWN])
        left = len(self.others) - self.OTHERS_SHOWN
        return f"{super().__str__()} [others={len(self.others)}: {shown}{'; ...' if left > 0 else ''}]"


class InvalidRequest(TraceStoreError, ValueError):
    """An argument is wrong. ``argument`` names it. Nothing was stored."""

    def __init__(self, message: str, *, argument: str = "") -> None:
        super().__init__(message)
        self.argument = argument


class SchemaMismatch(InvalidRequest):
    """The run is registered with a different site table."""


class NotFound(TraceStoreError, LookupError):
    """The run, partition or trajectory is unknown."""


class Conflict(TraceStoreError):
    """Rows written before under this attempt hold other bytes. The stored rows stand."""


class StaleAttempt(TraceStoreError):
    """The message belongs to an attempt that a newer one has replaced."""


class Sealed(TraceStoreError):
    """The attempt is sealed and takes no new rows."""


class Incomplete(TraceStoreError):
    """A seal found rows missing. ``holes`` is a tuple of (site name, start, stop), half-open."""

    def __init__(self, message: str, *, holes: tuple[tuple[str, int, int], ...] = ()) -> None:
        super().__init__(message)
        self.holes = holes


class StorageFull(TraceStoreError):
    """No room is left. Retry after a release."""

    retryable = True


class StorageFailed(TraceStoreError, OSError):
    """The file system refused an operation. Writes are refused until it works again; reads go on."""

    retryable = True


class DataLoss(TraceStoreError):
    """Stored bytes do not match their checksum."""


class FormatError(DataLoss):
    """A file is no valid segment. The message names the malformation."""


class Unavailable(TraceStoreError, ConnectionError):
    """The server cannot be reached, or went away. Repeating the call is safe."""

    retryable = True


class Overloaded(TraceStoreError):
    """A named bound was reached."""

    retryable = True


class DeadlineExceeded(TraceStoreError, TimeoutError):
    """No answer in time; the call may have taken effect. Repeating it is safe."""

    retryable = True


class Unauthenticated(TraceStoreError, PermissionError):
    """The token is wrong or missing."""


class Unsupported(TraceStoreError, RuntimeError):
    """A feature is missing on this server, build or device."""


def public_class(error: TraceStoreError) -> type[TraceStoreError]:
    """The class of this module that an error is of: parts of the engine raise subclasses that only they tell apart."""
    return next(kind for kind in type(error).__mro__ if kind.__module__ == __name__)
