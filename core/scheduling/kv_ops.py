"""KV operations of a request on the prefix cache, as its cache options say."""

from __future__ import annotations

from ...radix_cache import KVLease, PrefixCache
from ..interface.request import Request
from .admission import cache_limit


def acquire_kv(cache: PrefixCache, request: Request) -> KVLease:
    """Acquire the lease of an admitted request; count the cached tokens the first time."""
    is_first = request.num_preemptions == 0
    lease = cache.acquire(
        request.tokens,
        namespace=request.namespace,
        limit=cache_limit(request),
        is_first=is_first,
    )
    if is_first:
        request.usage.cached_tokens = request.num_noted = lease.num_cached_tokens
        request.usage.cache_loss = lease.eviction
    return lease


def publish(cache: PrefixCache, request: Request) -> None:
    """Publish computed pages to the tree, if the request may write to the cache."""
    if request.lease is not None and request.cache.write:
        written = cache.publish(request.lease, request.tokens, request.num_computed)
        _note(request, written, cache.page_size)


def release_kv(cache: PrefixCache, request: Request, *, keep: bool = True) -> None:
    """Release the lease; with ``keep`` computed pages stay cached, if the request may write."""
    lease, request.lease = request.lease, None
    if lease is not None:
        keep = keep and request.cache.write
        written = cache.release(lease, request.tokens, request.num_computed, keep=keep)
        _note(request, written, cache.page_size)


def pin_prompt(cache: PrefixCache, request: Request) -> None:
    """Pin the prefixes that the request asks to keep, once its prompt is published."""
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
    """Describe the cache: occupancy in pages, hits in tokens, the pins of one namespace."""
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
    """Count the prompt's full pages among those written, once, even after preemptions."""
    upto = min(written.stop, request.prompt_len // page_size * page_size)
    new = upto - max(written.start, request.num_noted)
    if new > 0:
        request.usage.cache_write_tokens += new
        request.num_noted = upto
