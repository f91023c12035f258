"""Move a microbatch to a torch device: pinned staging, copies on a stream of their own, one event per microbatch."""

from __future__ import annotations

from typing import Any

import torch

from trace_client.microbatch import Microbatch
from trace_store.errors import Unsupported


class DeviceCopy:
    """Copies microbatches to ``device``. Two sets of pinned staging buffers, each reused only after its event."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        if self._device.type != "cuda" or not torch.cuda.is_available():
            raise Unsupported(f"device must be 'cpu' or a CUDA device that torch can use, got={device!r}")
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._staging: list[dict[Any, torch.Tensor]] = [{}, {}]
        self._events: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def __call__(self, batch: Microbatch) -> Microbatch:
        """The microbatch with tensors in place of arrays, ready on the caller's current stream."""
        turn, self._turn = self._turn, 1 - self._turn
        event = self._events[turn]
        if event is not None:
            event.synchronize()
        result = Microbatch(batch.rows, missing=batch.missing, attempts=batch.attempts)
        with torch.cuda.stream(self._stream):
            for name in ("planes", "scales", "tensor_scales", "valid"):
                target: dict[Any, Any] = getattr(result, name)
                for site, array in getattr(batch, name).items():
                    target[site] = self._copy(turn, (name, site), torch.from_numpy(array))
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        self._events[turn] = done
        current = torch.cuda.current_stream(self._device)
        current.wait_event(done)
        for name in ("planes", "scales", "tensor_scales", "valid"):
            for tensor in getattr(result, name).values():
                # Made on the copy stream, used on the caller's: its allocator must know before it reuses the memory.
                tensor.record_stream(current)
        return result

    def _copy(self, turn: int, key: Any, source: torch.Tensor) -> torch.Tensor:
        staging = self._staging[turn].get(key)
        if staging is None or staging.numel() < source.numel():
            staging = self._staging[turn][key] = torch.empty(source.numel(), dtype=source.dtype, pin_memory=True)
        pinned = staging[: source.numel()].view(source.shape)
        pinned.copy_(source)
        return pinned.to(self._device, non_blocking=True)
