"""ColumnProposer: drafts token by token, with a layer that reads one column per token.

The column at position ``p`` joins the feature of position ``p - 1`` and the token at ``p``.
Therefore it depends on the tokens up to ``p`` only, as the target's KV at ``p`` does. Position 0
has no column. Drafting after a prefix hit needs the feature of the hit's last position, so the last
feature of every page is kept.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ....core.execution.step_layout import table_slots
from ....core.ops.batch import DeviceTokens, SamplingPlan
from ...proposers.tree_grower import Scored
from .head_kv import Written
from .packing import PassRows, seen_kv
from .proposer import Drafting, DraftStart, HeadProposer, Query, features_of


class Columns(NamedTuple):
    """The results of a pass over columns.

    ``scored``: logits of the next token of each column. ``features`` [n, hidden]: features that the
    head computed, to be used instead of the target's.
    """

    scored: Scored
    features: Tensor


Compute: TypeAlias = Callable[
    [Tensor, Sequence[PassRows], SamplingPlan | None, DeviceTokens | None], Columns
]
"""Computes columns from features ``[n, hidden]`` of the positions before and one row per token."""


class ColumnProposer(HeadProposer):
    """Drafts token by token; a kind of head defines how columns are written and computed."""

    keeps_node_kv = True
    takes_device_tokens = False  # `Drafting.takes_device_tokens`

    @abstractmethod
    def features(self, taps: Tensor) -> Tensor:
        """Compute features from taps, ``[n, num_taps * target_hidden] -> [n, hidden]``."""

    @abstractmethod
    def write_columns(self, before: Tensor, written: Written) -> None:
        """Write the KV of columns; ``before`` [n, hidden]: features of the preceding positions."""

    @abstractmethod
    def compute(
        self,
        features: Tensor,
        rows: Sequence[PassRows],
        draws: SamplingPlan | None,
        device_tokens: DeviceTokens | None,
    ) -> Columns:
        """Compute columns and write their KV.

        ``features`` [n, hidden]: features of the preceding positions. ``rows``: one row per column.
        ``device_tokens``: tokens of the rows that are still on the device; only if
        ``takes_device_tokens``.
        """

    def write_head_kv(self, written: Written) -> Tensor:
        """Write the KV of columns and return the features of their positions.

        Each column needs the feature of the preceding position; an unknown one is replaced by 0.
        """
        features = self.features(written.taps)
        before = features.roll(1, dims=0)
        for first, feature in zip(written.firsts.tolist(), written.before, strict=True):
            before[first] = 0.0 if feature is None else feature
        self.write_columns(before, written)
        return features

    def begin(self, starts: Sequence[DraftStart], num_drafted: int) -> Drafting:
        """Start drafting with one pass per level of the trees."""
        del num_drafted
        drafting = _ColumnDrafting(self.compute, self.pool.page_size, starts)
        drafting.takes_device_tokens = self.takes_device_tokens
        return drafting


class _ColumnDrafting(Drafting):
    """Computes a level of the trees, one column per token.

    The KV of a draft token's column is written to the slot of the token: on the trunk, the slot of
    its position; elsewhere a spare slot. After verification, the columns of accepted tokens are
    written again from the target's features.
    """

    def __init__(self, compute: Compute, page_size: int, starts: Sequence[DraftStart]) -> None:
        self._compute = compute
        self._features = features_of(starts)  # [queries of the previous call, hidden]
        self._anchors = [len(start.scheduled.tokens) - 1 for start in starts]
        self._seen = [seen_kv(start.scheduled, start.first, page_size) for start in starts]
        self._roots = [
            table_slots(start.scheduled, anchor, 1, page_size)
            for start, anchor in zip(starts, self._anchors, strict=True)
        ]

    def score(
        self,
        queries: Sequence[Query],
        draws: SamplingPlan | None,
        device_tokens: DeviceTokens | None = None,
    ) -> Scored:
        """Return the logits of the token after each token in ``queries``."""
        features = self._features
        if queries[0].level:
            parents = torch.tensor([each.parent for each in queries])
            # A blocking copy would wait for the passes that were launched before.
            features = features[parents.to(features.device, non_blocking=True)]
        rows = [self._row(each) for each in queries]
        found = self._compute(features, rows, draws, device_tokens)
        self._features = found.features
        return found.scored

    def _row(self, query: Query) -> PassRows:
        request = query.request
        path = [*self._roots[request], *query.slots]
        position = self._anchors[request] + len(path) - 1
        seen, draft_slots = self._seen[request], np.array(path)
        return PassRows((query.token_id,), position, path[-1:], seen, draft_slots)
