"""The documented command for the long tests runs them: none is cut off by the time limit of the short ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

COLLECT = """
import pytest

class Limits:
    def pytest_collection_finish(self, session):
        for item in session.items:
            marker = item.get_closest_marker("timeout")
            print("LIMIT", marker.args[0] if marker else None)

pytest.main(["tests/torture", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"], plugins=[Limits()])
"""


def test_long_tests_have_hours() -> None:
    result = subprocess.run(
        [sys.executable, "-c", COLLECT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "TRACE_STORE_TORTURE": "1"},
    )
    limits = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("LIMIT")]
    assert len(limits) > 10, result.stdout + result.stderr
    assert all(limit != "None" and int(limit) >= 3600 for limit in limits)
