"""Triton's interpreter as it is hastened here still refuses what it refuses by itself."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

if torch.get_default_device().type != "cpu":
    pytest.skip("the interpreter stands for a GPU", allow_module_level=True)


@triton.jit
def odd_kernel(out_ptr):
    tl.store(out_ptr + tl.arange(0, 3), 1)


@triton.jit
def unlike_kernel(out_ptr):
    tl.store(out_ptr + tl.arange(0, 4), tl.arange(0, 4) + tl.arange(0, 8))


@pytest.mark.parametrize(
    ("kernel", "why"),
    [(odd_kernel, "power of 2"), (unlike_kernel, "make_shape_compatible")],
    ids=["odd", "unlike"],
)
def test_shapes_that_no_gpu_has_or_that_do_not_meet_are_refused(kernel, why: str) -> None:
    with pytest.raises(InterpreterError, match=why):
        kernel[(1,)](torch.zeros(8, dtype=torch.int32))
