"""The allocator is told to keep what a step frees."""

from __future__ import annotations

import mmap
import platform

import torch

from foretoken.core.ops.host_memory import keep_freed_memory, use_huge_pages


def test_it_says_whether_it_could_and_may_be_called_again() -> None:
    is_glibc = platform.libc_ver()[0] == "glibc"
    assert keep_freed_memory() is is_glibc
    assert keep_freed_memory() is is_glibc


def test_huge_pages_are_asked_for_where_they_fit_and_change_nothing():
    large, small = torch.zeros(8 << 20, dtype=torch.uint8), torch.zeros(9)
    assert use_huge_pages(large) == hasattr(mmap, "MADV_HUGEPAGE")
    assert not use_huge_pages(small)
    assert not large.any()
    large.fill_(7)
    assert int(large.sum(dtype=torch.int64)) == 7 * (8 << 20)
