"""Guided rounding and rounding to nearest on the GPU.

Bit for bit ``trace_store.codebook.guided_round`` and ``rtn_round``, then one rounding to the type of x; rows
without a record become ``trace_store.codebook.native_round``. With magnitudes v = (0, .5, 1, 1.5, 2, 3, 4, 6),
element i of row t:

    s = block scale * tensor scale       z = x * (1 / s)         k = max{ j <= 6 : v_j <= |z| }
    r = the codeword with the recorded low bits nearest to |z|   (rule ``paper``; ``cell``: by decision cell)
    y = sign(z) * s * (the end of the bracket (v_k, v_k+1) nearest to r)

Memory bound: bfloat16, one bit, NVFP4 moves 4 + 1/8 + 1/16 bytes an element. ``kernels/README.md`` has the figures.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from trace_kernels._array import DeviceArray, array_of, dense_bytes, require, require_gpu, row_scales
from trace_kernels._launch import UNIT, Divisor, blocks_of, flat_units, launch
from trace_kernels._rows import Rows, record_shape, rows_of, rule_number, valid_rows

SHAPES = {0: (128, 2), 1: (128, 2), 2: (128, 2), 3: (256, 3), 4: (256, 3)}
"""(threads of a block, units a thread loads before it computes) by code bits, the fastest of 128 to 512 x 1 to 4 on an
H200. Tables of 4 and 8 KiB want the larger blocks, which copy them less often. Figures: kernels/README.md."""

ROW_THREADS = 128
LANES_MAX = 1024
"""Threads that may share a row; a wider row than they hold at once is read in parts, and once more for its maximum."""

HELD = {0: 8, 1: 8, 2: 4, 3: 4, 4: 8}
"""Units of 16-bit elements that a thread of ``round_each_row`` holds, by code bits; of 32-bit elements half as many.
With fewer a row takes more threads, which wait for each other's maximum; with more the planes of 2 and 3 bits spill."""

RESIDENT = {0: 6, 1: 6, 2: 8, 3: 8, 4: 6}
"""Blocks of 128 threads of ``round_each_row`` that registers leave room for on a multiprocessor, by code bits."""


class _Rounding(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "y", "planes", "scales", "tensor_scale")),
        ("units", ctypes.c_uint32),
        ("units_a_row", Divisor),
    )


class _RowRounding(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "y", "planes", "scales", "tensor_scale")),
        *((name, ctypes.c_void_p) for name in ("valid", "record_rows", "native_scale")),
        ("x_stride", ctypes.c_uint64),
        ("y_stride", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("tokens", "units_a_row", "scale_stride")),
    )


@dataclass(frozen=True)
class Checked:
    """Arguments that go together. The last three tell which rows have a record, and the scale of those without."""

    rows: Rows
    planes: DeviceArray | None
    scales: DeviceArray
    tensor_scale: DeviceArray
    switches: dict[str, int]
    valid: DeviceArray | None = None
    record_rows: DeviceArray | None = None
    native_scale: DeviceArray | None = None


def guided_round(
    x: Any,
    planes: Any,
    scales: Any,
    tensor_scale: Any,
    valid: Any = None,
    *,
    out: Any,
    format: str,
    bits: int,
    rule: str = "paper",
    record_rows: Any = None,
    native_tensor_scale: Any = None,
    stream: int | None = None,
) -> None:
    """Round x to the bracket end that the rollout recorded, into ``out``.

    Args:
        x: [T, W] bfloat16, float16 or float32 in device memory; rows contiguous and 16 bytes aligned, any row stride.
        planes: uint8 [R, bits, W / 8] for bits 1 to 3, whole codes uint8 [R, W / 2] for 4. R = T without record_rows.
        scales: uint8 [R, W / block], linear order.
        tensor_scale: float32 decode scale, one or [R].
        valid: bool or uint8 [T]; rows with 0 have no record. None: all have one.
        out: like x in shape, type and device; may be x itself.
        format: ``nvfp4``, ``mxfp4`` or ``mxfp4_block16``.
        bits: code bits in the record.
        rule: ``paper``, ``cell`` or ``bracket``; all agree for bits 3 and 4.
        record_rows: int32 [T], the record row of each row, below 0 for none. None: row t uses record row t. Entries are
            not checked against R.
        native_tensor_scale: float32 decode scale, one value, of rows without a record. None: from the row's maximum.
        stream: CUDA stream pointer; None for CuPy's current stream.

    Raises:
        InvalidRequest: an argument is wrong; nothing was launched.
        Unsupported: no GPU or CuPy.
    """
    require_gpu(x, "x")
    checked = check(
        x,
        planes,
        scales,
        tensor_scale,
        valid,
        format=format,
        bits=bits,
        rule=rule,
        record_rows=record_rows,
        native_tensor_scale=native_tensor_scale,
    )
    _round(checked, _output(out, checked.rows, format), stream)


def rtn_round(x: Any, scales: Any, tensor_scale: Any, *, out: Any, format: str, stream: int | None = None) -> None:
    """Round x to the nearest codeword under given scales, ties to the even code, into ``out``.

    Arguments as for ``guided_round``. With the rollout's scales this is the b = 0 baseline.
    """
    require_gpu(x, "x")
    checked = check_rtn(x, scales, tensor_scale, format=format)
    _round(checked, _output(out, checked.rows, format), stream)


def check(
    x: Any,
    planes: Any,
    scales: Any,
    tensor_scale: Any,
    valid: Any = None,
    *,
    format: str,
    bits: int,
    rule: str = "paper",
    record_rows: Any = None,
    native_tensor_scale: Any = None,
) -> Checked:
    """The arguments of ``guided_round`` but ``out``, in device or host memory, or InvalidRequest."""
    number = rule_number(rule, bits)
    rows = rows_of(x, "x", format)
    device = rows.array.device
    index = _record_rows(record_rows, rows.tokens, device)
    records = array_of(scales, "scales").shape[0] if index else rows.tokens
    code_rows = dense_bytes(planes, "planes", record_shape(records, rows.width, bits), device)
    require(
        bits != 4 or code_rows.pointer % 4 == 0, "planes", f"must be 4 bytes aligned, address={code_rows.pointer:#x}"
    )
    native = None if native_tensor_scale is None else row_scales(native_tensor_scale, "native_tensor_scale", 1, device)
    return Checked(
        rows,
        code_rows,
        dense_bytes(scales, "scales", (records, rows.width // rows.format.block), device),
        row_scales(tensor_scale, "tensor_scale", records, device),
        {"BITS": bits, "RULE": number},
        valid_rows(valid, rows.tokens, device),
        index,
        native,
    )


def check_rtn(x: Any, scales: Any, tensor_scale: Any, *, format: str) -> Checked:
    """The arguments of ``rtn_round`` but ``out``, in device or host memory, or InvalidRequest."""
    rows = rows_of(x, "x", format)
    device = rows.array.device
    return Checked(
        rows,
        None,
        dense_bytes(scales, "scales", (rows.tokens, rows.width // rows.format.block), device),
        row_scales(tensor_scale, "tensor_scale", rows.tokens, device),
        {"BITS": 0, "RULE": 0},
    )


def _output(out: Any, rows: Rows, format: str) -> Rows:
    target = rows_of(out, "out", format)
    array = target.array
    require(array.shape == rows.array.shape, "out", f"must have the shape of x, shape={list(array.shape)}")
    require(array.dtype == rows.array.dtype, "out", f"must have the type of x, dtype={array.dtype}")
    require(array.device == rows.array.device, "out", f"must be on the device of x, device={array.device}")
    same_place = array.pointer == rows.array.pointer and target.stride == rows.stride
    apart = array.pointer >= rows.array.pointer + _extent(rows) or rows.array.pointer >= array.pointer + _extent(target)
    require(same_place or apart or rows.tokens == 0, "out", "must be x itself or not overlap it")
    return target


def _extent(rows: Rows) -> int:
    """Bytes from the first to past the last element."""
    return ((rows.tokens - 1) * rows.stride + rows.width) * rows.array.itemsize


def _record_rows(record_rows: Any, tokens: int, device: int) -> DeviceArray | None:
    if record_rows is None:
        return None
    view = array_of(record_rows, "record_rows")
    require(view.dtype == "int32", "record_rows", f"must be int32, dtype={view.dtype}")
    require(view.shape == (tokens,) and view.dense, "record_rows", f"must be contiguous [T], shape={list(view.shape)}")
    require(view.device == device, "record_rows", f"must be on the device of x, device={view.device}")
    return view


def _pointer(array: DeviceArray | None) -> int | None:
    return array.pointer if array else None


def _round(checked: Checked, out: Rows, stream: int | None) -> None:
    rows, tensor_scale = checked.rows, checked.tensor_scale
    units = flat_units(rows.tokens, rows.width)
    if not units:
        return
    pointers = (
        rows.array.pointer,
        out.array.pointer,
        _pointer(checked.planes),
        checked.scales.pointer,
        tensor_scale.pointer,
    )
    switches = {**rows.switches, **checked.switches}
    arrays = (rows.array, out.array)
    some = checked.valid is not None or checked.record_rows is not None
    if rows.stride == out.stride == rows.width and tensor_scale.size == 1 and not some:
        threads, flight = SHAPES[switches["BITS"]]
        flat = _Rounding(*pointers, units, Divisor.of(rows.width // UNIT))
        grid = (blocks_of(units, threads * flight),)
        switches["FLIGHT"] = flight
        launch("guided_round.cu", "round_rows", switches, grid, flat, arrays, stream, threads=threads)
        return
    each = _RowRounding(
        *pointers,
        _pointer(checked.valid),
        _pointer(checked.record_rows),
        _pointer(checked.native_scale),
        rows.stride,
        out.stride,
        rows.tokens,
        rows.width // UNIT,
        int(tensor_scale.size > 1),
    )
    units_a_row = rows.width // UNIT
    lanes, held = _row_shape(units_a_row, HELD[switches["BITS"]] * 2 // rows.array.itemsize)
    threads = max(ROW_THREADS, lanes)
    switches["LANES"], switches["HOLD"] = lanes, held
    switches["WHOLE"], switches["PARTS"] = int(units_a_row % (lanes * held) == 0), int(units_a_row > lanes * held)
    switches["RESIDENT"] = max(1, RESIDENT[switches["BITS"]] * ROW_THREADS // threads)
    grid = (blocks_of(rows.tokens * lanes, threads),)
    launch("guided_rows.cu", "round_each_row", switches, grid, each, arrays, stream, threads=threads)


def _row_shape(units: int, held_most: int) -> tuple[int, int]:
    """Threads that share a row of this many units, and the units that each holds."""
    lanes = 1
    while lanes < LANES_MAX and (lanes < min(32, units) or lanes * held_most < units):
        lanes *= 2
    return lanes, min(held_most, blocks_of(units, lanes))
