"""Chained kernels: each is on the device before the previous one has ended.

Programmatic dependent launch, for steps of few rows, whose kernels take little longer than their
launch: a kernel lets the next one begin as soon as all of its programs have begun, and waits before
it reads the previous one's results. With many programs, waiting ones would take the place of
working ones.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CHAINED_ROWS = 16  # greatest number of rows of a step with chained kernels
CAPABILITY = (9, 0)
PREFETCHED = tl.constexpr(4)  # prefetched cache lines per row of a weight


def chained(num_rows: int, device: torch.device) -> dict[str, bool]:
    """Return the arguments that chain a kernel of ``num_rows`` rows if that is possible."""
    if num_rows > CHAINED_ROWS or not _can_chain(device):
        return {"IS_CHAINED": False}
    return {"IS_CHAINED": True, "launch_pdl": True}


@cache
def _can_chain(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


@triton.jit
def begin(IS_CHAINED: tl.constexpr):
    """Let the next kernel begin, and wait for the previous one."""
    if IS_CHAINED:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(pointers):
    """Prefetch lines into the L2 cache, without waiting: no kernel writes this memory."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
