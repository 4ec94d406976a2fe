"""KV tiers: the stores that options ask for, below an engine's pool.

Imported only where one is asked for.
"""

from __future__ import annotations

import logging
from types import ModuleType

import torch

from ...core.config import EngineConfig, format_size
from ...core.errors import InvalidRequest
from ...core.execution.proposer import Proposer
from ...core.interface.settings import parse_size
from ...core.interface.tiers import PageStore
from ...core.ops.device import free_memory
from ...core.ops.kv_pool import KVPool
from ...core.tiers.host_store import HostStore
from ...core.tiers.keys import PageKeys
from ...core.tiers.mooncake_store import MooncakeStore, check_reachable
from ...core.tiers.page_records import PageRecords
from ...core.tiers.slab_files import LEAST_PAGES
from ...core.tiers.slab_store import SlabStore
from ...core.tiers.store_folder import make_root
from ...core.tiers.tiers import Tiers
from ...radix_cache import PrefixCache

logger = logging.getLogger(__name__)


def check_places(config: EngineConfig) -> None:
    """Refuse stores that cannot be used, before weights are read. Raises `InvalidRequest`."""
    if (disk := config.kv_disk_place()) is not None:
        make_root(disk[0])
    if (remote := config.kv_remote_place()) is not None:
        check_reachable(*remote[:2])
    if config.takes_kv:
        _kv_transfer().check_secret()


def make_tiers(
    cache: PrefixCache,
    keys: PageKeys,
    pool: KVPool,
    proposer: Proposer | None,
    *,
    config: EngineConfig,
    fingerprint: bytes,
) -> Tiers:
    """Open the stores that the options ask for; a proposer's share of a page is kept, too.

    Raises `InvalidRequest` for a folder that cannot be used, and for a size of too few pages or
    more than there is.
    """
    parts = () if proposer is None else proposer.stored
    records = PageRecords(
        [pool.data, *(each.source for each in parts)], [pool.data, *(each.target for each in parts)]
    )
    quota, stores = config.cache_quota, list[PageStore]()
    if config.kv_host is not None:
        num_bytes = parse_size(config.kv_host)
        _check_host(num_bytes, records.num_bytes)
        pinned = pool.data.device.type == "cuda"
        if not pinned:
            logger.info("on a CPU --kv-memory uses the memory of --kv-host better")
        stores.append(HostStore(records.num_bytes, num_bytes, pinned=pinned, quota=quota))
    if (disk := config.kv_disk_place()) is not None:
        folder, num_bytes = disk
        stores.append(SlabStore(folder, fingerprint, records.num_bytes, num_bytes, quota=quota))
    if (remote := config.kv_remote_place()) is not None:
        host, port, lent = remote
        stores.append(MooncakeStore(host, port, fingerprint, records.num_bytes, lent_bytes=lent))
    peers = _kv_transfer().make_peers(records.num_bytes) if config.takes_kv else None
    return Tiers(cache.tree, keys, records, stores, peers)


def _kv_transfer() -> ModuleType:
    # Not at the top: nothing of NIXL is imported without it.
    from . import kv_transfer

    return kv_transfer


def _check_host(num_bytes: int, page_bytes: int) -> None:
    least, free = LEAST_PAGES * page_bytes, free_memory(torch.device("cpu"))
    if num_bytes < least:
        message = f"kv_host: {LEAST_PAGES} pages need {format_size(least)}"
        raise InvalidRequest(message, param="kv_host")
    if num_bytes > free:
        message = f"kv_host: {format_size(num_bytes)} is more than the {format_size(free)} free"
        raise InvalidRequest(message, param="kv_host")
