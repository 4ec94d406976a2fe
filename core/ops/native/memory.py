"""HugeArena: memory for weights in huge pages.

A weight streams once per step and no translation of an address is used again: with pages of 4 KiB
a virtual machine walks two page tables all the time, and reads at half of the bandwidth (measured).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_CHUNK = 64 << 20  # bytes; what is never written costs nothing but address space
_ALIGNMENT = 64


class HugeArena:
    """Hands out tensors one behind the other. A chunk is freed when its last tensor dies."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Uninitialised, dense, of the same shape and dtype."""
        size = tensor.nbytes
        if size > len(self._chunk):
            self._chunk = _map(max(size, _CHUNK))
        taken = self._chunk[:size]
        self._chunk = self._chunk[-(-size // _ALIGNMENT) * _ALIGNMENT :]
        return taken.view(tensor.dtype).view(tensor.shape)


def _map(size: int) -> Tensor:
    """Zeros from the system, aligned to a huge page."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, size + _HUGE_PAGE, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: slower, not wrong
            pages.madvise(mmap.MADV_HUGEPAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    chunk = torch.frombuffer(pages, dtype=torch.uint8)
    return chunk[-start % _HUGE_PAGE :][:size]
