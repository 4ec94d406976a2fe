"""Packing KV inside an answer: how many tokens lose their KV, and at which positions.

A fixed number of the answer's tokens, the *budget*, keep their KV; the prompt keeps all of its KV.
After each `EVERY` tokens beyond the budget, the KV is packed: the KV of `EVERY` tokens is dropped,
the rest moves to the front of the pages, and the pages after it become free. Packing happens at
fixed positions, and no step crosses such a position. So an answer depends on the request alone, not
on chunks, drafts or preemptions.
"""

from __future__ import annotations

import msgspec

EVERY = 128  # number of tokens between two packings; the last `EVERY` tokens keep their KV
LEAST_BUDGET = 256  # minimum budget in tokens


def num_packed_away(prompt_len: int, budget: int, stop: int) -> int:
    """Return how many tokens lose their KV by packing before position ``stop - 1`` is computed."""
    return max(0, -(-(stop - prompt_len - budget) // EVERY) - 1) * EVERY


def next_packing(prompt_len: int, budget: int, start: int) -> int:
    """Return the first position after ``start`` at which KV is packed; no step may cross it."""
    return prompt_len + budget + max(1, (start - prompt_len - budget) // EVERY + 1) * EVERY


def most_kv(prompt_len: int, budget: int, num_tokens: int) -> int:
    """Return the maximum number of tokens with KV until ``num_tokens`` tokens are computed."""
    return min(num_tokens, prompt_len + budget + EVERY)


class KvPack(msgspec.Struct, gc=False):
    """An order to pack a request's KV before a step.

    Of the tokens at indices ``first`` to ``stop`` in the request's pages, ``num_packed_away`` lose
    their KV. The runner sets ``is_begun`` and ``is_done``, because a failed step may be run again
    and must not pack twice.
    """

    first: int
    stop: int
    num_packed_away: int
    is_begun: bool = False
    is_done: bool = False
