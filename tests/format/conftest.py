"""Golden segments, and directories that an engine opens, made of segment files."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

from trace_store import TokenSpan
from trace_store.engine import Engine
from trace_store.naming import directory_name

HERE = Path(__file__).parent


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def golden() -> Path:
    return HERE / "golden"


@pytest.fixture(scope="session")
def make_golden() -> Any:
    return _load("make_golden")


@pytest.fixture(scope="session")
def reader() -> Any:
    return _load("independent_reader")


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[Callable[[dict[str, Path]], Engine]]:
    """Opens an engine on a directory that holds the given files: name in the partition -> file to copy."""
    engines: list[Engine] = []

    def open_(files: dict[str, Path], run: str = "run é", partition: str = "step/1") -> Engine:
        directory = tmp_path / "data" / "runs" / directory_name(run) / directory_name(partition)
        directory.mkdir(parents=True)
        for name, source in files.items():
            shutil.copy(source, directory / name)
        engines.append(Engine(tmp_path / "data"))
        return engines[-1]

    yield open_
    for engine in engines:
        engine.close()


@pytest.fixture
def read_all() -> Callable[..., dict[tuple[str, str, int], tuple[bytes, bytes, float]]]:
    """What the engine delivers, in the shape of the independent reader."""

    def read(
        engine: Engine, trajectories: list[str], tokens: int, run: str = "run é", partition: str = "step/1"
    ) -> dict[tuple[str, str, int], tuple[bytes, bytes, float]]:
        sites = engine.sites(run)
        found = {}
        spans = [TokenSpan(name, 0, tokens) for name in trajectories]
        for span in spans:
            with engine.read(run, partition, [span], range(len(sites))) as pieces:
                for piece in pieces:
                    site = sites[piece.site]
                    tensor = memoryview(piece.tensor_scales).cast("B").cast("f")
                    for n in range(piece.rows):
                        found[(span.trajectory, site.name, piece.dest_row + n)] = (
                            bytes(piece.codes[n * site.code_bytes :][: site.code_bytes]),
                            bytes(piece.scales[n * site.scale_bytes :][: site.scale_bytes]),
                            tensor[n],
                        )
        return found

    return read


@pytest.fixture
def as_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes record batches as an Arrow file with the given schema."""

    def write(name: str, schema: pa.Schema, batches: list[pa.RecordBatch], **options: Any) -> Path:
        path = tmp_path / name
        with pa.ipc.new_file(path, schema, options=pa.ipc.IpcWriteOptions(**options)) as file:
            for batch in batches:
                file.write_batch(batch)
        return path

    return write
