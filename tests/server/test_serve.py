"""Arguments of ``trace-store serve``: what is refused before anything is opened, and how it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from trace_server.http import split_address
from trace_server.serve import command
from trace_store.errors import InvalidRequest


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--data DIRECTORY"),
        (["--data", "D", "--tls-key", "k.pem"], "go together"),
        (["--data", "D", "--tls-client-ca", "ca.pem"], "--tls-client-ca needs"),
        (["--data", "D", "--log-level", "loud"], "--log-level must be one of"),
        (["--data", "D", "--no-such-option"], "unrecognized arguments"),
    ],
)
def test_bad_usage_is_status_2(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command(arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--listen", "0.0.0.0:0"], "all interfaces without authentication"),
        (["--listen", "[::]:0"], "all interfaces without authentication"),
        (["--listen", "7077"], "an address is host:port"),
        (["--listen", "127.0.0.1:70770"], "an address is host:port"),
        (["--metrics", "nonsense"], "an address is host:port"),
        (["--token-file", "EMPTY"], "one line of printable ASCII"),
        (["--token-file", "NONE"], "No such file"),
        (["--tls-certificate", "EMPTY", "--tls-key", "EMPTY"], "cannot listen"),
        (["--tls-certificate", "NONE", "--tls-key", "NONE"], "No such file"),
    ],
)
def test_what_cannot_start_is_one_line_and_status_1(
    arguments: list[str], says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "EMPTY").write_text("\n")
    given = [str(tmp_path / value) if value in ("EMPTY", "NONE") else value for value in arguments]
    defaults = ["--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
    assert command([*defaults, *given]) == 1
    lines = capfd.readouterr().err.strip().splitlines()
    assert says in lines[-1]
    assert lines[-1].startswith("trace-store serve: ")
    assert "Traceback" not in "\n".join(lines)


def test_options_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trace_server.serve import parser

    monkeypatch.setenv("TRACE_STORE_DATA", str(tmp_path))
    monkeypatch.setenv("TRACE_STORE_LISTEN", "unix:/run/store.sock")
    for value, allowed in (("1", True), ("true", True), ("0", False), ("", False)):
        monkeypatch.setenv("TRACE_STORE_ALLOW_ANONYMOUS", value)
        assert parser().parse_args([]).allow_anonymous is allowed
    assert parser().parse_args([]).data == str(tmp_path)
    assert parser().parse_args(["--listen", "127.0.0.1:1"]).listen == "127.0.0.1:1"


def test_addresses_are_host_and_port() -> None:
    assert split_address("127.0.0.1:0", "x") == ("127.0.0.1", 0)
    assert split_address("[::1]:7077", "x") == ("::1", 7077)
    for bad in ("", ":1", "host", "host:", "host:-1", "host:65536"):
        with pytest.raises(InvalidRequest):
            split_address(bad, "x")
