"""Streams, CUDA graphs, devices, memory and torch.compile: where a right kernel still gives wrong results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trace_kernels import _module, guided_round, torch_op
from trace_kernels.pack import PackSite
from trace_store.errors import InvalidRequest, Unsupported

pytest.importorskip("cupy", reason="GPU tests need CuPy and a CUDA device")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

DELAY_CYCLES = 90_000_000
"""About 50 ms at the 1.8 GHz of an H200; the race tests repeat with shorter ones."""


def inputs(rows: int, width: int, device: Any = "cuda", seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16, generator=generator)
    planes = torch.randint(0, 256, (rows, 1, width // 8), device=device, dtype=torch.uint8, generator=generator)
    scales = torch.randint(0x30, 0x40, (rows, width // 16), device=device, dtype=torch.uint8, generator=generator)
    return x, planes, scales, torch.ones(1, device=device)


def rounded(args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch_op.guided_round(*args, format="nvfp4", bits=1)


def test_waits_for_the_producer_on_a_side_stream() -> None:
    args = inputs(64, 256)
    codes = torch.randint(0, 256, (64, 128), device="cuda", dtype=torch.uint8)
    want_y = rounded(args)
    want_p, *_ = torch_op.pack(codes, args[2], width=256, format="nvfp4", bits=1)
    stale_x, stale_codes = torch.empty_like(args[0]), torch.empty_like(codes)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    for run in range(1000):
        stream = streams[run % 4]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            stale_x.zero_()
            stale_codes.zero_()
            torch.cuda._sleep(DELAY_CYCLES if run % 50 == 0 else 20_000)
            stale_x.copy_(args[0])
            stale_codes.copy_(codes)
            y = rounded((stale_x, *args[1:]))
            p, *_ = torch_op.pack(stale_codes, args[2], width=256, format="nvfp4", bits=1)
            wrong += (y.view(torch.int16) != want_y.view(torch.int16)).any() | (p != want_p).any()
        torch.cuda.current_stream().wait_stream(stream)
    assert wrong.item() == 0


def test_a_launch_does_not_wait_for_the_gpu() -> None:
    args = inputs(256, 1024)
    rounded(args)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(DELAY_CYCLES)
        rounded(args)
        pending = torch.cuda.Event()
        pending.record()
    assert not pending.query(), "the launch waited for earlier work of its stream"
    torch.cuda.synchronize()


def test_graph_replay_reads_new_contents() -> None:
    x, planes, scales, scale = inputs(64, 2048)
    valid = torch.ones(64, dtype=torch.bool, device="cuda")
    codes = torch.randint(0, 256, (64, 1024), device="cuda", dtype=torch.uint8)
    quantized = torch_op.quantize(x, format="nvfp4")
    torch_op.guided_round(x, planes, scales, scale, valid, format="nvfp4", bits=1)
    torch_op.pack(codes, scales, width=2048, format="nvfp4", bits=1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch_op.guided_round(x, planes, scales, scale, valid, format="nvfp4", bits=1)
        packed, moved, _ = torch_op.pack(codes, scales, width=2048, format="nvfp4", bits=1)
        quantized = torch_op.quantize(x, format="nvfp4")
    for seed in range(1, 6):
        fresh = inputs(64, 2048, seed=seed)
        x.copy_(fresh[0])
        planes.copy_(fresh[1])
        scales.copy_(fresh[2])
        valid.copy_(torch.rand(64, device="cuda") < 0.5)
        codes.random_(0, 256)
        graph.replay()
        want = torch_op.guided_round(x, planes, scales, scale, valid, format="nvfp4", bits=1)
        assert torch.equal(y.view(torch.int16), want.view(torch.int16))
        assert torch.equal(packed, torch_op.pack(codes, scales, width=2048, format="nvfp4", bits=1)[0])
        assert torch.equal(moved, scales)
        for ours, theirs in zip(quantized, torch_op.quantize(x, format="nvfp4"), strict=True):
            assert torch.equal(ours, theirs)


def test_many_sites_in_a_graph() -> None:
    sites = []
    for _ in range(20):
        codes = torch.randint(0, 256, (64, 1024), device="cuda", dtype=torch.uint8)
        scales = torch.randint(0, 256, (64, 128), device="cuda", dtype=torch.uint8)
        planes = torch.zeros(64, 1, 256, device="cuda", dtype=torch.uint8)
        sites.append(PackSite(codes, scales, planes, torch.zeros_like(scales), 2048, "nvfp4"))
    torch_op.pack_sites(sites, bits=1, stream=torch.cuda.current_stream().cuda_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch_op.pack_sites(sites, bits=1, stream=torch.cuda.current_stream().cuda_stream)
    for site in sites:
        site.codes.random_(0, 256)
        site.scales.random_(0, 256)
    graph.replay()
    for site in sites:
        assert torch.equal(site.planes, torch_op.pack(site.codes, site.scales, width=2048, format="nvfp4", bits=1)[0])
        assert torch.equal(site.out_scales, site.scales)


def test_no_second_memory_pool() -> None:
    cupy = _module.cupy()
    args = inputs(512, 2048)
    rounded(args)
    before = cupy.get_default_memory_pool().total_bytes()
    torch_op.quantize(args[0], format="nvfp4")
    torch_op.discrepancy(args[0], *args[1:3], args[3], format="nvfp4", bits=1)
    rounded(args)
    assert cupy.get_default_memory_pool().total_bytes() == before


def test_works_when_torch_holds_nearly_all_memory() -> None:
    free, _ = torch.cuda.mem_get_info()
    args = inputs(65_536, 2048)
    want = rounded(args)
    del want
    hog = torch.empty(int(free * 0.95) - (2 << 30), dtype=torch.uint8, device="cuda")
    codes = torch.empty(65_536, 1024, dtype=torch.uint8, device="cuda").random_(0, 256)
    planes, *_ = torch_op.pack(codes, args[2], width=2048, format="nvfp4", bits=1)
    torch.cuda.synchronize()
    assert planes.shape == (65_536, 1, 256)
    del hog


def test_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    want = rounded(inputs(64, 2048)).cpu()
    for device in (1, 0, 1, 0, 1):
        args = tuple(t.to(f"cuda:{device}") for t in inputs(64, 2048))
        with torch.cuda.device(1 - device):
            got = rounded(args)
            packed, *_ = torch_op.pack(
                torch.zeros(4, 32, dtype=torch.uint8, device=f"cuda:{device}"),
                args[2][:4, :4],
                width=64,
                format="nvfp4",
                bits=1,
            )
            assert torch.cuda.current_device() == 1 - device
            assert _module.cupy().cuda.runtime.getDevice() == 1 - device
        assert got.device.index == device == packed.device.index
        assert torch.equal(got.cpu().view(torch.int16), want.view(torch.int16))
    x, planes, scales, scale = inputs(64, 2048)
    with pytest.raises(InvalidRequest, match="device"):
        torch_op.guided_round(x, planes.to("cuda:1"), scales, scale, format="nvfp4", bits=1)


def test_compiled_without_a_graph_break() -> None:
    x, planes, scales, scale = inputs(96, 512)
    x.requires_grad_()

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch_op.guided_round(x * 2, planes, scales, scale, format="nvfp4", bits=1) * 3

    compiled = torch.compile(step, fullgraph=True)
    y = compiled(x)
    assert torch.equal(y.detach().view(torch.int16), step(x).detach().view(torch.int16))
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.unique().tolist() == [6.0]


def test_compiled_with_a_number_for_a_tensor_scale() -> None:
    x, planes, scales, _ = inputs(96, 512)

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch_op.guided_round(x, planes, scales, 0.37, format="nvfp4", bits=1) * 3

    assert torch.equal(torch.compile(step, fullgraph=True)(x).view(torch.int16), step(x).view(torch.int16))


def test_second_derivative_is_refused() -> None:
    x, planes, scales, scale = inputs(8, 64)
    x.requires_grad_()
    y = torch_op.guided_round(x, planes, scales, scale, format="nvfp4", bits=1)
    with pytest.raises(Unsupported, match="second derivative"):
        torch.autograd.grad(y.float().sum(), x, create_graph=True)


def test_raw_interface_on_cupy_arrays() -> None:
    cupy = _module.cupy()
    x, planes, scales, scale = inputs(32, 256)
    want = rounded((x, planes, scales, scale))
    arrays = [cupy.asarray(t) for t in (x.to(torch.float16), planes, scales, scale)]
    out = cupy.empty_like(arrays[0])
    guided_round.guided_round(*arrays, out=out, format="nvfp4", bits=1)
    half = torch_op.guided_round(x.to(torch.float16), planes, scales, scale, format="nvfp4", bits=1)
    np.testing.assert_array_equal(cupy.asnumpy(out).view(np.int16), half.cpu().numpy().view(np.int16))
    with pytest.raises(InvalidRequest, match="stream"):
        guided_round.guided_round(x, planes, scales, scale, out=torch.empty_like(want), format="nvfp4", bits=1)
