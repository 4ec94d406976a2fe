"""KV events: the publisher, opened before the model is loaded, and the keys of cached pages."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ....core.config import EngineConfig
from ....core.errors import InvalidRequest
from ....radix_cache import PrefixCache

if TYPE_CHECKING:
    from ....core.tiers.events import KVEventPublisher
    from ....core.tiers.keys import PageKeys


@contextlib.contextmanager
def events_of(config: EngineConfig) -> Iterator[KVEventPublisher | None]:
    """Open the publisher that the options ask for. It is closed if the block fails.

    Raises `InvalidRequest` for an address in use, and if the extra is not installed.
    """
    addresses = config.events_addresses
    if addresses is None:
        yield None
        return
    try:
        from ....core.tiers.events import KVEventPublisher
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
    """Return the keys of a cache's pages. They are updated whenever the cache changes."""
    from ....core.tiers.keys import PageKeys

    keys = PageKeys(fingerprint, cache.num_total_pages, cache.page_size)
    cache.tree.add_observer(keys)
    return keys


def name_fingerprint(model: str, page_size: int) -> bytes:
    """Return a hash of a model's name and the page size.

    It does not cover everything that determines a page's bits. Keys based on it may identify pages
    for routers but must not be used for a store.
    """
    return hashlib.blake2b(f"{page_size} {model}".encode(), digest_size=32).digest()
