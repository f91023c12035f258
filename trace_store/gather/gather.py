"""Execute a read plan into the caller's memory: positioned reads straight to each piece's place, every record verified.

Codes of one appended message lie next to each other in the file, so they arrive by one ``preadv`` whose vector is the
caller's layout: the kernel's copy is the only one. Raw scales go the same way. Compressed scales, and records of which
only a part is wanted, pass through a scratch buffer, since a checksum covers the whole record. Work goes on in steps of
about 2 MiB, so that a record is verified while it is still in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from trace_store.fetch import OpenSegment, Slice, Undelivered, fetch
from trace_store.gather.places import Places, select
from trace_store.gather.records import LocalRecords
from trace_store.planner import ReadPlan


def gather(
    plan: ReadPlan, segments: Mapping[int, OpenSegment], target: memoryview, places: Places
) -> list[Undelivered]:
    """Fill the places of a plan that ``file_order`` sorted; returns the pieces that could not be served.

    ``target`` is writable flat bytes that holds every place. The bytes at the place of an undelivered piece are
    undefined; its tensor scales are left as they were.
    """
    undelivered: list[Undelivered] = []
    floats = np.frombuffer(target[: len(target) // 4 * 4], np.float32)
    borders = [0, *(np.flatnonzero(np.diff(plan.segment)) + 1).tolist(), len(plan.segment)]
    for first, last in pairwise(borders):
        if first == last:
            continue
        segment = segments[int(plan.segment[first])]
        if segment.source.descriptor < 0:
            undelivered.extend(_copy_slices(plan, first, last, segments, target, places))
            continue
        records = LocalRecords(plan, segment, first, last, places)
        for low, high in records.steps():
            undelivered.extend(records.fill(low, high, target, floats))
    return undelivered


def _copy_slices(
    plan: ReadPlan, first: int, last: int, segments: Mapping[int, OpenSegment], target: memoryview, places: Places
) -> list[Undelivered]:
    """Pieces whose bytes come over the network: few round trips matter there, not a copy in memory."""
    undelivered = []
    for position, item in enumerate(fetch(select(plan, slice(first, last)), segments), first):
        if isinstance(item, Undelivered):
            undelivered.append(Undelivered(first + item.position, item.reason))
            continue
        _place(item, target, int(places.codes[position]), int(places.scales[position]), int(places.tensor[position]))
    return undelivered


def _place(piece: Slice, target: memoryview, codes: int, scales: int, tensor: int) -> None:
    for place, part in ((codes, piece.codes), (scales, piece.scales), (tensor, piece.tensor_scales)):
        target[place : place + part.nbytes] = part
