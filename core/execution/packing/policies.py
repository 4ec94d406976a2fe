"""Policies that choose which tokens of an answer keep their KV when it is packed."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from ...interface.extras.packing import KvPack
from ...interface.plan import ScheduledRequest
from ...ops.kv_pool import KVPool


class KeepPolicy(Protocol):
    """Chooses what is kept."""

    def kept(self, pool: KVPool, scheduled: ScheduledRequest, pack: KvPack) -> Tensor:
        """Places that are kept of those from ``pack.first`` to ``pack.stop``, rising.

        [num_layers, num_kv_heads, n], int64; dimensions of 1 as in `KVPool.pack`.
        """


class KeepWindow(KeepPolicy):
    """Keeps the latest tokens of the answer, the same in every layer and head."""

    @override
    def kept(self, pool: KVPool, scheduled: ScheduledRequest, pack: KvPack) -> Tensor:
        del pool, scheduled
        return torch.arange(pack.first + pack.num_packed_away, pack.stop).view(1, 1, -1)


def pack_kv(policy: KeepPolicy, pool: KVPool, scheduled: ScheduledRequest) -> None:
    """Pack a request's KV as its plan orders, once however often the step is run.

    Raises RuntimeError where an earlier try ended half way: the request's KV is void then.
    """
    pack = scheduled.extras.pack
    if pack is None or pack.is_done:
        return
    if pack.is_begun:
        raise RuntimeError(f"the KV of {scheduled.request_id} was packed half way")
    kept = policy.kept(pool, scheduled, pack)
    pack.is_begun = True
    pool.pack(scheduled.page_ids, kept, pack.first)
    pack.is_done = True
