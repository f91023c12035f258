"""Directory and segment names: one-to-one, harmless, in order."""

from __future__ import annotations

import re

from trace_store.naming import directory_name, segment_name


def test_fr29_every_name_gets_its_own_harmless_directory() -> None:
    names = [
        "a/b",
        "a-SEP-b",
        "a-b",
        "A-b",
        "e\u0301",
        "\u00e9",
        "x" * 512,
        "x" * 511 + "y",
        ".hidden",
        "manifest-1",
        "…",
    ]
    made = [directory_name(name) for name in names]
    assert len({name.casefold() for name in made}) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]{0,39}-[0-9a-f]{32}", name) for name in made)


def test_segments_sort_in_the_order_they_were_written() -> None:
    names = [segment_name(sequence, "e") for sequence in (0, 9, 10, 2**31)]
    assert names == sorted(names)
    assert segment_name(1, "a") != segment_name(1, "b")
