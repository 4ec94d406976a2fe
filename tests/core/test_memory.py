"""The allocator is told to keep what a step frees."""

from __future__ import annotations

import platform

from foretoken.core.memory import keep_freed_memory


def test_it_says_whether_it_could_and_may_be_called_again() -> None:
    is_glibc = platform.libc_ver()[0] == "glibc"
    assert keep_freed_memory() is is_glibc
    assert keep_freed_memory() is is_glibc
