"""Speed of the kernels beside a device copy of the same run, torch eager, torch.compile and a Triton version.

    python tests/bench/bench_kernels.py [--json FILE] [--quick]

Every figure is the median GPU time of one launch out of a CUDA graph of many, over buffers that rotate through more
than twice the L2 cache where they fit: launch overhead of Python is out, and the cache does not serve what memory
would. ``of copy`` compares bytes per second with a device-to-device copy of 1 GiB (read plus written) in the same run,
``of same`` with a copy that moves as many bytes as the kernel does, which shows what the size itself costs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trace_kernels import _launch, _module, discrepancy, guided_round, quantize, torch_op
from trace_kernels.pack import PackSite, pack_sites
from trace_store.codebook import FORMATS

WIDTH = 2048
ROTATION_BYTES = 150 << 20
REPLAYS = 15


@dataclass(frozen=True)
class Row:
    """One measured figure."""

    what: str
    rows: int
    microseconds: float
    terabytes_per_second: float
    of_copy: float
    of_same: float


def graph_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median seconds of one call, the calls in turn inside one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
        for start, stop in events:
            start.record()
            graph.replay()
            stop.record()
        stream.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events) * 1e-3 / len(calls)


def rotations(moved: int) -> int:
    """Buffer sets so that together they exceed the cache; at most 64, at least 1."""
    return max(1, min(64, -(-ROTATION_BYTES // max(moved, 1))))


def repeated(calls: list[Callable[[], object]], moved: int) -> list[Callable[[], object]]:
    """Enough calls for a graph of about 2 ms at 3 TB/s, and 20 at least."""
    count = max(20 if moved < 1 << 28 else 8, min(200, int(2e-3 * 3e12 / max(moved, 1))))
    return [calls[i % len(calls)] for i in range(count)]


def copy_rate(moved: int) -> float:
    """Bytes per second, read plus written, of copies that move ``moved`` bytes each.

    The better of copies launched one after another and copies inside a graph: a graph's copy node of a large buffer
    ran at 2.7 TB/s in some places and 4.2 in others on an H200 (2026-11-30); small copies are launch-bound outside one.
    """
    half = max(16, moved // 2)
    sources = [torch.empty(half, dtype=torch.uint8, device="cuda").random_(0, 256) for _ in range(rotations(moved))]
    targets = [torch.empty_like(source) for source in sources]
    calls = repeated([lambda a=a, b=b: b.copy_(a) for a, b in zip(sources, targets, strict=True)], moved)
    for call in calls:
        call()
    times = []
    for _ in range(3):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for call in calls:
            call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3 / len(calls))
    return 2 * half / min(statistics.median(times), graph_seconds(calls))


class Bench:
    """Measures against one reference copy."""

    def __init__(self) -> None:
        self.reference = copy_rate(1 << 30)
        self.rows: list[Row] = []

    def measure(
        self, what: str, rows: int, moved: int, calls: list[Callable[[], object]], *, same: bool = True
    ) -> None:
        """Time ``calls``, each on its own buffers, moving ``moved`` bytes each; prints and keeps the figure."""
        seconds = graph_seconds(repeated(calls, moved))
        rate = moved / seconds
        of_same = rate / copy_rate(moved) if same else float("nan")
        row = Row(what, rows, seconds * 1e6, rate / 1e12, rate / self.reference, of_same)
        self.rows.append(row)
        print(
            f"{row.what:42s} {row.rows:7d} {row.microseconds:9.2f} us {row.terabytes_per_second:7.3f} TB/s "
            f"{row.of_copy:6.3f} of copy {row.of_same:6.3f} of same",
            flush=True,
        )


def activations(rows: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, WIDTH, device="cuda", dtype=torch.float32).to(dtype)


def record(rows: int, fmt: str, bits: int, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Random record rows: planes or whole codes, scales around 1."""
    shape = (rows, width // 2) if bits == 4 else (rows, max(bits, 1), width // 8)
    low, high = (0x30, 0x40) if fmt == "nvfp4" else (125, 129)
    planes = torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)
    scales = torch.randint(low, high, (rows, width // FORMATS[fmt].block), device="cuda", dtype=torch.uint8)
    return planes, scales


def stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def bench_rounding(bench: Bench, rows: int, fmt: str, bits: int, dtype: torch.dtype = torch.bfloat16) -> None:
    x = activations(rows, dtype)
    planes, scales = record(rows, fmt, bits)
    moved = 2 * x.nbytes + scales.nbytes + (planes.nbytes if bits else 0)
    one = torch.ones(1, device="cuda")
    calls: list[Callable[[], object]] = []
    for _ in range(rotations(moved)):
        a, out, p, s = x.clone(), torch.empty_like(x), planes.clone(), scales.clone()
        if bits:
            calls.append(
                lambda a=a, o=out, p=p, s=s: guided_round.guided_round(
                    a, p, s, one, out=o, format=fmt, bits=bits, stream=stream()
                )
            )
        else:
            calls.append(lambda a=a, o=out, s=s: guided_round.rtn_round(a, s, one, out=o, format=fmt, stream=stream()))
    name = f"guided_round {fmt} b={bits}" if bits else f"rtn_round {fmt}"
    bench.measure(f"{name} {str(dtype).removeprefix('torch.')}", rows, moved, calls)


def bench_validity(bench: Bench, rows: int, share: float, *, width: int = WIDTH, bits: int = 1) -> None:
    x = torch.randn(rows, width, device="cuda").to(torch.bfloat16)
    planes, scales = record(rows, "nvfp4", bits, width)
    valid = torch.rand(rows, device="cuda") < share
    one, out = torch.ones(1, device="cuda"), torch.empty_like(x)
    moved = 2 * x.nbytes + int(share * (scales.nbytes + planes.nbytes))
    bench.measure(
        f"guided_round W={width} b={bits}, {share:.0%} with record",
        rows,
        moved,
        [
            lambda: guided_round.guided_round(
                x, planes, scales, one, valid, out=out, format="nvfp4", bits=bits, stream=stream()
            )
        ],
    )


def bench_discrepancy(bench: Bench, rows: int, bits: int, agreeing: bool = True, by_row: bool = False) -> None:
    """Records of activations that differ from the trainer's by 2 %, or random ones, whose look-ups collide most.

    ``by_row``: as a trainer's microbatch holds them, with ``valid`` and a tensor scale per row.
    """
    x, one = activations(rows), torch.ones(1, device="cuda")
    planes, scales = record(rows, "nvfp4", bits)
    if agreeing:
        one = torch.full((1,), 0.002, device="cuda")
        rollout = x + 0.02 * torch.randn_like(x)
        quantize.quantize(rollout, one, planes=planes, scales=scales, format="nvfp4", bits=bits, stream=stream())
        torch.cuda.synchronize()
    sums = torch.zeros(10, device="cuda", dtype=torch.float64)
    moved = x.nbytes + planes.nbytes + scales.nbytes
    valid = torch.ones(rows, device="cuda", dtype=torch.bool) if by_row else None
    one = one.expand(rows).contiguous() if by_row else one
    bench.measure(
        f"discrepancy nvfp4 b={bits} {'' if agreeing else 'random record'}{'valid, scale a row' if by_row else ''}",
        rows,
        moved,
        [
            lambda: discrepancy.discrepancy(
                x, planes, scales, one, valid, sums=sums, format="nvfp4", bits=bits, stream=stream()
            )
        ],
    )


def bench_quantize(bench: Bench, rows: int, fmt: str, bits: int) -> None:
    x = activations(rows)
    scale = torch.full((1,), 0.002, device="cuda") if fmt == "nvfp4" else None
    calls: list[Callable[[], object]] = []
    planes, scales = record(rows, fmt, bits)
    moved = x.nbytes + planes.nbytes + scales.nbytes
    for _ in range(rotations(moved)):
        a, p, s = x.clone(), planes.clone(), scales.clone()
        calls.append(
            lambda a=a, p=p, s=s: quantize.quantize(
                a, scale, planes=p, scales=s, format=fmt, bits=bits, stream=stream()
            )
        )
    bench.measure(f"quantize {fmt} b={bits}", rows, moved, calls)


def pack_site(rows: int, layout: str, bits: int) -> PackSite:
    planes, scales = record(rows, "nvfp4", bits)
    padded = -(-rows // 128) * 128
    codes = torch.randint(0, 256, (rows, WIDTH // 2), device="cuda", dtype=torch.uint8)
    held = torch.randint(0, 256, (padded, WIDTH // 16), device="cuda", dtype=torch.uint8)
    return PackSite(codes, held[:rows] if layout == "linear" else held, planes, scales, WIDTH, "nvfp4", layout)


def bench_pack(bench: Bench, rows: int, layout: str, bits: int) -> None:
    moved = rows * WIDTH * (8 + 2 * bits + 2) // 16
    sites = [pack_site(rows, layout, bits) for _ in range(rotations(moved))]
    calls: list[Callable[[], object]] = [lambda s=s: pack_sites([s], bits=bits, stream=stream()) for s in sites]
    bench.measure(f"pack {layout} b={bits}", rows, moved, calls)


_BARE_GATHER = """
extern "C" __global__ void gather(const uint4* codes, const unsigned short* scales, const int* slots, unsigned* planes,
                                  unsigned short* out, unsigned chunks) {
  unsigned first = blockIdx.x * 256u + threadIdx.x;
  int slot[2];
  uint4 held[2];
  unsigned short scale[2];
#pragma unroll
  for (int k = 0; k < 2; k++) slot[k] = slots[min(first + 128u * k, chunks - 1u) / 32u];
#pragma unroll
  for (int k = 0; k < 2; k++) {
    unsigned chunk = first + 128u * k;
    if (chunk >= chunks) continue;
    held[k] = __ldg(codes + (unsigned long long)slot[k] * 32u + chunk % 32u);
    scale[k] = __ldg(scales + (unsigned long long)slot[k] * 32u + chunk % 32u);
  }
#pragma unroll
  for (int k = 0; k < 2; k++) {
    unsigned chunk = first + 128u * k;
    if (chunk >= chunks) continue;
    planes[chunk] = held[k].x ^ held[k].y ^ held[k].z ^ held[k].w;
    out[chunk] = scale[k];
  }
}
"""


def bare_gather(
    pool: torch.Tensor, held: torch.Tensor, slots: torch.Tensor, planes: torch.Tensor, out: torch.Tensor
) -> Callable[[], object]:
    """What pack reads and writes, and nothing else: the limit of a gather of 512 and 64 bytes in this order."""
    cupy = _module.cupy()
    kernel = cupy.RawModule(code=_BARE_GATHER, options=("-std=c++14",)).get_function("gather").kernel
    chunks = slots.numel() * 32
    arguments = tuple(tensor.data_ptr() for tensor in (pool, held, slots, planes, out))

    def call() -> None:
        kernel((-(-chunks // 256),), (128,), (*arguments, np.uint32(chunks)), stream=_launch.Stream(stream()))

    return call


def bench_gather(bench: Bench, rows: int) -> None:
    """SGLang's KV pool: rows of 1024 elements by slot."""
    slots = torch.randperm(2 * rows, device="cuda", dtype=torch.int32)[:rows]
    pool = torch.randint(0, 256, (2 * rows, 8, 64), device="cuda", dtype=torch.uint8)
    held = torch.randint(0, 256, (2 * rows, 8, 8), device="cuda", dtype=torch.uint8)
    planes = torch.empty(rows, 1, 128, device="cuda", dtype=torch.uint8)
    out = torch.empty(rows, 64, device="cuda", dtype=torch.uint8)
    site = PackSite(pool, held, planes, out, 1024, "nvfp4", slots=slots)
    moved = rows * (512 + 64 + 128 + 64 + 4)
    bench.measure("pack KV pool by slot b=1", rows, moved, [lambda: pack_sites([site], bits=1, stream=stream())])
    bench.measure("  the same bytes by a bare gather", rows, moved, [bare_gather(pool, held, slots, planes, out)])
    codes, scales = pool.view(2 * rows, 512), held.view(2 * rows, 64)
    taken, moved_scales = torch.empty(rows, 512, device="cuda", dtype=torch.uint8), torch.empty_like(out)

    def select() -> None:
        torch.index_select(codes, 0, slots, out=taken)
        torch.index_select(scales, 0, slots, out=moved_scales)

    bench.measure("  the same rows by torch.index_select", rows, 2 * rows * (512 + 64 + 4), [select], same=False)


def bench_decode(bench: Bench) -> None:
    """The recorder's case: 64 rows of a decode step whose buffers sit in the cache, one site and 20 sites a launch."""
    for layout in ("linear", "128x4"):
        site = pack_site(64, layout, 1)
        moved = 64 * WIDTH * 12 // 16
        bench.measure(
            f"decode: pack {layout}, 1 site",
            64,
            moved,
            [lambda s=site: pack_sites([s], bits=1, stream=stream())],
            same=False,
        )
        many = [pack_site(64, layout, 1) for _ in range(20)]
        bench.measure(
            f"decode: pack {layout}, 20 sites", 64, 20 * moved,
            [lambda m=many: pack_sites(m, bits=1, stream=stream())], same=False,
        )  # fmt: skip


def bench_peers(bench: Bench, rows: int) -> None:
    from peers import compiled_guided, eager_guided, triton_guided

    x = activations(rows)
    planes, scales = record(rows, "nvfp4", 1)
    one = torch.ones(1, device="cuda")
    moved = 2 * x.nbytes + planes.nbytes + scales.nbytes
    want = torch_op.guided_round(x, planes, scales, one, format="nvfp4", bits=1)
    for name, peer in (("torch eager", eager_guided), ("torch.compile", compiled_guided), ("Triton", triton_guided)):
        got = peer(x, planes, scales)
        wrong = int((got.view(torch.int16) != want.view(torch.int16)).sum())
        del got
        bench.measure(
            f"{name} b=1 ({wrong} codes differ)", rows, moved, [lambda p=peer: p(x, planes, scales)], same=False
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="131,072 rows and the decode sizes only")
    options = parser.parse_args()
    environment: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cupy": _module.cupy().__version__,
        "python": platform.python_version(),
    }
    bench = Bench()
    environment["copy_terabytes_per_second"] = bench.reference / 1e12
    print(", ".join(f"{key} {value}" for key, value in environment.items()), flush=True)
    run(bench, options.quick)
    if options.json:
        options.json.write_text(json.dumps({**environment, "rows": [asdict(row) for row in bench.rows]}, indent=1))


def run(bench: Bench, quick: bool) -> None:
    large = 131_072
    for fmt in ("nvfp4", "mxfp4"):
        for bits in range(5):
            bench_rounding(bench, large, fmt, bits)
        for bits in (1, 4):
            bench_quantize(bench, large, fmt, bits)
    for layout in ("linear", "128x4", "8x4"):
        for bits in (1, 2, 3, 4) if layout == "linear" else (1,):
            bench_pack(bench, large, layout, bits)
    for rows in (large, 4 * large):
        bench_gather(bench, rows)
    for dtype in (torch.float16, torch.float32):
        bench_rounding(bench, large, "nvfp4", 1, dtype)
    for share in (1.0, 0.5, 0.0):
        for bits in (1, 2, 3, 4):
            bench_validity(bench, large, share, bits=bits)
        for width in (2880, 4096, 7168, 16_384):
            bench_validity(bench, large * WIDTH // width, share, width=width)
    for bits in (1, 2, 3, 4):
        for agreeing in (True, False):
            bench_discrepancy(bench, large, bits, agreeing)
        bench_discrepancy(bench, large, bits, by_row=True)
    bench_decode(bench)
    if quick:
        return
    bench_peers(bench, large)
    bench_peers(bench, large // 4)
    for rows in (1, 64, 512, 4096, 32_768):
        for fmt in ("nvfp4", "mxfp4"):
            bench_rounding(bench, rows, fmt, 1)
        bench_quantize(bench, rows, "nvfp4", 1)
        bench_pack(bench, rows, "linear", 1)
        bench_pack(bench, rows, "128x4", 1)


if __name__ == "__main__":
    main()
