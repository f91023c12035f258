"""CUDA sources to functions: found, compiled and cached per device, without toolkit headers.

The sources in ``cuda/`` include nothing but each other, so NVRTC compiles them on an image without CUDA headers;
includes are pasted in here, and compile-time switches are ``-D`` options. CuPy keeps compiled binaries on disk
(``$CUPY_CACHE_DIR``, by default ``~/.cupy/kernel_cache``), keyed by source, options and architecture, so a variant is
compiled once per machine, about half a second each. Importing this module needs neither CuPy nor a GPU.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from trace_store.errors import Unsupported

SOURCES = Path(__file__).parent / "cuda"
CAPABILITY_MIN = (8, 0)
"""sm_80: bfloat16 conversion, reductions across a warp."""

_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)
_PRAGMA = re.compile(r"^#pragma once\n", re.MULTILINE)


@cache
def cupy() -> Any:
    """The cupy module, or Unsupported with what to install."""
    try:
        import cupy as module
    except ImportError as error:
        raise Unsupported(
            "GPU kernels need CuPy: pip install 'trace-store[cuda13]' (or cuda12, as torch.version.cuda says); CPU "
            f"tensors work without it, import_error={error}"
        ) from error
    try:
        devices = module.cuda.runtime.getDeviceCount()
    except module.cuda.runtime.CUDARuntimeError as error:
        raise Unsupported(f"GPU kernels need a CUDA device and its driver, cuda_error={error}") from error
    if not devices:
        raise Unsupported("GPU kernels need a CUDA device, devices=0")
    return module


@cache
def multiprocessors(device: int) -> int:
    """Multiprocessors of a device."""
    return int(cupy().cuda.Device(device).attributes["MultiProcessorCount"])


def source(name: str) -> str:
    """Text of ``cuda/<name>`` with its includes pasted in, each once."""
    seen: set[str] = set()

    def read(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        text = _PRAGMA.sub("", (SOURCES / file).read_text(encoding="utf-8"))
        return _INCLUDE.sub(lambda match: read(match[1]), text)

    return read(name)


@cache
def function(file: str, name: str, switches: tuple[tuple[str, int], ...], device: int) -> Any:
    """The kernel ``name`` of ``cuda/<file>`` with TS_* switches, loaded on a device. Compiles on first use."""
    module = cupy()
    with module.cuda.Device(device) as active:
        capability = int(active.compute_capability)
        if divmod(capability, 10) < CAPABILITY_MIN:
            raise Unsupported(
                f"the kernels need compute capability {CAPABILITY_MIN[0]}.{CAPABILITY_MIN[1]}, got={capability / 10}"
            )
        options = ("-std=c++14", *(f"-DTS_{key}={value}" for key, value in switches))
        try:
            raw = module.RawModule(code=source(file), options=options).get_function(name)
            return raw.kernel
        except (module.cuda.compiler.CompileException, module.cuda.driver.CUDADriverError) as error:
            raise Unsupported(f"the kernel does not build on this device, kernel={name} reason={error}") from error
