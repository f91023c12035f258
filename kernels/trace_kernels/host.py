"""The operations on NumPy arrays: what CPU tensors get, and the reference that the GPU tests compare with.

Rounding and quantizing are ``trace_store.codebook``; layouts are written out here from their index formulas, element by
element as ``trace_kernels.layout`` states them. Arguments are taken as the ``check`` functions of the kernels' modules
let them pass; ``pack`` calls its own. Indices, which a kernel cannot check, are checked here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trace_kernels.discrepancy import SUMS
from trace_kernels.layout import ROW_PADDING, KVPage, layout_number, swizzled_bytes
from trace_kernels.pack import PackSite, check
from trace_store import codebook
from trace_store.errors import InvalidRequest

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[Any]


def guided_round(
    x: npt.NDArray[Any],
    planes: Bytes,
    scales: Bytes,
    tensor_scale: Floats,
    valid: npt.NDArray[np.bool_] | None,
    *,
    record_rows: Indices | None = None,
    format: str,
    bits: int,
    rule: str,
    native_tensor_scale: float | None = None,
) -> Floats:
    """``codebook.guided_round`` where a row has a record, ``codebook.native_round`` elsewhere; float32 [T, W]."""
    guided = np.ones(len(x), dtype=bool) if valid is None else valid.astype(bool)
    if record_rows is not None:
        guided = guided & (record_rows >= 0)
        _within(record_rows[guided], len(scales), "record_rows")
        rows = np.where(guided, record_rows, 0)
        planes, scales = planes[rows], scales[rows]
        tensor_scale = tensor_scale[rows] if tensor_scale.size > 1 else tensor_scale
    if guided.all():
        return codebook.guided_round(x, planes, scales, tensor_scale, format=format, bits=bits, rule=rule)
    per_row = np.broadcast_to(tensor_scale, len(x))
    out = np.empty(x.shape, dtype=np.float32)
    out[guided] = codebook.guided_round(
        x[guided], planes[guided], scales[guided], per_row[guided], format=format, bits=bits, rule=rule
    )
    out[~guided] = codebook.native_round(x[~guided], format=format, tensor_scale=native_tensor_scale)
    return out


def quantize(x: npt.NDArray[Any], tensor_scale: Any, *, format: str, bits: int) -> tuple[Bytes, Bytes, Floats]:
    """Record rows of ``codebook.quantize``: (planes or whole codes, scales, decode scale [1] or [T])."""
    codes, scales, decode = codebook.quantize(x, format=format, tensor_scale=tensor_scale)
    planes = codebook.pack_full(codes) if bits == 4 else codebook.pack(codes, bits=bits)
    return planes, scales, np.atleast_1d(np.asarray(decode, dtype=np.float32))


def scale_offsets(layout: str, rows: int, columns: int) -> npt.NDArray[np.int64]:
    """Byte offset of the scale of each row and column, int64 [rows, columns]."""
    m, s = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    groups = -(-columns // 4)
    if layout_number(layout) == 0:
        linear: npt.NDArray[np.int64] = m * columns + s
        return linear
    if layout == "128x4":
        return (m // 128 * groups + s // 4) * 512 + m % 32 * 16 + m // 32 % 4 * 4 + s % 4
    return (m // 8 * groups + s // 4) * 32 + m % 8 * 4 + s % 4


def swizzle(scales: Bytes, layout: str, padding: int = 0) -> Bytes:
    """Scales [M, S] in linear order to the bytes of ``layout``, padding filled with one byte."""
    rows, columns = scales.shape
    size = rows * columns if layout not in ROW_PADDING else swizzled_bytes(layout, rows, columns)
    out = np.full(size, padding, dtype=np.uint8)
    out[scale_offsets(layout, rows, columns)] = scales
    return out


def unswizzle(scales: Bytes, layout: str, rows: int, columns: int) -> Bytes:
    """Scales of ``layout`` to linear order [rows, columns]."""
    flat = np.ascontiguousarray(scales).reshape(-1).view(np.uint8)
    needed = rows * columns if layout not in ROW_PADDING else swizzled_bytes(layout, rows, columns)
    layout_number(layout)
    if flat.size < needed:
        raise InvalidRequest(
            f"scales are shorter than their layout, bytes={flat.size} needed={needed}", argument="scales"
        )
    linear: Bytes = flat[scale_offsets(layout, rows, columns)]
    return linear


def page_rows(cache: Bytes, page: KVPage, slots: Indices) -> tuple[Bytes, Bytes]:
    """Whole-code rows [T, W / 2] and scales [T, W / 16] of a paged KV cache, for slots [T]."""
    flat = cache.reshape(-1)
    per_head = page.head_dim // 16
    head, scale = np.meshgrid(np.arange(page.heads), np.arange(per_head), indexing="ij")
    start = slots[:, None, None] // page.block_size * page.page_bytes
    token = slots[:, None, None] % page.block_size
    if page.interleaved:
        quarter = per_head // 4
        token, scale = token // 4 * 4 + scale // quarter, scale % quarter * 4 + token % 4
    stride, head_stride = page.strides(per_head)
    scales = flat[start + page.scale_offset + token * stride + head * head_stride + scale]
    stride, head_stride = page.strides(page.head_dim // 2)
    head, byte = np.meshgrid(np.arange(page.heads), np.arange(page.head_dim // 2), indexing="ij")
    token = slots[:, None, None] % page.block_size
    codes = flat[start + page.code_offset + token * stride + head * head_stride + byte]
    return codes.reshape(len(slots), -1), scales.reshape(len(slots), -1)


def pack_rows(codes: Bytes, bits: int) -> Bytes:
    """Planes of whole-code rows [T, W / 2], or the rows themselves for bits 4."""
    return codes if bits == 4 else codebook.pack(codebook.unpack_full(codes), bits=bits)


def pack(site: PackSite, *, bits: int) -> None:
    """``trace_kernels.pack.pack`` for a site of NumPy arrays, written into its outputs.

    Raises:
        InvalidRequest: as ``trace_kernels.pack.pack``, or an index is out of range; nothing was written.
    """
    check(site, bits=bits)
    columns = site.width // codebook.FORMATS[site.format].block
    count = site.planes.shape[0] if site.tokens is None else site.tokens
    rows = np.arange(count) if site.slots is None else site.slots[: site.tokens].astype(np.int64)
    dest = np.arange(len(rows)) if site.dest_rows is None else site.dest_rows[: len(rows)].astype(np.int64)
    kept = (rows >= 0) & (dest >= 0)
    _within(dest[kept], site.planes.shape[0], "dest_rows")
    if site.page:
        _within(rows[kept], site.codes.nbytes // site.page.page_bytes * site.page.block_size, "slots")
        codes, linear = page_rows(site.codes, site.page, rows[kept])
    else:
        whole = np.ascontiguousarray(site.codes).reshape(-1).view(np.uint8).reshape(-1, site.width // 2)
        held = len(rows)
        if site.slots is not None:
            held = min(len(whole), len(site.scales))
            _within(rows[kept], held, "slots")
        codes = whole[rows[kept]]
        linear = unswizzle(site.scales, site.layout, held, columns)[rows[kept]]
    site.planes[dest[kept]] = pack_rows(codes, bits)
    site.out_scales[dest[kept]] = linear
    if site.decode is None:
        return
    given = np.asarray(site.global_scale, dtype=np.float32).reshape(-1)
    decode = given if site.global_scale_kind == "decode" else np.float32(1) / given
    if site.decode.size > 1:
        site.decode[dest[kept]] = np.broadcast_to(decode, len(rows))[kept]
    else:
        site.decode[:] = decode[:1]


def _within(indices: Indices, count: int, argument: str) -> None:
    if indices.size and int(indices.max()) >= count:
        raise InvalidRequest(
            f"{argument} has an entry that is out of range, largest={int(indices.max())} rows={count}",
            argument=argument,
        )


def discrepancy(
    x: npt.NDArray[Any],
    planes: Bytes,
    scales: Bytes,
    tensor_scale: Floats,
    valid: npt.NDArray[np.bool_] | None,
    *,
    format: str,
    bits: int,
    rule: str,
) -> npt.NDArray[np.float64]:
    """The ten sums of ``trace_kernels.discrepancy``, float64 [10]."""
    fmt = codebook.FORMATS[format]
    x = x.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        s = fmt.decode(scales) * np.broadcast_to(tensor_scale, len(x))[:, None]
    usable = np.repeat(np.isfinite(s) & (s != 0), fmt.block, axis=1) & np.isfinite(x)
    if valid is not None:
        usable &= valid.astype(bool)[:, None]
    if not usable.any():
        return np.zeros(SUMS)
    total = np.where(np.isfinite(s) & (s != 0), s, np.float32(1))
    clean = np.where(np.isfinite(x), x, np.float32(0))
    guided_y = codebook.guided_round(clean, planes, scales, tensor_scale, format=format, bits=bits, rule=rule)
    guided_y = np.where(np.isfinite(guided_y), guided_y, np.float32(0))
    spread = np.repeat(total, fmt.block, axis=1)
    ones = np.where(np.isfinite(s) & (s != 0), scales, np.uint8(0x38 if fmt.scale == "e4m3" else 127))
    nearest = codebook.rtn_codes(clean, ones, tensor_scale, format=format)
    chosen = codebook.rtn_codes(guided_y, ones, tensor_scale, format=format)
    return _sums(usable, clean, spread, (nearest, chosen), _recorded(planes, bits), bits)


def _recorded(planes: Bytes, bits: int) -> Bytes:
    record: Bytes = codebook.unpack_full(planes) if bits == 4 else codebook.unpack(planes)
    return record


def _sums(
    usable: npt.NDArray[np.bool_], x: Floats, s: Floats, codes: tuple[Bytes, Bytes], record: Bytes, bits: int
) -> npt.NDArray[np.float64]:
    nearest, guided = codes
    n, g = (nearest & 7).astype(int), (guided & 7).astype(int)
    sign = np.where(np.signbit(x) ^ np.signbit(s), -1, 1)
    if bits == 4:
        r = np.where(record & 8, -1, 1) * (record & 7) * sign
        mismatched, left, flipped = n != r, g != r, (r < 0)
    else:
        mask = (1 << bits) - 1
        r, mismatched, left, flipped = g, (n & mask) != record, (g & mask) != record, np.zeros_like(usable)
    value = np.concatenate([-codebook.MAGNITUDES[:0:-1], codebook.MAGNITUDES]).astype(np.float64)
    counts = (np.ones_like(usable), mismatched, mismatched & (np.abs(n - r) == 1), g > n, g < n, left, flipped)
    scale = np.abs(s.astype(np.float64))
    errors = (value[n + 7] - value[r + 7], value[g + 7] - value[r + 7])
    squares = [(error * scale) ** 2 for error in errors]
    squares.append((np.abs(x.astype(np.float64)) - value[g + 7] * scale) ** 2)
    return np.array([float(np.sum(np.where(usable, term, 0))) for term in (*counts, *squares)])
