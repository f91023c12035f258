"""The long versions of the fault tests: ``TRACE_STORE_TORTURE=1 pytest tests/torture -s``, half an hour on two cores.

Without that variable nothing here is collected, so that ``make test`` stays short. The fixtures are those of
``tests/integration``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).parents[1]

TEST_TIMEOUT_S = 4 * 3600
"""Each of these tests runs for up to an hour on two busy cores; the 120 s of the others would end it."""

collect_ignore_glob = [] if os.environ.get("TRACE_STORE_TORTURE") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))


def load(path: str) -> ModuleType:
    """A test module or conftest by its path under ``tests``."""
    name = "torture_" + path.replace("/", "_").removesuffix(".py")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, TESTS / path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


_integration = load("integration/conftest.py")
chance, make_disk, make_tmpfs, spawn, start_load, strace, tools = (
    getattr(_integration, name)
    for name in ("chance", "make_disk", "make_tmpfs", "spawn", "start_load", "strace", "tools")
)


@pytest.fixture
def module() -> Callable[[str], ModuleType]:
    return load


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints a figure for tests/README.md."""

    def say(line: str) -> None:
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\ntorture: {line}")

    return say
