"""What was appended and is not stored: not answered yet by any server, or refused by one.

A writer has one; the writers that follow each other over the servers of a fleet share one.
"""

from __future__ import annotations

from collections import deque

from trace_client.stream import AppendStream, Sent
from trace_store.errors import TraceStoreError

NAMES_SHOWN = 3
"""Trajectories that an error names."""


class Backlog:
    """Used under the lock of the writer that has it.

    Attributes:
        kept: messages that broken streams left unanswered, in order, with the stream that may hold their bytes. No more
            than one stream takes: nothing new is sent before all of them were sent again.
        errors: the first refusal of each trajectory, until it is raised.
    """

    def __init__(self) -> None:
        self.kept: deque[tuple[Sent, AppendStream]] = deque()
        self.errors: dict[str, TraceStoreError] = {}

    def raise_error(self, trajectory: str | None) -> None:
        """Raise what a server found wrong with a trajectory's frames (None: with any, together), once."""
        if not self.errors:
            return
        names = list(self.errors) if trajectory is None else [trajectory]
        found = [self.errors.pop(name) for name in names if name in self.errors]
        if found:
            found[0].others = tuple(found[1:])
            raise found[0]

    def name_in(self, error: TraceStoreError) -> None:
        """Say in an error's text what is kept."""
        if not self.kept:
            return
        names = list(dict.fromkeys(sent.trajectory for sent, _ in self.kept))
        shown = ",".join(repr(name) for name in names[:NAMES_SHOWN]) + (",..." if len(names) > NAMES_SHOWN else "")
        error.args = (
            f"{error.args[0]}; appends without an answer are kept, and the next call of the writer (flush, say) sends"
            f" them again: requests={len(self.kept)} trajectories={len(names)}: {shown}",
        )
