"""Bytes that are filled after they are made."""

from __future__ import annotations

import gc

import pytest

from trace_store.fresh import fresh_bytes


@pytest.mark.parametrize("size", [2, 7, 4096, (1 << 20) + 3])
def test_what_is_written_to_the_view_is_in_the_bytes(size: int) -> None:
    made, view = fresh_bytes(size)
    expected = bytes(position % 251 for position in range(size))
    view[:] = expected
    del view
    assert made == expected
    assert hash(made) == hash(expected)


def test_each_has_memory_of_its_own() -> None:
    several = [fresh_bytes(1000) for _ in range(50)]
    for number, (_, view) in enumerate(several):
        view[:] = bytes([number]) * 1000
    made = [item for item, _ in several]
    del several
    gc.collect()
    assert made == [bytes([number]) * 1000 for number in range(50)]


@pytest.mark.parametrize("size", [-1, 0, 1])
def test_shared_bytes_are_never_handed_out(size: int) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        fresh_bytes(size)
