"""Chained kernels: each is on the device before the one ahead of it is over.

Programmatic dependent launch, for steps of few rows, whose kernels take little longer than it takes
to begin one: a kernel lets the next begin as soon as all of its programs have, and waits before it
reads what the one ahead wrote. Where programs are many, those that wait would take the room of
those that work.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CHAINED_ROWS = 16  # of a step at most
CAPABILITY = (9, 0)
PREFETCHED = tl.constexpr(4)  # lines of the cache, of each row of a weight


def chained(num_rows: int, device: torch.device) -> dict[str, bool]:
    """Arguments of a kernel that may be chained."""
    if num_rows > CHAINED_ROWS or not _can_chain(device):
        return {"IS_CHAINED": False}
    return {"IS_CHAINED": True, "launch_pdl": True}


@cache
def _can_chain(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


@triton.jit
def begin(IS_CHAINED: tl.constexpr):
    """Let the next kernel begin, and wait for the one ahead."""
    if IS_CHAINED:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(pointers):
    """Have lines brought into the L2 cache: of what no kernel writes, so without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
