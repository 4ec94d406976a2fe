"""KV tiers: the stores that options ask for, below an engine's pool.

Imported only where one is asked for.
"""

from __future__ import annotations

from pathlib import Path

from ...core.execution.proposer import Proposer
from ...core.ops.kv_pool import KVPool
from ...core.tiers.keys import PageKeys
from ...core.tiers.page_records import PageRecords
from ...core.tiers.slab_store import SlabStore
from ...core.tiers.store_folder import make_root
from ...core.tiers.tiers import Tiers
from ...radix_cache import PrefixCache

__all__ = ["make_root", "make_tiers"]


def make_tiers(
    cache: PrefixCache,
    keys: PageKeys,
    pool: KVPool,
    proposer: Proposer | None,
    *,
    disk: tuple[Path, int],
    fingerprint: bytes,
    quota: float,
) -> Tiers:
    """Open the stores of a pool's pages; a proposer's share of them is kept, too.

    ``disk``: folder and size in bytes. ``quota``: share of a store beyond which the pages of a
    namespace go first. Raises `InvalidRequest` for a folder that cannot be used.
    """
    parts = () if proposer is None else proposer.stored
    records = PageRecords(
        [pool.data, *(each.source for each in parts)], [pool.data, *(each.target for each in parts)]
    )
    folder, num_bytes = disk
    store = SlabStore(folder, fingerprint, records.num_bytes, num_bytes, quota=quota)
    return Tiers(cache.tree, keys, records, [store])
