"""Admission: the limits of the scheduler, and the checks of a request against them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ...radix_cache import PrefixCache
from ..errors import InvalidRequest, PromptTooLong
from ..interface.request import Request

RETURN_GROWTH = 64  # tokens that each running request may grow before a preempted one is back


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of a step and of the queue, in tokens and requests.

    ``depth_cap``: draft tokens that one request may have in a step, at most. ``max_slowdown``:
    how many times longer a step may take because prompts are computed beside decoding requests.
    ``aging_seconds``: waiting so long makes a request as urgent as one priority does.
    ``max_priority``: the greatest distance of a request's priority from 0.
    """

    max_batch_tokens: int
    max_running: int
    max_queued: int
    max_model_len: int
    vocab_size: int
    depth_cap: int = 64
    max_slowdown: float = math.inf
    aging_seconds: float = 10.0
    max_priority: float = math.inf


class PendingArrivals(NamedTuple):
    """Requests that are accepted but not queued yet: they count against the queue's room."""

    num_all: int = 0
    num_own: int = 0  # of the tenant whose request is checked


NO_ARRIVALS = PendingArrivals()


def check_fits(request: Request, capacity: int) -> None:
    """Raise `PromptTooLong` unless the prompt and one more token fit ``capacity`` tokens."""
    if not request.tokens:
        raise InvalidRequest("prompt must have at least one token", param="prompt")
    if request.prompt_len >= capacity:
        raise PromptTooLong(request.prompt_len, capacity - 1)


def check_token_ids(request: Request, vocab_size: int) -> None:
    """Raise `InvalidRequest` for ids outside the vocabulary: a negative one would wrap round."""
    fields: dict[str, Collection[int]] = {
        "prompt": request.tokens,
        "prediction": request.prediction or (),
    }
    for param, ids in (fields | request.sampling.token_id_fields()).items():
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            message = f"{param} holds a token id outside 0..{vocab_size - 1}"
            raise InvalidRequest(message, param=param)


def check_priority(request: Request, most: float) -> None:
    """Raise `InvalidRequest` for a priority that is more than ``most`` away from 0.

    A priority outweighs ``aging_seconds`` of waiting: unbounded, it could starve other requests.
    """
    if not -most <= request.priority <= most:
        message = f"priority must be from -{most} to {most} (the server's --max-priority)"
        raise InvalidRequest(message, param="priority")


def cache_limit(request: Request) -> int | None:
    """Return how many tokens the request may read from the cache; None for no limit.

    Log-probabilities of prompt tokens need computed rows: only what was sent already is read.
    """
    if not request.cache.read:
        return 0
    num_sent, wanted = request.num_prompt_logprobs, request.prompt_len - 1
    wants_logprobs = request.sampling.params.prompt_logprobs is not None
    return num_sent if wants_logprobs and num_sent < wanted else None


def shares_prefill(cache: PrefixCache, request: Request, running: Iterable[Request]) -> bool:
    """Whether a running request is about to compute this one's next page."""
    if cache_limit(request) is not None:
        return False
    upto = cache.match_len(request.tokens, namespace=request.namespace) + cache.page_size
    if upto >= len(request.tokens):
        return False
    page = request.tokens[:upto]
    return any(
        other.num_computed < upto <= len(other.tokens)
        and other.namespace == request.namespace
        and other.tokens[:upto] == page
        for other in running
        if other.num_pending > 1 and other.cache.write
    )


def would_fit(cache: PrefixCache, request: Request, num_running: int) -> bool:
    """Whether all its tokens and one more fit, with room to grow for each that runs.

    Without spare room a preempted request would be admitted and preempted again at once.
    """
    growth = RETURN_GROWTH if request.num_preemptions else 1
    return cache.would_fit(
        request.tokens,
        len(request.tokens) + 1,
        namespace=request.namespace,
        limit=cache_limit(request),
        slack=num_running * -(-growth // cache.page_size),
    )
