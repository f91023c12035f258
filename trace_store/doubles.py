"""Rows that are held more than once: of which holdings, and who has which tokens of which sites. Pure.

A record whose stored bytes were found damaged is stored anew when its writer sends it again, and clients that changed
servers may have sent rows to both. The catalog keeps every copy; a read takes the newest and falls back to the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trace_store.attempt import Holding, SiteSet


@dataclass(frozen=True)
class Copies:
    """Tokens [start, stop) of some sites, and the holdings that all have them, newest first."""

    start: int
    stop: int
    sites: SiteSet
    holdings: tuple[Holding, ...]


def split_doubles(holdings: Sequence[Holding]) -> tuple[list[Holding], list[Copies]]:
    """Holdings that share no row with another one, as they are, and the rest cut into parts; oldest first given."""
    single: list[Holding] = []
    copies: list[Copies] = []
    for cluster in _clusters(holdings):
        if _shares_rows([holding for _, holding in cluster]):
            copies.extend(_cut(cluster))
        else:
            single.extend(holding for _, holding in cluster)
    return single, copies


def _clusters(holdings: Sequence[Holding]) -> Iterator[list[tuple[int, Holding]]]:
    """Holdings with their ages, in groups that share no token with each other."""
    cluster: list[tuple[int, Holding]] = []
    stop = 0
    for age, holding in sorted(enumerate(holdings), key=lambda item: item[1].start):
        if cluster and holding.start >= stop:
            yield cluster
            cluster = []
        cluster.append((age, holding))
        stop = max(stop, holding.stop)
    if cluster:
        yield cluster


def _shares_rows(cluster: Sequence[Holding]) -> bool:
    """Whether two holdings share a token and a site; sorted by start. Hosts that write disjoint sites share none."""
    reach: dict[SiteSet, int] = {}
    for holding in cluster:
        for sites, stop in reach.items():
            if holding.start < stop and (sites == holding.sites or not set(sites).isdisjoint(holding.sites)):
                return True
        reach[holding.sites] = max(reach.get(holding.sites, 0), holding.stop)
    return False


def _cut(cluster: Sequence[tuple[int, Holding]]) -> Iterator[Copies]:
    """Parts that lie in each of their holdings as a whole, so that any of them can stand in for another."""
    newest_first = [holding for _, holding in sorted(cluster, key=lambda item: -item[0])]
    borders = sorted({border for holding in newest_first for border in (holding.start, holding.stop)})
    for start, stop in pairwise(borders):
        there = [holding for holding in newest_first if holding.start <= start and stop <= holding.stop]
        owners: dict[tuple[int, ...], list[int]] = {}
        for site in sorted({site for holding in there for site in holding.sites}):
            key = tuple(place for place, holding in enumerate(there) if site in holding.sites)
            owners.setdefault(key, []).append(site)
        for places, sites in owners.items():
            yield Copies(start, stop, tuple(sites), tuple(there[place] for place in places))
