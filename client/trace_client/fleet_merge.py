"""Put together what several servers of a fleet have of a trajectory, and never rows of two attempts.

higher attempt              replaces the rows of the lower one, however few it has
same attempt, same seal     rows that one server lacks (damage, a failed disk) come from the other
same attempt, other seal    the one with more rows, as a whole
lower attempt               is not looked at
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trace_client.microbatch import Microbatch
from trace_store.record import TokenSpan


def invalidate(batch: Microbatch, spans: Sequence[TokenSpan]) -> None:
    """Take back the rows of spans, as after a read that broke off."""
    for span in spans:
        rows = slice(span.dest_row, span.dest_row + span.tokens)
        batch.all_valid[:, rows] = False
        for tensors in batch.tensor_scales.values():
            tensors[rows] = np.nan
        batch.attempts.pop(span.trajectory, None)
        batch.versions.pop(span.trajectory, None)


def packed(spans: Sequence[TokenSpan]) -> list[TokenSpan]:
    """The same spans with their rows one behind the other, for a microbatch of their own."""
    starts = np.cumsum([0, *(span.tokens for span in spans)]).tolist()
    return [
        TokenSpan(span.trajectory, span.start, span.stop, start) for span, start in zip(spans, starts, strict=False)
    ]


def merge(batch: Microbatch, spans: Sequence[TokenSpan], other: Microbatch, others: Sequence[TokenSpan]) -> None:
    """Take over from ``other`` what it has better; ``others`` are the same spans with their rows there.

    All spans of a trajectory must be among them.
    """
    by_name: dict[str, list[tuple[slice, slice]]] = {}
    for span, twin in zip(spans, others, strict=True):
        rows = slice(span.dest_row, span.dest_row + span.tokens)
        by_name.setdefault(span.trajectory, []).append((rows, slice(twin.dest_row, twin.dest_row + twin.tokens)))
    for name, places in by_name.items():
        theirs = (other.attempts.get(name, -1), other.versions.get(name, 0))
        ours = (batch.attempts.get(name, -1), batch.versions.get(name, 0))
        same = theirs == ours
        if theirs[0] < ours[0] or (theirs[0] == ours[0] and not same and not _has_more(other, batch, places)):
            continue
        for here, there in places:
            _take(batch, here, other, there, only_missing=same)
        if theirs[0] >= 0:
            batch.attempts[name], batch.versions[name] = theirs


def _has_more(other: Microbatch, batch: Microbatch, places: Sequence[tuple[slice, slice]]) -> bool:
    theirs = sum(int(other.all_valid[:, there].sum()) for _, there in places)
    return theirs > sum(int(batch.all_valid[:, here].sum()) for here, _ in places)


def _take(batch: Microbatch, here: slice, other: Microbatch, there: slice, *, only_missing: bool) -> None:
    for site, valid in batch.valid.items():
        chosen = other.valid[site][there] & ~valid[here] if only_missing else np.ones(here.stop - here.start, bool)
        for ours, theirs in (
            (batch.planes, other.planes),
            (batch.scales, other.scales),
            (batch.tensor_scales, other.tensor_scales),
            (batch.valid, other.valid),
        ):
            ours[site][here][chosen] = theirs[site][there][chosen]
