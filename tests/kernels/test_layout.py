"""Layouts of engines: the formulas, and what is refused. The host's functions are the reference of the GPU tests."""

from __future__ import annotations

import numpy as np
import pytest

from trace_kernels import host
from trace_kernels.layout import layout_number, vllm_kv_page
from trace_store.errors import InvalidRequest


@pytest.mark.parametrize("layout", ["linear", "128x4", "8x4"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 342), (128, 128), (130, 6), (257, 4)])
def test_swizzling_round_trips_and_pads_with_what_is_asked(layout: str, rows: int, columns: int) -> None:
    scales = np.random.default_rng(0).integers(1, 255, (rows, columns), dtype=np.uint8)
    held = host.swizzle(scales, layout, padding=0)
    np.testing.assert_array_equal(host.unswizzle(held, layout, rows, columns), scales)
    assert np.count_nonzero(held) == scales.size
    if layout == "128x4":
        assert held.size == -(-rows // 128) * 128 * (-(-columns // 4) * 4)


def test_known_offsets_of_swizzled_scales() -> None:
    at = host.scale_offsets("128x4", 256, 8)
    assert at[0, :4].tolist() == [0, 1, 2, 3]
    assert (at[1, 0], at[32, 0], at[127, 3], at[0, 4], at[128, 0]) == (16, 4, 31 * 16 + 3 * 4 + 3, 512, 1024)
    at = host.scale_offsets("8x4", 16, 8)
    assert (at[1, 0], at[7, 3], at[0, 4], at[8, 0]) == (4, 31, 32, 64)


def test_short_swizzled_buffers_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="needed=512"):
        host.unswizzle(np.zeros(511, np.uint8), "128x4", 100, 4)


def test_per_expert_scales_are_refused_with_the_remedy() -> None:
    with pytest.raises(InvalidRequest, match="shared by all experts"):
        layout_number("per_expert")
    with pytest.raises(InvalidRequest, match="linear"):
        layout_number("swizzled")


def test_vllm_pages_of_both_architectures() -> None:
    args = {"block_size": 16, "heads": 2, "head_dim": 64, "order": "nhd"}
    codes, scales = 16 * 2 * 32, 16 * 2 * 4
    k, v = (vllm_kv_page(half, architecture="sm_100", **args) for half in "kv")  # type: ignore[arg-type]
    assert (k.code_offset, k.scale_offset, v.code_offset, v.scale_offset) == (
        0, codes, codes + scales, 2 * codes + scales,
    )  # fmt: skip
    assert (k.interleaved, v.interleaved) == (False, True)
    k, v = (vllm_kv_page(half, architecture="sm_120", **args) for half in "kv")  # type: ignore[arg-type]
    assert (k.code_offset, v.code_offset, k.scale_offset, v.scale_offset) == (0, codes, 2 * codes, 2 * codes + scales)
    assert not v.interleaved
    assert k.page_bytes == 2 * (codes + scales)


def test_interleaving_is_a_permutation_within_four_tokens() -> None:
    page = vllm_kv_page("v", block_size=8, heads=1, head_dim=128, order="nhd", architecture="sm_100")
    cache = np.zeros((1, page.page_bytes), np.uint8)
    region = cache[0, page.scale_offset : page.scale_offset + 64]
    region[:] = np.arange(64)
    _, scales = host.page_rows(cache, page, np.arange(8))
    assert sorted(scales.ravel().tolist()) == list(range(64))
    # Token 1, scale 0 sits at token 0, column 1; token 1, scale 2 at token 1, column 1.
    assert (scales[1, 0], scales[1, 2], scales[4, 0]) == (1, 8 + 1, 32)
    assert set((scales[:4] // 32).ravel().tolist()) == {0}


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"half": "q"}, "half"),
        ({"order": "dnh"}, "order"),
        ({"architecture": "sm_90"}, "architecture"),
        ({"block_size": 6}, "block_size"),
        ({"head_dim": 80}, "block_size"),
    ],
)
def test_impossible_pages_are_refused(change: dict[str, object], argument: str) -> None:
    args = {"half": "k", "block_size": 16, "heads": 2, "head_dim": 64, "order": "nhd", "architecture": "sm_100"}
    with pytest.raises(InvalidRequest) as caught:
        vllm_kv_page(**{**args, **change})  # type: ignore[arg-type]
    assert caught.value.argument == argument
