"""Volume of guidance records: bytes per token, per step, and hours at a bandwidth. Pure arithmetic, and its command.

A token row of width W costs ``form.row_bytes(W) + W / block`` bytes, codes and block scales. A token has one such row
per guided MoE layer, before dispatch and so without a factor top-k, and one for K and one for V per guided attention
layer (one latent row with MLA):

    bytes per token = moe_layers * row(hidden) + kv_rows * attention_layers * row(kv_width)

For NVFP4 that is 4.5 bits a value in full and 1.5 at b = 1. The decode scale is not counted where it is one per tensor;
``token_scales`` adds its 4 bytes per token and row. Not counted either: catalog entries and Arrow framing, which are
per record of many tokens. Sizes are printed in powers of 1024, which is how TRACE (arXiv 2610.07767) counts its 45 KB a
token and 51 TB a step; bandwidths are in 10^9 bytes per second.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from trace_store.codebook.formats import block_format
from trace_store.errors import InvalidRequest
from trace_store.form import FORMS

HELP = "print the volume of guidance records for a model's shape: per token, per step, hours at a bandwidth"

COVERAGES = ("all", "latter-half")
"""Guided layers: every one, or per site kind the last floor(N / 2) of N, which is the paper's compact preset."""


@dataclass(frozen=True)
class ModelShape:
    """What of a model sets the volume.

    Attributes:
        name: public name of the model.
        hidden: width of a routed-expert input.
        moe_layers: layers with routed experts.
        kv_width: elements of one KV row: KV heads times head size, or the latent of MLA.
        attention_layers: layers that keep a KV cache.
        kv_rows: rows per token and attention layer: 2 (K and V), or 1 (the latent).
    """

    name: str
    hidden: int
    moe_layers: int
    kv_width: int
    attention_layers: int
    kv_rows: int = 2


MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("Qwen3.5-35B-A3B", 2048, 40, 2 * 256, 10),
        ModelShape("Qwen3-30B-A3B", 2048, 48, 4 * 128, 48),
        ModelShape("gpt-oss-20b", 2880, 24, 8 * 64, 24),
        ModelShape("gpt-oss-120b", 2880, 36, 8 * 64, 36),
        ModelShape("DeepSeek-V3", 7168, 58, 512, 61, kv_rows=1),
        ModelShape("Kimi-K2", 7168, 60, 512, 61, kv_rows=1),
    )
}
"""Shapes from the models' public configurations. Sliding-window layers of gpt-oss are counted like the others."""


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of one generated token's records."""

    moe_in: int
    kv: int

    @property
    def total(self) -> int:
        return self.moe_in + self.kv


def guided_layers(layers: int, coverage: str) -> int:
    """How many of ``layers`` are guided under a coverage of ``COVERAGES``."""
    if coverage not in COVERAGES:
        raise InvalidRequest(f"coverage must be one of {COVERAGES}, got={coverage!r}", argument="coverage")
    return layers if coverage == "all" else layers // 2


def row_bytes(width: int, *, form: str, format: str, token_scales: bool = False) -> int:
    """Bytes of one token row: codes, block scales and, if there is one per token, the decode scale."""
    if form not in FORMS:
        raise InvalidRequest(f"form must be one of {sorted(FORMS)}, got={form!r}", argument="form")
    block = block_format(format).block
    if width <= 0 or width % block:
        raise InvalidRequest(f"a width must be a multiple of the block, width={width} block={block}", argument="width")
    return FORMS[form].row_bytes(width) + width // block + (4 if token_scales else 0)


def bytes_per_token(
    shape: ModelShape, *, form: str, coverage: str = "all", format: str = "nvfp4", token_scales: bool = False
) -> TokenBytes:
    """Bytes of one token's records at every guided site of ``shape``."""
    moe_row = row_bytes(shape.hidden, form=form, format=format, token_scales=token_scales)
    kv_row = row_bytes(shape.kv_width, form=form, format=format, token_scales=token_scales)
    return TokenBytes(
        moe_in=guided_layers(shape.moe_layers, coverage) * moe_row,
        kv=guided_layers(shape.attention_layers, coverage) * shape.kv_rows * kv_row,
    )


def bytes_per_step(token_bytes: int, *, trajectories: int, tokens: int) -> int:
    """Bytes of one training step: ``trajectories`` of ``tokens`` generated tokens each."""
    return token_bytes * trajectories * tokens


def hours(size_bytes: float, *, bytes_per_second: float) -> float:
    """Hours of one serial pass. Writing and reading back is two."""
    return size_bytes / bytes_per_second / 3600


def plan(
    shape: ModelShape,
    *,
    format: str,
    trajectories: int,
    tokens: int,
    bytes_per_second: float,
    token_rate: float,
    token_scales: bool,
) -> list[dict[str, Any]]:
    """One row per form and coverage, the widest first; the keys are those of ``trace-store plan --json``."""
    full = bytes_per_token(shape, form="full", format=format, token_scales=token_scales).total
    rows = []
    for form in sorted(FORMS, key=lambda name: -FORMS[name].bits):
        for coverage in COVERAGES:
            token = bytes_per_token(shape, form=form, coverage=coverage, format=format, token_scales=token_scales)
            step = bytes_per_step(token.total, trajectories=trajectories, tokens=tokens)
            rows.append(
                {
                    "form": form,
                    "coverage": coverage,
                    "moe_in_bytes_per_token": token.moe_in,
                    "kv_bytes_per_token": token.kv,
                    "bytes_per_token": token.total,
                    "times_smaller_than_full": full / token.total,
                    "bytes_per_step": step,
                    "hours_per_pass": hours(step, bytes_per_second=bytes_per_second),
                    "ingest_bytes_per_second": token.total * token_rate,
                }
            )
    return rows


def size_text(size_bytes: float) -> str:
    """Three significant digits in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} TiB" if size_bytes < 1000 else f"{size_bytes:.0f} TiB"


def rate_text(bytes_per_second: float) -> str:
    """Three significant digits in 10^6 or 10^9 bytes per second."""
    if bytes_per_second < 999.5e6:
        return f"{bytes_per_second / 1e6:.3g} MB/s"
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def time_text(duration_h: float) -> str:
    """Seconds below two minutes, minutes below two hours, else hours."""
    if duration_h < 1 / 30:
        return f"{duration_h * 3600:.3g} s"
    return f"{duration_h * 60:.3g} min" if duration_h < 2 else f"{duration_h:.3g} h"


def _positive(kind: type) -> Any:
    def parse(text: str) -> Any:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise ValueError
        return value

    parse.__name__ = f"positive {kind.__name__}"  # argparse puts it into its message
    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trace-store plan", description=HELP)
    parser.add_argument("--model", choices=sorted(MODELS), default="Qwen3.5-35B-A3B", help="shape to start from")
    for name, text in (
        ("hidden", "width of a routed-expert input"),
        ("moe-layers", "layers with routed experts"),
        ("kv-width", "KV heads times head size, or the latent of MLA"),
        ("attention-layers", "layers with a KV cache"),
        ("kv-rows", "KV rows per token and layer: 2, or 1 with MLA"),
    ):
        parser.add_argument(f"--{name}", type=_positive(int), help=f"{text}; replaces the model's")
    parser.add_argument("--format", choices=("nvfp4", "mxfp4", "mxfp4_block16"), default="nvfp4")
    parser.add_argument("--trajectories", type=_positive(int), default=4096, help="trajectories of a step (4096)")
    parser.add_argument("--tokens", type=_positive(int), default=1 << 18, help="generated tokens of each (262144)")
    parser.add_argument("--bandwidth", type=_positive(float), default=5.0, help="of one pass, in GB/s (5)")
    parser.add_argument("--token-rate", type=_positive(float), default=20_000, help="tokens/s of one GPU (20000)")
    parser.add_argument("--token-scales", action="store_true", help="count one float32 decode scale per token and row")
    parser.add_argument("--json", action="store_true", help="print JSON: sizes in bytes, times in hours")
    return parser


def _shape(arguments: argparse.Namespace) -> ModelShape:
    names = ("hidden", "moe_layers", "kv_width", "attention_layers", "kv_rows")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    shape = MODELS[arguments.model]
    return replace(shape, name=f"{shape.name}, changed", **given) if given else shape


def _print_table(shape: ModelShape, arguments: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(
        title=f"{shape.name}, {arguments.format}",
        box=SIMPLE_HEAD,
        padding=0,  # the box already puts a space between columns; one more would not fit into 80 columns
        caption=f"MoE input {shape.hidden} x {shape.moe_layers} layers, KV {shape.kv_rows} x {shape.kv_width} x "
        f"{shape.attention_layers} layers; a step is {arguments.trajectories:,} trajectories of {arguments.tokens:,} "
        f"generated tokens; one pass at {arguments.bandwidth:g} GB/s; a GPU makes {arguments.token_rate:,.0f} tokens/s",
    )
    table.add_column("form, layers", no_wrap=True)
    for heading in ("MoE in\n/token", "KV\n/token", "all\n/token", "vs\nfull", "step", "one\npass", "one\nGPU"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row['form']}, {row['coverage']}",
            size_text(row["moe_in_bytes_per_token"]),
            size_text(row["kv_bytes_per_token"]),
            size_text(row["bytes_per_token"]),
            f"{row['times_smaller_than_full']:.2f}x",
            size_text(row["bytes_per_step"]),
            time_text(row["hours_per_pass"]),
            rate_text(row["ingest_bytes_per_second"]),
        )
    Console().print(table)


def command(argv: list[str]) -> int:
    """``trace-store plan``: print the volume table of one model. Returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    shape = _shape(arguments)
    try:
        rows = plan(
            shape,
            format=arguments.format,
            trajectories=arguments.trajectories,
            tokens=arguments.tokens,
            bytes_per_second=arguments.bandwidth * 1e9,
            token_rate=arguments.token_rate,
            token_scales=arguments.token_scales,
        )
    except InvalidRequest as error:
        parser.error(str(error))
    if arguments.json:
        print(json.dumps({"model": asdict(shape), "format": arguments.format, "rows": rows}, indent=2))
    else:
        _print_table(shape, arguments, rows)
    return 0
