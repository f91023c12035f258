"""10 GiB written behind a reader that takes a message a second: the server's memory stays under its bound."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.bulk import BACKLOG_GROWTH_MAX, MIB, backlog_behind_a_slow_reader

BACKLOG_BYTES = 10 << 30


def test_ten_gib_behind_a_slow_reader(new_server: Any, tmp_path: Path, report: Callable[[str], None]) -> None:
    assert shutil.disk_usage(tmp_path).free > 2 * BACKLOG_BYTES
    server = new_server(data=tmp_path / "data").start()
    resident = backlog_behind_a_slow_reader(server, BACKLOG_BYTES, pause_s=1.0, turns=60)
    server.kill()
    shutil.rmtree(server.data)
    report(
        f"10 GiB behind a reader of 1 message a second: resident memory {resident.first // MIB} MiB at first,"
        f" {resident.peak // MIB} MiB at most"
    )
    assert resident.growth < BACKLOG_GROWTH_MAX
