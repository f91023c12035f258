"""Sizes and names that keep the repository easy to find one's way in."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINES_MAX = 500
FUNCTION_LINES_MAX = 60
NO_NOUNS = {"utils.py", "helpers.py", "common.py", "misc.py"}


def sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    return [ROOT / name for name in listed if "/v1/" not in name and (ROOT / name).exists()]


def test_files_are_short_and_have_a_noun() -> None:
    for path in sources():
        assert path.name not in NO_NOUNS, path
        lines = len(path.read_text().splitlines())
        assert lines <= LINES_MAX, f"{path.relative_to(ROOT)} has {lines} lines"


def test_functions_are_short() -> None:
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                assert size <= FUNCTION_LINES_MAX, (
                    f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {size} lines"
                )


def test_modules_open_with_their_contract() -> None:
    for path in sources():
        if path.name == "__init__.py" and not path.read_text().strip():
            continue
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path.relative_to(ROOT)} has no module docstring"
