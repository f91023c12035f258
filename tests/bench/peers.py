"""Guided rounding (NVFP4, one bit, rule paper) as a torch user would write it, for comparison of speed.

``eager_guided`` is plain tensor code, ``compiled_guided`` the same under torch.compile, ``triton_guided`` a Triton
kernel with the same comparisons. All follow the arithmetic of ``trace_store.codebook`` for ordinary values.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@cache
def _on(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The grid and the bit numbers, made before a graph captures their use."""
    return torch.tensor(_GRID, device=device), torch.arange(8, device=device, dtype=torch.uint8)


def eager_guided(x: torch.Tensor, planes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x [T, W] bfloat16 with planes uint8 [T, 1, W / 8] and E4M3 scales uint8 [T, W / 16]."""
    return _guide(x, planes, scales, *_on(x.device))


def _guide(
    x: torch.Tensor, planes: torch.Tensor, scales: torch.Tensor, grid: torch.Tensor, shifts: torch.Tensor
) -> torch.Tensor:
    rows, width = x.shape
    s = scales.view(torch.float8_e4m3fn).float()
    z = (x.float().view(rows, -1, 16) * (1.0 / s)[:, :, None]).view(rows, width)
    a = z.abs()
    lower = sum((a >= v).to(torch.int8) for v in _GRID[1:7])
    bit = ((planes[:, 0, :, None] >> shifts) & 1).view(rows, width)
    band = (bit == 1) & (((lower == 4) & (a < 2.25)) | ((lower == 6) & (a < 4.5)))
    inside = (a > grid[lower.long()]) | (lower == 0)
    up = ((lower & 1) != bit) & inside & ~band
    y = grid[(lower + up).long()].view(rows, -1, 16) * s[:, :, None]
    return torch.where(x == 0, 0.0, torch.copysign(y.view(rows, width), z)).to(x.dtype)


@torch.compile
def _compiled(x: torch.Tensor, planes: torch.Tensor, scales: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
    return _guide(x, planes, scales, *tables)


def compiled_guided(x: torch.Tensor, planes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """As ``eager_guided``, compiled."""
    return _compiled(x, planes, scales, *_on(x.device))


@triton.jit
def _guided(x_ptr, y_ptr, planes_ptr, scales_ptr, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = offsets < count
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    byte = tl.load(planes_ptr + offsets // 8, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales_ptr + offsets // 16, mask=inside, other=0).to(tl.int32)
    s = ((scale & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    z = x * tl.div_rn(1.0, s)
    a = tl.abs(z)
    bit = (byte >> (offsets % 8)) & 1
    first = tl.where(a > 1.0, 1.5, 0.5)
    odd = tl.where(a >= 4.5, 6.0, tl.where(a >= 2.25, 3.0, first))
    even = tl.where(a > 3.0, 4.0, tl.where(a > 1.5, 2.0, tl.where(a > 0.5, 1.0, 0.0)))
    low = tl.where(a >= 1.0, 1.0, tl.where(a >= 0.5, 0.5, 0.0))
    low = tl.where(a >= 2.0, 2.0, tl.where(a >= 1.5, 1.5, low))
    low = tl.where(a >= 4.0, 4.0, tl.where(a >= 3.0, 3.0, low))
    v = tl.maximum(low, tl.where(bit == 1, odd, even)) * s
    # A product, because Triton negates by subtracting from 0, which loses the sign of a zero.
    y = tl.where(x == 0.0, 0.0, v * tl.where(z < 0.0, -1.0, 1.0))
    tl.store(y_ptr + offsets, y.to(tl.bfloat16), mask=inside)


def triton_guided(x: torch.Tensor, planes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """As ``eager_guided``."""
    y = torch.empty_like(x)
    size = 2048
    _guided[(triton.cdiv(x.numel(), size),)](x, y, planes, scales, x.numel(), SIZE=size)
    return y
