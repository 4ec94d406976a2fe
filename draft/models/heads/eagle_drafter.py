"""EagleProposer: drafts token by token from the target's features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....core.execution.step_layout import table_slots
from ....core.model.decoder import Decoder
from ....core.ops.kv_pool import KVPool
from .block_pass import ContextRows
from .eagle import EagleHead
from .eagle_pass import ColumnPlace, EaglePass
from .head_layers import KeysValues
from .head_proposer import (
    Anchors,
    Drafting,
    DraftStart,
    HeadProposer,
    IntArray,
    Place,
    Written,
    features_of,
)

MOST_PASSES = 64  # tokens of a draft


class EagleProposer(HeadProposer):
    """Drafts token by token with an `EagleHead`.

    The column of feature ``p - 1`` and token ``p`` lies at position ``p``: it depends on tokens up
    to ``p``, as the target's KV there does. Position 0 has none. A prefix hit needs the feature of
    its last position: it is kept for every page.
    """

    source = "eagle3"
    first = 1

    def __init__(
        self, head: EagleHead, pool: KVPool, target: Decoder, *, independent: bool = False
    ) -> None:
        super().__init__(head.config, pool, target.sampler, independent=independent)
        self.head = head
        self._features = torch.zeros(
            (pool.num_pages, head.config.hidden_size), dtype=target.dtype, device=target.device
        )

    @property
    def tokens_per_pass(self) -> int:
        """One."""
        return 1

    @property
    def longest(self) -> int:
        """As many as a step may ask for."""
        return MOST_PASSES

    @property
    def reads_in_place(self) -> bool:
        """Where the target's kernels compute the head."""
        return self.head.eagle_pass is not None

    @property
    def keeps_columns(self) -> bool:
        """Likewise: the columns of draft tokens are read in the pool, too."""
        return self.reads_in_place

    @property
    def draft_ids(self) -> Tensor | None:
        """The target's ids of the head's."""
        return self.head.draft_ids

    def page_feature(self, page_id: int) -> Tensor | None:
        """The feature of a ready page's last position."""
        return self._features[page_id]

    def keep_page_feature(self, page_id: int, feature: Tensor) -> None:
        """Keep the feature of a page's last position."""
        self._features[page_id] = feature

    def columns(self, written: Written) -> tuple[list[KeysValues], Tensor]:
        """Columns from the features of the positions before."""
        features, before = self._written_features(written)
        return [self.head.context(before, written.token_ids, written.positions)], features

    def _written_features(self, written: Written) -> tuple[Tensor, Tensor]:
        """Features of the positions, and of the position before each; 0 where that is unknown."""
        features = self.head.features(written.taps)
        before = features.roll(1, dims=0)
        for first, feature in zip(written.firsts.tolist(), written.before, strict=True):
            before[first] = 0.0 if feature is None else feature
        return features, before

    def _write_context(self, written: Written, slots: IntArray, lens: IntArray) -> Tensor | None:
        eagle_pass = self.head.eagle_pass
        if eagle_pass is None:
            return super()._write_context(written, slots, lens)
        features, before = self._written_features(written)
        rows = ContextRows.of(written, lens, slots)
        eagle_pass.write_context(self.pool, before, written.token_ids, rows)
        return features

    def begin(self, starts: Sequence[DraftStart], num_drafted: int) -> Drafting:
        """A pass for each token."""
        del num_drafted
        if self.head.eagle_pass is not None:
            return _PassedColumns(self.head, self.head.eagle_pass, self.pool, starts)
        return _Columns(self.head, self.anchors(starts), features_of(starts))


class _PassedColumns(Drafting):
    """Each place of a level is a column of its own, by the target's kernels."""

    def __init__(
        self, head: EagleHead, eagle_pass: EaglePass, pool: KVPool, starts: Sequence[DraftStart]
    ) -> None:
        self._head, self._pass, self._pool, self._starts = head, eagle_pass, pool, starts
        self._features = features_of(starts)  # [places of the call before, hidden]
        page_size = pool.page_size
        self._roots = [
            table_slots(start.scheduled, len(start.scheduled.tokens) - 1, 1, page_size)
            for start in starts
        ]

    def logits(self, places: Sequence[Place]) -> Tensor:
        """Of the column of each place's token."""
        columns = [self._column(each) for each in places]
        features = self._features
        if places[0].level:
            features = features[torch.tensor([each.parent for each in places])]
        token_ids = [each.token_id for each in places]
        normed, hidden = self._pass.hidden(self._pool, features, token_ids, columns)
        self._features = normed if self._head.config.norm_output else hidden
        return self._head.project(normed)

    def _column(self, place: Place) -> ColumnPlace:
        start = self._starts[place.request]
        return ColumnPlace(
            start.scheduled, start.first, [*self._roots[place.request], *place.slots]
        )


class _Columns(Drafting):
    """Each place of a level is a column of its own beside those of the same request."""

    def __init__(self, head: EagleHead, anchors: Anchors, features: Tensor) -> None:
        self._head = head
        self._positions = anchors.positions
        self._features = features  # [places of the call before, hidden]
        self._context, self._seen = anchors.context[0], anchors.seen
        self._own: list[KeysValues] = []  # of each level, [places, num_kv_heads, head_dim]
        self._paths: list[list[int]] = []  # of each place of the call before, itself included
        self._live = list(range(len(self._positions)))

    def logits(self, places: Sequence[Place]) -> Tensor:
        """Of the column of each place's token."""
        self._keep(list(dict.fromkeys(each.request for each in places)))
        level, parents = places[0].level, [each.parent for each in places]
        paths = [[*(self._paths[p] if level else ()), at] for at, p in enumerate(parents)]
        columns, where = self._columns([each.request for each in places])
        own = [
            (keys[ids], values[ids])
            for depth, (keys, values) in enumerate(self._own)
            for ids in [self._ids([path[depth] for path in paths])[columns]]
        ]
        before = self._features[self._ids(parents)] if level else self._features
        hidden = self._head.column(
            before[columns],
            self._ids([each.token_id for each in places])[columns],
            (self._positions + level).unsqueeze(1).expand(columns.shape),
            self._context,
            self._seen.unsqueeze(1),
            own,
        )[where]
        keys, values = own[-1]
        self._own.append((keys[where], values[where]))
        self._paths, self._features = paths, self._head.next_features(hidden)
        return self._head.logits(hidden)

    def _columns(self, requests: Sequence[int]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Places by live request, [b, most of one], filled up with its first; where each is."""
        rows: dict[int, list[int]] = {request: [] for request in self._live}
        where = []
        for at, request in enumerate(requests):
            where.append((self._live.index(request), len(rows[request])))
            rows[request].append(at)
        width = max(map(len, rows.values()))
        padded = [each + each[:1] * (width - len(each)) for each in rows.values()]
        at_row, at_column = zip(*where, strict=True)
        return self._ids(padded), (self._ids(at_row), self._ids(at_column))

    def _ids(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, device=self._positions.device)

    def _keep(self, live: list[int]) -> None:
        """Drop the requests whose drafts have ended."""
        if live == self._live:
            return
        at = self._ids([self._live.index(request) for request in live])
        keys, values = self._context
        self._context, self._seen = (keys[at], values[at]), self._seen[at]
        self._positions, self._live = self._positions[at], live
