"""Options of ``trace-store serve`` that say where segments go and how long they stay."""

from __future__ import annotations

import argparse
import os
import re

from trace_store.errors import InvalidRequest
from trace_store.retention import Limits
from trace_store.storage.s3 import ObjectStore

SIZE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
SIZE_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
TIME_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options; defaults come from TRACE_STORE_<OPTION>."""

    def option(name: str, text: str) -> None:
        variable = "TRACE_STORE_" + name.upper().replace("-", "_")
        parser.add_argument(f"--{name}", default=os.environ.get(variable), help=f"{text} ({variable})")

    option("object-store", "s3://bucket/prefix for sealed segments; endpoint and credentials from AWS_* variables")
    option("disk-bytes-max", "cap on segment bytes on disk, such as 500GiB: evicts uploaded, else releases oldest")
    option("disk-free-low", "slow writes below this free disk (default: 4 GiB or 5 %% of it, the smaller)")
    option("disk-free-min", "refuse writes below this free disk (default: 1 GiB or 2 %% of it, the smaller)")
    option("keep-partitions", "release all but the newest N partitions of a run")
    option("keep-age", "release partitions without a write for longer, such as 12h or 7d")


def limits_of(arguments: argparse.Namespace) -> Limits:
    """Limits that the options ask for. Raises InvalidRequest."""
    kept = arguments.keep_partitions
    try:
        partitions = int(kept) if kept else None
    except ValueError:
        raise InvalidRequest(f"partitions kept must be a number, got={kept}", argument="keep-partitions") from None
    return Limits(
        age_s=parse_amount(arguments.keep_age, TIME_UNITS, "keep-age") if arguments.keep_age else None,
        partitions_kept=partitions,
        disk_bytes_max=_size(arguments.disk_bytes_max, "disk-bytes-max"),
        free_min=_size(arguments.disk_free_min, "disk-free-min"),
        free_low=_size(arguments.disk_free_low, "disk-free-low"),
    )


def object_store_of(arguments: argparse.Namespace) -> ObjectStore | None:
    """The object store that the options name, not yet asked. Raises InvalidRequest, Unsupported."""
    return ObjectStore(arguments.object_store) if arguments.object_store else None


def parse_amount(text: str, units: dict[str, int], argument: str) -> float:
    """A number with a unit, such as ``1.5GiB`` or ``7d``. Raises InvalidRequest."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = found[2].lower().removesuffix("b") if found else None
    if found is None or unit not in units:
        known = ", ".join(name for name in units if name)
        raise InvalidRequest(f"{argument} must be a number with a unit of {known}, got={text!r}", argument=argument)
    return float(found[1]) * units[unit]


def _size(text: str | None, argument: str) -> int | None:
    return int(parse_amount(text, SIZE_UNITS, argument)) if text else None
