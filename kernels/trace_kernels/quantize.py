"""Quantizing rows on the GPU, for engines whose codes are invisible and for GPUs without FP4 instructions.

Bit for bit ``trace_store.codebook.quantize`` and a pack of its codes. The oracle raises on NaN and infinity, which a
kernel cannot do without synchronising: their block gets a NaN scale byte (0x7F, or 255 for E8M0), which every reader of
records refuses, and they do not take part in the tensor's maximum.
"""

from __future__ import annotations

import ctypes
from typing import Any

from trace_kernels._array import DeviceArray, array_of, dense_bytes, require, require_gpu, row_scales
from trace_kernels._launch import THREADS, UNIT, Divisor, blocks_of, flat_units, launch
from trace_kernels._rows import Rows, record_shape, rows_of
from trace_store.errors import InvalidRequest

PIECE = 16
"""Elements a thread quantizes at once: a whole NVFP4 block."""

QUANTIZE_THREADS, FLIGHT = 128, 3
"""Threads of a block, and pieces a thread loads before it quantizes the first: the fastest on an H200."""

_AMAX_BLOCKS = 132 * 8


class _Quantizing(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("planes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("tensor_scale", ctypes.c_void_p),
        ("amax", ctypes.c_void_p),
        ("decode", ctypes.c_void_p),
        ("x_stride", ctypes.c_uint64),
        ("pieces", ctypes.c_uint32),
        ("scale_stride", ctypes.c_uint32),
        ("pieces_a_row", Divisor),
    )


class _Maximum(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("amax", ctypes.c_void_p),
        ("x_stride", ctypes.c_uint64),
        ("units", ctypes.c_uint32),
        ("units_a_row", Divisor),
    )


def quantize(
    x: Any,
    tensor_scale: Any = None,
    *,
    planes: Any,
    scales: Any,
    decode: Any = None,
    workspace: Any = None,
    format: str,
    bits: int = 4,
    stream: int | None = None,
) -> None:
    """Quantize x into record rows.

    Args:
        x: [T, W] as for ``trace_kernels.guided_round.guided_round``.
        tensor_scale: float32 decode scale, one or [T], positive and finite. None: from the maximum of all of x (NVFP4),
            which reads x twice and needs ``workspace`` and ``decode``. The MXFP4 formats have none.
        planes: receives uint8 [T, bits, W / 8], or whole codes uint8 [T, W / 2] for bits 4.
        scales: receives uint8 [T, W / block].
        decode: float32 [1], receives the decode scale when tensor_scale is None and the format has one.
        workspace: int32 [1] that holds 0, left with the bits of the maximum.
        format, bits, stream: as for guided_round.

    Raises:
        InvalidRequest: an argument is wrong; nothing was launched.
        Unsupported: no GPU or CuPy.
    """
    require_gpu(x, "x")
    rows, given = check(x, tensor_scale, format=format, bits=bits)
    device = rows.array.device
    code_rows = dense_bytes(planes, "planes", record_shape(rows.tokens, rows.width, bits), device)
    require(code_rows.pointer % 8 == 0, "planes", f"must be 8 bytes aligned, address={code_rows.pointer:#x}")
    block_scales = dense_bytes(scales, "scales", (rows.tokens, rows.width // rows.format.block), device)
    dynamic = rows.format.scale != "e8m0" and given is None
    amax = _single(workspace, "workspace", "int32", device) if dynamic else None
    result = _single(decode, "decode", "float32", device) if dynamic else None
    if amax:
        _maximum(rows, amax, stream)
    _quantize(rows, (code_rows, block_scales), given, (amax, result), bits, stream)


def check(x: Any, tensor_scale: Any, *, format: str, bits: int) -> tuple[Rows, DeviceArray | None]:
    """Rows and tensor scale of ``quantize``, in device or host memory, or InvalidRequest."""
    rows = rows_of(x, "x", format)
    record_shape(rows.tokens, rows.width, bits)
    if tensor_scale is None:
        return rows, None
    if rows.format.scale == "e8m0":
        raise InvalidRequest("the mxfp4 formats have no tensor scale; give None", argument="tensor_scale")
    return rows, row_scales(tensor_scale, "tensor_scale", rows.tokens, rows.array.device)


def _single(array: Any, argument: str, dtype: str, device: int) -> DeviceArray:
    require(array is not None, argument, "is needed to find the tensor scale")
    view = array_of(array, argument)
    require(view.dtype == dtype and view.size == 1, argument, f"must be {dtype} [1], shape={list(view.shape)}")
    require(view.device == device, argument, f"must be on the device of x, device={view.device}")
    return view


def _maximum(rows: Rows, amax: DeviceArray, stream: int | None) -> None:
    units = flat_units(rows.tokens, rows.width)
    if not units:
        return
    parameters = _Maximum(rows.array.pointer, amax.pointer, rows.stride, units, Divisor.of(rows.width // 8))
    grid = (min(_AMAX_BLOCKS, blocks_of(units, THREADS)),)
    launch("quantize.cu", "amax_rows", {**rows.switches, "BITS": 1}, grid, parameters, (rows.array,), stream)


def _quantize(
    rows: Rows,
    outputs: tuple[DeviceArray, DeviceArray],
    given: DeviceArray | None,
    dynamic: tuple[DeviceArray | None, DeviceArray | None],
    bits: int,
    stream: int | None,
) -> None:
    pieces = flat_units(rows.tokens, rows.width) * UNIT // PIECE
    if not pieces:
        return
    parameters = _Quantizing(
        rows.array.pointer,
        outputs[0].pointer,
        outputs[1].pointer,
        given.pointer if given else None,
        dynamic[0].pointer if dynamic[0] else None,
        dynamic[1].pointer if dynamic[1] else None,
        0 if rows.stride == rows.width else rows.stride,
        pieces,
        int(given is not None and given.size > 1),
        Divisor.of(rows.width // PIECE),
    )
    launch(
        "quantize.cu",
        "quantize_rows",
        {**rows.switches, "BITS": bits, "FLIGHT": FLIGHT},
        (blocks_of(pieces, QUANTIZE_THREADS * FLIGHT),),
        parameters,
        (rows.array, *outputs),
        stream,
        threads=QUANTIZE_THREADS,
    )
