"""``trace-store serve`` and ``python -m trace_server``: arguments -> engine and server -> run.

Every option can also be given as an environment variable TRACE_STORE_<OPTION>, which is what containers use.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from pathlib import Path

import uvloop

from trace_server.app import Listen, Server, serve
from trace_server.http import DEFAULT_METRICS, split_address
from trace_server.storage_options import add_options, limits_of, object_store_of
from trace_store.allocator import keep_freed_memory
from trace_store.engine import Engine
from trace_store.errors import InvalidRequest, TraceStoreError

HELP = "run a storage server"

DEFAULT_LISTEN = "127.0.0.1:7077"

SWITCH_INTERVAL_S = 0.0005
"""How long a thread that wants the GIL waits before it asks for it; Python's own 5 ms is long for an event loop beside
a writer thread: durable appends carried 1.15 to 1.25x with this, and health answers sooner."""

LOG_LEVELS = ("debug", "info", "warning", "error")

WILDCARDS = ("", "0.0.0.0", "::")
"""Hosts that mean every interface."""


def parser() -> argparse.ArgumentParser:
    """Arguments of serve; defaults come from the environment."""

    def environment(name: str, default: str | None = None) -> str | None:
        return os.environ.get(f"TRACE_STORE_{name}", default)

    result = argparse.ArgumentParser(prog="trace-store serve", description=HELP)
    result.add_argument("--data", default=environment("DATA"), help="data directory (TRACE_STORE_DATA)")
    add_options(result)
    result.add_argument("--listen", default=environment("LISTEN", DEFAULT_LISTEN), help="host:port or unix:/path")
    result.add_argument(
        "--metrics",
        default=environment("METRICS", DEFAULT_METRICS),
        help="host:port of /metrics and /health, '' for none",
    )
    result.add_argument("--name", default=environment("NAME", ""), help="server name in receipts (default: host name)")
    result.add_argument("--token-file", default=environment("TOKEN_FILE"), help="file with the token clients must send")
    result.add_argument(
        "--allow-anonymous",
        action="store_true",
        default=environment("ALLOW_ANONYMOUS", "") not in ("", "0", "false", "no"),
        help="listen on all interfaces without a token or client certificates",
    )
    result.add_argument("--tls-certificate", default=environment("TLS_CERTIFICATE"), help="PEM certificate chain")
    result.add_argument("--tls-key", default=environment("TLS_KEY"), help="PEM private key")
    result.add_argument(
        "--tls-client-ca", default=environment("TLS_CLIENT_CA"), help="PEM CA: clients need certificates"
    )
    result.add_argument(
        "--arena-dir",
        default=environment("ARENA_DIR", "/dev/shm"),
        help="tmpfs directory for memory shared with clients on this host, '' for none",
    )
    result.add_argument(
        "--arena-mib",
        type=int,
        default=environment("ARENA_MIB"),
        help="most memory shared with clients in MiB (default: half of the tmpfs)",
    )
    result.add_argument(
        "--ready-file", default=environment("READY_FILE"), help="file that gets the address once serving"
    )
    result.add_argument("--log-level", default=environment("LOG_LEVEL", "info"), help=f"one of {', '.join(LOG_LEVELS)}")
    return result


def command(argv: list[str]) -> int:
    """Run a server until SIGTERM; 0 after a clean stop, 1 with one line on stderr when it cannot start."""
    arguments = parser().parse_args(argv)
    if not arguments.data:
        parser().error("--data DIRECTORY (or TRACE_STORE_DATA) is required")
    if bool(arguments.tls_certificate) != bool(arguments.tls_key):
        parser().error("--tls-certificate and --tls-key go together")
    if arguments.tls_client_ca and not arguments.tls_certificate:
        parser().error("--tls-client-ca needs --tls-certificate and --tls-key")
    if arguments.log_level not in LOG_LEVELS:
        parser().error(f"--log-level must be one of {', '.join(LOG_LEVELS)}")
    logging.basicConfig(
        level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    try:
        keep_freed_memory()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        listen = _listen(arguments)
        limits, objects = limits_of(arguments), object_store_of(arguments)
        engine = Engine(Path(arguments.data), arguments.name, limits=limits, objects=objects)
        # The catalog stays: a full collection looked at it for 0.4 s a million objects, with the GIL held.
        gc.freeze()
        try:
            uvloop.run(serve(engine, listen, lambda server: _announce(server, listen, arguments.ready_file)))
        finally:
            engine.close()
    except (TraceStoreError, OSError) as error:
        print(f"trace-store serve: {error}", file=sys.stderr)
        return 1
    return 0


def _listen(arguments: argparse.Namespace) -> Listen:
    token = _token(arguments.token_file)
    if not arguments.listen.startswith("unix:"):
        host, _ = split_address(arguments.listen, "listen")
        if host in WILDCARDS and not (token or arguments.tls_client_ca or arguments.allow_anonymous):
            raise InvalidRequest(
                "all interfaces without authentication: give --token-file or --tls-client-ca, listen on one address,"
                f" or say --allow-anonymous, listen={arguments.listen}",
                argument="listen",
            )

    def path(value: str | None) -> Path | None:
        return Path(value) if value else None

    return Listen(
        address=arguments.listen,
        metrics_address=arguments.metrics,
        token=token,
        arena_directory=path(arguments.arena_dir),
        arena_bytes_max=arguments.arena_mib << 20 if arguments.arena_mib is not None else None,
        tls_certificate=path(arguments.tls_certificate),
        tls_key=path(arguments.tls_key),
        tls_client_ca=path(arguments.tls_client_ca),
    )


def _token(path: str | None) -> str:
    if not path:
        return ""
    token = Path(path).read_text().strip()
    if not token or not token.isascii() or not token.isprintable():
        raise InvalidRequest(f"the token file must hold one line of printable ASCII, path={path}", argument="token")
    return token


def _announce(server: Server, listen: Listen, ready_file: str | None) -> None:
    address = listen.address
    if not address.startswith("unix:"):
        address = f"{address.rpartition(':')[0]}:{server.port}"
    metrics = f"{listen.metrics_address.rpartition(':')[0]}:{server.metrics_port}" if server.metrics_port else ""
    logging.getLogger("trace_server").info("serving on %s metrics=%s", address, metrics or "off")
    if ready_file:
        partial = Path(f"{ready_file}.partial")
        partial.write_text(f"{address}\n{metrics}\n")
        partial.rename(ready_file)
