"""EAGLE-3 heads: their files, and how they draft. The network is in eagle_network.py.

The column of feature ``p - 1`` and token ``p`` lies at position ``p``: it depends on tokens up to
``p``, as the target's KV there does. Position 0 has none. A prefix hit needs the feature of its
last position: it is kept for every page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.execution.step_layout import table_slots
from ...core.interface.plan import ScheduledRequest
from ...core.model.config import DecoderConfig
from ...core.model.decoder import OwnDecoder
from ...core.model.fields import Fields
from ...core.model.rope import RopeTable
from ...core.ops.batch import IntArray, RaggedBatch, Taps
from ...core.ops.kv_pool import KVPool
from .base import HeadKind, PackedHead, ParsedHead, Tensors
from .copies import Anchors, CopyingProposer
from .eagle_network import EagleConfig, EagleFrame, EagleHead
from .files import (
    OWN_KEY,
    PICKLES,
    WEIGHTS,
    check_taps,
    fill_vocabulary,
    own_taps,
    parse_shape,
    shape_json,
)
from .head_kv import Written
from .layers import KeysValues
from .packing import (
    ContextRows,
    can_pass,
    head_layout,
    pack_linears,
    pack_mlp,
    pack_qkv,
    plain_norm,
)
from .proposer import Drafting, DraftStart, HeadProposer, Query, features_of

_NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_LEAST_LAYERS = 8  # of a target; with fewer the default boundaries coincide

# -- files ----------------------------------------------------------------------------------------


def _is_plain_eagle(values: Mapping[str, Any], folder: Path) -> bool:
    """The first EAGLE-3 heads name a plain architecture; their draft vocabulary gives them away."""
    return "draft_vocab_size" in values and any(
        (folder / name).is_file() for name in (WEIGHTS, PICKLES[0])
    )


def _parse(fields: Fields, target: DecoderConfig, names: set[str]) -> ParsedHead:
    """EAGLE-3. Engines disagree on whether its ids count layers or boundaries."""
    for name, value in fields.values.items():
        if "norm" in name and value is True and name not in _NORM_FLAGS:
            raise fields.error(name, "is not supported")
    shape = parse_shape(fields, target, names)
    if shape["num_layers"] != 1:
        raise fields.error("num_hidden_layers", "must be 1 for an EAGLE-3 head")
    shifted: Taps | None = None
    taps = own_taps(fields)
    if taps is None:
        name = "eagle_aux_hidden_state_layer_ids"
        if fields.has(name):
            ids = fields.integers(name)
            plus = tuple(i + 1 for i in ids)
            taps, shifted = (plus, ids) if min(ids, default=0) == 1 else (ids, plus)
            taps = check_taps(fields, name, taps, target)
            is_possible = max(shifted) <= target.num_layers
            shifted = shifted if is_possible else None
        else:
            taps = default_taps(target.num_layers)
    else:
        check_taps(fields, f"{OWN_KEY}.taps", taps, target)
    config = EagleConfig(
        **shape,
        taps=taps,
        fc_bias="fc.bias" in names,
        norm_before_residual=fields.flag("norm_before_residual", False),
        norm_before_fc=fields.flag("norm_before_fc", False),
        fc_norm=fields.flag("fc_norm", "fc_norm.0.weight" in names),
        norm_output=fields.flag("norm_output", False),
    )
    return ParsedHead(config, shifted)


def default_taps(num_layers: int) -> Taps:
    """The boundaries of an EAGLE-3 head whose config names none."""
    return (2, num_layers // 2, num_layers - 3)


def _load(where: Path, config: EagleConfig, tensors: Tensors) -> EagleHead:
    named = {_midlayer(name): tensor for name, tensor in tensors.items()}
    return fill_vocabulary(where, EagleHead(config), named)


def _midlayer(name: str) -> str:
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _to_json(config: EagleConfig) -> dict[str, object]:
    values = shape_json(config) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }
    if not _are_default(config.taps):  # left out they are read alike by every engine
        values["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": list(config.taps),
            "use_aux_hidden_state": True,
        }
    return values


def _are_default(taps: Taps) -> bool:
    """Whether these are `default_taps` of some target of at least 8 layers."""
    num_layers = taps[-1] + 3
    return num_layers >= _LEAST_LAYERS and taps == default_taps(num_layers)


def _guess(head: EagleHead, token_ids: Tensor, taps: Tensor) -> Tensor:
    hidden = head(token_ids, taps, 1)[0]  # column i decides token i + 2
    return head.target_ids(head.logits(hidden).argmax(-1))


# -- drafting -------------------------------------------------------------------------------------


def _pack(head: EagleHead, target: OwnDecoder) -> PackedHead:
    if not can_pass(target):
        pack_linears(head, target.ops)
        return PackedHead(partial(CopyingEagleProposer, head))
    layers, frame = EaglePass(head, target), head.frame()
    pack_linears(frame, target.ops)
    return PackedHead(partial(EagleProposer, frame, layers))


def _written_features(frame: EagleFrame, written: Written) -> tuple[Tensor, Tensor]:
    """Features of the positions, and of the position before each; 0 where that is unknown."""
    features = frame.features(written.taps)
    before = features.roll(1, dims=0)
    for first, feature in zip(written.firsts.tolist(), written.before, strict=True):
        before[first] = 0.0 if feature is None else feature
    return features, before


class EagleProposer(HeadProposer):
    """Drafts token by token with the layer of a head as a pass, and its frame."""

    head: EagleFrame
    keeps_node_kv = True

    def __init__(
        self,
        frame: EagleFrame,
        layers: EaglePass,
        pool: KVPool,
        target: OwnDecoder,
        *,
        independent: bool,
    ) -> None:
        super().__init__(frame, pool, target, independent=independent)
        self._layers = layers

    def write_head_kv(self, written: Written) -> Tensor:
        """Write columns from the features of the positions before."""
        features, before = _written_features(self.head, written)
        rows = ContextRows.of(written)
        self._layers.write_context(self.pool, before, written.token_ids, rows)
        return features

    def begin(self, starts: Sequence[DraftStart], num_drafted: int) -> Drafting:
        """A pass for each token."""
        del num_drafted
        return _EagleDrafting(self.head, self._layers, self.pool, starts)


class CopyingEagleProposer(CopyingProposer):
    """Drafts token by token with an `EagleHead` over copies of its KV."""

    head: EagleHead

    def keys_values(self, written: Written) -> tuple[list[KeysValues], Tensor]:
        """Columns from the features of the positions before."""
        features, before = _written_features(self.head, written)
        return [self.head.context(before, written.token_ids, written.positions)], features

    def begin(self, starts: Sequence[DraftStart], num_drafted: int) -> Drafting:
        """A pass for each token."""
        del num_drafted
        return _CopyingEagleDrafting(self.head, self.anchors(starts), features_of(starts))


class _EagleDrafting(Drafting):
    """Each query of a level is a column of its own, by the target's kernels."""

    def __init__(
        self, frame: EagleFrame, layers: EaglePass, pool: KVPool, starts: Sequence[DraftStart]
    ) -> None:
        self._frame, self._layers, self._pool, self._starts = frame, layers, pool, starts
        self._features = features_of(starts)  # [queries of the call before, hidden]
        page_size = pool.page_size
        self._roots = [
            table_slots(start.scheduled, len(start.scheduled.tokens) - 1, 1, page_size)
            for start in starts
        ]

    def logits(self, queries: Sequence[Query]) -> Tensor:
        """Compute the column of each query's token."""
        columns = [self._column(each) for each in queries]
        features = self._features
        if queries[0].level:
            features = features[torch.tensor([each.parent for each in queries])]
        token_ids = [each.token_id for each in queries]
        normed, hidden = self._layers.hidden(self._pool, features, token_ids, columns)
        self._features = normed if self._frame.config.norm_output else hidden
        return self._frame.project(normed)

    def _column(self, query: Query) -> Column:
        start = self._starts[query.request]
        return Column(start.scheduled, start.first, [*self._roots[query.request], *query.slots])


class _CopyingEagleDrafting(Drafting):
    """Each query of a level is a column of its own beside those of the same request."""

    def __init__(self, head: EagleHead, anchors: Anchors, features: Tensor) -> None:
        self._head = head
        self._positions = anchors.positions
        self._features = features  # [queries of the call before, hidden]
        self._context, self._seen = anchors.context[0], anchors.seen
        self._own: list[KeysValues] = []  # of each level, [queries, num_kv_heads, head_dim]
        self._paths: list[list[int]] = []  # of each query of the call before, itself included
        self._live = list(range(len(self._positions)))

    def logits(self, queries: Sequence[Query]) -> Tensor:
        """Compute the column of each query's token."""
        self._keep(list(dict.fromkeys(each.request for each in queries)))
        level, parents = queries[0].level, [each.parent for each in queries]
        paths = [[*(self._paths[p] if level else ()), at] for at, p in enumerate(parents)]
        columns, where = self._by_request([each.request for each in queries])
        own = [
            (keys[ids], values[ids])
            for depth, (keys, values) in enumerate(self._own)
            for ids in [self._ids([path[depth] for path in paths])[columns]]
        ]
        before = self._features[self._ids(parents)] if level else self._features
        hidden = self._head.column(
            before[columns],
            self._ids([each.token_id for each in queries])[columns],
            (self._positions + level).unsqueeze(1).expand(columns.shape),
            self._context,
            self._seen.unsqueeze(1),
            own,
        )[where]
        keys, values = own[-1]
        self._own.append((keys[where], values[where]))
        self._paths, self._features = paths, self._head.next_features(hidden)
        return self._head.logits(hidden)

    def _by_request(self, requests: Sequence[int]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Queries by live request, [b, most of one], filled up with its first; where each is."""
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


# -- the layer as a pass --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a draft: where it lies, and what it sees."""

    scheduled: ScheduledRequest
    first: int  # position from which on it sees columns
    slots: Sequence[int]  # of the draft's columns on its path, of the last token to its own

    @property
    def anchor(self) -> int:
        """Position of the last token that is known."""
        return len(self.scheduled.tokens) - 1


class EaglePass:
    """The layer of an `EagleHead` by the kernels of its target, its KV read where it lies.

    Each column is a segment of one row. The columns of a draft lie where its tokens' KV would: the
    first path in the slots of its positions, the others in spare slots. They are written again
    behind verification, from the target's features. The page table of a segment begins with the
    first whole page that the column sees; its tail lists what it sees of the page before, then its
    own path. Keys keep the rotation of their positions, and a softmax does not ask for their order.
    """

    def __init__(self, head: EagleHead, target: OwnDecoder) -> None:
        """The head has its dtype already, and has borrowed its embedding."""
        config, layer, ops = head.config, head.midlayer, target.ops
        self._ops = ops
        self._heads = head_layout(config)
        self._rope = RopeTable(config.rope, config.head_dim, target.device)
        self._embedding = head.table.detach()
        self._embedding_norm = plain_norm(layer.input_layernorm)
        self._feature_norm = plain_norm(layer.hidden_norm)
        self._mlp_norm = plain_norm(layer.post_attention_layernorm)
        self._final_norm = plain_norm(head.norm)
        self._qkv = pack_qkv(layer.self_attn, ops, has_bias=config.attention_bias)
        self._o = ops.pack_linear(layer.self_attn.o_proj.weight.detach().contiguous())
        self._mlp = pack_mlp(layer.mlp, ops)
        self._norms_residual = config.norm_before_residual

    def write_context(
        self, pool: KVPool, features: Tensor, token_ids: Tensor, rows: ContextRows
    ) -> None:
        """Write keys and values of columns.

        ``features`` [n, hidden] of the positions before ``token_ids`` [n].
        """
        plan = self._ops.plan(rows.batch(pool.page_size), pool, self._heads, self._rope)
        qkv, _ = self._projected(features, token_ids)
        self._ops.rope_write(qkv, 0, plan, None)

    def hidden(
        self,
        pool: KVPool,
        features: Tensor,
        token_ids: Sequence[int],
        columns: Sequence[Column],
    ) -> tuple[Tensor, Tensor]:
        """Hidden states ``[n, hidden]`` of columns, behind the final norm and before it.

        ``features`` [n, hidden] of the positions before ``token_ids`` [n].
        """
        ops, batch = self._ops, self._batch(pool.page_size, token_ids, columns)
        self._rope.table(int(batch.positions.max()) + 1)  # beyond `stops`: pages are left out
        plan = ops.plan(batch, pool, self._heads, self._rope)
        qkv, normed = self._projected(features, batch.token_ids)
        attended = ops.attention(ops.rope_write(qkv, 0, plan, None), 0, plan, None)
        residual = normed if self._norms_residual else features
        x, residual = ops.add_norm(ops.linear(attended, self._o), residual, self._mlp_norm)
        x = ops.activate(ops.linear(x, self._mlp.gate_up), self._mlp.activation)
        return ops.add_norm(ops.linear(x, self._mlp.down), residual, self._final_norm)

    def _projected(self, features: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys and values of columns, and their normed features."""
        ops = self._ops
        embedded = ops.norm(ops.embedding(token_ids, self._embedding), self._embedding_norm)
        normed = ops.norm(features, self._feature_norm)
        return ops.linear(torch.cat((embedded, normed), dim=-1), self._qkv), normed

    def _batch(
        self, page_size: int, token_ids: Sequence[int], columns: Sequence[Column]
    ) -> RaggedBatch:
        seen = [_seen(column, page_size) for column in columns]
        tails = [[*edge, *column.slots] for (_, _, edge), column in zip(seen, columns, strict=True)]
        num_in_pages = np.array([count for _, count, _ in seen], dtype=np.int64)
        tail_lens = np.array([len(tail) for tail in tails], dtype=np.int64)
        positions = [column.anchor + len(column.slots) - 1 for column in columns]
        num_rows = len(columns)
        return RaggedBatch(
            token_ids=torch.tensor(token_ids),
            positions=torch.tensor(positions),
            slots=torch.tensor([column.slots[-1] for column in columns]),
            logit_rows=torch.empty(0, dtype=torch.int64),
            num_logits=0,
            page_size=page_size,
            starts=num_in_pages + tail_lens - 1,
            lens=np.ones(num_rows, dtype=np.int64),
            first_rows=np.arange(num_rows, dtype=np.int64),
            page_counts=np.array([len(pages) for pages, _, _ in seen], dtype=np.int64),
            pages=np.concatenate([pages for pages, _, _ in seen]),
            tail_lens=tail_lens,
            tails=np.array([slot for tail in tails for slot in tail], dtype=np.int64),
        )


def _seen(column: Column, page_size: int) -> tuple[IntArray, int, list[int]]:
    """The whole pages that a column sees of its context, and how many columns they have for it.

    And the slots of the columns before these. There is always a page, whatever it holds.
    """
    page_ids, anchor = column.scheduled.page_ids, column.anchor
    first_page = -(-column.first // page_size)
    stop = min(anchor, first_page * page_size)
    edge = [
        page_ids[position // page_size] * page_size + position % page_size
        for position in range(column.first, stop)
    ]
    count = max(0, anchor - first_page * page_size)
    pages = page_ids[first_page : first_page + max(1, -(-count // page_size))] or page_ids[:1]
    return np.asarray(pages, dtype=np.int64), count, edge


EAGLE = HeadKind(
    name=EagleConfig.kind,
    words=("eagle3",),
    recognises=_is_plain_eagle,
    parse=_parse,
    load=_load,
    to_json=_to_json,
    pack=_pack,
    guess=_guess,
)
