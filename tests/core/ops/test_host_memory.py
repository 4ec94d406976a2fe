"""The allocator is told to keep what a step frees."""

from __future__ import annotations

import mmap
import platform
from pathlib import Path

import torch

from foretoken.core.ops.machine.host_memory import keep_freed_memory, map_zeros


def test_it_says_whether_it_could_and_may_be_called_again() -> None:
    is_glibc = platform.libc_ver()[0] == "glibc"
    assert keep_freed_memory() is is_glibc
    assert keep_freed_memory() is is_glibc


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def test_mapped_memory_is_zero_aligned_and_costs_nothing_until_it_is_written() -> None:
    before = resident_bytes()
    memory = map_zeros(1 << 30)
    assert memory.nbytes == 1 << 30
    assert memory.data_ptr() % (2 << 20) == 0
    assert not memory[:: 64 << 20].any()
    memory[: 8 << 20] = 7
    assert int(memory[: 16 << 20].sum(dtype=torch.int64)) == 7 * (8 << 20)
    assert resident_bytes() - before < 256 << 20
