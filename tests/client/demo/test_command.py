"""``trace-store demo``: where it writes, and what it refuses to overwrite."""

from __future__ import annotations

from pathlib import Path

import pytest

from trace_client.demo import store
from trace_client.demo.command import command, prepare_output
from trace_store.errors import InvalidRequest, Unavailable


def test_an_earlier_demos_files_are_replaced(tmp_path: Path) -> None:
    output = prepare_output(tmp_path / "out")
    (output / "store").mkdir()
    (output / "report.html").write_text("old")
    assert prepare_output(output) == output
    assert not (output / "store").exists()
    assert not (output / "report.html").exists()
    assert prepare_output(output) == output


def test_a_directory_that_no_demo_made_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InvalidRequest) as caught:
        prepare_output(tmp_path)
    assert caught.value.argument == "output"
    assert command(["--output", str(tmp_path)]) == 1
    assert "not empty" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    assert prepare_output(tmp_path) == tmp_path


def test_a_file_as_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(InvalidRequest, match="no directory"):
        prepare_output(tmp_path / "out")


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "runs").write_text("in the way")
    with pytest.raises(Unavailable, match="did not start") as caught, store.server_process(tmp_path / "store"):
        pass
    assert "not a directory" in str(caught.value)
