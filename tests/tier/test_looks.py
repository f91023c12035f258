"""What is known of a place while and after somebody looks."""

from __future__ import annotations

from trace_store.tier.looks import LOOK_SLOW_S, Looks

PLACE = ("run", "partition")


def test_a_quick_look_does_not_answer_for_one_that_hangs() -> None:
    now = [0.0]
    looks = Looks(lambda: now[0])
    hanging = looks.begin(PLACE)
    now[0] = 5 * LOOK_SLOW_S
    assert looks.doubt(PLACE)
    quick = looks.begin(PLACE)
    looks.end(PLACE, quick, "", False)
    assert looks.doubt(PLACE), "the other one has still not been answered"
    looks.end(PLACE, hanging, "")
    assert not looks.doubt(PLACE)


def test_a_look_that_failed_is_in_doubt_until_one_lists() -> None:
    looks = Looks(lambda: 0.0)
    looks.end(PLACE, looks.begin(PLACE), "refused")
    looks.end(PLACE, looks.begin(PLACE), "", False)
    assert looks.doubt(PLACE) == "refused"
    looks.end(PLACE, looks.begin(PLACE), "")
    assert not looks.doubt(PLACE)
