"""What a request takes from the prefix cache and what it leaves there, as its options say."""

from __future__ import annotations

from ..radix_cache import KVLease, PrefixCache
from .admission import cache_limit
from .request import Request


def borrow(cache: PrefixCache, request: Request) -> KVLease:
    """The lease of a request that is let in; what it finds is noted the first time."""
    is_first = request.num_preemptions == 0
    lease = cache.acquire(
        request.tokens,
        namespace=request.namespace,
        limit=cache_limit(request),
        is_first=is_first,
    )
    if is_first:
        request.usage.cached_tokens = request.num_noted = lease.num_cached_tokens
        request.usage.cache_loss = lease.loss
    return lease


def publish(cache: PrefixCache, request: Request) -> None:
    """Give what is computed to the tree, if it may have it."""
    if request.lease is not None and request.cache.write:
        written = cache.publish(request.lease, request.tokens, request.num_computed)
        _note(request, written, cache.page_size)


def give_back(cache: PrefixCache, request: Request, *, keep: bool = True) -> None:
    """End the lease; with ``keep`` what is computed stays in the tree, if it may have it."""
    lease, request.lease = request.lease, None
    if lease is not None:
        keep = keep and request.cache.write
        written = cache.release(lease, request.tokens, request.num_computed, keep=keep)
        _note(request, written, cache.page_size)


def pin_prompt(cache: PrefixCache, request: Request) -> None:
    """Pin what the request wants kept; once its prompt is published."""
    if not request.cache.write:
        return
    for pin in request.cache.pins:
        cache.pin(
            request.tokens,
            min(pin.num_tokens, request.prompt_len),
            ttl=pin.ttl,
            namespace=request.namespace,
        )


def describe_cache(cache: PrefixCache, namespace: str | None) -> dict[str, object]:
    """Occupancy in pages, hits in tokens, and the pins of one namespace one by one."""
    return {
        "page_size": cache.page_size,
        "total_pages": cache.num_total_pages,
        "free_pages": cache.num_free_pages,
        "evictable_pages": cache.num_evictable_pages,
        "pinned_pages": cache.num_pinned_pages,
        "num_pins": len(cache.pins),
        "pins": [
            {
                "tokens": pinned.lock.num_pages * cache.page_size,
                "ttl_seconds": pinned.ttl,
                "expires_in_seconds": round(pinned.until - cache.pins.now, 3),
            }
            for pinned in cache.pins.of(namespace)
        ],
        "usage": cache.usage,
        "queried_tokens": cache.num_queries,
        "hit_tokens": cache.num_hits,
    }


def _note(request: Request, written: range, page_size: int) -> None:
    """Count the prompt's whole pages of those written, once however often it is preempted."""
    upto = min(written.stop, request.prompt_len // page_size * page_size)
    new = upto - max(written.start, request.num_noted)
    if new > 0:
        request.usage.cache_write_tokens += new
        request.num_noted = upto
