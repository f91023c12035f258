"""What every kernel over activation rows checks and prepares: types, formats, strides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trace_kernels._array import DeviceArray, array_of, require
from trace_store.codebook import FORMATS, RULES, BlockFormat
from trace_store.errors import InvalidRequest

INPUTS = {"bfloat16": 0, "float16": 1, "float32": 2}
"""Element types of x by name, with the number that the sources use."""


@dataclass(frozen=True)
class Rows:
    """Activation rows [T, W] that the kernels can address: unit inner stride, rows 16 bytes aligned."""

    array: DeviceArray
    format: BlockFormat

    @property
    def tokens(self) -> int:
        """Rows T."""
        return self.array.shape[0]

    @property
    def width(self) -> int:
        """Elements W of a row."""
        return self.array.shape[1]

    @property
    def stride(self) -> int:
        """Elements from row to row."""
        return self.array.strides[0] // self.array.itemsize if self.tokens > 1 else self.width

    @property
    def switches(self) -> dict[str, int]:
        """Compile-time switches of ``cuda/rows.cuh``."""
        return {
            "INPUT": INPUTS[self.array.dtype],
            "BLOCK": self.format.block,
            "E8M0": int(self.format.scale == "e8m0"),
        }


def block_format(name: str) -> BlockFormat:
    """The format called ``name``."""
    if name not in FORMATS:
        raise InvalidRequest(f"format must be one of {sorted(FORMATS)}, got={name!r}", argument="format")
    return FORMATS[name]


def rows_of(x: Any, argument: str, format: str) -> Rows:
    """``x`` as rows of ``format``; refused before launch if the kernels cannot address it."""
    fmt = block_format(format)
    array = array_of(x, argument)
    require(array.dtype in INPUTS, argument, f"must be one of {sorted(INPUTS)}, dtype={array.dtype}")
    require(len(array.shape) == 2, argument, f"must have shape [T, W], shape={list(array.shape)}")
    tokens, width = array.shape
    require(
        width > 0 and width % fmt.block == 0,
        argument,
        f"must have a width that is a multiple of the block, width={width} block={fmt.block}",
    )
    require(array.strides[1] == array.itemsize, argument, f"must have contiguous rows, strides={list(array.strides)}")
    aligned = array.pointer % 16 == 0 and (tokens < 2 or (array.strides[0] % 16 == 0 and array.strides[0] >= 0))
    require(
        aligned or tokens == 0,
        argument,
        f"must have rows at multiples of 16 bytes, address={array.pointer:#x} row_stride_bytes={array.strides[0]}",
    )
    return Rows(array, fmt)


def record_shape(rows: int, width: int, bits: int) -> tuple[int, ...]:
    """Shape of the code rows of ``bits`` bits (4: whole codes)."""
    if isinstance(bits, bool) or bits not in (1, 2, 3, 4):
        raise InvalidRequest(f"bits must be 1, 2, 3 or 4, got={bits!r}", argument="bits")
    return (rows, width // 2) if bits == 4 else (rows, bits, width // 8)


def rule_number(rule: str, bits: int) -> int:
    """Number of a rule in the sources; the rules differ for one and two bits alone."""
    if rule not in RULES:
        raise InvalidRequest(f"rule must be one of {RULES}, got={rule!r}", argument="rule")
    return RULES.index(rule) if bits in (1, 2) else 0


def valid_rows(valid: Any, tokens: int, device: int) -> DeviceArray | None:
    """Which rows have a record, bool or uint8 [T]."""
    if valid is None:
        return None
    view = array_of(valid, "valid")
    require(view.dtype in ("bool", "uint8"), "valid", f"must be bool or uint8, dtype={view.dtype}")
    require(view.shape == (tokens,) and view.dense, "valid", f"must be contiguous [T], shape={list(view.shape)}")
    require(view.device == device, "valid", f"must be on the device of x, device={view.device}")
    return view
