"""What happens before a launch: refusals, constants and sources, none of which needs a GPU."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_kernels import _module, guided_round, pack, quantize
from trace_kernels._launch import Divisor, flat_units
from trace_kernels.pack import PackSite
from trace_store.errors import InvalidRequest, Unsupported

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


@dataclass
class Tensor:
    """A CUDA tensor as far as the checks look at it; its memory does not exist."""

    shape: tuple[int, ...]
    dtype: str = "torch.uint8"
    strides: tuple[int, ...] | None = None
    pointer: int = 1 << 20
    index: int = 0
    is_cuda: bool = True
    device: Any = field(init=False)

    def __post_init__(self) -> None:
        self.device = self

    def stride(self) -> tuple[int, ...]:
        if self.strides is not None:
            return self.strides
        dense = [1]
        for extent in self.shape[:0:-1]:
            dense.insert(0, dense[0] * extent)
        return tuple(dense)

    def element_size(self) -> int:
        return {"6": 2, "2": 4, "4": 8}.get(self.dtype[-1], 1) if "float8" not in self.dtype else 1

    def data_ptr(self) -> int:
        return self.pointer


def bfloat16(*shape: int, **how: Any) -> Tensor:
    return Tensor(shape, "torch.bfloat16", **how)


def rounding(**change: Any) -> None:
    args: dict[str, Any] = {
        "x": bfloat16(8, 64),
        "planes": Tensor((8, 1, 8)),
        "scales": Tensor((8, 4)),
        "tensor_scale": Tensor((1,), "torch.float32"),
        "out": bfloat16(8, 64, pointer=1 << 24),
        "format": "nvfp4",
        "bits": 1,
        "stream": 0,
    }
    guided_round.guided_round(**{**args, **change})


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"x": Tensor((8, 64), "torch.float64")}, "x"),
        ({"x": bfloat16(8, 60)}, "x"),
        ({"x": bfloat16(8, 64, strides=(1, 8))}, "x"),
        ({"x": bfloat16(8, 64, strides=(66, 1))}, "x"),
        ({"x": bfloat16(8, 64, pointer=(1 << 20) + 2)}, "x"),
        ({"x": bfloat16(2, 8, 64)}, "x"),
        ({"x": bfloat16(8, 64, is_cuda=False)}, "x"),
        ({"planes": Tensor((8, 2, 8))}, "planes"),
        ({"planes": Tensor((8, 1, 8), "torch.int32")}, "planes"),
        ({"planes": Tensor((8, 1, 8), index=1)}, "planes"),
        ({"scales": Tensor((8, 4), strides=(8, 1))}, "scales"),
        ({"scales": Tensor((8, 2))}, "scales"),
        ({"tensor_scale": Tensor((8,), "torch.float64")}, "tensor_scale"),
        ({"tensor_scale": Tensor((3,), "torch.float32")}, "tensor_scale"),
        ({"valid": Tensor((7,), "torch.bool")}, "valid"),
        ({"record_rows": Tensor((8,), "torch.int64")}, "record_rows"),
        ({"out": bfloat16(8, 64, pointer=(1 << 20) + 128)}, "out"),
        ({"out": Tensor((8, 64), "torch.float16")}, "out"),
        ({"bits": 0}, "bits"),
        ({"rule": "best"}, "rule"),
        ({"format": "fp8"}, "format"),
        ({"stream": None}, "stream"),
    ],
)
def test_rounding_refuses_before_launch(change: dict[str, Any], argument: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        rounding(**change)
    assert caught.value.argument == argument, caught.value


def test_a_good_call_says_what_is_missing_without_cupy() -> None:
    if "cupy" in sys.modules:
        pytest.skip("CuPy is there")
    with pytest.raises(Unsupported, match=r"pip install 'trace-store\[cuda13\]'"):
        rounding()
    site = PackSite(Tensor((8, 32)), Tensor((8, 4)), Tensor((8, 1, 8)), Tensor((8, 4)), 64, "nvfp4")
    with pytest.raises(Unsupported, match="CuPy"):
        pack.pack(site, bits=1, stream=0)


def test_no_rows_need_no_device() -> None:
    rounding(
        x=bfloat16(0, 64), out=bfloat16(0, 64), planes=Tensor((0, 1, 8)), scales=Tensor((0, 4)), stream=None
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"codes": Tensor((8, 32), "torch.float8_e4m3fn")}, "codes"),
        ({"codes": Tensor((8, 64), "torch.bfloat16")}, "codes"),
        ({"codes": Tensor((8, 30))}, "codes"),
        ({"codes": Tensor((8, 32), strides=(1, 8))}, "codes"),
        ({"codes": Tensor((8, 32), strides=(36, 1))}, "codes"),
        ({"codes": Tensor((4, 32)), "tokens": 8}, "codes"),
        ({"scales": Tensor((8, 4), "torch.float32")}, "scales"),
        ({"scales": Tensor((8, 5))}, "scales"),
        ({"scales": Tensor((8, 4)), "layout": "128x4"}, "scales"),
        ({"layout": "per_expert"}, "layout"),
        ({"layout": "8x4", "slots": Tensor((8,), "torch.int32")}, "layout"),
        ({"planes": Tensor((8, 2, 8))}, "planes"),
        ({"planes": Tensor((4, 1, 8)), "out_scales": Tensor((4, 4)), "tokens": 8}, "planes"),
        ({"out_scales": Tensor((7, 4))}, "out_scales"),
        ({"slots": Tensor((8,), "torch.float32")}, "slots"),
        ({"global_scale": Tensor((1,), "torch.float32")}, "decode"),
        (
            {"global_scale": Tensor((6,), "torch.float32"), "decode": Tensor((8,), "torch.float32")},
            "global_scale",
        ),
        ({"width": 72}, "width"),
    ],
)
def test_packing_refuses_before_launch(change: dict[str, Any], argument: str) -> None:
    args: dict[str, Any] = {
        "codes": Tensor((8, 32)), "scales": Tensor((8, 4)), "planes": Tensor((8, 1, 8)), "out_scales": Tensor((8, 4)),
        "width": 64, "format": "nvfp4",
    }  # fmt: skip
    with pytest.raises(InvalidRequest) as caught:
        pack.pack(PackSite(**{**args, **change}), bits=1, stream=0)
    assert caught.value.argument == argument, caught.value


def test_quantizing_refuses_before_launch() -> None:
    outputs: dict[str, Any] = {"planes": Tensor((8, 32)), "scales": Tensor((8, 4)), "stream": 0}
    with pytest.raises(InvalidRequest, match="workspace"):
        quantize.quantize(bfloat16(8, 64), format="nvfp4", **outputs)
    with pytest.raises(InvalidRequest, match="no tensor scale"):
        quantize.quantize(
            bfloat16(8, 64), Tensor((1,), "torch.float32"), format="mxfp4", **{**outputs, "scales": Tensor((8, 2))}
        )


def test_too_many_elements_for_one_call() -> None:
    assert flat_units(2**23, 2040) < 2**31
    with pytest.raises(Unsupported, match="split the rows"):
        flat_units(2**23, 2048)


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_division_by_multiplication_is_exact(divisor: int, number: int) -> None:
    constants = Divisor.of(divisor)
    for n in (number, number // divisor * divisor, max(number // divisor * divisor - 1, 0)):
        quotient = n if divisor == 1 else (n * constants.multiplier >> 32) >> constants.shift
        assert quotient == n // divisor


def test_parameters_fit_what_every_cuda_version_passes_by_value() -> None:
    assert ctypes.sizeof(pack._Sites) <= 4096


@pytest.mark.parametrize("name", sorted(path.name for path in _module.SOURCES.glob("*.cu")))
def test_sources_need_no_header_but_their_own(name: str) -> None:
    text = _module.source(name)
    assert "#include" not in text
    assert text.count("namespace e2m1 {") == 1


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("name", sorted(path.name for path in _module.SOURCES.glob("*.cu")))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sources_compile(name: str, architecture: str, tmp_path: Path) -> None:
    source = tmp_path / name
    source.write_text(_module.source(name))
    values = {
        "INPUT": 0,
        "BLOCK": 16,
        "E8M0": 0,
        "BITS": 2,
        "RULE": 1,
        "CHUNK": 16,
        "LAYOUT": 1,
        "DENSE": 0,
        "SPLIT": 1,
        "GAP": 1,
        "ROWS": 1,
        "ALIGNED": 0,
    }
    switches = [f"-DTS_{key}={value}" for key, value in values.items()]
    used = set(re.findall(r"\bTS_([A-Z0-9]+)\b", source.read_text())) & set(values)
    assert used, "the source reads none of the switches"
    virtual = architecture.replace("sm", "compute")
    command = [
        "nvcc",
        "-std=c++14",
        "-ftz=true",
        "-ptx",
        f"-arch={virtual}",
        "-Werror",
        "all-warnings",
        "-diag-suppress=177",
    ]
    subprocess.run([*command, *switches, str(source), "-o", str(tmp_path / "out.ptx")], check=True)


def test_importing_needs_no_gpu_library() -> None:
    code = (
        "import sys, trace_kernels.guided_round, trace_kernels.pack, trace_kernels.quantize, trace_kernels.host; "
        "print([m for m in ('cupy', 'torch', 'grpc') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
