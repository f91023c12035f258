"""Half-open token spans [start, stop): union and gaps. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def covered(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Union of half-open spans, sorted and merged."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def gaps(spans: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Parts of [start, stop) that no span covers."""
    missing = []
    for low, high in covered(spans):
        if low >= stop:
            break
        if low > start:
            missing.append((start, low))
        start = max(start, high)
    if start < stop:
        missing.append((start, stop))
    return missing
