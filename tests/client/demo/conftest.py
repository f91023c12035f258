"""A model and settings small enough that the demo's parts run in a second."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads and parallel test runs do not mix

import torch

from trace_client.demo.model import ModelSize, build_model


@pytest.fixture(scope="session")
def size() -> ModelSize:
    """Four narrow layers with all kinds of sites."""
    return ModelSize(
        hidden=64, layers=4, heads=4, kv_heads=2, head_dim=16, experts=4, experts_per_token=2, expert_width=32
    )


@pytest.fixture
def model(size: ModelSize) -> Any:
    """A seeded float32 model."""
    torch.manual_seed(3)
    return build_model(size).eval()
