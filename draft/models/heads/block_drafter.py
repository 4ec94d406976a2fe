"""BlockProposer: drafts whole blocks of tokens, a pass each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ....core.interface.plan import ScheduledRequest
from ....core.model.decoder import Decoder
from ....core.ops.kv_pool import KVPool
from .block import BlockHead, MarkovHead
from .block_pass import BLOCKS_A_PASS, BlockPass, BlockPlace, ContextRows
from .head_layers import KeysValues
from .head_proposer import Drafting, DraftStart, HeadProposer, IntArray, Place, Written


def num_spare_pages(head: BlockHead, page_size: int) -> int:
    """Pages behind those of the target's ids, where a pass keeps blocks."""
    if head.block_pass is None:
        return 0
    return -(-BLOCKS_A_PASS * head.config.block_size // page_size)


class BlockProposer(HeadProposer):
    """Drafts whole blocks with a `BlockHead`."""

    source = "block"

    def __init__(
        self, head: BlockHead, pool: KVPool, target: Decoder, *, independent: bool = False
    ) -> None:
        super().__init__(head.config, pool, target.sampler, independent=independent)
        self.head = head
        self._first_spare = pool.num_pages - num_spare_pages(head, pool.page_size)
        self._pairs = _Pairs.of(head)

    @property
    def tokens_per_pass(self) -> int:
        """Tokens of a block."""
        return self.longest

    @property
    def longest(self) -> int:
        """Tokens of a block."""
        return self.head.config.num_drafted

    @property
    def reads_in_place(self) -> bool:
        """Where the target's kernels compute the head."""
        return self.head.block_pass is not None

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

    def begin(self, starts: Sequence[DraftStart], num_drafted: int) -> Drafting:
        """One pass for the whole block."""
        if self.head.block_pass is not None:
            hidden = self._pass(self.head.block_pass, starts)
            first = not self.head.config.predicts_at_anchor
            return _Block(self.head, hidden[:, first : first + num_drafted], self._pairs)
        anchors = self.anchors(starts)
        ids, positions = anchors.token_ids.unsqueeze(1), anchors.positions.unsqueeze(1)
        hidden = self.head.block(ids, positions, anchors.context, anchors.seen.unsqueeze(1))
        return _Block(self.head, hidden[:, 0, :num_drafted], self._pairs)

    # -- by the target's kernels ----------------------------------------------------------------

    def _pass(self, block_pass: BlockPass, starts: Sequence[DraftStart]) -> Tensor:
        """Hidden states of the rows of blocks, ``[b, block_size, hidden]``."""
        page_size = self.pool.page_size
        places = [BlockPlace(start.scheduled, start.first // page_size) for start in starts]
        parts = [
            block_pass.hidden(self.pool, self._first_spare, places[at : at + BLOCKS_A_PASS])
            for at in range(0, len(places), BLOCKS_A_PASS)
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _write_context(self, written: Written, slots: IntArray, lens: IntArray) -> Tensor | None:
        block_pass = self.head.block_pass
        if block_pass is None:
            return super()._write_context(written, slots, lens)
        rows = ContextRows.of(written, lens, slots)
        block_pass.write_context(self.pool, written.taps, rows)
        return None

    def _start(self, scheduled: ScheduledRequest) -> DraftStart | None:
        """A pass leaves out whole pages, and needs a position that its blocks see."""
        start = super()._start(scheduled)
        if start is None or self.head.block_pass is None:
            return start
        first = -(-start.first // self.pool.page_size) * self.pool.page_size
        return start._replace(first=first) if first < len(scheduled.tokens) - 1 else None


class _Block(Drafting):
    """``hidden`` [b, num, hidden]: of the tokens behind each anchor.

    ``pairs``: looks up what the token before says, where nothing but that token matters.
    """

    def __init__(self, head: BlockHead, hidden: Tensor, pairs: _Pairs | None) -> None:
        self._head, self._num, self._pairs = head, hidden.shape[1], pairs
        self._hidden = hidden.flatten(0, 1)
        self._unary = head.project(self._hidden)  # [b * num, draft_vocab]
        self._state: Tensor | None = None  # of the places of the call before

    def logits(self, places: Sequence[Place]) -> Tensor:
        """What the pass said of this position, and what the token before says."""
        level, markov = places[0].level, self._head.markov_head
        rows = [each.request * self._num + level for each in places]
        if markov is None:
            return self._unary.index_select(0, self._ids(rows))
        if self._pairs is not None:
            return self._pairs.added(self._unary, rows, [each.token_id for each in places])
        at = self._ids(rows)
        hidden = self._hidden.index_select(0, at)
        if self._state is None:
            state = self._head.first_state(hidden)
        else:
            state = self._state.index_select(0, self._ids([each.parent for each in places]))
        before = self._head.markov_ids(self._ids([each.token_id for each in places]))
        bias: Tensor
        bias, self._state = markov(before, hidden, state)
        return bias.add_(self._unary.index_select(0, at))

    def _ids(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self._hidden.device)


class _Pairs:
    """The Markov head of the kind "vanilla" on a CPU: for few rows NumPy looks up in less time."""

    def __init__(self, head: BlockHead, markov: MarkovHead) -> None:
        rows = markov.markov_w1.weight.detach()
        self._dtype, self._w2 = rows.dtype, markov.markov_w2
        self._rows = rows.view(_SAME_SIZE[rows.itemsize]).numpy()  # which has no bfloat16
        ids = torch.arange(head.config.vocab_size)
        self._known: IntArray = head.markov_ids(ids).numpy()

    @classmethod
    def of(cls, head: BlockHead) -> _Pairs | None:
        """None where more than the token before matters, or a device has the weights."""
        markov = head.markov_head
        if (
            markov is None
            or markov.kind != "vanilla"
            or markov.markov_w1.weight.device.type != "cpu"
        ):
            return None
        return cls(head, markov)

    def added(self, unary: Tensor, rows: Sequence[int], before: Sequence[int]) -> Tensor:
        """``unary`` [.., draft_vocab] at ``rows`` [n], and what tokens ``before`` [n] say."""
        ids = self._known[np.array(before)]
        found = self._rows[ids]
        if ids.min() < 0:
            found[ids < 0] = 0
        bias: Tensor = self._w2(torch.from_numpy(found).view(self._dtype))
        total = bias.numpy()
        total += unary.numpy()[rows]
        return bias


_SAME_SIZE = {2: torch.int16, 4: torch.int32}
