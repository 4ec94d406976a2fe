"""The tests of the GPU's backend run under Triton's interpreter, or on a GPU where one is named.

``FORETOKEN_TEST_DEVICE=cuda pytest tests/core/ops/triton/test_triton_*``: what a test makes is made
there.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

from support.quick_interpreter import quicken


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[torch.device]:
    """Set the device of tensors that name none, which `torch.get_default_device` returns."""
    name = os.environ.get("FORETOKEN_TEST_DEVICE", "cpu")
    if name == "cpu" and importlib.util.find_spec("triton") is not None:
        quicken()
    if name != "cpu":
        torch.set_default_device(name)
    yield torch.device(name)
    if name != "cpu":
        torch.set_default_device(None)
