"""Packing KV inside an answer: how many tokens lose their KV, and at which positions.

A fixed number of the answer's tokens, the *budget*, keep their KV; a prompt keeps all of its KV.
Every `EVERY` tokens beyond the budget the kept tokens are packed: they move forward in the pages,
and the pages after them become free. Packing happens at fixed positions and no step crosses one, so
an answer depends on the request alone, not on chunks, drafts or preemptions.
"""

from __future__ import annotations

import msgspec

EVERY = 128  # tokens between two packings; the last `EVERY` tokens are always kept
LEAST_BUDGET = 256  # tokens


def num_packed_away(prompt_len: int, budget: int, stop: int) -> int:
    """Return how many tokens lose their KV before the row at position ``stop - 1`` is computed."""
    return max(0, -(-(stop - prompt_len - budget) // EVERY) - 1) * EVERY


def next_packing(prompt_len: int, budget: int, start: int) -> int:
    """Return the position of the first packing after ``start``; no step may cross it."""
    return prompt_len + budget + max(1, (start - prompt_len - budget) // EVERY + 1) * EVERY


def most_kv(prompt_len: int, budget: int, num_tokens: int) -> int:
    """Return the most tokens with KV at any time until ``num_tokens`` tokens are computed."""
    return min(num_tokens, prompt_len + budget + EVERY)


class KvPack(msgspec.Struct, gc=False):
    """An order to pack a request's KV before a step.

    ``num_packed_away`` of the KV vectors from index ``first`` up to ``stop`` in the request's pages
    are dropped. The runner sets the flags, because a failed step may be run again and must not pack
    twice.
    """

    first: int
    stop: int
    num_packed_away: int
    is_begun: bool = False
    is_done: bool = False
