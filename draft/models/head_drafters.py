"""The proposers of the two heads, and how a head is joined to its target."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...core.model.decoder import Decoder
from ...core.ops.base import Ops, PackedLinear
from ...core.ops.kv_pool import KVPool
from .block import BlockHead
from .eagle import EagleHead
from .head_layers import HeadConfig, KeysValues, Vocabulary
from .head_proposer import Anchors, Drafting, HeadProposer, Written


def join_target(head: Vocabulary, target: Decoder, read_output: Callable[[], Tensor]) -> None:
    """Move a head beside its target and lend it what it lacks.

    ``read_output`` reads the target's output matrix [vocab, hidden], which a head of fewer ids
    takes rows of; it is called only if the target's embedding does not serve for it.
    """
    head.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    weights, ops = target.weights, target.ops
    packed = weights.lm_head
    if head.draft_ids is not None and head.lm_head is None:
        is_tied = target.config.tie_embeddings
        matrix = weights.embedding if is_tied else read_output()
        rows = matrix[head.draft_ids.to(matrix.device)]
        packed = ops.pack_linear(rows.to(target.device, target.dtype).contiguous())
    head.borrow(weights.embedding, lambda hidden: _logits(ops, packed, hidden))


def make_head_pool(config: HeadConfig, num_pages: int, page_size: int, target: Decoder) -> KVPool:
    """A pool for a head's KV, with a page for each of the target's."""
    return KVPool(
        num_pages,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=target.dtype,
        device=target.device,
    )


def _logits(ops: Ops, packed: PackedLinear, hidden: Tensor) -> Tensor:
    """``[.., hidden]`` to logits, by the backend's own kernels, which want a few rows at least."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    count = len(flat)
    if count < ops.min_rows:
        flat = torch.cat((flat, flat[-1:].expand(ops.min_rows - count, -1)))
    return ops.logits(flat.contiguous(), packed)[:count].view(*hidden.shape[:-1], -1)


class BlockProposer(HeadProposer):
    """Drafts whole blocks with a `BlockHead`."""

    def __init__(
        self, head: BlockHead, pool: KVPool, target: Decoder, *, independent: bool = False
    ) -> None:
        super().__init__(head.config, pool, target.sampler, independent=independent)
        self.head = head

    @property
    def longest(self) -> int:
        """Tokens of a block."""
        return self.head.config.num_drafted

    @property
    def draft_ids(self) -> Tensor | None:
        """The target's ids of the head's."""
        return self.head.draft_ids

    def columns(self, written: Written) -> tuple[list[KeysValues], None]:
        """The injected KV: of each position alone."""
        return self.head.context(written.taps, written.positions), None

    def page_feature(self, page_id: int) -> None:
        """A block head wants none."""

    def keep_page_feature(self, page_id: int, feature: Tensor) -> None:
        """A block head has none."""

    def begin(self, anchors: Anchors, num_drafted: int) -> Drafting:
        """One pass for the whole block."""
        return _Block(self.head, anchors, num_drafted)


class _Block(Drafting):
    def __init__(self, head: BlockHead, anchors: Anchors, num_drafted: int) -> None:
        self._head = head
        ids, positions = anchors.token_ids.unsqueeze(1), anchors.positions.unsqueeze(1)
        hidden = head.block(ids, positions, anchors.context, anchors.seen.unsqueeze(1))
        self._hidden = hidden[:, 0, :num_drafted]  # [b, num, hidden]
        self._unary = head.project(self._hidden)  # [b, num, draft_vocab]
        self._state = head.first_state(self._hidden[:, 0])
        self._depth = 0

    def logits(self, live: Sequence[int], last: Sequence[int]) -> Tensor:
        """What the pass said of this position, and what the token before says."""
        at = torch.tensor(live, device=self._hidden.device)
        found = self._unary[at, self._depth]
        markov = self._head.markov_head
        if markov is not None:
            before = self._head.markov_ids(torch.tensor(last, device=at.device))
            hidden = self._hidden[at, self._depth]
            bias, self._state[at] = markov(before, hidden, self._state[at])
            found = found + bias
        self._depth += 1
        return found


class EagleProposer(HeadProposer):
    """Drafts token by token with an `EagleHead`.

    The column of feature ``p - 1`` and token ``p`` lies at position ``p``: it depends on tokens up
    to ``p``, as the target's KV there does. Position 0 has none. A prefix hit needs the feature of
    its last position: it is kept for every page.
    """

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
    def longest(self) -> int:
        """As many as are asked for."""
        return self.config.max_model_len

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
        features = self.head.features(written.taps)
        before = features.roll(1, dims=0)
        for first, feature in zip(written.firsts.tolist(), written.before, strict=True):
            before[first] = 0.0 if feature is None else feature
        return [self.head.context(before, written.token_ids, written.positions)], features

    def begin(self, anchors: Anchors, num_drafted: int) -> Drafting:
        """A pass for each token."""
        del num_drafted
        return _Columns(self.head, anchors)


class _Columns(Drafting):
    def __init__(self, head: EagleHead, anchors: Anchors) -> None:
        self._head = head
        self._positions = anchors.positions
        known = [each for each in anchors.features if each is not None]
        assert len(known) == len(anchors.features)
        self._features = torch.stack(known)  # [b, hidden]
        self._context, self._seen = anchors.context[0], anchors.seen
        self._own: list[KeysValues] = []
        self._live = list(range(len(self._positions)))

    def logits(self, live: Sequence[int], last: Sequence[int]) -> Tensor:
        """Of the column of each ``last`` token."""
        if len(live) < len(self._live):
            self._keep(torch.tensor([self._live.index(i) for i in live]))
            self._live = list(live)
        hidden = self._head.column(
            self._features.unsqueeze(1),
            torch.tensor(last, device=self._positions.device).unsqueeze(1),
            self._positions.unsqueeze(1),
            self._context,
            self._seen.unsqueeze(1),
            self._own,
        )[:, 0]
        self._features = self._head.next_features(hidden)
        self._positions = self._positions + 1
        return self._head.logits(hidden)

    def _keep(self, at: Tensor) -> None:
        """Drop the requests whose drafts have ended."""
        at = at.to(self._positions.device)
        self._positions, self._features = self._positions[at], self._features[at]
        keys, values = self._context
        self._context, self._seen = (keys[at], values[at]), self._seen[at]
        self._own = [(k[at], v[at]) for k, v in self._own]
