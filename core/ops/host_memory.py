"""Hints for the allocator: keep freed memory, and use huge pages.

A step allocates and frees a few megabytes many times over. glibc hands the top of its heap back to
the system whenever enough of it is free, and every page that comes back is cleared and mapped
anew: at 32 requests half of a step's time went there (measured).
"""

from __future__ import annotations

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


def use_huge_pages(memory: Tensor) -> bool:
    """Advise the system to back a CPU tensor with huge pages; return whether it accepted.

    The KV of a sequence lies all over its pool: with pages of 4 KiB most of the reads wait for two
    page tables to be walked (attention over 2,048 positions took 1.2 times as long, measured).
    Memory never written costs nothing all the same, memory written costs up to 2 MiB more.
    """
    start = -(-memory.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    stop = (memory.data_ptr() + memory.nbytes) // _HUGE_PAGE * _HUGE_PAGE
    if stop <= start or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(madvise(start, stop - start, mmap.MADV_HUGEPAGE) == 0)
