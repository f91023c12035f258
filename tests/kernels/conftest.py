"""A CUDA device for the tests marked ``gpu``, or a skip that says what is missing."""

from __future__ import annotations

import pytest
import torch

from trace_kernels import _module
from trace_store.errors import Unsupported


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    try:
        _module.cupy()
    except Unsupported as error:
        pytest.skip(str(error))
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())
