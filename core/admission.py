"""What a scheduler lets in."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..radix_cache import PrefixCache
from .errors import InvalidRequest, PromptTooLong
from .request import Request

RETURN_GROWTH = 64  # tokens that each running request may grow before a preempted one is back


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of a step and of the queue, in tokens and requests.

    ``depth_cap``: draft tokens that one request may have in a step, at most. ``max_slowdown``:
    how many times longer a step may take because prompts are computed beside those who decode.
    ``aging_seconds``: waiting so long makes a request as urgent as one priority does.
    ``max_priority``: a request's own is at most so far from 0.
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


class Ahead(NamedTuple):
    """Requests that were let through and that the queue does not know yet."""

    num_all: int = 0
    num_own: int = 0  # of the tenant that asks


NOBODY = Ahead()


def check_fits(request: Request, capacity: int) -> None:
    """Raises `PromptTooLong` unless the prompt and one more token fit ``capacity`` tokens."""
    if not request.tokens:
        raise InvalidRequest("prompt must have at least one token", param="prompt")
    if request.prompt_len >= capacity:
        raise PromptTooLong(request.prompt_len, capacity - 1)


def check_token_ids(request: Request, vocab_size: int) -> None:
    """Raises `InvalidRequest` for ids outside the vocabulary: a negative one would wrap round."""
    params = request.sampling.params
    fields: dict[str, Collection[int]] = {
        "prompt": request.tokens,
        "prediction": request.prediction or (),
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids,
    }
    for param, ids in fields.items():
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            message = f"{param} holds a token id outside 0..{vocab_size - 1}"
            raise InvalidRequest(message, param=param)


def check_priority(request: Request, most: float) -> None:
    """Raises `InvalidRequest` for a priority that is more than ``most`` away from 0.

    One is worth ``aging_seconds`` of waiting: without a bound the others could wait for ever.
    """
    if not -most <= request.priority <= most:
        message = f"priority must be from -{most} to {most} (the server's --max-priority)"
        raise InvalidRequest(message, param="priority")


def cache_limit(request: Request) -> int | None:
    """Tokens that it may read from the cache, None for all there are.

    Log-probabilities of the prompt need its rows computed: nothing beyond those told is read.
    """
    if not request.cache.read:
        return 0
    told, wanted = request.num_prompt_logprobs, request.prompt_len - 1
    asks = request.sampling.params.prompt_logprobs is not None
    return told if asks and told < wanted else None


def shares_prefill(cache: PrefixCache, request: Request, running: Iterable[Request]) -> bool:
    """Whether a running request is about to compute this one's next page: then wait for it."""
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

    Without more room a preempted request would come back only to be preempted again.
    """
    growth = RETURN_GROWTH if request.num_preemptions else 1
    return cache.would_fit(
        request.tokens,
        len(request.tokens) + 1,
        namespace=request.namespace,
        limit=cache_limit(request),
        slack=num_running * -(-growth // cache.page_size),
    )
