"""What a request asks of the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InvalidRequest

MAX_TTL = 30 * 24 * 3600.0  # seconds


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep the first ``num_tokens`` of the prompt, in whole pages, for ``ttl`` seconds.

    More tokens than the prompt has mean all of it. Each hit begins the time anew. Raises
    `InvalidRequest` for a number that is not positive or a time beyond 30 days.
    """

    num_tokens: int
    ttl: float

    def __post_init__(self) -> None:
        """Check both."""
        if self.num_tokens < 1:
            raise InvalidRequest("a pin needs at least one token", param="cache")
        if not 0 < self.ttl <= MAX_TTL:  # also false for nan
            message = f"the ttl of a pin must be above 0 and at most {MAX_TTL:.0f} s"
            raise InvalidRequest(message, param="cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Whether a request draws on what others left, whether it leaves something, and for how long.

    Without ``read`` nothing is borrowed, and drafts come from the request itself. Without ``write``
    nothing of it is published, at no time, nor kept for later drafts; then pins keep nothing.
    """

    read: bool = True
    write: bool = True
    pins: tuple[Pin, ...] = ()

    @property
    def is_private(self) -> bool:
        """Whether it gives to or takes from others less than everything."""
        return not (self.read and self.write)


DEFAULT_CACHE = CacheOptions()
