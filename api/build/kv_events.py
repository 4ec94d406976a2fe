"""KV events: opened before the model is loaded, and told of the pages of its cache."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...core.config import EngineConfig
from ...core.errors import InvalidRequest
from ...radix_cache import PrefixCache

if TYPE_CHECKING:
    from ...core.tiers.events import KVEventPublisher
    from ...core.tiers.keys import PageKeys


@contextlib.contextmanager
def events_of(config: EngineConfig) -> Iterator[KVEventPublisher | None]:
    """Open the publisher that the options ask for; it is closed if the block fails.

    Raises `InvalidRequest` for an address that is taken, or without the extra.
    """
    addresses = config.events_addresses
    if addresses is None:
        yield None
        return
    try:
        from ...core.tiers.events import KVEventPublisher
    except ModuleNotFoundError as error:
        message = f"kv_events needs the extra events: pip install 'foretoken[events]' ({error})"
        raise InvalidRequest(message, param="kv_events") from None
    publisher = KVEventPublisher(*addresses, config.kv_events_topic)
    try:
        yield publisher
    except BaseException:
        publisher.close()
        raise


def keys_of(cache: PrefixCache, fingerprint: bytes) -> PageKeys:
    """Give the pages of a cache keys, from now on."""
    from ...core.tiers.keys import PageKeys

    keys = PageKeys(fingerprint, cache.num_total_pages, cache.page_size)
    cache.tree.add_observer(keys)
    return keys


def name_fingerprint(model: str, page_size: int) -> bytes:
    """Hash a model's name and the page size.

    It does not tell apart all that changes a page's bits, so keys made with it may name pages to
    routers, and must not be those of a store.
    """
    return hashlib.blake2b(f"{page_size} {model}".encode(), digest_size=32).digest()
