"""Packing an engine's FP4 codes and scales into record rows, in one launch for up to 20 sites.

Input is what the engine's quantizer wrote: codes as nibbles, the even element low, under any byte-sized or int32 view;
block scales in one of the layouts of ``trace_kernels.layout``. Output is what a record holds: bit planes (or whole
codes), scales in linear order without padding, and the decode scale. Bytes are copied, never computed again. Codes of
padding rows are not read; padding of swizzled scales may hold anything.

Per element, one bit and NVFP4: 1/2 + 1/16 bytes read, 1/8 + 1/16 written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trace_kernels._array import DeviceArray, array_of, require, require_gpu
from trace_kernels._launch import UNITS_MAX, Divisor, blocks_of, launch
from trace_kernels._rows import block_format, record_shape
from trace_kernels.layout import INTERLEAVED_V, ROW_PADDING, KVPage, layout_number, swizzled_bytes
from trace_store.errors import InvalidRequest, Unsupported

SITES_MAX = 20
"""Sites of one launch: their parameters fit the 4 KiB that every CUDA version passes by value."""

PACK_THREADS = 128
FLIGHT = {0: 3, 1: 2}
"""Chunks of codes a thread loads before it packs the first: three where rows are gathered by index, else two."""

_CODE_TYPES = ("uint8", "int8", "int32", "uint32", "float4_e2m1fn_x2")
_SCALE_TYPES = ("uint8", "int8", "int32", "uint32", "float8_e4m3fn", "float8_e8m0fnu")
_SLOTS_64, _DEST_64, _ENCODE, _SCALE_A_ROW, _DECODE_A_ROW = 1, 2, 4, 8, 16


@dataclass(frozen=True)
class PackSite:
    """One site of a pack: where its rows are and where they go.

    Attributes:
        codes: [R, W / 2] bytes (any view of them), or a KV pool [slots, heads, D / 2]; R rows or pool slots.
        scales: [R, W / block] bytes for ``linear``, [slots, heads, D / block] of a pool, else the swizzled buffer.
        planes: receives uint8 [N, bits, W / 8], or whole codes uint8 [N, W / 2] for bits 4.
        out_scales: receives uint8 [N, W / block].
        width: elements W of a row.
        format: ``nvfp4``, ``mxfp4`` or ``mxfp4_block16``.
        layout: ``linear``, ``128x4`` or ``8x4``.
        tokens: rows to pack. None: as many as ``slots`` has, else N.
        slots: int32 or int64 [tokens], the row (or KV slot) of each token, below 2^31; below 0 skips it. None: row t.
        dest_rows: int32 or int64 [tokens], the record row of each token, below 2^31; below 0 skips it. None: row t.
        global_scale: float32, one value or [tokens].
        global_scale_kind: ``decode`` (value = code * scale * G) or ``encode`` (its reciprocal, as quantizers take it).
        decode: receives float32 decode scales, [1] or [N].
        page: a paged KV cache; then codes and scales are both the cache, uint8, and ``slots`` is needed.
    """

    codes: Any
    scales: Any
    planes: Any
    out_scales: Any
    width: int
    format: str
    layout: str = "linear"
    tokens: int | None = None
    slots: Any = None
    dest_rows: Any = None
    global_scale: Any = None
    global_scale_kind: str = "decode"
    decode: Any = None
    page: KVPage | None = None


class _Strides(ctypes.Structure):
    _fields_ = (("page", ctypes.c_uint32), ("token", ctypes.c_uint32), ("head", ctypes.c_uint32))


class _Site(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "global_scale", "slots", "dest")),
        *((name, ctypes.c_void_p) for name in ("planes", "out_scales", "decode")),
        *((name, ctypes.c_uint32) for name in ("tokens", "chunks", "width_scales", "flags")),
        *((name, Divisor) for name in ("page_size", "chunks_a_row", "chunks_a_head")),
        ("code_strides", _Strides),
        ("scale_strides", _Strides),
    )


class _Sites(ctypes.Structure):
    _fields_ = (("site", _Site * SITES_MAX),)


@dataclass(frozen=True)
class _Prepared:
    """A site ready for launch: parameters, what it touches, the kernel it needs, its blocks."""

    parameters: _Site
    arrays: tuple[DeviceArray, ...]
    switches: tuple[tuple[str, int], ...]
    blocks: int


@dataclass(frozen=True)
class _Region:
    """Codes or scales of a site as bytes: base address, strides in bytes, bytes of a row and of a head."""

    pointer: int
    page: int
    token: int
    head: int
    row_bytes: int
    head_bytes: int

    def divisible(self, piece: int) -> bool:
        """True if every piece of this many bytes lies within a head and is aligned."""
        parts = (self.pointer, self.page, self.token, self.head, self.head_bytes)
        return all(part % piece == 0 for part in parts)

    def whole(self, row_bytes: int) -> bool:
        """True if rows of this many bytes follow each other."""
        return (self.page, self.token, self.head) == (row_bytes, 0, 0)

    @property
    def strides(self) -> _Strides:
        """The strides as the kernel takes them."""
        for stride in (self.page, self.token, self.head):
            require(stride < 2**32, "codes", f"must have strides below 4 GiB, stride={stride}")
        return _Strides(self.page, self.token, self.head)


def pack_sites(sites: Sequence[PackSite], *, bits: int, stream: int | None = None) -> None:
    """Pack any number of sites, 20 a launch.

    Raises:
        InvalidRequest: an argument is wrong; the message names it, and nothing was launched.
        Unsupported: no GPU or CuPy, or a tensor beyond 2^31 pieces of work.
    """
    for site in sites:
        require_gpu(site.codes, "codes")
    prepared = [_prepare(site, bits) for site in sites]
    devices = {entry.arrays[0].device for entry in prepared}
    if len(devices) > 1:
        raise InvalidRequest(f"the sites of one call must share a device, devices={sorted(devices)}", argument="sites")
    prepared = [entry for entry in prepared if entry.blocks]
    for switches in sorted({entry.switches for entry in prepared}):
        group = [entry for entry in prepared if entry.switches == switches]
        for first in range(0, len(group), SITES_MAX):
            _launch_group(group[first : first + SITES_MAX], dict(switches), stream)


def pack(site: PackSite, *, bits: int, stream: int | None = None) -> None:
    """Pack one site; see ``pack_sites``."""
    pack_sites([site], bits=bits, stream=stream)


def check(site: PackSite, *, bits: int) -> None:
    """Refuse what ``pack`` refuses, for a site in device or host memory; InvalidRequest names the argument."""
    _prepare(site, bits)


def _launch_group(group: list[_Prepared], switches: dict[str, int], stream: int | None) -> None:
    parameters = _Sites()
    for index, entry in enumerate(group):
        parameters.site[index] = entry.parameters
    grid = (max(entry.blocks for entry in group), len(group))
    arrays = tuple(array for entry in group for array in entry.arrays)
    switches["FLIGHT"] = FLIGHT[switches["DENSE"]]
    launch("pack.cu", "pack_sites", switches, grid, parameters, arrays, stream, threads=PACK_THREADS)


def _prepare(site: PackSite, bits: int) -> _Prepared:
    fmt = block_format(site.format)
    require(
        site.width > 0 and site.width % fmt.block == 0,
        "width",
        f"must be a multiple of the block, width={site.width} block={fmt.block}",
    )
    planes, out_scales = array_of(site.planes, "planes"), array_of(site.out_scales, "out_scales")
    rows = planes.shape[0] if planes.shape else 0
    _check_output(planes, "planes", record_shape(rows, site.width, bits), planes.device)
    columns = site.width // fmt.block
    _check_output(out_scales, "out_scales", (rows, columns), planes.device)
    slots, dest = _indices(site.slots, "slots", planes.device), _indices(site.dest_rows, "dest_rows", planes.device)
    tokens = _tokens(site, slots, dest, rows)
    layout = layout_number(site.layout)
    codes, code_array = _codes_region(site)
    scales, scale_array = _scales_region(site, layout, columns, tokens, slots is not None)
    chunk = 16 if codes.divisible(16) and planes.pointer % 16 == 0 else 8
    require(codes.divisible(chunk), "codes", f"must have rows and heads at multiples of 8 bytes, region={codes}")
    scale_bytes = chunk * 2 // fmt.block
    require(scale_bytes < 2 or scales.divisible(2), "scales", f"must be 2 bytes aligned, region={scales}")
    if site.page and site.page.interleaved:
        layout = INTERLEAVED_V
    parameters = _Site()
    parameters.codes, parameters.scales = codes.pointer, scales.pointer
    parameters.planes, parameters.out_scales = planes.pointer, out_scales.pointer
    parameters.slots, parameters.dest = slots and slots.pointer, dest and dest.pointer
    parameters.tokens, parameters.width_scales = tokens, columns
    parameters.flags = _set_global_scale(parameters, site, tokens, rows, planes.device)
    parameters.flags |= _SLOTS_64 * bool(slots and slots.itemsize == 8) | _DEST_64 * bool(dest and dest.itemsize == 8)
    # The kernel takes swizzled rows in the order of their sectors, which closes only over whole tiles of rows.
    padded = -(-tokens // 128) * 128 if site.layout == "128x4" else tokens
    parameters.chunks = _bounded(padded * (codes.row_bytes // chunk))
    parameters.page_size = Divisor.of(site.page.block_size if site.page else 1)
    parameters.chunks_a_row = Divisor.of(codes.row_bytes // chunk)
    parameters.chunks_a_head = Divisor.of(codes.head_bytes // chunk)
    parameters.code_strides, parameters.scale_strides = codes.strides, scales.strides
    arrays = (planes, out_scales, code_array, scale_array)
    for array in arrays:
        require(
            array.device == planes.device,
            array.argument,
            f"must be on the device of planes, device={array.device} planes={planes.device}",
        )
    linear = layout == 0 and scales.whole(columns) and site.width % (chunk * 2) == 0
    dense = slots is None and dest is None and codes.whole(site.width // 2) and (linear or layout in (1, 2))
    split = bool(site.page) or codes.head_bytes < codes.row_bytes or (layout == 0 and scales.head_bytes < columns)
    switches = tuple(
        sorted(
            {
                "BITS": bits,
                "BLOCK": fmt.block,
                "CHUNK": chunk,
                "DENSE": int(dense),
                "LAYOUT": layout,
                "SPLIT": int(split),
            }.items()
        )
    )
    return _Prepared(parameters, arrays, switches, blocks_of(parameters.chunks, PACK_THREADS * FLIGHT[int(dense)]))


def _bounded(units: int) -> int:
    if units >= UNITS_MAX:
        raise Unsupported(f"one call takes below 2^31 pieces of work: split the rows, pieces={units}")
    return units


def _check_output(view: DeviceArray, argument: str, shape: tuple[int, ...], device: int) -> None:
    require(view.dtype == "uint8", argument, f"must be uint8, dtype={view.dtype}")
    require(view.shape == shape, argument, f"has the wrong shape, expected={list(shape)} got={list(view.shape)}")
    require(view.dense and view.device == device, argument, "must be contiguous and on one device with planes")
    require(view.pointer % 8 == 0 or view.size == 0, argument, f"must be 8 bytes aligned, address={view.pointer:#x}")


def _indices(array: Any, argument: str, device: int) -> DeviceArray | None:
    if array is None:
        return None
    view = array_of(array, argument)
    require(view.dtype in ("int32", "int64"), argument, f"must be int32 or int64, dtype={view.dtype}")
    require(len(view.shape) == 1 and view.dense, argument, f"must be contiguous [T], shape={list(view.shape)}")
    require(view.device == device, argument, f"must be on the device of planes, device={view.device}")
    return view


def _tokens(site: PackSite, slots: DeviceArray | None, dest: DeviceArray | None, rows: int) -> int:
    counts = [index.shape[0] for index in (slots, dest) if index]
    tokens = site.tokens if site.tokens is not None else (counts[0] if counts else rows)
    require(tokens >= 0, "tokens", f"must not be negative, tokens={tokens}")
    require(all(count >= tokens for count in counts), "slots", f"are fewer than tokens, tokens={tokens}")
    require(dest is not None or tokens <= rows, "planes", f"has fewer rows than tokens, rows={rows} tokens={tokens}")
    require(site.page is None or slots is not None, "slots", "are needed for a paged cache")
    return tokens


def _region(view: DeviceArray, argument: str, row_bytes: int) -> _Region:
    """Rows [R, ...] or pool [slots, heads, ...] of ``row_bytes`` bytes each, under any item size."""
    shape, strides = view.shape, view.strides
    inner = view.itemsize
    for extent in shape[1:]:
        inner *= extent
    require(
        len(shape) in (2, 3) and inner == row_bytes,
        argument,
        f"has the wrong row size, expected_bytes={row_bytes} shape={list(shape)} itemsize={view.itemsize}",
    )
    require(
        shape[-1] == 1 or not shape[0] or strides[-1] == view.itemsize,
        argument,
        f"must have contiguous rows, strides={list(strides)}",
    )
    require(all(s >= 0 for s in strides), argument, f"must have positive strides, strides={list(strides)}")
    head_bytes = shape[-1] * view.itemsize
    if len(shape) == 2 or shape[1] == 1 or strides[1] == head_bytes:
        return _Region(view.pointer, strides[0], 0, 0, row_bytes, row_bytes)
    return _Region(view.pointer, strides[0], 0, strides[1], row_bytes, head_bytes)


def _paged_region(view: DeviceArray, argument: str, page: KVPage, offset: int, head_bytes: int) -> _Region:
    require(view.dtype == "uint8" and view.dense, argument, "must be the whole cache, contiguous uint8")
    require(
        view.nbytes % page.page_bytes == 0,
        argument,
        f"is no whole number of pages, bytes={view.nbytes} page={page.page_bytes}",
    )
    token, head = page.strides(head_bytes)
    return _Region(view.pointer + offset, page.page_bytes, token, head, page.heads * head_bytes, head_bytes)


def _codes_region(site: PackSite) -> tuple[_Region, DeviceArray]:
    view = array_of(site.codes, "codes")
    require(
        view.dtype in _CODE_TYPES,
        "codes",
        "must hold packed E2M1 nibbles; 8-bit or 16-bit float activations have no FP4 code to record, "
        f"dtype={view.dtype}",
    )
    if site.page:
        require(
            site.page.heads * site.page.head_dim == site.width, "width", f"must be heads x head_dim, width={site.width}"
        )
        return _paged_region(view, "codes", site.page, site.page.code_offset, site.page.head_dim // 2), view
    region = _region(view, "codes", site.width // 2)
    needed = 0 if site.slots is not None or site.tokens is None else site.tokens
    require(view.shape[0] >= needed, "codes", f"has fewer rows than tokens, rows={view.shape[0]} tokens={needed}")
    return region, view


def _scales_region(
    site: PackSite, layout: int, columns: int, tokens: int, gathered: bool
) -> tuple[_Region, DeviceArray]:
    view = array_of(site.scales, "scales")
    require(view.dtype in _SCALE_TYPES, "scales", f"must be bytes of E4M3 or E8M0 scales, dtype={view.dtype}")
    if site.page:
        require(layout == 0, "layout", "of a paged cache is given by its page: leave it linear")
        head_bytes = columns // site.page.heads
        return _paged_region(view, "scales", site.page, site.page.scale_offset, head_bytes), view
    if layout == 0:
        region = _region(view, "scales", columns)
        needed = 0 if gathered else tokens
        require(view.shape[0] >= needed, "scales", f"has fewer rows than tokens, rows={view.shape[0]} tokens={needed}")
        return region, view
    require(not gathered, "layout", "linear is the only one that slots can index")
    needed = swizzled_bytes(site.layout, tokens, columns)
    require(
        view.dense and view.nbytes >= needed,
        "scales",
        f"must be contiguous and padded to {ROW_PADDING[site.layout]} rows and 4 columns, bytes={view.nbytes} "
        f"needed={needed}",
    )
    return _Region(view.pointer, 0, 0, 0, columns, 2), view


def _set_global_scale(parameters: _Site, site: PackSite, tokens: int, rows: int, device: int) -> int:
    """Fill in the decode scale; the flags for it."""
    kind = site.global_scale_kind
    if kind not in ("decode", "encode"):
        raise InvalidRequest(f"global_scale_kind must be decode or encode, got={kind!r}", argument="global_scale_kind")
    require((site.decode is None) == (site.global_scale is None), "decode", "and global_scale come together")
    if site.decode is None:
        return 0
    given, decode = array_of(site.global_scale, "global_scale"), array_of(site.decode, "decode")
    for view, argument, count in ((given, "global_scale", tokens), (decode, "decode", rows)):
        require(view.dtype == "float32" and view.dense, argument, f"must be contiguous float32, dtype={view.dtype}")
        require(view.device == device, argument, f"must be on the device of planes, device={view.device}")
        require(
            view.size == 1 or view.shape == (count,),
            argument,
            f"must hold one value or one a token (one an expert is no key of a record), shape={list(view.shape)}",
        )
    require(given.size == 1 or decode.size == rows, "decode", "must hold one value a row, as global_scale does")
    parameters.global_scale, parameters.decode = given.pointer, decode.pointer
    return (
        _ENCODE * (kind == "encode")
        | _SCALE_A_ROW * (given.size > 1)
        | _DECODE_A_ROW * (decode.size > 1 or (rows == 1 and given.size > 1))
    )
