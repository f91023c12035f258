"""The demo's text: the same bytes on every run, held-out files apart from training files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trace_client.demo.corpus import load_corpus, windows
from trace_store.errors import InvalidRequest


def test_library_sources_are_enough_and_stay_the_same() -> None:
    corpus = load_corpus()
    assert len(corpus.training) > 1_000_000
    assert len(corpus.held_out) > 10_000
    assert torch.equal(corpus.training, load_corpus().training)


def test_every_tenth_file_is_held_out(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02d}.py").write_text(chr(ord("a") + number) * 20_000)
    corpus = load_corpus(tmp_path)
    assert set(corpus.held_out.tolist()) == {ord("a"), ord("k")}
    assert set(corpus.training.tolist()).isdisjoint(corpus.held_out.tolist())


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("pass\n")
    with pytest.raises(InvalidRequest, match="too little source text"):
        load_corpus(tmp_path)


def test_windows_are_pieces_of_the_text() -> None:
    text = torch.arange(100)
    pieces = windows(text, 50, 7, torch.Generator().manual_seed(0))
    assert pieces.shape == (50, 7)
    assert torch.equal(pieces - pieces[:, :1], torch.arange(7).expand(50, 7))
