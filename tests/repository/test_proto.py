"""The committed protobuf code is what the committed proto files give, and the proto files keep their rules."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def tool(name: str) -> str:
    found = shutil.which(name, path=str(BIN)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def test_generated_code_equals_regenerated(tmp_path: Path) -> None:
    protos = sorted(str(p.relative_to(ROOT / "proto")) for p in (ROOT / "proto").rglob("*.proto"))
    command = [tool("protoc"), "-I.", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", *protos]
    subprocess.run(command, cwd=ROOT / "proto", check=True)
    generated = sorted(tmp_path.rglob("*_pb2.py*"))
    assert len(generated) == 2 * len(protos)
    for path in generated:
        committed = ROOT / path.relative_to(tmp_path)
        assert committed.read_text() == path.read_text(), f"{committed.name} differs: run make proto"


def test_buf_lint() -> None:
    answer = subprocess.run([tool("buf"), "lint"], cwd=ROOT / "proto", capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_bulk_messages_are_header_then_payload() -> None:
    from trace_store.v1 import trace_store_service_pb2 as service_pb2

    for message in (service_pb2.AppendRequest, service_pb2.ReadResponse):
        fields = {field.number: field.name for field in message.DESCRIPTOR.fields}
        assert fields == {1: "header", 15: "payload"}
