"""Time goes on over restarts, never back, and a pause ages data by no more than a quarter of the limit."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from trace_store.lifetime import CLOCK_FILE, PAUSES_MAX, Pause, age, begin, save

DAY = 86400.0
YEARS = 14 * 365 * DAY
LIMIT = 8 * DAY


def test_a_new_directory_starts_with_the_clock(tmp_path: Path) -> None:
    started = begin(tmp_path, 5e8, 0.0)
    assert (started.started, started.pauses) == (5e8, [])


def test_time_goes_on_over_a_restart(tmp_path: Path) -> None:
    save(tmp_path, 1000.0, [])
    assert begin(tmp_path, 1005.0, 900.0).pauses == []  # a short pause is none
    found = begin(tmp_path, 1500.0, 900.0)
    assert (found.started, found.pauses) == (1500.0, [(1000.0, 1500.0)])
    assert age(900.0, 1600.0, found.pauses, LIMIT) == 700.0


def test_a_clock_that_is_years_ahead_ages_nothing_by_more_than_a_quarter_of_the_limit(tmp_path: Path) -> None:
    wall, pauses, now = 1e9, list[Pause](), 0.0
    for life, offset in enumerate((0.0, YEARS, YEARS, 0.0, 0.0)):  # wrong, wrong again, right again
        save(tmp_path, now or wall, pauses)
        wall += 60.0
        found = begin(tmp_path, wall + offset, 0.0)
        assert found.started >= now  # later writes are younger
        now, pauses = found.started + 600.0, found.pauses
        wall += 600.0
        assert age(1e9 - DAY, now, pauses, LIMIT) <= DAY + (life + 1) * 660.0 + LIMIT / 4
        assert age(now - 100.0, now, pauses, LIMIT) == 100.0


def test_a_clock_that_starts_in_1970_makes_nothing_old_or_out_of_order(tmp_path: Path) -> None:
    save(tmp_path, 1e9, [])
    first = begin(tmp_path, 100.0, 1e9)
    assert (first.started, first.pauses) == (1e9, [])
    save(tmp_path, 1e9 + 50, first.pauses)
    second = begin(tmp_path, 1e9 + 200, 0.0)
    assert second.started == 1e9 + 200
    assert age(1e9 + 25, 1e9 + 200, second.pauses, LIMIT) == pytest.approx(175.0)


def test_a_write_within_a_pause_of_this_server_counts_the_rest_of_it() -> None:
    """Another server may have written to the partition meanwhile."""
    pauses = [(1000.0, 1000.0 + 4 * DAY)]
    assert age(1000.0 + 3 * DAY, 1000.0 + 5 * DAY, pauses, LIMIT) == 2 * DAY
    assert age(900.0, 1000.0 + 5 * DAY, pauses, LIMIT) == 100.0 + 3 * DAY


def test_without_a_readable_clock_file_the_newest_segment_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for content in (None, "", "{}", '{"time": "x", "pauses": []}', '{"time": 1, "pauses": [3]}'):
        if content is not None:
            (tmp_path / CLOCK_FILE).write_text(content)
        with caplog.at_level(logging.WARNING):
            found = begin(tmp_path, 1e9 + YEARS, 1e9)
        assert found.pauses == [(1e9, 1e9 + YEARS)]
    assert "not readable" in caplog.text


def test_the_file_stays_small_and_a_directory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    save(tmp_path, 1e9, [(float(n), n + 0.5) for n in range(2 * PAUSES_MAX)])
    assert len(begin(tmp_path, 1e9 + 100, 0.0).pauses) == PAUSES_MAX
    save(tmp_path / "gone", 1e9, [])
