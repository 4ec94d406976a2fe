"""Seeds of random streams: 64-bit integers, mixed so that related seeds are uncorrelated.

This file does not import torch, because processes without a model derive seeds, too. The mixing
function belongs to splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
"""

from __future__ import annotations

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
ODD_1 = 0xBF58476D1CE4E5B9
ODD_2 = 0x94D049BB133111EB
_SIBLING = 0xD1B54A32D192ED03


def mix(word: int) -> int:
    """Return splitmix64's mix of ``word``, in which each bit depends on all bits of ``word``.

    The result is an unsigned 64-bit integer; the result for 0 is 0.
    """
    word &= MASK
    word = ((word ^ (word >> 30)) * ODD_1) & MASK
    word = ((word ^ (word >> 27)) * ODD_2) & MASK
    return word ^ (word >> 31)


def splitmix64(word: int) -> int:
    """Return the first output of splitmix64 from the state ``word``, an unsigned 64-bit integer."""
    return mix(word + GOLDEN)


def sibling_seed(seed: int, index: int) -> int:
    """Return the seed, unsigned 64 bits, of completion ``index`` of a request for n completions.

    Completion 0 keeps ``seed``.
    """
    if index == 0:
        return seed & MASK
    return mix(mix(seed ^ _SIBLING) + GOLDEN * index)
