"""Memory of the host: freed memory is kept, and large areas lie in huge pages.

A step allocates and frees a few megabytes many times over. glibc hands the top of its heap back to
the system whenever enough of it is free, and every page that comes back is cleared and mapped
anew: at 32 requests half of a step's time went there (measured).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # the command line imports this before it needs torch
    from torch import Tensor

MapBytes: TypeAlias = "Callable[[int], Tensor]"
"""Gives so many zeros as uint8: `map_zeros`, or memory that other processes have, too."""
CAN_SHARE = hasattr(os, "memfd_create")  # Linux
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


def shared_zeros(num_bytes: int) -> int:
    """Return a descriptor of zeros that processes map with `map_shared`. Raises OSError.

    They lie in no file system, so its limit does not bind them; each page is made on first touch.
    """
    file = os.memfd_create("foretoken")
    try:
        os.truncate(file, num_bytes)
    except BaseException:
        os.close(file)
        raise
    return file


def map_shared(file: int, num_bytes: int) -> Tensor:
    """Map the memory of `shared_zeros` as uint8, and close the descriptor. Raises OSError.

    In huge pages only where the system has them for such memory (``shmem_enabled``).
    """
    import torch

    try:
        pages = mmap.mmap(file, num_bytes)
    finally:
        os.close(file)
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
