"""The proposers of the two heads, and how a head is joined to its target."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor, nn

from ...core.errors import ModelLoadError
from ...core.execution.layout import natural_slots
from ...core.interface.sampling_params import TokenSamplingParams
from ...core.interface.step import SamplingMetadata, ScheduledRequest
from ...core.model.decoder import Decoder
from ...core.ops.base import Ops, PackedLinear
from ...core.ops.batch import Segment, Taps, Wanted
from ...core.ops.kv_pool import KvDtype, KVPool, bytes_per_page
from ...core.sampling.logits_processors import SampleRow
from .block import BlockHead
from .block_pass import BLOCKS_A_PASS, BlockPass, BlockPlace, ContextRows, can_pass
from .eagle import EagleHead
from .eagle_pass import ColumnPlace, EaglePass
from .head_files import Head, Odds, open_head
from .head_layers import KeysValues
from .head_proposer import (
    Anchors,
    Drafting,
    DraftStart,
    HeadProposer,
    IntArray,
    Place,
    Written,
)
from .medusa import MedusaConfig, MedusaHead

logger = logging.getLogger(__name__)
MOST_PASSES = 64  # tokens of a draft of EAGLE-3
NUM_DRAWN, NUM_SCORED = 32, 64  # tokens that distinguish two readings of tap ids


def join_target(head: Head, target: Decoder, read_output: Callable[[], Tensor]) -> None:
    """Move a head beside its target and lend it what it lacks; for inference only.

    Its matrices are laid out for the target's kernels, quantised if the target's are.
    ``read_output``: see `lend`.
    """
    lend(head, target, read_output)
    pack(head, target)


def lend(head: Head, target: Decoder, read_output: Callable[[], Tensor]) -> None:
    """Move a head beside its target and lend it what it lacks.

    ``read_output`` reads the target's output matrix [vocab, hidden], which a head of fewer ids
    takes rows of; it is called only if the target's embedding does not serve for it.
    """
    head.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    if isinstance(head, MedusaHead):  # it has its own output layers
        return
    weights, ops = target.weights, target.ops
    packed = weights.lm_head
    if head.draft_ids is not None and head.lm_head is None:
        is_tied = target.config.tie_embeddings
        matrix = weights.embedding if is_tied else read_output()
        rows = matrix[head.draft_ids.to(matrix.device)]
        packed = ops.pack_linear(rows.to(target.device, target.dtype).contiguous())
    logits = partial(ops.logits, cap=weights.logit_cap)
    head.borrow(weights.embedding, partial(_by_kernels, logits, packed, ops.min_rows))


def pack(head: Head, target: Decoder) -> None:
    """Lay out a head's matrices for the target's kernels: its layers as a pass, where they can."""
    if isinstance(head, BlockHead) and can_pass(head, target):
        head.block_pass = BlockPass(head, target, head.context_vectors)
        head.layers = nn.ModuleList()  # packed by now
    if isinstance(head, EagleHead) and can_pass(head, target):
        head.eagle_pass = EaglePass(head, target)
        del head.midlayer  # likewise
    _pack_linears(head, target.ops)


class _Packed(nn.Module):
    """A linear layer by the backend's own kernels. ``wide``: of logits, which are float32."""

    def __init__(self, linear: nn.Linear, ops: Ops, *, wide: bool) -> None:
        super().__init__()
        self._packed = ops.pack_linear(linear.weight.detach().contiguous(), linear.bias)
        self._min_rows = ops.min_rows
        self._kernel: Callable[[Tensor, PackedLinear], Tensor] = ops.logits if wide else ops.linear

    def forward(self, x: Tensor) -> Tensor:
        return _by_kernels(self._kernel, self._packed, self._min_rows, x)


_WIDE = ("lm_head", "markov_w2")


def _pack_linears(module: nn.Module, ops: Ops) -> None:
    for name, each in module.named_children():
        if isinstance(each, nn.Linear):
            wide = name in _WIDE or isinstance(module, nn.Sequential)  # the last of a Medusa head
            setattr(module, name, _Packed(each, ops, wide=wide))
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


def _num_spare_pages(head: Head, page_size: int) -> int:
    """Pages behind those of the target's ids, where a pass keeps blocks."""
    if not isinstance(head, BlockHead) or head.block_pass is None:
        return 0
    return -(-BLOCKS_A_PASS * head.config.block_size // page_size)


class _PoolShape(TypedDict):
    num_layers: int
    num_kv_heads: int
    head_dim: int


class JoinedHead:
    """A head that was joined to its target: what pools and proposers are made of.

    ``odds``: those of `HeadFolder`, with which its proposers begin.
    """

    def __init__(
        self, head: Head, target: Decoder, odds: Mapping[bool, Odds] | None = None
    ) -> None:
        self.head, self.target = head, target
        self._odds = {} if odds is None else odds
        self.device = target.device

    def make_pool(self, num_pages: int, *, page_size: int, kv_dtype: KvDtype = "auto") -> KVPool:
        """A pool for the head's KV, with a page for each of the target's.

        Head KV is small and is kept in the target's dtype whatever ``kv_dtype`` says.
        """
        del kv_dtype
        dtype, device = self.target.dtype, self.target.device
        num_pages += _num_spare_pages(self.head, page_size)
        return KVPool(num_pages, **self._shape, page_size=page_size, dtype=dtype, device=device)

    def bytes_per_page(self, *, page_size: int, kv_dtype: KvDtype = "auto") -> int:
        """Bytes of a page, of the feature too that EAGLE-3 keeps for it."""
        del kv_dtype
        own = bytes_per_page(**self._shape, page_size=page_size, dtype=self.target.dtype)
        is_eagle = isinstance(self.head, EagleHead)
        return own + is_eagle * self.head.config.hidden_size * self.target.dtype.itemsize

    def proposer(self, pool: KVPool, *, independent: bool = False) -> HeadProposer:
        """What drafts with it. ``independent``: for rejection sampling."""
        made = self._proposer(pool, independent=independent)
        made.begin_with(self._odds)
        return made

    def _proposer(self, pool: KVPool, *, independent: bool) -> HeadProposer:
        if isinstance(self.head, BlockHead):
            return BlockProposer(self.head, pool, self.target, independent=independent)
        if isinstance(self.head, MedusaHead):
            return MedusaProposer(self.head, pool, self.target, independent=independent)
        return EagleProposer(self.head, pool, self.target, independent=independent)

    @property
    def _shape(self) -> _PoolShape:
        config = self.head.config
        if isinstance(config, MedusaConfig):
            return {"num_layers": 0, "num_kv_heads": 1, "head_dim": 1}  # there is no KV
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
    lend(head, target, read_output)
    if isinstance(head, EagleHead) and folder.shifted_taps is not None:
        _choose_taps(path, head, folder.shifted_taps, target)
    pack(head, target)
    config = head.config
    logger.info(
        "head %s: %s, taps %s, drafts %d of %d token ids",
        path, type(head).__name__, list(config.taps), config.draft_vocab_size, config.vocab_size,
    )  # fmt: skip
    return JoinedHead(head, target, folder.odds)


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

    They follow a text that the target draws at temperature 1. The head was lent what it lacks and
    is not packed.
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

    source = "block"

    def __init__(
        self, head: BlockHead, pool: KVPool, target: Decoder, *, independent: bool = False
    ) -> None:
        super().__init__(head.config, pool, target.sampler, independent=independent)
        self.head = head
        self._first_spare = pool.num_pages - _num_spare_pages(head, pool.page_size)

    @property
    def tokens_per_pass(self) -> int:
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

    def begin(self, starts: Sequence[DraftStart], num_drafted: int) -> Drafting:
        """One pass for the whole block."""
        if self.head.block_pass is not None:
            hidden = self._pass(self.head.block_pass, starts)
            first = not self.head.config.predicts_at_anchor
            return _Block(self.head, hidden[:, first : first + num_drafted])
        anchors = self.anchors(starts)
        ids, positions = anchors.token_ids.unsqueeze(1), anchors.positions.unsqueeze(1)
        hidden = self.head.block(ids, positions, anchors.context, anchors.seen.unsqueeze(1))
        return _Block(self.head, hidden[:, 0, :num_drafted])

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
    """``hidden`` [b, num, hidden]: of the tokens behind each anchor."""

    def __init__(self, head: BlockHead, hidden: Tensor) -> None:
        self._head = head
        self._hidden = hidden
        self._unary = head.project(self._hidden)  # [b, num, draft_vocab]
        self._state = head.first_state(self._hidden[:, 0])  # of the places of the call before

    def logits(self, places: Sequence[Place]) -> Tensor:
        """What the pass said of this position, and what the token before says."""
        at, level = self._ids([each.request for each in places]), places[0].level
        found: Tensor = self._unary[at, level]
        markov = self._head.markov_head
        if markov is None:
            return found
        bias: Tensor
        state = self._state[self._ids([each.parent for each in places]) if level else at]
        before = self._head.markov_ids(self._ids([each.token_id for each in places]))
        bias, self._state = markov(before, self._hidden[at, level], state)
        return found.add_(bias)

    def _ids(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self._hidden.device)


class MedusaProposer(HeadProposer):
    """Drafts trees of the best tokens that each head of a `MedusaHead` gives."""

    source = "medusa"

    def __init__(
        self, head: MedusaHead, pool: KVPool, target: Decoder, *, independent: bool = False
    ) -> None:
        super().__init__(head.config, pool, target.sampler, independent=independent)
        self.head = head
        self._final_norm = partial(target.ops.norm, norm=target.weights.final_norm)

    @property
    def tokens_per_pass(self) -> int:
        """A token of each head."""
        return self.longest

    @property
    def longest(self) -> int:
        """A token of each head."""
        return self.head.config.num_heads

    def columns(self, written: Written) -> tuple[list[KeysValues], Tensor]:
        """No KV; the features are what the target's final norm makes of its last layer's output."""
        return [], self._final_norm(written.taps.contiguous())

    def page_feature(self, page_id: int) -> None:
        """None is read: the last position before a draft was always computed for its request."""

    def keep_page_feature(self, page_id: int, feature: Tensor) -> None:
        """None is kept."""

    def _start(self, scheduled: ScheduledRequest) -> DraftStart | None:
        track = self._tracks.get(scheduled.request_id)
        if track is None or track.stop < len(scheduled.tokens) - 1:
            return None
        return DraftStart(scheduled, 0, track.feature)

    def begin(self, starts: Sequence[DraftStart], num_drafted: int) -> Drafting:
        """From the state before each last token."""
        del num_drafted
        return _Heads(self.head, _features(starts))


def _features(starts: Sequence[DraftStart]) -> Tensor:
    """``[b, hidden]``."""
    known = [start.feature for start in starts if start.feature is not None]
    assert len(known) == len(starts)
    return torch.stack(known)


class _Heads(Drafting):
    """``hidden`` [b, hidden]: the state before each anchor."""

    def __init__(self, head: MedusaHead, hidden: Tensor) -> None:
        self._head, self._hidden = head, hidden

    def logits(self, places: Sequence[Place]) -> Tensor:
        """What the level's own head says; the same behind every token of a request."""
        requests = sorted({each.request for each in places})
        found = self._head.logits(self._hidden[requests], places[0].level)
        if len(requests) == len(places):
            return found
        at = {request: index for index, request in enumerate(requests)}
        return found[[at[each.request] for each in places]]


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
    def keeps_columns(self) -> bool:
        """Where the target's kernels compute the head."""
        return self.head.eagle_pass is not None

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
        return _Columns(self.head, self.anchors(starts), _features(starts))


class _PassedColumns(Drafting):
    """Each place of a level is a column of its own, by the target's kernels."""

    def __init__(
        self, head: EagleHead, eagle_pass: EaglePass, pool: KVPool, starts: Sequence[DraftStart]
    ) -> None:
        self._head, self._pass, self._pool, self._starts = head, eagle_pass, pool, starts
        self._features = _features(starts)  # [places of the call before, hidden]
        page_size = pool.page_size
        self._roots = [
            natural_slots(start.scheduled, len(start.scheduled.tokens) - 1, 1, page_size)
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
