"""Memory of the host: freed memory is kept, and large areas lie in huge pages.

A step allocates and frees a few megabytes many times over. glibc hands the top of its heap back to
the system whenever enough of it is free, and every page that comes back is cleared and mapped
anew: at 32 requests half of a step's time went there (measured).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line imports this before it needs torch
    from torch import Tensor

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of <malloc.h>
_NEVER = 2**31 - 1
_LARGEST = 32 * 2**20  # bytes; glibc takes no more
_HUGE_PAGE = 2 * 2**20


def keep_freed_memory() -> bool:
    """Keep freed memory in the process; return whether the allocator supports that.

    To be called before threads are started: an arena of the model thread's own would be given back
    whatever is said. Other allocators than glibc's are left alone.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    options = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, _NEVER))
    granted = [mallopt(option, value) == 1 for option, value in options]
    return all(granted)


def map_zeros(num_bytes: int) -> Tensor:
    """Zeros from the system as uint8, in huge pages and aligned to one; mapped on first touch.

    Memory that is never written costs address space alone. What is read without any order, or once
    a step, as KV and weights are, waits with pages of 4 KiB for two page tables to be walked
    (attention over 2,048 positions took 1.2 times as long, a virtual machine read weights at half
    of the bandwidth: measured). Raises OSError where the system refuses.
    """
    import torch

    if not hasattr(mmap, "MAP_ANONYMOUS"):  # Windows
        return torch.zeros(num_bytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: slower, not wrong
            pages.madvise(mmap.MADV_HUGEPAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    return torch.frombuffer(pages, dtype=torch.uint8)[-start % _HUGE_PAGE :][:num_bytes]
