"""Seeds of random streams: integers of 64 bits, mixed so that related ones have nothing in common.

Without torch: a process that computes nothing derives seeds, too. The mixer is splitmix64 (Steele,
Lea, Flood, OOPSLA 2014).
"""

from __future__ import annotations

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
ODD_1 = 0xBF58476D1CE4E5B9
ODD_2 = 0x94D049BB133111EB
_SIBLING = 0xD1B54A32D192ED03


def mix(word: int) -> int:
    """64 bits, unsigned, each of which depends on all bits of ``word``; 0 stays 0."""
    word &= MASK
    word = ((word ^ (word >> 30)) * ODD_1) & MASK
    word = ((word ^ (word >> 27)) * ODD_2) & MASK
    return word ^ (word >> 31)


def splitmix64(word: int) -> int:
    """64 bits, unsigned, each of which depends on all bits of ``word``."""
    return mix(word + GOLDEN)


def sibling_seed(seed: int, index: int) -> int:
    """Seed of the ``index``-th of n completions, unsigned 64 bits; number 0 keeps ``seed``."""
    if index == 0:
        return seed & MASK
    return mix(mix(seed ^ _SIBLING) + GOLDEN * index)
