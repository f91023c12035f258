"""Who may import whom. Imports are read from the source, those under TYPE_CHECKING and inside functions too."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "trace_store": ROOT / "trace_store",
    "trace_server": ROOT / "server/trace_server",
    "trace_client": ROOT / "client/trace_client",
    "trace_kernels": ROOT / "kernels/trace_kernels",
}

NEVER = {
    "trace_store": {"grpc", "torch", "cupy", "prometheus_client", "trace_server", "trace_client", "trace_kernels"},
    "trace_server": {"torch", "cupy", "trace_client", "trace_kernels"},
    "trace_client": {"trace_server", "cupy"},
    "trace_kernels": {"grpc", "pyarrow", "trace_client", "trace_server"},
}

ENGINE = {"engine", "shard", "syncer", "volume", "catalog", "recovery", "admission", "planner", "fetch", "retention"}
"""Modules of the core that a client must not reach into."""

CORE_PROTOBUF = {"wire.py"}
"""Modules of the core that may import protobuf or generated code."""


def imports(path: Path) -> set[str]:
    """Dotted names that a module imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def modules(package: str) -> list[Path]:
    return [path for path in PACKAGES[package].rglob("*.py") if "v1" not in path.parts]


@pytest.mark.parametrize("package", PACKAGES)
def test_package_imports_only_what_its_layer_may(package: str) -> None:
    for path in modules(package):
        wrong = {name for name in imports(path) if name.split(".")[0] in NEVER[package]}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_only_wire_knows_protobuf_in_the_core() -> None:
    for path in modules("trace_store"):
        if path.name in CORE_PROTOBUF:
            continue
        wrong = {name for name in imports(path) if name.startswith(("google", "trace_store.v1"))}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_client_does_not_reach_into_the_engine() -> None:
    for path in modules("trace_client"):
        wrong = {name for name in imports(path) if name.startswith("trace_store.") and name.split(".")[1] in ENGINE}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_torch_stays_in_one_kernel_module() -> None:
    users = {path.name for path in modules("trace_kernels") if any(n.split(".")[0] == "torch" for n in imports(path))}
    assert users <= {"torch_op.py"}, users


def test_core_imports_are_cheap_and_need_no_server_or_torch() -> None:
    loaded = "[m for m in ('torch', 'grpc', 'cupy') if m in sys.modules]"
    code = f"import sys, trace_store, trace_store.codebook; print({loaded})"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
