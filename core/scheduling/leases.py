"""Leases of KV pages: acquire, publish and release them as a request's cache options allow.

`awaits_prefix` and `would_fit` are the admission rules that concern pages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from ...radix_cache import KVLease, PrefixCache
from ..interface.plan import ScheduledRequest
from ..interface.request import Request
from .states import claim_states

# A preempted request is admitted only if each running request could grow by this many tokens.
RETURN_GROWTH = 64


def cache_limit(request: Request) -> int | None:
    """Return how many tokens the request may read from the cache; None for no limit.

    Log-probabilities of prompt tokens need computed rows: only tokens whose log-probabilities were
    sent already are read from the cache. A recorded answer that is compared needs computed rows,
    too.
    """
    if not request.cache.read:
        return 0
    if request.sampling.compares:
        return request.prompt_len - 1
    if request.extras.branches is not None:
        return request.extras.branches.first - 1
    if request.extras.kv_budget and request.num_output:
        return request.prompt_len  # packing rewrites the later pages: they must be private
    num_sent, wanted = request.num_prompt_logprobs, request.prompt_len - 1
    wants_logprobs = request.sampling.params.prompt_logprobs is not None
    return num_sent if wants_logprobs and num_sent < wanted else None


def reads_prefix(request: Request) -> bool:
    """Whether the request may read every page of its prompt from the cache, branches apart."""
    return cache_limit(request) is None or (
        request.cache.read and request.extras.branches is not None
    )


def readable_len(request: Request) -> int:
    """Return the maximum number of tokens that a request may read from the cache."""
    limit = cache_limit(request)
    return len(request.tokens) - 1 if limit is None else limit


def awaits_prefix(cache: PrefixCache, request: Request, running: Iterable[Request]) -> bool:
    """Whether ``request`` should wait, because more of its prefix will soon be cached.

    This is so while its pages are looked up in tiers, or while a running request computes the next
    page of its prefix. For a model with recurrent states: while a running request computes a state
    to resume from.
    """
    load = request.transfer.load
    if load is not None and not (load.is_found or load.is_over):
        return True
    if not reads_prefix(request):
        return False
    if cache.states is not None:
        return claim_states(cache, request, running)
    upto = cache.match_len(request.tokens, namespace=request.namespace) + cache.page_size
    if upto > readable_len(request):
        return False
    page = request.tokens[:upto]
    return any(
        other.num_computed < upto <= len(other.tokens)
        and other.namespace == request.namespace
        and other.tokens[:upto] == page
        for other in running
        if other.num_pending > 1 and other.cache.write
    )


def num_uncached_tokens(cache: PrefixCache, request: Request) -> int:
    """Return how many tokens would have to be computed if a request were admitted now."""
    limit = cache_limit(request)
    num_cached = cache.match_len(request.tokens, namespace=request.namespace, limit=limit)
    return len(request.tokens) - num_cached


def would_fit(cache: PrefixCache, request: Request, running: Collection[Request]) -> bool:
    """Whether the pool has pages for a request's tokens, and for one more token if it generates.

    Pages that the prompts of running requests still need count as taken, and so do pages for the
    growth of each running request: otherwise a preempted request would be admitted and preempted
    again at once.
    """
    growth = RETURN_GROWTH if request.num_preemptions else 1
    page_size = cache.page_size
    lacking = sum(
        max(0, -(-other.most_kv(len(other.tokens)) // page_size) - len(other.lease.page_ids))
        for other in running
        if other.lease is not None
    )
    return cache.would_fit(
        request.tokens,
        request.most_kv(len(request.tokens) + request.sampling.generates),
        namespace=request.namespace,
        limit=cache_limit(request),
        slack=lacking + len(running) * -(-growth // page_size),
    )


def acquire_kv(cache: PrefixCache, request: Request) -> KVLease:
    """Acquire the lease of an admitted request.

    The request's usage counts the cached tokens of its first admission only.
    """
    is_first = request.num_preemptions == 0
    lease = cache.acquire(
        request.tokens,
        namespace=request.namespace,
        limit=cache_limit(request),
        is_first=is_first and not request.extras.is_idle_prefill,
    )
    if is_first:
        request.usage.matched_tokens = lease.num_found_tokens
        request.usage.cached_tokens = request.num_tokens_accounted = lease.num_cached_tokens
        request.usage.cache_loss = lease.eviction
    return lease


def publish(cache: PrefixCache, request: Request) -> None:
    """Publish computed pages to the tree, if the request may write to the cache."""
    if request.lease is not None and request.cache.write:
        num_computed = request.num_computed
        if request.extras.kv_budget:  # packing may still change the pages after the prompt
            num_computed = min(num_computed, request.prompt_len)
        num_computed = _cacheable_len(request, num_computed)
        written = cache.publish(request.lease, request.tokens, num_computed)
        _count_written(request, written, cache.page_size)


def release_kv(cache: PrefixCache, request: Request, *, keep: bool = True) -> None:
    """Release the lease. ``keep``: computed pages stay cached, if the request may write them."""
    lease, request.lease = request.lease, None
    if lease is not None:
        keep = keep and request.cache.write
        num_computed = request.num_computed
        # Pages of a packed answer are not cached: its KV depends on what was packed away.
        if request.num_packed_away(num_computed + 1):
            num_computed = request.prompt_len
        num_computed = _cacheable_len(request, num_computed)
        written = cache.release(lease, request.tokens, num_computed, keep=keep)
        _count_written(request, written, cache.page_size)


def _cacheable_len(request: Request, num_computed: int) -> int:
    """Return how many of the first ``num_computed`` tokens may be cached: all but branches."""
    branches = request.extras.branches
    return num_computed if branches is None else min(num_computed, branches.first)


def pin_prompt(cache: PrefixCache, request: Request) -> None:
    """Pin the prefixes that `CacheOptions.pins` names; the prompt must be published."""
    if not request.cache.write:
        return
    for pin in request.cache.pins:
        cache.pin(
            request.tokens,
            min(pin.num_tokens, request.prompt_len),
            ttl=pin.ttl,
            namespace=request.namespace,
        )


def end_turn(cache: PrefixCache, request: Request, num_computed: int) -> None:
    """Pin the computed tokens of an ended request as its session's last turn, or end the session.

    A request that generates nothing computes its prompt before the turn that will read it.
    """
    session = request.cache.session
    if session is None:
        return
    num_computed = _cacheable_len(request, num_computed)
    if request.cache.ends_session:
        cache.end_session(session)
        if request.cache.write:
            cache.retire(request.tokens, num_computed, namespace=request.namespace)
    elif request.cache.write:
        began = request.arrival_time + request.usage.queue_time
        cache.pin_session(
            request.tokens,
            num_computed,
            session=session,
            namespace=request.namespace,
            began=began if request.sampling.generates else None,
        )


def hold_prompt(cache: PrefixCache, request: Request) -> None:
    """Hold the prompt's pages of an ended request for another engine, which continues the request.

    The other engine computes the prompt's last token itself, because it needs the logits.
    """
    held = cache.transfers.hold(request.tokens, request.prompt_len - 1, namespace=request.namespace)
    request.transfer = replace(request.transfer, handed=held)


def settle_pages(
    cache: PrefixCache, request: Request, scheduled: ScheduledRequest, *, with_drafts: bool
) -> None:
    """Publish the pages that a step completed, and free the pages that it had too many.

    Only drafts and packing leave surplus pages. The pages of an answer are published when it ends.
    """
    lease = request.lease
    if lease is None:
        return
    has_kept = lease.state is not None and lease.state.keeps
    is_chunk = scheduled.stop - scheduled.start > 1
    if is_chunk or has_kept or scheduled.start < request.sampling.prompt_len:
        publish(cache, request)
    if with_drafts or scheduled.extras.pack is not None:
        upto = len(request.tokens)
        if request.extras.kv_budget:
            # A packing that is due still reads the pages of all tokens.
            upto = max(request.kv_len(request.num_computed), request.kv_len(upto))
        if upto <= (len(lease.page_ids) - 1) * cache.page_size:
            cache.shrink(lease, upto)


def _count_written(request: Request, written: range, page_size: int) -> None:
    """Add the prompt's full pages among the ``written`` tokens to the request's usage.

    Tokens that were counted before a preemption are not counted again.
    """
    upto = min(written.stop, request.prompt_len // page_size * page_size)
    new = upto - max(written.start, request.num_tokens_accounted)
    if new > 0:
        request.usage.cache_write_tokens += new
        request.num_tokens_accounted = upto
