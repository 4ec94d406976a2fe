"""Cache breakpoints: prompt prefixes to pin in the cache, and the count of tokens written to it.

A breakpoint follows a content block. `BreakpointLocator` finds its token position by rendering the
conversation up to that block: the common prefix with the full prompt is the part that later prompts
can share.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ....core.interface.request import Pin, Usage
from ...runtime.conversation.chat_input import ChatInput
from ...runtime.conversation.prompt_history import common_len
from .fields import SECONDS, CacheWriteDetails

# Some templates require a message after the system text. No real message begins with this text, so
# the common prefix with the prompt ends before the message.
NEXT_CONTENT = "\x01"


@dataclass(frozen=True, slots=True)
class Mark:
    """A breakpoint. ``head``: returns the conversation up to it. ``ttl``: lifetime, in seconds."""

    head: Callable[[], ChatInput]
    ttl: float


@dataclass(frozen=True, slots=True)
class Breakpoints:
    """The pins of a prompt, shortest prefix first."""

    pins: tuple[Pin, ...] = ()
    page_size: int = 1  # number of tokens; only full pages are cached

    def written(self, num_cached: int, ttl: float | None = None) -> int:
        """Return the number of tokens before the last breakpoint that were written to the cache.

        ``num_cached``: number of tokens that were cached before. ``ttl``: count only tokens that
        breakpoints with this lifetime pin. Tokens after the last full page are not cached and not
        counted.
        """
        total, done = 0, num_cached
        for pin in self.pins:
            kept = pin.num_tokens // self.page_size * self.page_size
            fresh = max(0, kept - done)
            done += fresh
            total += fresh if ttl in (None, pin.ttl) else 0
        return total


def pins_at(ttls: Sequence[float], heads: Sequence[array[int]], ids: array[int]) -> Breakpoints:
    """Return the pins of a prompt: one for its longest common prefix with each of ``heads``.

    ``ttls``: the lifetime of each pin in seconds. ``ids``: the token ids of the prompt.
    ``heads``: the token ids of the conversation up to each breakpoint.
    """
    lifetimes: dict[int, float] = {}
    for ttl, head in zip(ttls, heads, strict=True):
        num_tokens = common_len(head, ids)
        if num_tokens:
            lifetimes[num_tokens] = max(ttl, lifetimes.get(num_tokens, 0.0))
    return Breakpoints(tuple(Pin(*each) for each in sorted(lifetimes.items())))


def write_details(usage: Usage, breakpoints: Breakpoints) -> CacheWriteDetails:
    """Return the numbers of prompt tokens that were written to the cache, by lifetime."""
    ttls = {pin.ttl for pin in breakpoints.pins if pin.ttl >= SECONDS["12h"]}
    long = sum(breakpoints.written(usage.cached_tokens, ttl) for ttl in ttls)
    long = min(long, usage.cache_write_tokens)
    return CacheWriteDetails(ttl_12h_tokens=long, ttl_30m_tokens=usage.cache_write_tokens - long)
