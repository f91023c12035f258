"""Keys and values of the store: sites, token spans, guidance records, receipts. Frozen, validated when built.

A guidance record is what the rollout's quantizer did at one site for T consecutive tokens of one trajectory:

    codes          uint8 [T, *form.row_shape(width)]   low bits of each E2M1 code (``trace_store.form``)
    scales         uint8 [T, width / block]            block scale bytes, linear order, E4M3 or E8M0
    tensor_scale   float32 [1] or [T]                  decode scale: value = code * block scale * tensor_scale
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trace_store.errors import InvalidRequest
from trace_store.form import FORMS, Form
from trace_store.limits import ATTEMPT_MAX, ID_BYTES_MAX, POLICY_VERSION_MAX, SITES_MAX, TOKENS_MAX, WIDTH_MAX

Bytes2D = npt.NDArray[np.uint8]

SCALE_TYPES = ("e4m3", "e8m0")

_FORMAT_NAMES = {(16, "e4m3"): "nvfp4", (32, "e8m0"): "mxfp4", (16, "e8m0"): "mxfp4_block16"}


def check_name(value: object, argument: str) -> str:
    """Return ``value`` if it is a usable run, partition or trajectory name.

    A name is 1 to 512 UTF-8 bytes without control characters, and no part between slashes is empty, ``.`` or ``..``.
    Names are compared as bytes: a composed and a decomposed accent are two names.
    """
    if not isinstance(value, str):
        raise InvalidRequest(f"{argument} must be a string, got={type(value).__name__}", argument=argument)
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{argument} is no valid UTF-8: {error.reason}", argument=argument) from None
    if not 1 <= size <= ID_BYTES_MAX:
        raise InvalidRequest(f"{argument} must be 1 to {ID_BYTES_MAX} UTF-8 bytes, bytes={size}", argument=argument)
    if any(unicodedata.category(character) == "Cc" for character in value):
        raise InvalidRequest(f"{argument} has a control character, name={value!r}", argument=argument)
    if any(part in ("", ".", "..") for part in value.replace("\\", "/").split("/")):
        raise InvalidRequest(f"{argument} has an empty or dotted path part, name={value!r}", argument=argument)
    return value


def check_int(value: object, argument: str, low: int, high: int) -> int:
    """Return ``value`` as int if it is an integer in [low, high]; bool and float are refused."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidRequest(f"{argument} must be an integer, got={value!r}", argument=argument)
    if not low <= int(value) <= high:
        raise InvalidRequest(f"{argument} must be in [{low}, {high}], got={int(value)}", argument=argument)
    return int(value)


@dataclass(frozen=True, order=True)
class Site:
    """A named quantization point of the model.

    Attributes:
        layer: global 0-based layer over all layers of the model, dense ones included.
        kind: ``moe_in``, ``k``, ``v`` or a free name of letters, digits, ``_``, ``-`` and ``.``.
        width: elements of one token row; a multiple of ``block``.
        block: elements that share a scale, 16 or 32.
        scale: type of the block scale, ``e4m3`` or ``e8m0``.
        form: how codes are stored, a key of ``trace_store.form.FORMS``.
        quantizer: free text that names the quantizer's mode, such as ``fi-exact`` or ``4over6``.
    """

    layer: int
    kind: str
    width: int
    block: int = 16
    scale: str = "e4m3"
    form: str = "b1"
    quantizer: str = ""

    def __post_init__(self) -> None:
        check_int(self.layer, "site.layer", 0, 100_000)
        kind = check_name(self.kind, "site.kind")
        if not all(c.isascii() and (c.isalnum() or c in "_-.") for c in kind) or len(kind) > 64:
            raise InvalidRequest(f"site.kind must be up to 64 of [A-Za-z0-9_.-], got={kind!r}", argument="site.kind")
        check_int(self.width, "site.width", 1, WIDTH_MAX)
        if self.block not in (16, 32):
            raise InvalidRequest(f"site.block must be 16 or 32, got={self.block!r}", argument="site.block")
        if self.width % self.block:
            raise InvalidRequest(
                f"site.width must be a multiple of the block, width={self.width} block={self.block}",
                argument="site.width",
            )
        if self.scale not in SCALE_TYPES:
            raise InvalidRequest(f"site.scale must be e4m3 or e8m0, got={self.scale!r}", argument="site.scale")
        if self.form not in FORMS:
            raise InvalidRequest(f"site.form must be one of {sorted(FORMS)}, got={self.form!r}", argument="site.form")
        if not isinstance(self.quantizer, str) or len(self.quantizer) > 128:
            raise InvalidRequest("site.quantizer must be a string of up to 128 characters", argument="site.quantizer")

    @property
    def name(self) -> str:
        """``layer/kind``, unique within a run."""
        return f"{self.layer}/{self.kind}"

    @cached_property
    def code_form(self) -> Form:
        return FORMS[self.form]

    @cached_property
    def code_bytes(self) -> int:
        """Bytes of codes of one token."""
        return self.code_form.row_bytes(self.width)

    @cached_property
    def scale_bytes(self) -> int:
        """Bytes of block scales of one token."""
        return self.width // self.block

    @property
    def format(self) -> str:
        """Format of ``trace_store.codebook``: ``nvfp4``, ``mxfp4`` or ``mxfp4_block16``; empty for 32 with E4M3."""
        return _FORMAT_NAMES.get((self.block, self.scale), "")


def check_site_table(sites: object) -> tuple[Site, ...]:
    """Return the sites of a run as a tuple; the order is the order of the forward pass and fixes each site's number."""
    try:
        table: tuple[Any, ...] = tuple(sites)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidRequest(
            f"sites must be a sequence of Site, got={type(sites).__name__}", argument="sites"
        ) from None
    if not 1 <= len(table) <= SITES_MAX:
        raise InvalidRequest(f"a run has 1 to {SITES_MAX} sites, got={len(table)}", argument="sites")
    for site in table:
        if not isinstance(site, Site):
            raise InvalidRequest(f"sites must hold Site values, got={type(site).__name__}", argument="sites")
    names = [site.name for site in table]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"a site is named twice, site={twice}", argument="sites")
    return table


@dataclass(frozen=True)
class TokenSpan:
    """Tokens [start, stop) of one trajectory, and the row of the caller's buffer where the first one lands."""

    trajectory: str
    start: int
    stop: int
    dest_row: int = 0

    def __post_init__(self) -> None:
        check_name(self.trajectory, "span.trajectory")
        check_int(self.start, "span.start", 0, TOKENS_MAX)
        check_int(self.stop, "span.stop", 0, TOKENS_MAX)
        check_int(self.dest_row, "span.dest_row", 0, TOKENS_MAX)
        if self.stop <= self.start:
            raise InvalidRequest(
                f"span is empty or negative, start={self.start} stop={self.stop}", argument="span.stop"
            )

    @property
    def tokens(self) -> int:
        return self.stop - self.start


NAN_COPY_BYTES_MAX = 64 << 10
"""Up to here a copy and memchr are faster than NumPy, which gives up the GIL for it and has to get it back: 2 against
20 microseconds for 16 KiB in a client whose other threads are busy."""


def has_nan_scale(scales: bytes | memoryview | npt.NDArray[np.uint8], scale: str) -> bool:
    """Whether block scale bytes hold a NaN: 0x7F or 0xFF for E4M3, 0xFF for E8M0 (method: never silently guided)."""
    size = scales.nbytes if isinstance(scales, (np.ndarray, memoryview)) else len(scales)
    if size <= NAN_COPY_BYTES_MAX:
        copied = scales if isinstance(scales, bytes) else bytes(scales)
        return copied.find(b"\xff") >= 0 or (scale == "e4m3" and copied.find(b"\x7f") >= 0)
    raw = scales if isinstance(scales, np.ndarray) else np.frombuffer(scales, np.uint8)
    # A scale is positive, so its largest byte decides nearly always: one pass at 30 to 100 GB/s, nothing copied.
    highest = int(raw.max()) if raw.size else 0
    if scale != "e4m3" or highest < 0x7F:
        return highest == 0xFF
    return bool(((raw & 0x7F) == 0x7F).any())


@dataclass(frozen=True)
class GuidanceRecord:
    """Codes and scales of one site for tokens [start, start + T) of a trajectory; arrays as in the module docstring."""

    site: Site
    start: int
    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.uint8]
    tensor_scale: npt.NDArray[np.float32]

    @property
    def tokens(self) -> int:
        return int(self.codes.shape[0])

    @classmethod
    def build(cls, site: Site, start: int, codes: Any, scales: Any, tensor_scale: Any) -> GuidanceRecord:
        """Validate caller's arrays (NumPy, or anything ``np.asarray`` takes without a copy of the dtype)."""
        check_int(start, "start", 0, TOKENS_MAX)
        codes = _byte_rows(codes, "planes", site, site.code_form.row_shape(site.width))
        scales = _byte_rows(scales, "scales", site, (site.scale_bytes,))
        tokens = codes.shape[0]
        if tokens == 0 or start + tokens > TOKENS_MAX:
            raise InvalidRequest(f"planes need 1 token or more, site={site.name} tokens={tokens}", argument="planes")
        if scales.shape[0] != tokens:
            raise InvalidRequest(
                f"planes and scales differ in tokens, site={site.name} planes={tokens} scales={scales.shape[0]}",
                argument="scales",
            )
        if has_nan_scale(scales, site.scale):
            raise InvalidRequest(f"scales hold a NaN byte, site={site.name}", argument="scales")
        return cls(site, int(start), codes, scales, _tensor_scale(tensor_scale, site, tokens))


def _byte_rows(array: Any, argument: str, site: Site, row: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    array = np.asarray(array)
    if array.dtype != np.uint8:
        raise InvalidRequest(f"{argument} must be uint8, site={site.name} dtype={array.dtype}", argument=argument)
    if array.ndim == 2 and len(row) == 2 and array.shape[1] == row[0] * row[1]:
        array = array.reshape(array.shape[0], *row)
    if array.shape[1:] != row:
        expected = ", ".join(map(str, row))
        raise InvalidRequest(
            f"{argument} must have shape [T, {expected}], site={site.name} shape={list(array.shape)}", argument=argument
        )
    return np.ascontiguousarray(array)


_FLOAT32_MAX = float(np.finfo(np.float32).max)


def _tensor_scale(value: Any, site: Site, tokens: int) -> npt.NDArray[np.float32]:
    if type(value) in (float, np.float32) and 0 <= value <= _FLOAT32_MAX:
        return np.array([value], np.float32)  # the common case, at a tenth of the cost
    array = np.atleast_1d(np.asarray(value))
    if array.dtype.kind not in "fiu" or array.dtype == np.float16:
        raise InvalidRequest(
            f"tensor_scale must be float32, site={site.name} dtype={array.dtype}", argument="tensor_scale"
        )
    with np.errstate(over="ignore"):  # a double beyond float32 becomes inf, which is refused below
        array = np.ascontiguousarray(array, dtype=np.float32).reshape(-1)
    if array.size not in (1, tokens):
        raise InvalidRequest(
            f"tensor_scale must hold 1 or T values, site={site.name} values={array.size} tokens={tokens}",
            argument="tensor_scale",
        )
    if not np.isfinite(array).all() or bool((array < 0).any()):
        raise InvalidRequest(f"tensor_scale must be finite and >= 0, site={site.name}", argument="tensor_scale")
    return array


def check_attempt(attempt: object, policy_version: object = 0) -> tuple[int, int]:
    return (
        check_int(attempt, "attempt", 0, ATTEMPT_MAX),
        check_int(policy_version, "policy_version", 0, POLICY_VERSION_MAX),
    )


DURABILITIES = ("memory", "written", "synced")
"""What an acknowledgement promises: held in memory; survives a process kill; survives a power cut."""


def check_durability(value: object) -> str:
    if value not in DURABILITIES:
        raise InvalidRequest(f"durability must be one of {DURABILITIES}, got={value!r}", argument="durability")
    return str(value)


@dataclass(frozen=True)
class Receipt:
    """Promise that a sealed trajectory survives a crash, and where its bytes are.

    Attributes:
        tokens, prompt_tokens: what the seal named.
        durability: level reached, always ``synced`` after a seal.
        server: name of the server that sealed it.
        segments: names of the segments that hold its records.
        holes: rows that the seal was allowed to lack, (site name, start, stop).
    """

    run: str
    partition: str
    trajectory: str
    attempt: int
    tokens: int
    prompt_tokens: int
    durability: str
    server: str
    segments: tuple[str, ...] = ()
    holes: tuple[tuple[str, int, int], ...] = ()
