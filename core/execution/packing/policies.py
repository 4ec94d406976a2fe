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
    """Policy that chooses the tokens of an answer that keep their KV."""

    def kept(self, pool: KVPool, scheduled: ScheduledRequest, pack: KvPack) -> Tensor:
        """Return the ascending indices of the tokens to keep among ``pack.first`` to ``pack.stop``.

        Only the request's tokens that still have KV are numbered. The result is int64 [num_layers,
        num_kv_heads, num_kept]; either of the first two dimensions may be 1, as in `KVPool.pack`.
        """


class KeepWindow(KeepPolicy):
    """Policy that keeps the latest tokens of the answer, the same in every layer and head."""

    @override
    def kept(self, pool: KVPool, scheduled: ScheduledRequest, pack: KvPack) -> Tensor:
        del pool, scheduled
        return torch.arange(pack.first + pack.num_packed_away, pack.stop).view(1, 1, -1)


def pack_kv(policy: KeepPolicy, pool: KVPool, scheduled: ScheduledRequest) -> None:
    """Pack a request's KV if a packing is due; a step that is run again does not pack it again.

    Raises RuntimeError if an earlier attempt was interrupted, so that the KV is not usable.
    """
    pack = scheduled.extras.pack
    if pack is None or pack.is_done:
        return
    if pack.is_begun:
        raise RuntimeError(f"packing the KV of {scheduled.request_id} failed half way")
    kept = policy.kept(pool, scheduled, pack)
    pack.is_begun = True
    pool.pack(scheduled.page_ids, kept, pack.first)
    pack.is_done = True
