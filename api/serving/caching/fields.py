"""OpenAI's fields of the prompt cache: options, and breakpoints in parts of messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from msgspec import Struct

from ....core.interface.request import DEFAULT_CACHE, CacheOptions, Pin

WHOLE = 2**31 - 1  # tokens of a pin for the full prompt: more than any prompt has
CacheClass = Literal["30m", "12h"]
"""The shortest lifetime of a cached prefix that a client asks for."""
SECONDS = {"30m": 1800.0, "12h": 12 * 3600.0, "24h": 24 * 3600.0}
MAX_IMPLICIT, MAX_EXPLICIT = 3, 4  # numbers of last breakpoints that are used, by mode


class CacheSpec(Struct, kw_only=True):
    """The field ``cache``: whether a request reads from and writes to the prefix cache."""

    read: bool = True
    write: bool = True


class PromptCacheOptions(Struct, kw_only=True):
    """``prompt_cache_options``: pin, prewarm and explain a prompt.

    In the mode "explicit", only breakpoints in the messages pin prefixes, and a request without a
    breakpoint does not use the cache.
    """

    mode: Literal["implicit", "explicit"] | None = None
    ttl: CacheClass | None = None
    prewarm: bool | None = None
    comparison_response_id: str | None = None


class PromptCacheBreakpoint(Struct, kw_only=True):
    """``prompt_cache_breakpoint`` of a part: the prefix that ends with the part is pinned."""

    mode: Literal["explicit"]
    ttl: CacheClass | None = None  # None: as in ``prompt_cache_options``


class CacheWriteDetails(Struct, kw_only=True):
    """``cache_write_tokens_details``: tokens written to the cache, by their lifetime."""

    ttl_30m_tokens: int
    ttl_12h_tokens: int


class Marked(Protocol):
    """A message whose content may be a list of parts with breakpoints."""

    @property
    def content(self) -> object:
        """A text, a list of parts, or None."""


def _has_breakpoint(message: Marked) -> bool:
    parts = message.content if isinstance(message.content, list) else []
    return any(part.prompt_cache_breakpoint is not None for part in parts)


def is_explicit(options: PromptCacheOptions | None) -> bool:
    """Whether only breakpoints in the messages pin prefixes."""
    return options is not None and options.mode == "explicit"


def read_cache(
    spec: CacheSpec | None,
    retention: str | None,
    options: PromptCacheOptions | None,
    messages: Sequence[Marked] = (),
) -> CacheOptions:
    """Return the cache options of a body; the longest requested retention applies.

    ``retention``: ``prompt_cache_retention``; ``options``: ``prompt_cache_options``.
    ``messages``: messages that may have breakpoints.
    """
    if spec is None and retention is None and options is None:
        return DEFAULT_CACHE
    spec = spec or CacheSpec()
    if is_explicit(options):
        uses = any(map(_has_breakpoint, messages))
        return CacheOptions(read=spec.read and uses, write=spec.write and uses)
    asked = (retention or "", (options and options.ttl) or "")
    seconds = max(SECONDS.get(each, 0.0) for each in asked)
    pins = (Pin(WHOLE, seconds),) if seconds else ()
    return CacheOptions(read=spec.read, write=spec.write, pins=pins)
