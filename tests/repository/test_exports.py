"""Public names are listed (ruff sorts them), and nothing listed is missing."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize("package", ["trace_store", "trace_client", "trace_store.codebook"])
def test_exported_names_are_unique_and_there(package: str) -> None:
    module = importlib.import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert hasattr(module, name), name


def test_the_public_surface() -> None:
    import trace_client
    import trace_store

    assert {"Site", "TokenSpan"} <= set(trace_store.__all__)
    for name in ("quantize", "pack", "guided_round", "rtn_round"):
        assert callable(getattr(importlib.import_module("trace_store.codebook"), name))
    assert callable(trace_client.connect)


def test_every_public_name_says_what_it_is() -> None:
    for package in ("trace_store", "trace_client", "trace_store.codebook"):
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value):
                assert (value.__doc__ or "").strip(), f"{package}.{name} has no docstring"
