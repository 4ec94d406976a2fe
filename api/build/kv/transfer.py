"""KV transfer: the NIXL agents that ``--kv-transfer`` asks for, and ``kv_transfer_params``.

Imported only if KV transfer is enabled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from torch import Tensor

from ....core.errors import InvalidRequest
from ....core.execution.proposer import PageRows
from ....core.interface.extras.transfers import PageOffer, PageServer
from ....core.ops.kv_pool import KVPool
from ....core.tiers.keys import PageKeys
from ....core.tiers.nixl_transport import NixlReader, NixlServer
from ....core.tiers.stores.peer_store import PeerStore
from ....core.tiers.tiers import CALL_BYTES
from ....core.tiers.transfer_params import TransferParams
from ....radix_cache import PrefixCache

CLUSTER_KEY = "FORETOKEN_CLUSTER_KEY"


def check_secret() -> str:
    """Return the cluster's secret. Raises `InvalidRequest` if it is not set."""
    secret = os.environ.get(CLUSTER_KEY)
    if not secret:
        message = f"kv_transfer needs {CLUSTER_KEY}, the same secret for all servers"
        raise InvalidRequest(message, param="kv_transfer")
    return secret


def make_peers(record_bytes: int) -> PeerStore:
    """Return the store that reads other engines' pools."""
    return PeerStore(NixlReader(max(CALL_BYTES, record_bytes)), record_bytes)


def make_server(cache: PrefixCache, pool: KVPool, stored: Sequence[PageRows]) -> PageServer:
    """Return the server that lets other engines read a pool and the proposer's rows ``stored``."""
    return NixlServer(_parts(pool, stored), cache.transfers.words)


def make_params(
    cache: PrefixCache,
    keys: PageKeys,
    pool: KVPool,
    stored: Sequence[PageRows],
    *,
    fingerprint: bytes,
    server: PageServer | None,
    end_offer: Callable[[PageOffer], None] | None,
) -> TransferParams:
    """Return the codec that reads and writes ``kv_transfer_params``."""
    return TransferParams(
        check_secret(),
        fingerprint,
        cache,
        keys,
        memory=None if server is None else server.memory,
        end_offer=end_offer,
        row_bytes=tuple(part[0].nbytes for part in _parts(pool, stored)),
    )


def _parts(pool: KVPool, stored: Sequence[PageRows]) -> list[Tensor]:
    return [*pool.stored, *(each.source for each in stored)]
