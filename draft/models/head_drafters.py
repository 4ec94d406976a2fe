"""The proposers of the two heads, and how a head is joined to its target."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor, nn

from ...core.errors import ModelLoadError
from ...core.interface.sampling_params import TokenSamplingParams
from ...core.interface.step import SamplingMetadata
from ...core.model.decoder import Decoder
from ...core.ops.base import Ops, PackedLinear
from ...core.ops.batch import Segment, Taps, Wanted
from ...core.ops.kv_pool import KvDtype, KVPool, bytes_per_page
from ...core.sampling.logits_processors import SampleRow
from .block import BlockHead
from .eagle import EagleHead
from .head_files import Head, open_head
from .head_layers import KeysValues, Vocabulary
from .head_proposer import Anchors, Drafting, HeadProposer, Written

logger = logging.getLogger(__name__)
MOST_PASSES = 64  # tokens of a draft of EAGLE-3
NUM_DRAWN, NUM_SCORED = 32, 64  # tokens that tell two readings of tap ids apart


def join_target(head: Vocabulary, target: Decoder, read_output: Callable[[], Tensor]) -> None:
    """Move a head beside its target and lend it what it lacks; for inference only.

    Its matrices are laid out for the target's kernels, quantised if the target's are.
    ``read_output`` reads the target's output matrix [vocab, hidden], which a head of fewer ids
    takes rows of; it is called only if the target's embedding does not serve for it.
    """
    head.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    weights, ops = target.weights, target.ops
    _pack_linears(head, ops)
    packed = weights.lm_head
    if head.draft_ids is not None and head.lm_head is None:
        is_tied = target.config.tie_embeddings
        matrix = weights.embedding if is_tied else read_output()
        rows = matrix[head.draft_ids.to(matrix.device)]
        packed = ops.pack_linear(rows.to(target.device, target.dtype).contiguous())
    logits = partial(ops.logits, cap=weights.logit_cap)
    head.borrow(weights.embedding, partial(_by_kernels, logits, packed, ops.min_rows))


class _Packed(nn.Module):
    """A linear layer by the backend's own kernels."""

    def __init__(self, linear: nn.Linear, ops: Ops) -> None:
        super().__init__()
        self._packed = ops.pack_linear(linear.weight.detach().contiguous(), linear.bias)
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return _by_kernels(self._ops.linear, self._packed, self._ops.min_rows, x)


def _pack_linears(module: nn.Module, ops: Ops) -> None:
    for name, each in module.named_children():
        if isinstance(each, nn.Linear):
            setattr(module, name, _Packed(each, ops))
        else:
            _pack_linears(each, ops)


def _by_kernels(
    kernel: Callable[[Tensor, PackedLinear], Tensor], packed: PackedLinear, min_rows: int, x: Tensor
) -> Tensor:
    """``[.., in_features] -> [.., out_features]``; kernels want ``min_rows`` rows at least."""
    flat = x.reshape(-1, x.shape[-1])
    count = len(flat)
    if count < min_rows:
        flat = torch.cat((flat, flat[-1:].expand(min_rows - count, -1)))
    return kernel(flat.contiguous(), packed)[:count].view(*x.shape[:-1], -1)


class _PoolShape(TypedDict):
    num_layers: int
    num_kv_heads: int
    head_dim: int


class JoinedHead:
    """A head that was joined to its target: what pools and proposers are made of."""

    def __init__(self, head: Head, target: Decoder) -> None:
        self.head, self.target = head, target
        self.device = target.device

    def make_pool(self, num_pages: int, *, page_size: int, kv_dtype: KvDtype = "auto") -> KVPool:
        """A pool for the head's KV, with a page for each of the target's.

        Head KV is small and is kept in the target's dtype whatever ``kv_dtype`` says.
        """
        del kv_dtype
        dtype, device = self.target.dtype, self.target.device
        return KVPool(num_pages, **self._shape, page_size=page_size, dtype=dtype, device=device)

    def bytes_per_page(self, *, page_size: int, kv_dtype: KvDtype = "auto") -> int:
        """Bytes of a page, of the feature too that EAGLE-3 keeps for it."""
        del kv_dtype
        own = bytes_per_page(**self._shape, page_size=page_size, dtype=self.target.dtype)
        is_eagle = isinstance(self.head, EagleHead)
        return own + is_eagle * self.head.config.hidden_size * self.target.dtype.itemsize

    def proposer(self, pool: KVPool, *, independent: bool = False) -> HeadProposer:
        """What drafts with it. ``independent``: for rejection sampling."""
        if isinstance(self.head, BlockHead):
            return BlockProposer(self.head, pool, self.target, independent=independent)
        return EagleProposer(self.head, pool, self.target, independent=independent)

    @property
    def _shape(self) -> _PoolShape:
        config = self.head.config
        return {
            "num_layers": config.num_layers,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
        }


def load_head(path: Path, target: Decoder, read_output: Callable[[], Tensor]) -> JoinedHead:
    """The head in a folder, joined to its target; ``read_output``: see `join_target`.

    Where the config leaves open which hidden states the head reads, both readings are tried on
    what the target says, and a warning names the better one, which is used. Raises
    `ModelLoadError` for a head that is not supported or does not fit the target.
    """
    if target.path != "own":
        raise ModelLoadError(
            f"{path}: a trained head reads weights of its target's own decoder, and "
            f"{target.config.model_type} is computed by transformers' modules: take draft auto, or "
            "a draft model"
        )
    folder = open_head(path, target.config)
    head = folder.load()
    join_target(head, target, read_output)
    if isinstance(head, EagleHead) and folder.shifted_taps is not None:
        _choose_taps(path, head, folder.shifted_taps, target)
    config = head.config
    logger.info(
        "head %s: %s, taps %s, drafts %d of %d token ids",
        path, type(head).__name__, list(config.taps), config.draft_vocab_size, config.vocab_size,
    )  # fmt: skip
    return JoinedHead(head, target)


def _choose_taps(path: Path, head: EagleHead, others: Taps, target: Decoder) -> None:
    """Give a head the boundaries under which it guesses more of the target's own tokens."""
    readings = (head.config.taps, others)
    scores = [score_taps(head, taps, target) for taps in readings]
    best = readings[1] if scores[1] > scores[0] else readings[0]
    logger.warning(
        "%s: eagle_aux_hidden_state_layer_ids may mean the boundaries %s or %s; of %d tokens the "
        "head guesses %d and %d, so %s are read",
        path, list(readings[0]), list(readings[1]), NUM_SCORED, *scores, list(best),
    )  # fmt: skip
    head.config = replace(head.config, taps=best)


@torch.inference_mode()
def score_taps(head: EagleHead, taps: Taps, target: Decoder) -> int:
    """How many of `NUM_SCORED` greedy tokens of the target the head guesses, one at a time.

    They follow a text that the target draws at temperature 1.
    """
    ids, tapped = _own_text(target, taps)
    hidden = head(ids[:, :-1], tapped, 1)[0]  # column i decides token i + 2
    guessed = head.target_ids(head.logits(hidden).argmax(-1))
    return int((guessed[0, -NUM_SCORED:] == ids[0, -NUM_SCORED:]).sum())


def _own_text(target: Decoder, taps: Taps) -> tuple[Tensor, Tensor]:
    """Token ids ``[1, T + 1]`` that the target says, and the taps ``[1, T, ..]`` of all but one."""
    tokens = array("q", target.config.eos_token_ids[:1] or (0,))
    num_tokens, page_size = NUM_DRAWN + NUM_SCORED, 16
    pages = array("q", range(-(-num_tokens // page_size)))
    pool = target.make_pool(len(pages), page_size=page_size)
    once = tuple(dict.fromkeys(taps))
    found: list[Tensor] = []
    for index in range(num_tokens):
        params = TokenSamplingParams(temperature=1.0 if index < NUM_DRAWN else 0.0)
        sampling = SamplingMetadata(params=params, seed=0, prompt_len=1)
        batch = target.batch([Segment(tokens[-1:], index, pages, 1)], page_size=page_size)
        output = target.forward(batch, pool, Wanted(taps=once))
        assert output.taps is not None
        parts = output.taps[:1].chunk(len(once), dim=-1)
        found.append(torch.cat([parts[once.index(boundary)] for boundary in taps], dim=-1))
        (choice,) = target.sampler.sample(output.logits, [SampleRow(tokens, sampling)])
        tokens.append(max(0, choice.token_id))
    ids = torch.tensor([tokens.tolist()], device=target.device)
    return ids, torch.cat(found).unsqueeze(0)


class BlockProposer(HeadProposer):
    """Drafts whole blocks with a `BlockHead`."""

    def __init__(
        self, head: BlockHead, pool: KVPool, target: Decoder, *, independent: bool = False
    ) -> None:
        super().__init__(head.config, pool, target.sampler, independent=independent)
        self.head = head

    @property
    def tokens_a_pass(self) -> int:
        """Tokens of a block."""
        return self.longest

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
    def tokens_a_pass(self) -> int:
        """One."""
        return 1

    @property
    def longest(self) -> int:
        """As many as a step may ask for."""
        return MOST_PASSES

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
