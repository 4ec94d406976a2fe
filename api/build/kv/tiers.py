"""KV tiers: the stores for cached KV outside an engine's pool that the options ask for.

Imported only if a tier is configured.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

import torch

from ....core.config import EngineConfig, format_size
from ....core.errors import InvalidRequest
from ....core.execution.proposer import Proposer
from ....core.interface.extras.tiers import PageStore
from ....core.ops.kv_pool import KVPool
from ....core.ops.machine.device import free_memory
from ....core.options.settings import parse_size
from ....core.tiers.keys import PageKeys
from ....core.tiers.page_records import PageRecords, StateRecords
from ....core.tiers.stores.host_store import HostStore
from ....core.tiers.stores.mooncake_store import MooncakeStore, check_reachable
from ....core.tiers.stores.peer_store import PeerStore
from ....core.tiers.stores.slab_files import LEAST_PAGES
from ....core.tiers.stores.slab_store import SlabStore
from ....core.tiers.stores.store_folder import make_root
from ....core.tiers.tiers import StateTiers, Tiers
from ....radix_cache import PrefixCache

LEAST_STATES = 2  # minimum number of recurrent states that a store must have room for
logger = logging.getLogger(__name__)


def check_stores(config: EngineConfig) -> None:
    """Raise `InvalidRequest` for a store that cannot be used, before the weights are read."""
    if (disk := config.kv_disk_place()) is not None:
        make_root(disk[0])
    if (remote := config.kv_remote_place()) is not None:
        check_reachable(*remote[:2])


def make_tiers(
    cache: PrefixCache,
    keys: PageKeys,
    pool: KVPool,
    proposer: Proposer | None,
    *,
    config: EngineConfig,
    fingerprint: bytes,
    make_peers: Callable[[int], PeerStore] | None,
) -> Tiers:
    """Return the tiers that the options ask for.

    ``proposer``: if it keeps rows for each page, they are stored with the page. ``make_peers``
    makes the store that reads other engines' pools, given the size of a page's record in bytes.
    For a model with recurrent states, half of each store is for states. Raises `InvalidRequest`
    for an unusable folder, and for a size that is too small or exceeds the free memory.
    """
    parts = () if proposer is None else proposer.stored
    records = PageRecords(
        [*pool.stored, *(each.source for each in parts)],
        [*pool.stored, *(each.target for each in parts)],
    )
    states = None if pool.states is None else StateRecords(pool.states)
    stores, of_states = list[PageStore](), list[PageStore]()
    if config.kv_host is not None:
        pinned = pool.data.device.type == "cuda"
        if not pinned:
            logger.info("on the CPU, --kv-memory makes better use of memory than --kv-host")
        parts_of_host = _host_stores(config, records, states, pinned=pinned)
        stores.append(parts_of_host[0])
        of_states += parts_of_host[1:]
    if config.kv_disk is not None:
        parts_of_disk = _disk_stores(config, fingerprint, records, states)
        stores.append(parts_of_disk[0])
        of_states += parts_of_disk[1:]
    if (remote := config.kv_remote_place()) is not None:
        host, port, lent = remote
        stores.append(MooncakeStore(host, port, fingerprint, records.num_bytes, lent_bytes=lent))
    peers = None if make_peers is None else make_peers(records.num_bytes)
    kept = None
    if states is not None and cache.states is not None:
        kept = StateTiers(cache.states, states, of_states)
    return Tiers(cache.tree, keys, records, stores, peers, states=kept)


def _host_stores(
    config: EngineConfig, records: PageRecords, states: StateRecords | None, *, pinned: bool
) -> list[PageStore]:
    """Return the host memory stores for pages and, if there are any, for recurrent states."""
    num_bytes, quota = parse_size(config.kv_host or "0"), config.cache_quota
    share = num_bytes if states is None else num_bytes // 2
    least = max(LEAST_PAGES * records.num_bytes, states.num_bytes * LEAST_STATES if states else 0)
    _check_host(num_bytes, least if states is None else 2 * least)
    sizes = [each.num_bytes for each in (records, states) if each is not None]
    return [HostStore(size, share, pinned=pinned, quota=quota) for size in sizes]


def _disk_stores(
    config: EngineConfig, fingerprint: bytes, records: PageRecords, states: StateRecords | None
) -> list[PageStore]:
    """Return the disk stores for pages and, if there are any, for recurrent states."""
    disk = config.kv_disk_place()
    assert disk is not None, "kv_disk must be set"
    folder, num_bytes = disk
    quota, share = config.cache_quota, num_bytes if states is None else num_bytes // 2
    size = records.num_bytes
    pages = SlabStore(folder, fingerprint, size, num_bytes, quota=quota, most_bytes=share)
    if states is None:
        return [pages]
    try:
        of_states = SlabStore(
            folder,
            hashlib.sha256(b"states" + fingerprint).digest()[: len(fingerprint)],
            states.num_bytes,
            num_bytes,
            quota=quota,
            most_bytes=share,
            least_pages=LEAST_STATES,
            noun="recurrent states",
        )
    except BaseException:
        pages.close()
        raise
    return [pages, of_states]


def _check_host(num_bytes: int, least: int) -> None:
    free = free_memory(torch.device("cpu"))
    if num_bytes < least:
        message = f"kv_host must be at least {format_size(least)} for this model"
        raise InvalidRequest(message, param="kv_host")
    if num_bytes > free:
        message = f"kv_host: {format_size(num_bytes)} is more than the {format_size(free)} free"
        raise InvalidRequest(message, param="kv_host")
