"""The console script ``trace-store``: finds the command in the entry points and runs it.

A command is ``command(argv) -> exit status`` in the package that can do it, with a one-line ``HELP`` beside it. It is
registered under ``trace_store.commands`` in pyproject.toml, so the core imports no server, client or torch, and a host
that lacks a command's packages is told which extra brings them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from rich.console import Console
from rich.table import Table

from trace_store.errors import TraceStoreError
from trace_store.version import VERSION

EXTRAS = {"trace_server": "server", "trace_client": "client", "trace_client.demo": "demo"}
"""Extra that a command's package needs, longest prefix first."""

EXIT_ERROR = 1
EXIT_USAGE = 2


def main(argv: list[str] | None = None) -> int:
    """Run a command; 0 success, 1 an error said in one line, 2 wrong usage."""
    arguments = sys.argv[1:] if argv is None else argv
    commands = {entry.name: entry for entry in entry_points(group="trace_store.commands")}
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        _print_help(commands)
        return 0 if arguments else EXIT_USAGE
    if arguments[0] in ("-V", "--version"):
        print(VERSION)
        return 0
    entry = commands.get(arguments[0])
    if entry is None:
        print(f"trace-store: unknown command, command={arguments[0]}; see trace-store --help", file=sys.stderr)
        return EXIT_USAGE
    command = _load(entry)
    if command is None:
        return EXIT_ERROR
    try:
        return command(arguments[1:])
    except TraceStoreError as error:
        print(f"trace-store {arguments[0]}: {error}", file=sys.stderr)
        return EXIT_ERROR
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130


def _load(entry: EntryPoint) -> Callable[[list[str]], int] | None:
    try:
        loaded: Callable[[list[str]], int] = entry.load()
    except ModuleNotFoundError as error:
        module = entry.value.partition(":")[0]
        extra = next(EXTRAS[prefix] for prefix in sorted(EXTRAS, reverse=True) if module.startswith(prefix))
        print(
            f"trace-store {entry.name}: a package is missing, package={error.name};"
            f' install it with: pip install "trace-store[{extra}]"',
            file=sys.stderr,
        )
        return None
    return loaded


def _print_help(commands: dict[str, EntryPoint]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for name in sorted(commands):
        table.add_row(f"  {name}", _help_of(commands[name]))
    console = Console()
    console.print(f"trace-store {VERSION}: storage of guidance records between FP4 rollouts and training\n")
    console.print("usage: trace-store COMMAND [OPTIONS]   (each command has --help)\n")
    console.print(table)


def _help_of(entry: EntryPoint) -> str:
    module, _, attribute = entry.value.partition(":")
    try:
        loaded = importlib.import_module(module)
    except ImportError:
        return "(needs an extra that is not installed)"
    prefix = attribute.removesuffix("command").rstrip("_").upper()
    return str(getattr(loaded, f"{prefix}_HELP" if prefix else "HELP", ""))
