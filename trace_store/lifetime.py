"""How old data is, although the machine's clock may be wrong: the store's time goes on over restarts.

    ROOT/clock     the store's time a minute ago at most, and the pauses between its runs so far

Within a run time is counted by the monotonic clock. Between runs the wall clock is believed in one direction: the time
never goes back, so that what is written later is younger (a machine without a battery starts in 1970). Forward it may
be wrong as well (a year ahead until NTP answers), and nobody can tell that from a long pause. So a pause ages data by
no more than PAUSE_SHARE_MAX of the limit: a wrong clock releases nothing that was not almost due, and after a true
pause that is longer the data stays for longer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger("trace_store.lifetime")

CLOCK_FILE = "clock"

SAVE_S = 60.0

PAUSE_S_MIN = 10.0
"""Shorter pauses are not noted: 10 s are two thirds of what a pause may count under the shortest limit, 60 s."""

PAUSES_MAX = 1000

PAUSE_SHARE_MAX = 0.25
"""Share of the age limit that one pause counts at most."""

Pause = tuple[float, float]
"""From the last sign of life to the next start, in seconds of the store's time."""


@dataclass
class Lifetime:
    """Time at start and pauses before it, oldest first."""

    started: float
    pauses: list[Pause] = field(default_factory=list)


def begin(root: Path, wall: float, newest: float) -> Lifetime:
    """The store's time at a start.

    Args:
        wall: seconds since 1970 by the machine's clock.
        newest: time of the newest segment, 0 if there is none; counts where no clock file is.
    """
    last, pauses = newest, []
    try:
        saved = json.loads((root / CLOCK_FILE).read_text(encoding="utf-8"))
        last, pauses = float(saved["time"]), [(float(low), float(high)) for low, high in saved["pauses"]]
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("the clock file is not readable, ages count from the newest segment: %s", error)
    if wall < last:
        log.warning("the machine's clock is %.0f s behind the store's; the store's goes on", last - wall)
    elif last and wall - last > PAUSE_S_MIN:
        pauses.append((last, wall))
    return Lifetime(max(wall, last), pauses[-PAUSES_MAX:])


def last_sign(root: Path) -> float | None:
    """The store's time at the last sign of life of an earlier run; None if none is noted."""
    try:
        return float(json.loads((root / CLOCK_FILE).read_text(encoding="utf-8"))["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save(root: Path, now: float, pauses: Sequence[Pause]) -> None:
    """Note a sign of life. A disk that refuses it makes the next pause look longer, and that costs nothing."""
    path = root / CLOCK_FILE
    unfinished = path.with_suffix(".partial")
    with contextlib.suppress(OSError):
        unfinished.write_text(json.dumps({"time": now, "pauses": pauses}), encoding="utf-8")
        os.replace(unfinished, path)


def age(written_at: float, now: float, pauses: Sequence[Pause], age_s_max: float) -> float:
    """Seconds since a write, of each pause no more than PAUSE_SHARE_MAX of the limit."""
    counted = PAUSE_SHARE_MAX * age_s_max
    excess = sum(max(min(high, now) - max(low, written_at) - counted, 0.0) for low, high in pauses)
    return now - written_at - excess
