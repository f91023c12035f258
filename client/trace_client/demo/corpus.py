"""Text that every machine has: the sources of Python's standard library, as bytes.

The top-level modules give about 4.7 MB under CPython 3.11. Files are taken in name order, so one interpreter version
always gives the same bytes; every tenth file is held out for prompts, calibration and the loss that is reported.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from trace_store.errors import InvalidRequest

HELD_OUT_EVERY = 10
CORPUS_BYTES_MIN = 100_000
"""Below this a minute of training sees the text too often to say anything."""


@dataclass(frozen=True)
class Corpus:
    """Byte tokens, int64 [n], of the training text and of the text held out."""

    training: torch.Tensor
    held_out: torch.Tensor


def load_corpus(directory: Path | None = None) -> Corpus:
    """Read the ``*.py`` files of ``directory``, by default the standard library's.

    Raises:
        InvalidRequest: the directory holds too little source text, as some slim Python builds do.
    """
    directory = directory or Path(sysconfig.get_paths()["stdlib"])
    files = [path.read_bytes() for path in sorted(directory.glob("*.py"))]
    held_out = b"".join(files[::HELD_OUT_EVERY])
    training = b"".join(text for number, text in enumerate(files) if number % HELD_OUT_EVERY)
    if min(len(training), len(held_out) * HELD_OUT_EVERY) < CORPUS_BYTES_MIN:
        raise InvalidRequest(
            f"too little source text to train on, directory={directory} files={len(files)} bytes={len(training)}",
            argument="directory",
        )
    return Corpus(_tokens(training), _tokens(held_out))


def _tokens(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def windows(text: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """``count`` random pieces of ``text``, int64 [count, length]."""
    starts = torch.randint(0, len(text) - length, (count,), generator=generator)
    return torch.stack([text[start : start + length] for start in starts.tolist()])
