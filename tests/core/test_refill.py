"""Rows that replace lost ones of a sealed attempt are written so that they count after a restart too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trace_store import Site, TokenSpan
from trace_store.engine import Engine
from trace_store.testing.reads import read_slices
from trace_store.testing.records import make_chunk

TABLE = (Site(0, "k", 64), Site(0, "v", 64))
TOKENS = 40


def missing(engine: Engine) -> list[Any]:
    return read_slices(engine, "run", "p", TokenSpan("t", 0, TOKENS), (0, 1))[1]


def test_a_refill_that_fills_its_segment_stays_with_the_rows_that_say_what_it_knew(tmp_path: Path) -> None:
    chunk = make_chunk("run", "p", TABLE, "t", 0, TOKENS)
    engine = Engine(tmp_path, "a")
    engine.register("run", TABLE)
    engine.append("run", "p", chunk).result(30)
    engine.close()
    engine = Engine(tmp_path, "a")
    engine.seal("run", "p", "t", tokens=TOKENS + 1, prompt_tokens=0).result(30)
    engine.close()
    min(tmp_path.glob("runs/*/*/*.arrow")).unlink()
    engine = Engine(tmp_path, "a")
    assert missing(engine)
    engine.append("run", "p", make_chunk("run", "p", TABLE, "other", 0, 4)).result(30)
    tail = next(iter(engine._shard._open.values()))
    engine._shard._segment_bytes_max = tail.writer.written_bytes + 1
    engine.append("run", "p", chunk).result(30)
    assert missing(engine) == []
    engine.close()
    engine = Engine(tmp_path, "a")
    assert missing(engine) == []
    engine.close()
