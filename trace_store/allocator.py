"""Keep freed memory in the process instead of giving it back to the system between messages.

Bulk frames are buffers of a few MiB that are allocated and freed all the time. By default glibc maps each from the
system and unmaps it, and the first touch of a fresh page cost 0.7 to 1.6 GB/s on a small virtual machine, against 10
and more for touched memory: holding it gained 1.1 to 1.25x on gRPC streams and 2x in clients of other stores.

The price is memory: what was in use at the peak stays with the process, and every growth of the heap takes
TOP_PAD_BYTES more: a server with four gRPC writers and a reader held 150 to 170 MiB afterwards instead of 57, at its
peak 270 to 290 instead of 170 to 210. With arenas there is no difference. Servers do this at start. A client decides
for its own process: call ``keep_freed_memory`` early, or start it with ``environment()``.
"""

from __future__ import annotations

import ctypes

MMAP_THRESHOLD_BYTES = (32 << 20) - 1
"""Larger buffers are still mapped; more than this is refused by glibc before 2.35."""

TRIM_THRESHOLD_BYTES = 1 << 30
TOP_PAD_BYTES = 64 << 20

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> bool:
    """Set glibc's thresholds in this process; False where there is no glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = (
        (_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
        (_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES),
        (_M_TOP_PAD, TOP_PAD_BYTES),
    )
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)


def environment() -> dict[str, str]:
    """The same as environment variables, for processes that are started."""
    return {
        "MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD_BYTES),
        "MALLOC_TRIM_THRESHOLD_": str(TRIM_THRESHOLD_BYTES),
        "MALLOC_TOP_PAD_": str(TOP_PAD_BYTES),
    }
