"""Arrays as the checks and the kernels see them: pointer, shape, byte strides, element type, device.

Torch tensors are read through their own methods, CuPy and NumPy arrays through theirs, so that no library is imported
here, no conversion copies or synchronises, and types that DLPack, CuPy or NumPy lack (float8, float4) pass as what they
are. Host memory passes too: one set of checks serves the kernels and the oracle, and a launch alone asks for a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from trace_store.errors import InvalidRequest

HOST = -1
"""``device`` of an array in host memory."""


@dataclass(frozen=True)
class DeviceArray:
    """An array in memory. ``strides`` are in bytes; ``owner`` says whose stream order it follows."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    device: int
    owner: str
    argument: str

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a dense array of this shape."""
        return self.size * self.itemsize

    @property
    def dense(self) -> bool:
        """True if rows follow each other without gaps in C order."""
        expected = self.itemsize
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != expected:
                return self.size == 0
            expected *= extent
        return True


def array_of(array: Any, argument: str) -> DeviceArray:
    """View a torch tensor, a CuPy array or a NumPy array. ``argument`` names it in errors."""
    if hasattr(array, "data_ptr") and hasattr(array, "element_size"):
        itemsize = array.element_size()
        return DeviceArray(
            array.data_ptr(),
            tuple(array.shape),
            tuple(stride * itemsize for stride in array.stride()),
            str(array.dtype).removeprefix("torch."),
            itemsize,
            array.device.index if array.is_cuda else HOST,
            "torch",
            argument,
        )
    if hasattr(array, "__cuda_array_interface__") and hasattr(array, "strides") and hasattr(array, "data"):
        pointer, device, owner = array.data.ptr, array.device.id, "cupy"
    elif hasattr(array, "__array_interface__") and hasattr(array, "strides") and hasattr(array, "itemsize"):
        pointer, device, owner = array.__array_interface__["data"][0], HOST, "numpy"
    else:
        raise InvalidRequest(
            f"{argument} must be a torch tensor, a CuPy array or a NumPy array, type={type(array).__name__}",
            argument=argument,
        )
    return DeviceArray(pointer, array.shape, array.strides, array.dtype.name, array.itemsize, device, owner, argument)


def require_gpu(array: Any, argument: str) -> None:
    """Raise InvalidRequest unless ``array`` is in device memory."""
    require(array_of(array, argument).device != HOST, argument, "must be in CUDA memory")


def require(condition: bool, argument: str, message: str) -> None:
    """Raise InvalidRequest naming ``argument`` unless ``condition`` holds."""
    if not condition:
        raise InvalidRequest(f"{argument} {message}", argument=argument)


def dense_bytes(array: Any, argument: str, shape: tuple[int, ...], device: int) -> DeviceArray:
    """A dense uint8 array of this shape on this device."""
    view = array_of(array, argument)
    require(view.dtype == "uint8", argument, f"must be uint8, dtype={view.dtype}")
    require(view.shape == shape, argument, f"has the wrong shape, expected={list(shape)} got={list(view.shape)}")
    require(view.dense, argument, f"must be contiguous, strides={list(view.strides)}")
    require(view.device == device, argument, f"must be on the same device as x, device={view.device} x={device}")
    return view


def row_scales(array: Any, argument: str, rows: int, device: int) -> DeviceArray:
    """A dense float32 array of one value, or of one a row."""
    view = array_of(array, argument)
    require(view.dtype == "float32", argument, f"must be float32, dtype={view.dtype}")
    require(
        view.size == 1 or view.shape == (rows,),
        argument,
        f"must hold one value or one a row, rows={rows} shape={list(view.shape)}",
    )
    require(view.dense, argument, f"must be contiguous, strides={list(view.strides)}")
    require(view.device == device, argument, f"must be on the same device as x, device={view.device} x={device}")
    return view
