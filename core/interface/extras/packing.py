"""Packing KV inside an answer: how many tokens lose their KV, and at which positions.

Of an answer a fixed number of tokens, the *budget*, keep their KV; a prompt keeps all of it. Every
`EVERY` tokens beyond the budget the kept ones are packed: they move forward in the pages, and the
pages behind them are free. That happens at fixed positions and no step crosses one, so an answer
depends on the request alone, not on chunks, drafts or preemptions.
"""

from __future__ import annotations

import msgspec

EVERY = 128  # tokens between two packings; so many last ones are always kept
LEAST_BUDGET = 256  # tokens


def num_packed_away(prompt_len: int, budget: int, stop: int) -> int:
    """Return how many tokens lose their KV before the row at position ``stop - 1`` is computed."""
    return max(0, -(-(stop - prompt_len - budget) // EVERY) - 1) * EVERY


def next_packing(prompt_len: int, budget: int, start: int) -> int:
    """Return the first packing's position after ``start``: a step from there ends there at most."""
    return prompt_len + budget + max(1, (start - prompt_len - budget) // EVERY + 1) * EVERY


def most_kv(prompt_len: int, budget: int, num_tokens: int) -> int:
    """Return the most places that a request takes on its way from no KV to ``num_tokens``."""
    return min(num_tokens, prompt_len + budget + EVERY)


class KvPack(msgspec.Struct, gc=False):
    """An order to pack a request's KV before the step that it is planned with.

    Of the places ``first`` to ``stop`` in the request's pages, ``num_packed_away`` tokens go. The
    runner sets the marks: a step that failed may be run again, and must not pack twice.
    """

    first: int
    stop: int
    num_packed_away: int
    is_begun: bool = False
    is_done: bool = False
