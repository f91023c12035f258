"""Guidance inside a trainer: a straight-through fake quantizer, and a context that applies one microbatch's records.

    y = guided_fake_quant(x, planes, scales, tensor_scale, valid, format="nvfp4", bits=1)

forward   y is x rounded to the rollout's grid on the side that the record names (Algorithm 1 of TRACE,
          arXiv 2610.07767), in the dtype of x; a row without a record is rounded natively, with its own block scales
backward  the gradient of y is passed to x unchanged; nothing else gets one

``GuidanceContext`` holds what ``reader.prefetch`` gave for one microbatch and rounds by site, either where the
trainer's code calls ``ctx.round`` or in front of a module by a forward pre-hook. Missing guidance never fails a step:
the rows are rounded natively and counted, see ``GuidanceContext.report``.

CPU tensors go through the NumPy oracle ``trace_store.codebook``, CUDA tensors through ``trace_kernels``; both give the
same bits. Reading rows twice (recompute in the backward pass) gives the same result twice, since nothing is consumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from trace_store import Site, codebook
from trace_store.errors import InvalidRequest

__all__ = ["GuidanceBatch", "GuidanceContext", "SiteReport", "guided_fake_quant"]


class GuidanceBatch(Protocol):
    """What a reader returns for one microbatch: mappings from site to rows, in the row order of the forward pass."""

    @property
    def planes(self) -> Mapping[Site, Any]:
        """uint8 [rows, b, W / 8], or [rows, W / 2] for form ``full``."""

    @property
    def scales(self) -> Mapping[Site, Any]:
        """uint8 [rows, W / block]."""

    @property
    def tensor_scales(self) -> Mapping[Site, Any]:
        """float32 [rows]."""

    @property
    def valid(self) -> Mapping[Site, Any]:
        """bool [rows]; False where the store has no record."""


def guided_fake_quant(
    x: torch.Tensor,
    planes: Any,
    scales: Any,
    tensor_scale: Any,
    valid: Any = None,
    *,
    format: str,
    bits: int,
    rule: str = "paper",
    native_tensor_scale: float | None = None,
) -> torch.Tensor:
    """Round x with the rollout's record; forward the rounded value, backward the identity.

    Args:
        x: float32, float16 or bfloat16 [..., W]; the leading axes flatten to T rows.
        planes: uint8 [T, bits, W / 8], or [T, W / 2] whole codes for ``bits`` 4. Tensor or NumPy array on the host,
            tensor on the device of x for CUDA; the same holds for the next three.
        scales: block scales of the rollout, uint8 [T, W / block].
        tensor_scale: decode scale of the rollout, float32 [T], [1] or a scalar.
        valid: bool [T]; rows that are False have no record. None means that all have one.
        format, bits, rule: as ``trace_store.codebook.guided_round`` takes them.
        native_tensor_scale: decode scale for rows without a record; None takes one from each row's maximum.

    Returns:
        A tensor like x.

    Raises:
        InvalidRequest: shape, dtype, format, bits or rule is wrong; the message names the argument.
    """
    if x.device.type == "cuda":
        from trace_kernels.torch_op import guided_round  # type: ignore[import-not-found, unused-ignore]

        result: torch.Tensor = guided_round(
            x, planes, scales, tensor_scale, valid,
            format=format, bits=bits, rule=rule, native_tensor_scale=native_tensor_scale,
        )  # fmt: skip
        return result
    rounded = _guided_rows(
        host_rows(x), planes, scales, tensor_scale, valid,
        format=format, bits=bits, rule=rule, native_tensor_scale=native_tensor_scale,
    )  # fmt: skip
    return straight_through(x, rounded)


def straight_through(x: torch.Tensor, rounded: npt.NDArray[np.float32]) -> torch.Tensor:
    """``rounded`` [T, W] in shape and dtype of x as the forward value; the gradient goes to x unchanged."""
    value = torch.from_numpy(rounded).to(x.dtype).view(x.shape)
    result: torch.Tensor = _StraightThrough.apply(x, value)  # type: ignore[no-untyped-call]
    return result


def host_rows(x: torch.Tensor) -> npt.NDArray[np.float32]:
    """x [..., W] on the host as float32 [T, W], detached."""
    if x.dim() < 1 or not x.is_floating_point():
        raise InvalidRequest(f"x must be a float tensor [..., W], shape={list(x.shape)} dtype={x.dtype}", argument="x")
    rows: npt.NDArray[np.float32] = x.detach().reshape(-1, x.shape[-1]).float().numpy()
    return rows


class _StraightThrough(torch.autograd.Function):
    """Forward the second argument, backward the gradient to the first."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def _guided_rows(
    x: npt.NDArray[np.float32],
    planes: Any,
    scales: Any,
    tensor_scale: Any,
    valid: Any,
    *,
    format: str,
    bits: int,
    rule: str,
    native_tensor_scale: float | None,
) -> npt.NDArray[np.float32]:
    planes, scales, tensor_scale = _array(planes), _array(scales), _array(tensor_scale).astype(np.float32).reshape(-1)
    mask = np.ones(len(x), bool) if valid is None else _array(valid).astype(bool)
    for argument, array in (("planes", planes), ("scales", scales), ("valid", mask)):
        if len(array) != len(x):
            raise InvalidRequest(
                f"{argument} must have one row per row of x, rows={len(array)} x={len(x)}", argument=argument
            )
    if tensor_scale.size not in (1, len(x)):
        raise InvalidRequest(
            f"tensor_scale must hold 1 value or one per row of x, values={tensor_scale.size} x={len(x)}",
            argument="tensor_scale",
        )
    if mask.all():
        return codebook.guided_round(x, planes, scales, tensor_scale, format=format, bits=bits, rule=rule)
    # The masked-out rows of a record are unspecified bytes under a NaN scale: they are left out, not computed.
    out = np.empty_like(x)
    out[~mask] = codebook.native_round(x[~mask], format=format, tensor_scale=native_tensor_scale)
    if mask.any():
        row_scale = tensor_scale if tensor_scale.size == 1 else tensor_scale[mask]
        out[mask] = codebook.guided_round(
            x[mask], planes[mask], scales[mask], row_scale, format=format, bits=bits, rule=rule
        )
    return out


def _array(value: Any) -> npt.NDArray[Any]:
    return np.asarray(value.detach().numpy() if isinstance(value, torch.Tensor) else value)


@dataclass(frozen=True)
class SiteReport:
    """Rows that a context rounded at one site. A row rounded twice (recompute) counts twice."""

    guided: int
    native: int


class GuidanceContext:
    """One microbatch's guidance, applied by site.

        for batch in reader.prefetch(microbatches):
            with GuidanceContext(batch) as ctx:
                for layer, module in routed_experts(model):
                    ctx.attach(module, Site(layer, "moe_in", width=2048))
                loss(model(tokens)).backward()
            rows_without_guidance += sum(site.native for site in ctx.report().values())

    Leaving the ``with`` block removes the hooks. A backward pass that recomputes the forward belongs inside it.

    Args:
        batch: what the reader returned; its rows are the rows of x, leading axes flattened.
        rule: tie rule of the guided rounding, ``paper`` or ``cell``.
        native_tensor_scale: decode scale by site for rows without a record; a site that is not in it takes one from
            each row's maximum.
    """

    def __init__(
        self, batch: GuidanceBatch, *, rule: str = "paper", native_tensor_scale: Mapping[Site, float] | None = None
    ) -> None:
        self._batch = batch
        self._rule = rule
        self._native_tensor_scale = dict(native_tensor_scale or {})
        self._hooks: list[Any] = []
        self._rows: dict[Site, int] = {}
        self._guided: dict[Site, Any] = {}

    def round(self, site: Site, x: torch.Tensor) -> torch.Tensor:
        """x [..., W] rounded with the microbatch's records of ``site``; natively if the microbatch has none of it."""
        if not site.format:
            raise InvalidRequest(f"site has no rounding format, block={site.block} scale={site.scale}", argument="site")
        if x.shape[-1] != site.width:
            raise InvalidRequest(f"x must be {site.width} wide, site={site.name} shape={list(x.shape)}", argument="x")
        rows = x.numel() // site.width
        batch, native = self._batch, self._native_tensor_scale.get(site)
        self._rows[site] = self._rows.get(site, 0) + rows
        if site not in batch.planes:
            return self._round_natively(site, x, native)
        # Summed where the mask is and read in report(): a number here would wait for the device at every site.
        self._guided[site] = self._guided.get(site, 0) + batch.valid[site].sum()
        return guided_fake_quant(
            x, batch.planes[site], batch.scales[site], batch.tensor_scales[site], batch.valid[site],
            format=site.format, bits=site.code_form.bits, rule=self._rule, native_tensor_scale=native,
        )  # fmt: skip

    def attach(self, module: torch.nn.Module, site: Site) -> Any:
        """Round the first positional input of ``module`` from now on.

        Returns:
            The hook's handle; ``handle.remove()`` undoes it, and so does leaving the context.
        """

        def round_input(_: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (self.round(site, inputs[0]), *inputs[1:])

        hook = module.register_forward_pre_hook(round_input)
        self._hooks.append(hook)
        return hook

    def detach(self) -> None:
        """Remove every hook that ``attach`` placed."""
        while self._hooks:
            self._hooks.pop().remove()

    def report(self) -> dict[Site, SiteReport]:
        """Rows rounded with a record and without one, by site, in the order of first use. Waits for a CUDA device."""
        guided = {site: int(self._guided.get(site, 0)) for site in self._rows}
        return {site: SiteReport(guided[site], rows - guided[site]) for site, rows in self._rows.items()}

    def __enter__(self) -> GuidanceContext:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()

    def _round_natively(self, site: Site, x: torch.Tensor, tensor_scale: float | None) -> torch.Tensor:
        if x.device.type != "cuda":
            rounded = codebook.native_round(host_rows(x), format=site.format, tensor_scale=tensor_scale)
            return straight_through(x, rounded)
        rows = x.numel() // site.width
        shape = (rows, *site.code_form.row_shape(site.width))
        # No row is valid, so the kernel reads none of these.
        planes = torch.empty(shape, dtype=torch.uint8, device=x.device)
        scales = torch.empty((rows, site.scale_bytes), dtype=torch.uint8, device=x.device)
        return guided_fake_quant(
            x, planes, scales, torch.ones(rows, device=x.device), torch.zeros(rows, dtype=torch.bool, device=x.device),
            format=site.format, bits=site.code_form.bits, rule=self._rule, native_tensor_scale=tensor_scale,
        )  # fmt: skip
