"""The block formats, and the checks of arrays that belong to one. The only source of block size and scale type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trace_store.codebook.scales import Bytes, Floats, e4m3_decode, e8m0_decode
from trace_store.errors import InvalidRequest


@dataclass(frozen=True)
class BlockFormat:
    """A way to group E2M1 codes under block scales.

    Attributes:
        name: what the functions of this package take as ``format``.
        block: elements that share a scale.
        scale: type of the block scale, ``e4m3`` or ``e8m0``.
    """

    name: str
    block: int
    scale: str

    @property
    def decode(self) -> Callable[[npt.ArrayLike], Floats]:
        """Block scale bytes to float32."""
        return e4m3_decode if self.scale == "e4m3" else e8m0_decode


FORMATS: dict[str, BlockFormat] = {
    f.name: f
    for f in (
        BlockFormat("nvfp4", 16, "e4m3"),
        BlockFormat("mxfp4", 32, "e8m0"),
        BlockFormat("mxfp4_block16", 16, "e8m0"),
    )
}


def block_format(name: object) -> BlockFormat:
    """The format called ``name``."""
    if not isinstance(name, str) or name not in FORMATS:
        raise InvalidRequest(f"format must be one of {sorted(FORMATS)}, got={name!r}", argument="format")
    return FORMATS[name]


def float_rows(x: Any, fmt: BlockFormat) -> npt.NDArray[Any]:
    """``x`` as an array [T, W] of a float type that float32 holds exactly; not yet converted."""
    rows = np.asarray(x)
    if rows.dtype not in (np.float32, np.float16) and rows.dtype.name != "bfloat16":
        raise InvalidRequest(f"x must be float32, float16 or bfloat16, dtype={rows.dtype}", argument="x")
    if rows.ndim != 2:
        raise InvalidRequest(f"x must have shape [T, W], shape={list(rows.shape)}", argument="x")
    if rows.shape[1] == 0 or rows.shape[1] % fmt.block:
        raise InvalidRequest(
            f"the width of x must be a multiple of the block, width={rows.shape[1]} block={fmt.block}", argument="x"
        )
    return rows


def byte_array(array: Any, argument: str, shape: tuple[int, ...]) -> Bytes:
    """``array`` if it is uint8 of exactly this shape."""
    checked = np.asarray(array)
    if checked.dtype != np.uint8:
        raise InvalidRequest(f"{argument} must be uint8, dtype={checked.dtype}", argument=argument)
    if checked.shape != shape:
        raise InvalidRequest(
            f"{argument} has the wrong shape, expected={list(shape)} got={list(checked.shape)}", argument=argument
        )
    return checked


def tensor_scale_rows(tensor_scale: Any, tokens: int) -> Floats:
    """``tensor_scale`` as float32 [1, 1] or [T, 1], ready to multiply block scales [T, W / block]."""
    scale = np.asarray(tensor_scale)
    if scale.dtype.kind not in "fiu":
        raise InvalidRequest(f"tensor_scale must be float32, dtype={scale.dtype}", argument="tensor_scale")
    if scale.shape not in ((), (1,), (tokens,)):
        raise InvalidRequest(
            f"tensor_scale must be a scalar or hold one value a token, tokens={tokens} shape={list(scale.shape)}",
            argument="tensor_scale",
        )
    return scale.astype(np.float32).reshape(-1, 1)


def total_scales(scales: Any, tensor_scale: Any, fmt: BlockFormat, tokens: int, width: int) -> Floats:
    """s = fp32(block scale) * tensor scale, rounded once, float32 [T, W / block].

    A product that is no finite number (NaN scale byte, NaN or infinite tensor scale, overflow) becomes NaN, so that the
    block ends as NaN and is never silently guided.
    """
    block_scales = fmt.decode(byte_array(scales, "scales", (tokens, width // fmt.block)))
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        total = block_scales * tensor_scale_rows(tensor_scale, tokens)
    total[~np.isfinite(total)] = np.nan
    return total
