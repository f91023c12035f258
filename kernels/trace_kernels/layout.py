"""Where engines keep codes and scales: the layouts that pack reads.

A shape never tells the layout, so it is an argument.

    layout        scales of row m, column s, with S columns, G = ceil(S / 4)
    linear        m * S + s, any row stride
    128x4         ((m / 128) * G + s / 4) * 512 + m % 32 * 16 + m / 32 % 4 * 4 + s % 4, rows padded to 128
    8x4           ((m / 8) * G + s / 4) * 32 + m % 8 * 4 + s % 4, rows padded to 8
    per_expert    refused: one token has other codes for each of its experts, so (token, site) is no key

Producers: linear is FlashInfer's and SGLang's before a TRT-LLM MoE kernel; 128x4 is the default of vLLM's
scaled_fp4_quant and FlashInfer's fp4_quantize; 8x4 is FlashInfer's for small batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from trace_store.errors import InvalidRequest

LAYOUTS = {"linear": 0, "128x4": 1, "8x4": 2}
"""Scale layouts by name, with the number that pack.cu uses."""

INTERLEAVED_V = 3
"""vLLM's V scales on sm_100: linear within a page but for groups of four tokens."""

ROW_PADDING = {"128x4": 128, "8x4": 8}
"""Rows that a swizzled buffer is padded to."""


def layout_number(layout: str) -> int:
    """Number of a scale layout; refuses what cannot be recorded."""
    if layout == "per_expert":
        raise InvalidRequest(
            "per-expert scales give a token one set of codes per expert, so a record has no key for them: quantize "
            "with the maximum shared by all experts, layout=per_expert",
            argument="layout",
        )
    if layout not in LAYOUTS:
        raise InvalidRequest(f"layout must be one of {sorted(LAYOUTS)}, got={layout!r}", argument="layout")
    return LAYOUTS[layout]


def swizzled_bytes(layout: str, rows: int, columns: int) -> int:
    """Bytes of a swizzled scale buffer, padding included."""
    padding = ROW_PADDING[layout]
    return -(-rows // padding) * padding * (-(-columns // 4) * 4)


@dataclass(frozen=True)
class KVPage:
    """One half, K or V, of a paged FP4 KV cache. Offsets and strides are in bytes.

    A token slot is page * block_size + position in the page. ``interleaved`` marks vLLM's V scales on sm_100: with
    S = head_dim / 16 the scale s of token t is stored at token t / 4 * 4 + s / (S / 4), column s % (S / 4) * 4 + t % 4.
    """

    block_size: int
    heads: int
    head_dim: int
    page_bytes: int
    code_offset: int
    scale_offset: int
    token_major: bool
    interleaved: bool = False

    def strides(self, head_bytes: int) -> tuple[int, int]:
        """Byte strides (token, head) of a region with ``head_bytes`` bytes per token and head."""
        if self.token_major:
            return self.heads * head_bytes, head_bytes
        return head_bytes, self.block_size * head_bytes


def vllm_kv_page(half: str, *, block_size: int, heads: int, head_dim: int, order: str, architecture: str) -> KVPage:
    """vLLM's ``--kv-cache-dtype nvfp4`` page.

    sm_100 keeps [K codes | K scales | V codes | V scales] with V scales interleaved; sm_120 keeps
    [K codes | V codes | K scales | V scales] and interleaves nothing.

    Args:
        half: ``k`` or ``v``.
        block_size: tokens of a page, a multiple of 4.
        heads: KV heads of this rank.
        head_dim: elements of a head, a multiple of 64.
        order: ``nhd`` (token before head) or ``hnd``.
        architecture: ``sm_100`` or ``sm_120``, as the engine ran.
    """
    for argument, value, allowed in (
        ("half", half, ("k", "v")),
        ("order", order, ("nhd", "hnd")),
        ("architecture", architecture, ("sm_100", "sm_120")),
    ):
        if value not in allowed:
            raise InvalidRequest(f"{argument} must be one of {list(allowed)}, got={value!r}", argument=argument)
    if block_size % 4 or head_dim % 64 or block_size <= 0 or heads <= 0 or head_dim <= 0:
        raise InvalidRequest(
            f"a page has a block_size in fours and a head_dim in 64s, block_size={block_size} head_dim={head_dim}",
            argument="block_size",
        )
    codes = block_size * heads * head_dim // 2
    scales = block_size * heads * head_dim // 16
    second = half == "v"
    if architecture == "sm_100":
        code_offset = (codes + scales) if second else 0
        scale_offset = code_offset + codes
    else:
        code_offset = codes if second else 0
        scale_offset = 2 * codes + (scales if second else 0)
    return KVPage(
        block_size,
        heads,
        head_dim,
        2 * (codes + scales),
        code_offset,
        scale_offset,
        token_major=order == "nhd",
        interleaved=second and architecture == "sm_100",
    )
