"""Memory of the host: freed memory stays in the process, and large areas are in huge pages.

A step allocates and frees a few megabytes many times. glibc returns the top of its heap to the
system whenever enough of it is free, and the system clears and maps every page that is taken
again: at 32 requests this took half of a step's time (measured).
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
"""Returns a number of zero bytes as uint8: `map_zeros`, or memory shared with other processes."""
CAN_SHARE = hasattr(os, "memfd_create")  # only on Linux
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # constants of <malloc.h>
_NEVER = 2**31 - 1
_LARGEST = 32 * 2**20  # bytes; the greatest value that glibc accepts
_HUGE_PAGE = 2 * 2**20


def keep_freed_memory() -> bool:
    """Keep freed memory in the process; return whether the allocator supports that.

    Call this before threads are started: glibc would return memory of the model thread's own arena
    in any case. Allocators other than glibc's are left unchanged.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    options = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, _NEVER))
    granted = [mallopt(option, value) == 1 for option, value in options]
    return all(granted)


def map_zeros(num_bytes: int) -> Tensor:
    """Return zeros as uint8 in huge pages, aligned to a huge page and mapped on first touch.

    Memory that is never written costs only address space. With pages of 4 KiB, data read in random
    order or once a step (KV and weights) waits for page table walks: attention over 2,048 positions
    took 1.2 times as long, and a virtual machine read weights at half the bandwidth (measured).
    Raises OSError if the system refuses.
    """
    import torch

    if not hasattr(mmap, "MAP_ANONYMOUS"):  # Windows lacks it
        return torch.zeros(num_bytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages is only slower
            pages.madvise(mmap.MADV_HUGEPAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    return torch.frombuffer(pages, dtype=torch.uint8)[-start % _HUGE_PAGE :][:num_bytes]


def shared_zeros(num_bytes: int) -> int:
    """Return a descriptor of zeros that processes map with `map_shared`. Raises OSError.

    The memory belongs to no file system, whose size would limit it; pages are made on first touch.
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

    The pages are huge only if the system allows that for shared memory (``shmem_enabled``).
    """
    import torch

    try:
        pages = mmap.mmap(file, num_bytes)
    finally:
        os.close(file)
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
