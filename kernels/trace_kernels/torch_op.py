"""torch operators ``trace_store::*``: CUDA tensors run the kernels, CPU tensors the NumPy oracle, with the same bits.

Every operator has a fake implementation, so that torch.compile traces through it without a graph break, allocates from
torch's allocator alone, runs on torch's current stream of the tensor's device, and neither synchronises nor needs a
current device; so all of them can be captured in a CUDA graph.

    guided_round, rtn_round   straight-through: the gradient of y is passed to x unchanged, nothing else gets one
    quantize, pack            no gradient
    discrepancy               no gradient

A second derivative of a straight-through estimate does not exist: a backward pass under ``create_graph=True`` raises
Unsupported instead of returning zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trace_kernels import discrepancy as _discrepancy
from trace_kernels import guided_round as _guided_round
from trace_kernels import host
from trace_kernels import pack as _pack
from trace_kernels import quantize as _quantize
from trace_kernels.layout import KVPage, layout_number
from trace_store import codebook
from trace_store.codebook import FORMATS
from trace_store.errors import InvalidRequest, Unsupported

__all__ = ["discrepancy", "guided_round", "pack", "pack_sites", "quantize", "rtn_round"]

Tensor = torch.Tensor
pack_sites = _pack.pack_sites
"""Many sites in one launch; see ``trace_kernels.pack``. Not an operator: call it eagerly or under graph capture."""


# ---- operators -------------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "trace_store::guided_round",
    mutates_args=(),
    schema="(Tensor x, Tensor planes, Tensor scales, Tensor tensor_scale, Tensor? valid, Tensor? record_rows, "
    "Tensor? native_tensor_scale, str format, int bits, str rule) -> Tensor",
)
def _guided_round_op(
    x: Tensor,
    planes: Tensor,
    scales: Tensor,
    tensor_scale: Tensor,
    valid: Tensor | None,
    record_rows: Tensor | None,
    native_tensor_scale: Tensor | None,
    format: str,
    bits: int,
    rule: str,
) -> Tensor:
    rows = _addressable(x)
    if _on_gpu(x):
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        _guided_round.guided_round(
            rows, planes, scales, tensor_scale, valid, out=out, format=format, bits=bits, rule=rule,
            record_rows=record_rows, native_tensor_scale=native_tensor_scale, stream=_stream(x),
        )  # fmt: skip
        return out
    _guided_round.check(
        rows, planes, scales, tensor_scale, valid, format=format, bits=bits, rule=rule, record_rows=record_rows,
        native_tensor_scale=native_tensor_scale,
    )  # fmt: skip
    y = host.guided_round(
        _numpy(x), _numpy(planes), _numpy(scales), _numpy(tensor_scale), _optional(valid), format=format, bits=bits,
        rule=rule, record_rows=_optional(record_rows),
        native_tensor_scale=None if native_tensor_scale is None else float(native_tensor_scale),
    )  # fmt: skip
    return torch.from_numpy(y).to(x.dtype)


@torch.library.custom_op(
    "trace_store::rtn_round",
    mutates_args=(),
    schema="(Tensor x, Tensor scales, Tensor tensor_scale, str format) -> Tensor",
)
def _rtn_round_op(x: Tensor, scales: Tensor, tensor_scale: Tensor, format: str) -> Tensor:
    rows = _addressable(x)
    if _on_gpu(x):
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        _guided_round.rtn_round(rows, scales, tensor_scale, out=out, format=format, stream=_stream(x))
        return out
    _guided_round.check_rtn(rows, scales, tensor_scale, format=format)
    y = codebook.rtn_round(_numpy(x), _numpy(scales), _numpy(tensor_scale), format=format)
    return torch.from_numpy(y).to(x.dtype)


@torch.library.custom_op(
    "trace_store::quantize",
    mutates_args=(),
    schema="(Tensor x, Tensor? tensor_scale, str format, int bits) -> (Tensor, Tensor, Tensor)",
)
def _quantize_op(x: Tensor, tensor_scale: Tensor | None, format: str, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    if not _on_gpu(x):
        _quantize.check(_addressable(x), tensor_scale, format=format, bits=bits)
        given = None if tensor_scale is None else _numpy(tensor_scale)
        scale = given if given is None or given.size > 1 else given.reshape(-1)[0]
        planes, scales, decode = host.quantize(_numpy(x), scale, format=format, bits=bits)
        return torch.from_numpy(planes), torch.from_numpy(scales), torch.from_numpy(decode)
    planes_, scales_, decode_ = _quantized_like(x, tensor_scale, format, bits)
    workspace = None
    if tensor_scale is not None:
        decode_.copy_(tensor_scale.reshape(decode_.shape))
    elif FORMATS[format].scale == "e8m0" or not x.shape[0]:
        decode_.fill_(1.0)
    else:
        workspace = torch.zeros(1, dtype=torch.int32, device=x.device)
    if x.shape[0]:
        _quantize.quantize(
            _addressable(x), tensor_scale, planes=planes_, scales=scales_, decode=decode_, workspace=workspace,
            format=format, bits=bits, stream=_stream(x),
        )  # fmt: skip
    return planes_, scales_, decode_


@torch.library.custom_op(
    "trace_store::pack",
    mutates_args=("planes", "out_scales", "decode"),
    schema="(Tensor codes, Tensor scales, Tensor(a!) planes, Tensor(b!) out_scales, Tensor(c!)? decode, "
    "Tensor? global_scale, Tensor? slots, Tensor? dest_rows, int[] page, SymInt width, SymInt tokens, str format, "
    "int bits, str layout, str global_scale_kind) -> ()",
)
def _pack_op(
    codes: Tensor,
    scales: Tensor,
    planes: Tensor,
    out_scales: Tensor,
    decode: Tensor | None,
    global_scale: Tensor | None,
    slots: Tensor | None,
    dest_rows: Tensor | None,
    page: Sequence[int],
    width: int,
    tokens: int,
    format: str,
    bits: int,
    layout: str,
    global_scale_kind: str,
) -> None:
    site = _pack.PackSite(
        codes, scales, planes, out_scales, width, format, layout, tokens, slots, dest_rows, global_scale,
        global_scale_kind, decode, _page(page),
    )  # fmt: skip
    if _on_gpu(codes):
        _pack.pack(site, bits=bits, stream=_stream(codes))
    else:
        _pack.check(site, bits=bits)
        arrays: dict[str, Any] = {
            name: _in_place(getattr(site, name)) for name in _ARRAYS if getattr(site, name) is not None
        }
        host.pack(replace(site, **arrays), bits=bits)


@torch.library.custom_op(
    "trace_store::discrepancy",
    mutates_args=(),
    schema="(Tensor x, Tensor planes, Tensor scales, Tensor tensor_scale, Tensor? valid, str format, int bits, "
    "str rule) -> Tensor",
)
def _discrepancy_op(
    x: Tensor,
    planes: Tensor,
    scales: Tensor,
    tensor_scale: Tensor,
    valid: Tensor | None,
    format: str,
    bits: int,
    rule: str,
) -> Tensor:
    if _on_gpu(x):
        sums = torch.zeros(_discrepancy.SUMS, dtype=torch.float64, device=x.device)
        _discrepancy.discrepancy(
            _addressable(x), planes, scales, tensor_scale, valid, sums=sums, format=format, bits=bits, rule=rule,
            stream=_stream(x),
        )  # fmt: skip
        return sums
    _discrepancy.check(_addressable(x), planes, scales, tensor_scale, valid, format=format, bits=bits, rule=rule)
    return torch.from_numpy(
        host.discrepancy(
            _numpy(x),
            _numpy(planes),
            _numpy(scales),
            _numpy(tensor_scale),
            _optional(valid),
            format=format,
            bits=bits,
            rule=rule,
        )
    )


# ---- shapes without data, gradients ----------------------------------------------------------------------------------


@_guided_round_op.register_fake
@_rtn_round_op.register_fake
def _same_as_x(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_quantize_op.register_fake
def _quantized_like(x: Tensor, tensor_scale: Tensor | None, format: str, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, width = x.shape
    shape = (tokens, width // 2) if bits == 4 else (tokens, bits, width // 8)
    return (
        x.new_empty(shape, dtype=torch.uint8),
        x.new_empty((tokens, width // FORMATS[format].block), dtype=torch.uint8),
        x.new_empty((1 if tensor_scale is None else tensor_scale.numel(),), dtype=torch.float32),
    )


@_pack_op.register_fake
def _packs_in_place(*arguments: Any) -> None:
    return None


@_discrepancy_op.register_fake
def _ten_sums(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty((_discrepancy.SUMS,), dtype=torch.float64)


def _straight_through(arguments: int) -> Any:
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise Unsupported(
                "a straight-through estimate has no second derivative: call backward without create_graph, "
                "create_graph=True"
            )
        return gradient, *([None] * (arguments - 1))

    return backward


_guided_round_op.register_autograd(_straight_through(10))
_rtn_round_op.register_autograd(_straight_through(4))


# ---- what callers use ------------------------------------------------------------------------------------------------


def guided_round(
    x: Tensor,
    planes: Any,
    scales: Any,
    tensor_scale: Any,
    valid: Any = None,
    *,
    format: str,
    bits: int,
    rule: str = "paper",
    native_tensor_scale: Any = None,
    record_rows: Tensor | None = None,
) -> Tensor:
    """Round x to the bracket end that the rollout recorded; straight-through gradient.

    Args:
        x: [..., W] bfloat16, float16 or float32, CPU or CUDA; the leading axes flatten to T rows.
        planes: uint8 [R, bits, W / 8], whole codes [R, W / 2] for bits 4; R = T without record_rows.
        scales: uint8 [R, W / block], linear order.
        tensor_scale: decode scale, float32 [1] or [R], or a number.
        valid: bool [T]; False rows have no record and are rounded with their own scales.
        format, bits, rule: as ``trace_store.codebook.guided_round`` takes them.
        native_tensor_scale: decode scale of rows without a record; None takes one from each row's maximum (NVFP4).
        record_rows: int32 [T], the record row of each row of x, below 0 for none.

    Returns:
        Like x, contiguous. Arrays and numbers that are no tensors are copied to the device of x, which synchronises.

    Raises:
        InvalidRequest: an argument is wrong; names it.
        Unsupported: CUDA tensors without CuPy.
    """
    _check_format(format)
    device = x.device
    y: Tensor = _guided_round_op(
        x.reshape(-1, x.shape[-1]),
        _tensor(planes, device),
        _tensor(scales, device),
        _scale(tensor_scale, device),
        None if valid is None else _tensor(valid, device),
        record_rows,
        None if native_tensor_scale is None or format != "nvfp4" else _scale(native_tensor_scale, device),
        format,
        bits,
        rule,
    )
    return y.view(x.shape)


def rtn_round(x: Tensor, scales: Any, tensor_scale: Any, *, format: str) -> Tensor:
    """Round x [..., W] to the nearest codeword under given scales; straight-through gradient."""
    _check_format(format)
    rows = x.reshape(-1, x.shape[-1])
    y: Tensor = _rtn_round_op(rows, _tensor(scales, x.device), _scale(tensor_scale, x.device), format)
    return y.view(x.shape)


def quantize(x: Tensor, tensor_scale: Any = None, *, format: str, bits: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x [T, W] into record rows: (planes or whole codes, scales, decode scale [1] or [T]).

    ``tensor_scale`` None takes the decode scale from the maximum of x; see ``trace_kernels.quantize``.
    """
    _check_format(format)
    given = None if tensor_scale is None else _scale(tensor_scale, x.device)
    result: tuple[Tensor, Tensor, Tensor] = _quantize_op(x, given, format, bits)
    return result


def pack(
    codes: Tensor,
    scales: Tensor,
    *,
    width: int,
    format: str,
    bits: int,
    layout: str = "linear",
    tokens: int | None = None,
    global_scale: Tensor | None = None,
    global_scale_kind: str = "decode",
    slots: Tensor | None = None,
    dest_rows: Tensor | None = None,
    page: KVPage | None = None,
    out: tuple[Tensor, Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Pack an engine's codes and scales into record rows: (planes or whole codes, scales, decode scale or None).

    Arguments are those of ``trace_kernels.pack.PackSite``. ``out`` gives the three outputs, for a ring or a CUDA graph;
    without it they are allocated with one row a token.
    """
    _check_format(format)
    layout_number(layout)
    count = tokens if tokens is not None else (slots.shape[0] if slots is not None else codes.shape[0])
    if out is None:
        shape = (count, width // 2) if bits == 4 else (count, bits, width // 8)
        decode = None if global_scale is None else codes.new_empty((global_scale.numel(),), dtype=torch.float32)
        block = FORMATS[format].block
        out = (
            codes.new_empty(shape, dtype=torch.uint8),
            codes.new_empty((count, width // block), dtype=torch.uint8),
            decode,
        )
    fields = [] if page is None else [int(getattr(page, name)) for name in _PAGE_FIELDS]
    _pack_op(
        codes, scales, *out, global_scale, slots, dest_rows, fields, width, count, format, bits, layout,
        global_scale_kind,
    )  # fmt: skip
    return out


def discrepancy(
    x: Tensor,
    planes: Tensor,
    scales: Tensor,
    tensor_scale: Any,
    valid: Tensor | None = None,
    *,
    format: str,
    bits: int,
    rule: str = "paper",
) -> Tensor:
    """The ten sums of ``trace_kernels.discrepancy`` over rows x [T, W], float64 [10]; ``Discrepancy.of`` names them."""
    _check_format(format)
    result: Tensor = _discrepancy_op(x, planes, scales, _scale(tensor_scale, x.device), valid, format, bits, rule)
    return result


# ---- helpers of the operators ----------------------------------------------------------------------------------------

_PAGE_FIELDS = (
    "block_size", "heads", "head_dim", "page_bytes", "code_offset", "scale_offset", "token_major", "interleaved",
)  # fmt: skip


_ARRAYS = ("codes", "scales", "planes", "out_scales", "slots", "dest_rows", "global_scale", "decode")


def _page(fields: Sequence[int]) -> KVPage | None:
    if not fields:
        return None
    named: dict[str, Any] = dict(zip(_PAGE_FIELDS, fields, strict=True))
    named["token_major"], named["interleaved"] = bool(named["token_major"]), bool(named["interleaved"])
    return KVPage(**named)


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise InvalidRequest(f"format must be one of {sorted(FORMATS)}, got={format!r}", argument="format")


def _on_gpu(tensor: Tensor) -> bool:
    if tensor.device.type not in ("cuda", "cpu"):
        raise Unsupported(f"tensors are on the CPU or a CUDA device, device={tensor.device}")
    return tensor.device.type == "cuda"


def _stream(tensor: Tensor) -> int:
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)


def _addressable(x: Tensor) -> Tensor:
    """x, or a contiguous copy where the kernels cannot address its rows."""
    step = x.stride(0) * x.element_size()
    ready = x.dim() == 2 and x.stride(1) == 1 and x.data_ptr() % 16 == 0 and step % 16 == 0 and step > 0
    return x if ready else x.contiguous() if not x.is_contiguous() else x.clone()


def _tensor(value: Any, device: torch.device) -> Tensor:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(np.ascontiguousarray(value), device=device)


def _scale(value: Any, device: torch.device) -> Tensor:
    """A tensor scale as float32 [1] or [T] on the device. A number is written by a kernel, so it may be captured."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(torch.float32).reshape(-1).contiguous()
    if isinstance(value, (float, int)):  # before NumPy is asked, which torch.compile cannot trace with a number
        return torch.full((1,), float(value), dtype=torch.float32, device=device)
    return torch.as_tensor(np.asarray(value, dtype=np.float32).reshape(-1), device=device)


def _numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """CPU tensor to NumPy; bfloat16, which NumPy lacks, as the float32 that holds it."""
    plain = tensor.detach().contiguous()
    array: np.ndarray[Any, Any] = (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    return array


def _in_place(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The memory of a CPU tensor; types that NumPy lacks as bytes."""
    plain = tensor.detach()
    known = plain.dtype in (torch.uint8, torch.int32, torch.int64, torch.float32)
    array: np.ndarray[Any, Any] = (plain if known else plain.view(torch.uint8)).numpy()
    return array


def _optional(tensor: Tensor | None) -> Any:
    return None if tensor is None else _numpy(tensor)
