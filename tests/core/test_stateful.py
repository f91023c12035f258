"""Random operations on the engine against a model of a few lines, with crash and reopen among them.

A crash is a copy of the directory taken while the engine is open: what a killed process leaves in the page cache. A
torn crash also cuts the open segment at a random byte; the model then is what it was when the segment last ended before
that.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from trace_store import Site, TokenSpan
from trace_store.checksum import RowKind
from trace_store.engine import Engine
from trace_store.errors import Conflict, Incomplete, InvalidRequest, Sealed, StaleAttempt, TraceStoreError
from trace_store.naming import directory_name
from trace_store.planner import MissingReason
from trace_store.testing.reads import read_gathered, read_slices
from trace_store.testing.records import make_chunk, make_rows

TABLE = (Site(0, "k", 16), Site(0, "moe_in", 16, form="full"), Site(1, "moe_in", 32, block=32, scale="e8m0"))
PARTITIONS, TRAJECTORIES, TOKENS = ("p", "q"), ("a", "b"), 10

Rows = dict[tuple[int, int], int]
"""(site, token) -> seed of its content."""


@dataclass
class ModelAttempt:
    rows: Rows = field(default_factory=dict)
    sealed: tuple[int, int] | None = None


@dataclass
class ModelTrajectory:
    attempts: dict[int, ModelAttempt] = field(default_factory=dict)
    visible: int | None = None

    @property
    def newest(self) -> int:
        return max(self.attempts, default=-1)


@dataclass
class ModelPartition:
    """What the engine must say, in plain words of Python."""

    trajectories: dict[str, ModelTrajectory] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)

    def append(self, name: str, attempt: int, rows: Rows) -> set[type[TraceStoreError]]:
        """Apply; the errors one of which must be raised, none when it is taken."""
        entry = self.trajectories.get(name, ModelTrajectory())
        if attempt < entry.newest:
            return {StaleAttempt}
        found = entry.attempts.get(attempt, ModelAttempt())
        errors: set[type[TraceStoreError]] = set()
        if any(found.rows.get(key, seed) != seed for key, seed in rows.items()):
            errors.add(Conflict)
        if found.sealed is not None and set(rows) - set(found.rows):
            errors.add(Sealed)
        if not errors:
            self._open(name, attempt).rows.update(rows)
            self.released.discard(name)
        return errors

    def seal(self, name: str, attempt: int, tokens: int, prompt: int, allow_holes: bool) -> set[type[TraceStoreError]]:
        entry = self.trajectories.get(name, ModelTrajectory())
        if attempt < entry.newest:
            return {StaleAttempt}
        found = entry.attempts.get(attempt, ModelAttempt())
        if found.sealed not in (None, (tokens, prompt)):
            return {Conflict}
        if max((token for _, token in found.rows), default=-1) >= tokens:
            return {InvalidRequest}
        wanted = {
            (number, token)
            for number, site in enumerate(TABLE)
            for token in range(0 if site.kind == "k" else prompt, tokens - 1)
        }
        if wanted - set(found.rows) and not allow_holes:
            return {Incomplete}
        self._open(name, attempt).sealed = (tokens, prompt)
        self.trajectories[name].visible = attempt
        return set()

    def _open(self, name: str, attempt: int) -> ModelAttempt:
        entry = self.trajectories.setdefault(name, ModelTrajectory())
        if attempt not in entry.attempts:
            entry.attempts = {n: a for n, a in entry.attempts.items() if n == entry.visible}
        return entry.attempts.setdefault(attempt, ModelAttempt())

    def release(self, names: list[str]) -> int:
        there = [name for name in names if self.trajectories.pop(name, None) is not None]
        self.released.update(there)
        return len(there)

    def expect(self, name: str, include_open: bool) -> tuple[int, Rows] | MissingReason:
        entry = self.trajectories.get(name)
        if entry is None:
            return MissingReason.RELEASED if name in self.released else MissingReason.UNKNOWN_TRAJECTORY
        number = entry.newest if include_open else entry.visible
        return MissingReason.NOT_SEALED if number is None else (number, entry.attempts[number].rows)


def check_engine(engine: Engine, partition: str, model: ModelPartition) -> None:
    """Read everything, visible and open, and compare."""
    for name in TRAJECTORIES:
        for include_open in (False, True):
            expected = model.expect(name, include_open)
            span = TokenSpan(name, 0, TOKENS + 2)
            got, gaps = read_slices(engine, "run", partition, span, range(3), include_open=include_open)
            assert (got, gaps) == read_gathered(engine, "run", partition, span, range(3), include_open=include_open)
            missing = {(gap.site, token): gap.reason for gap in gaps for token in range(gap.start, gap.stop)}
            everything = {(site, token) for site in range(3) for token in range(TOKENS + 2)}
            assert len(missing) + len(got) == len(everything)
            if isinstance(expected, MissingReason):
                # Of a partition released as a whole the engine remembers that until its next start.
                gone = {MissingReason.RELEASED} if expected == MissingReason.UNKNOWN_TRAJECTORY else set()
                assert set(missing.values()) <= {expected} | gone
                continue
            number, rows = expected
            assert set(got) == set(rows)
            assert set(missing.values()) <= {MissingReason.NOT_RECORDED}
            for (site, token), parts in got.items():
                wanted = make_rows(TABLE[site], site, name, number, token, token + 1, seed=rows[(site, token)])
                assert parts == (wanted[0].tobytes(), wanted[1].tobytes(), float(wanted[2][0]))


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="trace-store-stateful-"))
        self.copies = 0
        self.model = {name: ModelPartition() for name in PARTITIONS}
        self.states: dict[str, tuple[str, list[tuple[int, ModelPartition]]]] = {}
        """By partition: its open segment, and (its size, model) after each operation on it."""
        self.spoiled: set[str] = set()
        """Segments with a damaged record, or with one that stands in for it: cut short they would lose it."""

    @initialize()
    def start(self) -> None:
        self.engine = Engine(self.root / "0", server="s")
        self.engine.register("run", TABLE)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()
        shutil.rmtree(self.root, ignore_errors=True)  # a released directory may be on its way out

    def _answer(self, future: Any, errors: set[type[TraceStoreError]]) -> Any:
        error = future.exception(30)
        assert (type(error) in errors) if errors else (error is None), (error, errors)
        return None if error else future.result()

    def _note(self, partition: str, before: ModelPartition) -> None:
        """Remember what the model was when the open segment of a partition had its present size."""
        found = self._open_segment(partition)
        if found is None:
            self.states.pop(partition, None)
            return
        name, states = self.states.get(partition, ("", []))
        if name != found.name:
            states = [(0, before)]
        states.append((found.stat().st_size, copy.deepcopy(self.model[partition])))
        self.states[partition] = (found.name, states)

    def _open_segment(self, partition: str) -> Path | None:
        directory = self._root / "runs" / directory_name("run") / directory_name(partition)
        return next(directory.glob("*.open"), None)

    @property
    def _root(self) -> Path:
        return self.root / str(self.copies)

    # -- operations

    @rule(
        partition=st.sampled_from(PARTITIONS),
        name=st.sampled_from(TRAJECTORIES),
        attempt=st.sampled_from([0, 0, 0, 1, 2]),
        start=st.integers(0, TOKENS - 1),
        length=st.integers(1, TOKENS),
        sites=st.sampled_from([(0, 1, 2), (0, 1, 2), (0,), (2, 1)]),
        seed=st.sampled_from([0, 0, 0, 1]),
        durability=st.sampled_from(["written", "synced"]),
    )
    def append(
        self, partition: str, name: str, attempt: int, start: int, length: int, sites: Any, seed: int, durability: str
    ) -> None:
        stop = min(start + length, TOKENS)
        rows = {(site, token): seed for site in sites for token in range(start, stop)}
        before = copy.deepcopy(self.model[partition])
        held = before.trajectories.get(name, ModelTrajectory()).attempts.get(attempt, ModelAttempt()).rows
        errors = self.model[partition].append(name, attempt, rows)
        chunk = make_chunk("run", partition, TABLE, name, start, stop, sites=sites, attempt=attempt, seed=seed)
        result = self._answer(self.engine.append("run", partition, chunk, durability), errors)
        if result is not None:
            new = set(rows) - set(held)
            assert result.duplicates == sum(all((s, t) in held for t in range(start, stop)) for s in sites)
            assert result.stored == sum(
                (s, t) in new and (s, t - 1) not in new for s in sites for t in range(start, stop)
            )
        self._note(partition, before)

    @rule(
        partition=st.sampled_from(PARTITIONS),
        name=st.sampled_from(TRAJECTORIES),
        attempt=st.sampled_from([0, 0, 1, 2]),
        tokens=st.integers(1, TOKENS + 1),
        prompt=st.integers(0, 3),
        allow_holes=st.booleans(),
    )
    def seal(self, partition: str, name: str, attempt: int, tokens: int, prompt: int, allow_holes: bool) -> None:
        prompt = min(prompt, tokens)
        before = copy.deepcopy(self.model[partition])
        errors = self.model[partition].seal(name, attempt, tokens, prompt, allow_holes)
        future = self.engine.seal(
            "run", partition, name, tokens=tokens, prompt_tokens=prompt, attempt=attempt, allow_holes=allow_holes
        )
        receipt = self._answer(future, errors)
        if receipt is not None:
            assert receipt.durability == "synced"
        self._note(partition, before)

    @rule(partition=st.sampled_from(PARTITIONS), names=st.lists(st.sampled_from(TRAJECTORIES), unique=True))
    def release_trajectories(self, partition: str, names: list[str]) -> None:
        before = copy.deepcopy(self.model[partition])
        count = self.model[partition].release(names)
        assert self.engine.release("run", partition, names).result(30) == count
        self._note(partition, before)

    @rule(partition=st.sampled_from(PARTITIONS))
    def release_partition(self, partition: str) -> None:
        count = len(self.model[partition].trajectories)
        assert self.engine.release("run", partition).result(30) == count
        self.model[partition] = ModelPartition()
        self.states.pop(partition, None)

    @rule(partition=st.sampled_from(PARTITIONS), choice=st.integers(0, 1000))
    def damage_and_send_again(self, partition: str, choice: int) -> None:
        """The disk spoils a record, and its writer sends it again: nothing that was promised changes."""
        found = self._records(partition)
        if not found:
            return
        path, offset, name, attempt, site, start, stop = found[choice % len(found)]
        with open(path, "r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))
        self.spoiled.add(path.stem)
        seed = self.model[partition].trajectories[name].attempts[attempt].rows[(site, start)]
        chunk = make_chunk("run", partition, TABLE, name, start, stop, sites=(site,), attempt=attempt, seed=seed)
        result = self.engine.append("run", partition, chunk, "synced").result(30)
        assert result.stored <= 1  # none if it had been stored again before
        open_segment = self._open_segment(partition)
        if open_segment is not None:
            self.spoiled.add(open_segment.stem)

    def _records(self, partition: str) -> list[tuple[Path, int, str, int, int, int, int]]:
        """Records of newest attempts on the disk: file, place of the codes, trajectory, attempt, site, span."""
        held = self.engine.snapshot_runs()[0].partitions.get(partition)
        newest = {name: entry.newest for name, entry in self.model[partition].trajectories.items()}
        found = []
        for segment in held.segments.values() if held is not None else ():
            for row in segment.index.rows[segment.index.rows["kind"] == RowKind.RECORD]:
                name = segment.index.trajectories[int(row["trajectory"])]
                span = (int(row["site"]), int(row["start"]), int(row["stop"]))
                if newest.get(name) == row["attempt"] and span in self._held(held, segment.number, name):
                    found.append((segment.path, int(row["codes_offset"]), name, int(row["attempt"]), *span))
        return sorted(found, key=lambda item: (item[0].name, item[1]))

    @staticmethod
    def _held(partition: Any, segment: int, name: str) -> set[tuple[int, int, int]]:
        """Sites and spans of the newest attempt that a segment has: not those from before a release."""
        attempt = partition.trajectories[name].newest
        holdings = (h for h in attempt.overlapping(0, TOKENS + 2) if h.segment == segment)
        return {(site, h.start, h.stop) for h in holdings for site in h.sites}

    @rule()
    def roll(self) -> None:
        self.engine.roll().result(30)
        self.states.clear()

    @rule()
    def reopen(self) -> None:
        self.engine.close()
        self.engine = Engine(self._root, server="s")
        self.states.clear()

    @rule()
    def crash(self) -> None:
        old, source = self.engine, self._root
        self.copies += 1
        shutil.copytree(source, self._root, ignore=shutil.ignore_patterns(".released-*"))
        self.engine = Engine(self._root, server="s")
        old.close()
        self.states.clear()

    @rule(partition=st.sampled_from(PARTITIONS), share=st.floats(0, 1))
    def torn_crash(self, partition: str, share: float) -> None:
        segment = self._open_segment(partition)
        if segment is None or partition not in self.states or segment.stem in self.spoiled:
            return
        states = self.states[partition][1]
        target = self.root / "torn"
        shutil.copytree(self._root, target, ignore=shutil.ignore_patterns(".released-*"))
        cut = int(share * segment.stat().st_size)
        with open(target / segment.relative_to(self._root), "r+b") as file:
            file.truncate(cut)
        engine = Engine(target, server="s")
        try:
            check_engine(engine, partition, next(model for size, model in reversed(states) if size <= cut))
            for other in set(PARTITIONS) - {partition}:
                check_engine(engine, other, self.model[other])
        finally:
            engine.close()
            shutil.rmtree(target, ignore_errors=True)

    @invariant()
    def reads_agree(self) -> None:
        if hasattr(self, "engine"):
            for partition in PARTITIONS:
                check_engine(self.engine, partition, self.model[partition])


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
