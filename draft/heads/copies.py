"""CopyingProposer: a head whose layers PyTorch computes, over copies of the head KV that they see.

So heads draft where the target's kernels do not compute their layers (`can_pass` of packing.py): on
a GPU, and blocks of which some layers have windows. Requests draft in groups of about the same
length, so that what is copied at a time is bounded.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.errors import is_out_of_memory
from ...core.interface.plan import ScheduledRequest
from ...core.model.decoder import OwnDecoder
from ...core.ops.kv_pool import KVPool
from ..proposers.tree_growth import TreeGrowth
from .head_kv import Written
from .layers import Head, KeysValues
from .proposer import DraftStart, HeadProposer

MOST_COPIED = 256 * 2**20  # bytes: the copy of head KV that requests draft from together
REGROWTH = 1 / 64  # of a limit lowered by lack of memory, for each draft that filled it and fitted


class Anchors(NamedTuple):
    """The last tokens of the requests that draft, and the head KV that they see."""

    token_ids: Tensor  # [b]
    positions: Tensor  # [b]
    context: list[KeysValues]  # of each layer, [b, num_kv_heads, T, head_dim] each
    seen: Tensor  # bool [b, T]


class CopyingProposer(HeadProposer):
    """Drafts from copies of head KV. Whether another pass pays is decided for each group.

    If memory runs out, that is raised, and later drafts copy half as much head KV at a time.
    """

    def __init__(self, head: Head, pool: KVPool, target: OwnDecoder, *, independent: bool) -> None:
        super().__init__(head, pool, target, independent=independent)
        self._page_bytes = pool.data[0].nbytes
        self._most_copied: float = MOST_COPIED  # less once memory ran out

    @abstractmethod
    def keys_values(self, written: Written) -> tuple[list[KeysValues], Tensor | None]:
        """Keys and values [num, num_kv_heads, head_dim] of each layer, and features [num, hidden].

        KV whose feature before is unknown is void.
        """

    def write_head_kv(self, written: Written) -> Tensor | None:
        """Compute and write the head KV of positions; returns their features, if it has such."""
        layers, features = self.keys_values(written)
        data = self.pool.data
        pages, offsets = (
            torch.from_numpy(each).to(data.device)
            for each in np.divmod(written.slots, self.pool.page_size)
        )
        for layer, pair in enumerate(layers):
            for kind, values in enumerate(pair):
                data[:, layer, kind][pages, :, offsets] = values.to(data.dtype)
        return features

    def anchors(self, starts: Sequence[DraftStart]) -> Anchors:
        """The last tokens of requests, and a copy of the head KV that they see."""
        requests = [start.scheduled for start in starts]
        context, seen = self._read(requests, [start.first for start in starts])
        return Anchors(
            torch.tensor([scheduled.tokens[-1] for scheduled in requests], device=self.device),
            torch.tensor([len(scheduled.tokens) - 1 for scheduled in requests], device=self.device),
            context,
            seen,
        )

    def _grow_all(self, starts: Sequence[DraftStart]) -> list[TreeGrowth]:
        groups = self._groups(starts)
        try:
            trees = [tree for group in groups for tree in self._grow(group)]
        except Exception as failure:
            if is_out_of_memory(failure):
                self._most_copied = max(self._page_bytes, self._most_copied / 2)
            raise
        if len(groups) > 1:
            self._most_copied = min(MOST_COPIED, self._most_copied * (1 + REGROWTH))
        return trees

    def _groups(self, starts: Sequence[DraftStart]) -> list[list[DraftStart]]:
        """Split requests by length, so that the copy of head KV for each group is within the limit.

        The copy has as many pages for each request as for the longest one of its group. A request
        whose own copy exceeds the limit is alone.
        """
        groups: list[list[DraftStart]] = [[]]
        for start in sorted(starts, key=lambda start: len(start.scheduled.tokens)):
            num_pages = (len(groups[-1]) + 1) * max(1, self._num_pages_seen(start.scheduled))
            if groups[-1] and num_pages * self._page_bytes > self._most_copied:
                groups.append([])
            groups[-1].append(start)
        return groups

    def _read(
        self, requests: Sequence[ScheduledRequest], firsts: Sequence[int]
    ) -> tuple[list[KeysValues], Tensor]:
        """The KV of each request from ``firsts`` to its last token; and which of it are seen."""
        page_size, data = self.pool.page_size, self.pool.data
        stops = np.array([len(scheduled.tokens) - 1 for scheduled in requests])
        counts = [self._num_pages_seen(scheduled) for scheduled in requests]
        num_pages = max(1, *counts)
        table = np.zeros((len(requests), num_pages), dtype=np.int64)
        for row, scheduled, num_seen in zip(table, requests, counts, strict=True):
            row[:num_seen] = scheduled.page_ids[:num_seen]
        positions = np.arange(num_pages * page_size)
        seen = torch.from_numpy(
            (positions >= np.array(firsts)[:, None]) & (positions < stops[:, None])
        ).to(data.device)
        ids = torch.from_numpy(table).to(data.device)
        void = ~seen[:, None, :, None]
        context: list[KeysValues] = []
        for layer in range(self.pool.num_layers):
            # [b, pages, 2, kv, page_size, dim] -> [2, b, kv, positions, dim]
            found = data[:, layer][ids].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
            # a copy by now: what is not seen may be NaN, and NaN times weight 0 would be NaN
            keys, values = found.masked_fill_(void, 0.0).unbind()
            context.append((keys, values))
        return context, seen

    def _num_pages_seen(self, scheduled: ScheduledRequest) -> int:
        """Pages of the positions before the request's last token."""
        return -(-(len(scheduled.tokens) - 1) // self.pool.page_size)
