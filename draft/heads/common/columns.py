"""ColumnProposer: drafts token by token with a layer that reads one column for each.

The column of feature ``p - 1`` and token ``p`` lies at position ``p``: it depends on tokens up to
``p``, as the target's KV there does. Position 0 has none. A prefix hit needs the feature of its
last position: it is kept for every page.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ....core.execution.step_layout import table_slots
from ....core.ops.batch import SamplingPlan
from ...proposers.tree_grower import Scored
from .head_kv import Written
from .packing import PassRows, seen_kv
from .proposer import Drafting, DraftStart, HeadProposer, Query, features_of


class Columns(NamedTuple):
    """Columns as a pass computes them.

    ``scored``: of what follows each token. ``features`` [n, hidden]: what stands for the target's
    of the same positions.
    """

    scored: Scored
    features: Tensor


Compute: TypeAlias = Callable[[Tensor, Sequence[PassRows], SamplingPlan | None], Columns]
"""Computes columns of the features ``[n, hidden]`` before them and their tokens, a row each."""


class ColumnProposer(HeadProposer):
    """Drafts token by token; a kind of head says how columns are written and computed."""

    keeps_node_kv = True

    @abstractmethod
    def features(self, taps: Tensor) -> Tensor:
        """``[n, num_taps * target_hidden]`` of the target to features ``[n, hidden]``."""

    @abstractmethod
    def write_columns(self, before: Tensor, written: Written) -> None:
        """Write columns; ``before`` [n, hidden]: features of the positions before."""

    @abstractmethod
    def compute(
        self, features: Tensor, rows: Sequence[PassRows], draws: SamplingPlan | None
    ) -> Columns:
        """Compute columns, writing them; see `Compute`."""

    def write_head_kv(self, written: Written) -> Tensor:
        """Write columns from the features of the positions before; 0 where one is unknown."""
        features = self.features(written.taps)
        before = features.roll(1, dims=0)
        for first, feature in zip(written.firsts.tolist(), written.before, strict=True):
            before[first] = 0.0 if feature is None else feature
        self.write_columns(before, written)
        return features

    def begin(self, starts: Sequence[DraftStart], num_drafted: int) -> Drafting:
        """A pass for each token."""
        del num_drafted
        return _ColumnDrafting(self.compute, self.pool.page_size, starts)


class _ColumnDrafting(Drafting):
    """Each query of a level is a column of its own.

    The columns of a draft lie where its tokens' KV would: the first path in the slots of its
    positions, the others in spare slots. They are written again behind verification, from the
    target's features.
    """

    def __init__(self, compute: Compute, page_size: int, starts: Sequence[DraftStart]) -> None:
        self._compute = compute
        self._features = features_of(starts)  # [queries of the call before, hidden]
        self._anchors = [len(start.scheduled.tokens) - 1 for start in starts]
        self._seen = [seen_kv(start.scheduled, start.first, page_size) for start in starts]
        self._roots = [
            table_slots(start.scheduled, anchor, 1, page_size)
            for start, anchor in zip(starts, self._anchors, strict=True)
        ]

    def score(self, queries: Sequence[Query], draws: SamplingPlan | None) -> Scored:
        """Compute the column of each query's token."""
        features = self._features
        if queries[0].level:
            parents = torch.tensor([each.parent for each in queries], device=features.device)
            features = features[parents]
        found = self._compute(features, [self._row(each) for each in queries], draws)
        self._features = found.features
        return found.scored

    def _row(self, query: Query) -> PassRows:
        request = query.request
        path = [*self._roots[request], *query.slots]
        position = self._anchors[request] + len(path) - 1
        seen, beside = self._seen[request], np.array(path)
        return PassRows((query.token_id,), position, path[-1:], seen, beside)
