"""Launching: parameters by value, division by multiplication, device and stream of the caller.

A kernel gets one structure by value, so a CUDA graph captures every pointer with the launch and no table lives in
device memory. Nothing here allocates on the device or synchronises.
"""

from __future__ import annotations

import ctypes

import numpy as np

from trace_kernels import _module
from trace_kernels._array import DeviceArray
from trace_store.errors import InvalidRequest, Unsupported

THREADS = 256
UNIT = 8
"""Elements a thread handles at once: one byte of a plane, 16 bytes of bfloat16."""

UNITS_MAX = 2**31
"""Bound of the flat index; 2^34 elements. Also the range in which division by multiplication is exact."""


class Divisor(ctypes.Structure):
    """n / divisor as (n * multiplier >> 32) >> shift, exact for n < 2^31 (Granlund and Montgomery, 1994)."""

    _fields_ = (("divisor", ctypes.c_uint32), ("multiplier", ctypes.c_uint32), ("shift", ctypes.c_uint32))

    @classmethod
    def of(cls, divisor: int) -> Divisor:
        """The constants for 1 <= divisor < 2^31."""
        if divisor == 1:
            return cls(1, 0, 0)
        shift = (divisor - 1).bit_length()
        return cls(divisor, ((1 << (31 + shift)) + divisor - 1) // divisor, shift - 1)


class Stream:
    """A stream by its pointer, as CuPy's launcher reads it. CuPy's own wrapper costs more and is deprecated."""

    def __init__(self, pointer: int) -> None:
        self.ptr = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        """The CUDA stream protocol, version 0."""
        return 0, self.ptr


def blocks_of(pieces: int, pieces_a_block: int) -> int:
    """Blocks for this many pieces, rounded up."""
    return -(-pieces // pieces_a_block)


def flat_units(tokens: int, width: int) -> int:
    """Units of 8 elements, refused where the flat index would not hold them."""
    units = tokens * width // UNIT
    if units >= UNITS_MAX:
        raise Unsupported(f"one call takes below 2^34 elements: split the rows, rows={tokens} width={width}")
    return units


def launch(
    file: str,
    name: str,
    switches: dict[str, int],
    grid: tuple[int, ...],
    parameters: ctypes.Structure,
    arrays: tuple[DeviceArray, ...],
    stream: int | None,
    *,
    threads: int = THREADS,
    resident: int | None = None,
) -> None:
    """Launch on the device of ``arrays`` and on ``stream``, leaving the caller's device current.

    ``resident`` bounds the first axis of the grid to this many blocks a multiprocessor, for kernels whose blocks stay.

    ``stream`` is the pointer of a CUDA stream (``torch.cuda.current_stream().cuda_stream``), or None for CuPy's current
    stream. Torch tensors need it: CuPy cannot know which stream wrote them.
    """
    device = arrays[0].device
    if stream is None and any(array.owner == "torch" for array in arrays):
        raise InvalidRequest(
            "torch tensors need the stream they belong to; or call trace_kernels.torch_op", argument="stream"
        )
    cupy = _module.cupy()
    kernel = _module.function(file, name, tuple(sorted({**switches, "THREADS": threads}.items())), device)
    if resident is not None:
        grid = (min(grid[0], resident * _module.multiprocessors(device)), *grid[1:])
    # CuPy copies the argument during the call, so the structure may die afterwards.
    argument = np.frombuffer(bytes(parameters), dtype=f"V{ctypes.sizeof(parameters)}")
    with cupy.cuda.Device(device):
        kernel(grid, (threads,), (argument,), stream=None if stream is None else Stream(stream))
