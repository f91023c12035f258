"""Fixtures of the core tests: an engine on a temporary directory, and what a read of it must give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trace_store import Site, TokenSpan
from trace_store.chunk import Chunk
from trace_store.engine import Engine
from trace_store.planner import Missing, MissingReason
from trace_store.record import Receipt
from trace_store.testing.reads import read_gathered, read_slices
from trace_store.testing.records import make_chunk, make_rows

TABLE = (
    Site(0, "k", 64),
    Site(0, "v", 64, form="full"),
    Site(1, "moe_in", 128, form="b2"),
    Site(2, "moe_in", 64, block=32, scale="e8m0"),
)
SITES = range(len(TABLE))
RUN, PARTITION = "run", "step-1"


class Store:
    """An engine and its directory; rows are those of ``trace_store.testing.records``."""

    table = TABLE

    def __init__(self, root: Path) -> None:
        self.root = root
        self.engine = Engine(root, server="test")
        self.engine.register(RUN, TABLE)

    def chunk(self, trajectory: str, start: int, stop: int, **more: Any) -> Chunk:
        return make_chunk(RUN, more.pop("partition", PARTITION), TABLE, trajectory, start, stop, **more)

    def append(self, trajectory: str, start: int, stop: int, *, durability: str = "synced", **more: Any) -> Any:
        partition = more.get("partition", PARTITION)
        chunk = self.chunk(trajectory, start, stop, **more)
        return self.engine.append(RUN, partition, chunk, durability).result(30)

    def seal(self, trajectory: str, tokens: int, prompt_tokens: int = 0, **more: Any) -> Receipt:
        partition = more.pop("partition", PARTITION)
        return self.engine.seal(RUN, partition, trajectory, tokens=tokens, prompt_tokens=prompt_tokens, **more).result(
            30
        )

    def read(
        self, trajectory: str, start: int, stop: int, sites: Sequence[int] = SITES, **more: Any
    ) -> tuple[dict[int, Any], list[Missing]]:
        """Rows by site as (token positions, codes, scales, tensor scales), and what is missing; read in both ways."""
        partition = more.pop("partition", PARTITION)
        span = TokenSpan(trajectory, start, stop)
        rows, missing = read_slices(self.engine, RUN, partition, span, list(sites), **more)
        again, also_missing = read_gathered(self.engine, RUN, partition, span, list(sites), **more)
        if not more.get("include_open"):  # an open trajectory may have grown in between
            assert again == rows
            assert set(also_missing) == set(missing)
        found: dict[int, Any] = {}
        for number in {site for site, _ in rows}:
            mine = sorted((token, *parts) for (site, token), parts in rows.items() if site == number)
            found[number] = (
                np.array([row[0] for row in mine]),
                *(np.array([np.frombuffer(row[column], np.uint8) for row in mine]) for column in (1, 2)),
                np.array([row[3] for row in mine], np.float32),
            )
        return found, missing

    def check(
        self, trajectory: str, start: int, stop: int, *, attempt: int = 0, seed: int = 0, **more: Any
    ) -> list[Missing]:
        """Read and compare every delivered row; each row comes once or is missing once. Returns what is missing."""
        sites = list(more.get("sites", SITES))
        rows, missing = self.read(trajectory, start, stop, **more)
        for number in sites:
            given = [position for gap in missing if gap.site == number for position in range(gap.start, gap.stop)]
            if number in rows:
                positions = rows[number][0]
                given += positions.tolist()
                wanted = make_rows(TABLE[number], number, trajectory, attempt, start, stop, seed=seed)
                for got, want in zip(rows[number][1:], wanted, strict=True):
                    np.testing.assert_array_equal(got, want[positions - start])
            assert sorted(given) == list(range(start, stop)), f"site={number}"
        return missing

    def reasons(self, trajectory: str, start: int, stop: int, **more: Any) -> set[MissingReason]:
        return {gap.reason for gap in self.check(trajectory, start, stop, **more)}

    def reopen(self) -> None:
        self.engine.close()
        self.engine = Engine(self.root, server="test")

    def segments(self, suffix: str = ".arrow") -> list[Path]:
        return sorted(p for p in (self.root / "runs").rglob("*" + suffix) if not p.name.startswith("manifest-"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "data")
    yield made
    made.engine.close()


@pytest.fixture
def open_store() -> Iterator[Callable[[Path], Store]]:
    """Opens further stores; closed at the end."""
    opened: list[Store] = []

    def open_(root: Path) -> Store:
        opened.append(Store(root))
        return opened[-1]

    yield open_
    for made in opened:
        made.engine.close()
