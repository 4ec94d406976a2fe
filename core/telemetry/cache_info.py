"""Report of the prefix cache, for `Engine.cache_info`."""

from __future__ import annotations

from dataclasses import asdict

from ...radix_cache import PrefixCache
from ..interface.extras.tiers import KVTiers


def describe_cache(
    cache: PrefixCache,
    namespace: str | None,
    tiers: KVTiers | None = None,
    num_packed_away_tokens: int = 0,
) -> dict[str, object]:
    """Return a description of the cache and its tiers: occupancy in pages, hits in tokens, pins.

    Only the pins of ``namespace`` are listed. ``num_packed_away_tokens``: number of answer tokens
    whose KV was dropped by packing.
    """
    return {
        "page_size": cache.page_size,
        "total_pages": cache.num_total_pages,
        "free_pages": cache.num_free_pages,
        "evictable_pages": cache.num_evictable_pages,
        "pinned_pages": cache.num_pinned_pages,
        "num_pins": len(cache.pins),
        "num_sessions": cache.pins.num_sessions,
        "pins": [
            {
                "tokens": pinned.lock.num_pages * cache.page_size,
                "num_sessions": len(pinned.sessions),
                "ttl_seconds": pinned.ttl,
                "expires_in_seconds": round(pinned.until - cache.pins.now, 3),
            }
            for pinned in cache.pins.of(namespace)
        ],
        "usage": cache.usage,
        "queried_tokens": cache.num_queries,
        "hit_tokens": cache.num_hits,
        "evicted_answer_tokens": num_packed_away_tokens,
        "tiers": [] if tiers is None else [asdict(tier) for tier in tiers.describe()],
    }
