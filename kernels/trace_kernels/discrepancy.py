"""How far a trainer's own rounding is from a rollout's record, for reports: ten sums over the rows of one site.

    elements     finite x under a finite scale other than 0, in rows that have a record
    mismatched   rounding to nearest gives another code than the record (whole codes: -0 equals 0), or other low bits
    adjacent     of these, one step on the grid from the reference
    raised       guidance chose the next magnitude above the nearest one
    lowered      guidance chose the next magnitude below it
    left         still another code, or other low bits, after guidance
    flipped      the recorded codeword lies on the other side of zero (whole codes only)
    rtn_error    sum of (nearest - reference)^2 in units of x^2
    left_error   sum of (guided - reference)^2
    error        sum of (x - guided)^2

The reference is the recorded codeword where the record has it whole (bits 4), else the guided one. Counts are exact;
the sums of squares vary by about 1e-7 relative from run to run on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trace_kernels._array import DeviceArray, array_of, dense_bytes, require, require_gpu, row_scales
from trace_kernels._launch import UNIT, Divisor, blocks_of, flat_units, launch
from trace_kernels._rows import Rows, record_shape, rows_of, rule_number, valid_rows

SUMS = 10
SHAPES = {1: (512, 2), 2: (512, 2), 3: (512, 3), 4: (768, 1)}
"""(threads of a block, pairs of units that a thread holds) by code bits, the fastest of 256 to 1,024 x 1 to 5 on an
H200. One block a multiprocessor stays for many elements. Figures: kernels/README.md."""


@dataclass(frozen=True)
class Discrepancy:
    """The ten sums as numbers; see the module."""

    elements: int
    mismatched: int
    adjacent: int
    raised: int
    lowered: int
    left: int
    flipped: int
    rtn_error: float
    left_error: float
    error: float

    @classmethod
    def of(cls, sums: Sequence[float]) -> Discrepancy:
        """From the sums in their order, say ``sums.tolist()`` of the kernel's result."""
        counts = [round(value) for value in sums[:7]]
        return cls(*counts, *(float(value) for value in sums[7:SUMS]))


class _Comparing(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("planes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("tensor_scale", ctypes.c_void_p),
        ("valid", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("x_gap", ctypes.c_uint64),
        ("pairs", ctypes.c_uint32),
        ("scale_stride", ctypes.c_uint32),
        ("pairs_a_row", Divisor),
    )


def discrepancy(
    x: Any,
    planes: Any,
    scales: Any,
    tensor_scale: Any,
    valid: Any = None,
    *,
    sums: Any,
    format: str,
    bits: int,
    rule: str = "paper",
    stream: int | None = None,
) -> None:
    """Add a site's sums to ``sums``, float64 [10], which the caller zeroes.

    The other arguments are those of ``trace_kernels.guided_round.guided_round``; nothing is written to x.

    Raises:
        InvalidRequest: an argument is wrong; nothing was launched.
        Unsupported: no GPU or CuPy.
    """
    require_gpu(x, "x")
    checked = check(x, planes, scales, tensor_scale, valid, format=format, bits=bits, rule=rule)
    rows, decode, present = checked.rows, checked.tensor_scale, checked.valid
    total = _ten_sums(sums, rows.array.device)
    units = flat_units(rows.tokens, rows.width)
    if not units:
        return
    gap = (rows.stride - rows.width) * rows.array.itemsize
    parameters = _Comparing(
        rows.array.pointer,
        checked.planes.pointer,
        checked.scales.pointer,
        decode.pointer,
        present.pointer if present else None,
        total.pointer,
        gap % 2**64,
        units // 2,
        int(decode.size > 1),
        Divisor.of(rows.width // (2 * UNIT)),
    )
    threads, depth = SHAPES[bits]
    pairs_a_row = rows.width // (2 * UNIT)
    switches = {
        **rows.switches,
        "BITS": bits,
        "RULE": checked.rule,
        "GAP": int(gap != 0),
        "ROWS": int(present is not None or decode.size > 1),
        "ALIGNED": int(threads % pairs_a_row == 0),
        "DEPTH": depth,
    }
    grid = (blocks_of(units // 2, threads * depth),)
    launch(
        "discrepancy.cu", "compare_rows", switches, grid, parameters, (rows.array, total), stream,
        threads=threads, resident=1,
    )  # fmt: skip


@dataclass(frozen=True)
class Checked:
    """Arguments that go together."""

    rows: Rows
    planes: DeviceArray
    scales: DeviceArray
    tensor_scale: DeviceArray
    valid: DeviceArray | None
    rule: int


def check(
    x: Any, planes: Any, scales: Any, tensor_scale: Any, valid: Any = None, *, format: str, bits: int, rule: str
) -> Checked:
    """The arguments of ``discrepancy`` but ``sums``, in device or host memory, or InvalidRequest."""
    number = rule_number(rule, bits)
    rows = rows_of(x, "x", format)
    device = rows.array.device
    code_rows = dense_bytes(planes, "planes", record_shape(rows.tokens, rows.width, bits), device)
    aligned = code_rows.pointer % (8 if bits == 4 else 2) == 0
    require(aligned, "planes", f"must be 2 bytes aligned, whole codes 8, address={code_rows.pointer:#x}")
    return Checked(
        rows,
        code_rows,
        dense_bytes(scales, "scales", (rows.tokens, rows.width // rows.format.block), device),
        row_scales(tensor_scale, "tensor_scale", rows.tokens, device),
        valid_rows(valid, rows.tokens, device),
        number,
    )


def _ten_sums(sums: Any, device: int) -> DeviceArray:
    view = array_of(sums, "sums")
    right = view.dtype == "float64" and view.shape == (SUMS,)
    require(right, "sums", f"must be float64 [10], dtype={view.dtype} shape={list(view.shape)}")
    require(view.dense, "sums", f"must be contiguous, strides={list(view.strides)}")
    require(view.device == device, "sums", f"must be on the device of x, device={view.device}")
    return view
