"""The process's allocator, told that a step's memory will be wanted again in the next one.

A step allocates and frees a few megabytes many times over. glibc hands the top of its heap back to
the system whenever enough of it is free, and every page that comes back is cleared and mapped
anew: at 32 requests half of a step's time went there (measured).
"""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of <malloc.h>
_NEVER = 2**31 - 1
_LARGEST = 32 * 2**20  # bytes; glibc takes no more


def keep_freed_memory() -> bool:
    """Let freed memory stay with the process; whether the allocator could be told so.

    To be called before threads are started: an arena of the model thread's own would be given back
    whatever is said. Other allocators than glibc's are left alone.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    wishes = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, _NEVER))
    granted = [mallopt(option, value) == 1 for option, value in wishes]
    return all(granted)
