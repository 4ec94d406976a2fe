"""Block heads: their files, and how they draft. The network is in block_network.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import numpy as np
import torch
from torch import Tensor

from ...core.errors import ModelLoadError
from ...core.interface.plan import ScheduledRequest
from ...core.model.config import DecoderConfig
from ...core.model.decoder import OwnDecoder
from ...core.model.fields import Fields
from ...core.model.rope import RopeTable
from ...core.ops.base import DecoderWeights, LayerWeights, Ops
from ...core.ops.batch import NOTHING_MORE, IntArray, RaggedBatch
from ...core.ops.kv_pool import KvPlace, KVPool
from .base import HeadKind, PackedHead, ParsedHead, Tensors
from .block_network import BlockConfig, BlockFrame, BlockHead, BlockLayer, MarkovHead, MarkovKind
from .copies import CopyingProposer
from .files import OWN_KEY, check_taps, fill_vocabulary, own_taps, parse_shape, shape_json, words_of
from .head_kv import Written
from .layers import KeysValues
from .packing import (
    ContextRows,
    can_pass,
    head_layout,
    head_norm,
    pack_linears,
    pack_mlp,
    pack_qkv,
    plain_norm,
)
from .proposer import Drafting, DraftStart, HeadProposer, Query

BLOCKS_A_PASS = 16  # requests of one pass; more draft one pass after another

# -- files ----------------------------------------------------------------------------------------


def _is_dflash(values: Mapping[str, Any], folder: Path) -> bool:  # noqa: ARG001
    return "dflash_config" in values


def _parse(fields: Fields, target: DecoderConfig, names: set[str]) -> ParsedHead:
    """DFlash and DSpark. Their ids name layers: what a layer leaves is the next boundary."""
    shape = parse_shape(fields, target, names)
    taps = own_taps(fields)
    if taps is None:
        name = next(
            (n for n in ("target_layer_ids", "aux_hidden_state_layer_ids") if fields.has(n)),
            "target_layer_ids",
        )
        ids = fields.integers(name) if fields.has(name) else _default_block_ids(fields, target)
        taps = check_taps(fields, name, tuple(i + 1 for i in ids), target)
    else:
        check_taps(fields, f"{OWN_KEY}.taps", taps, target)
    mask = fields.integer("mask_token_id")
    if not 0 <= mask < target.vocab_size:
        raise fields.error(
            "mask_token_id",
            f"is {mask}, but the target has token ids from 0 to {target.vocab_size - 1}",
        )
    kind = fields.text("markov_head_type", "vanilla")
    if kind not in get_args(MarkovKind):
        raise fields.error("markov_head_type", f"{kind!r} is not supported")
    has_markov = "markov_head.markov_w1.weight" in names
    rank = fields.integer("markov_rank", 256) if has_markov else 0
    is_dflash = "dflash" in fields.text("speculators_model_type", "").lower() or any(
        "dflash" in word for word in words_of(fields.values)
    )
    config = BlockConfig(
        **shape,
        taps=taps,
        block_size=fields.positive("block_size", 16 if is_dflash else 7),
        mask_token_id=mask,
        predicts_at_anchor=fields.flag("sample_from_anchor", not is_dflash),
        markov_rank=rank,
        markov_kind=cast(MarkovKind, kind),
        windows=_windows(fields, shape["num_layers"]),
    )
    return ParsedHead(config)


def _default_block_ids(fields: Fields, target: DecoderConfig) -> tuple[int, ...]:
    """Layers spread as DFlash spreads them, where the config names none."""
    count = fields.positive("num_target_features", 5)
    span = target.num_layers - 4
    return tuple(round(1 + i * span / max(1, count - 1)) for i in range(count))


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    types = fields.values.get("layer_types")
    window = fields.positive("sliding_window") if fields.has("sliding_window") else None
    if not isinstance(types, list):
        return ()
    if len(types) < num_layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise fields.error("layer_types", f"must name {num_layers} full or sliding layers")
    if "sliding_attention" in types[:num_layers] and window is None:
        raise fields.error("sliding_window", "is missing, though layer_types has sliding layers")
    return tuple(window if t == "sliding_attention" else None for t in types[:num_layers])


def _load(where: Path, config: BlockConfig, tensors: Tensors) -> BlockHead:
    return fill_vocabulary(where, BlockHead(_with_markov_size(where, config, tensors)), tensors)


def _with_markov_size(where: Path, config: BlockConfig, tensors: Tensors) -> BlockConfig:
    """Whether the Markov head reads the target's ids or the draft's shows in its size."""
    table = tensors.get("markov_head.markov_w1.weight")
    if table is None:
        return config
    if len(table) not in (config.vocab_size, config.draft_vocab_size):
        raise ModelLoadError(
            f"{where}: markov_head.markov_w1.weight has {len(table)} rows, neither the target's "
            f"{config.vocab_size} tokens nor the draft's {config.draft_vocab_size}"
        )
    return replace(config, markov_vocab_size=len(table))


def _to_json(config: BlockConfig) -> dict[str, object]:
    layer_ids = [boundary - 1 for boundary in config.taps]
    name = "DSparkDraftModel" if config.predicts_at_anchor else "DFlashDraftModel"
    values = shape_json(config) | {
        "architectures": [name],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": layer_ids,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": layer_ids},
        "sample_from_anchor": config.predicts_at_anchor,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_kind,
        "enable_confidence_head": False,
    }
    if any(config.windows):
        kinds = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
        values |= {"layer_types": kinds, "sliding_window": next(w for w in config.windows if w)}
    return values


# -- drafting -------------------------------------------------------------------------------------


def _pack(head: BlockHead, target: OwnDecoder) -> PackedHead:
    """Pack the layers as a pass, unless they have windows, which would end at the last row."""
    if not can_pass(target) or any(head.config.windows):
        pack_linears(head, target.ops)
        return PackedHead(partial(CopyingBlockProposer, head))
    layers, frame = BlockPass(head, target), head.frame()
    pack_linears(frame, target.ops)
    num_rows = BLOCKS_A_PASS * head.config.block_size
    return PackedHead(partial(BlockProposer, frame, layers), lambda size: -(-num_rows // size))


class BlockProposer(HeadProposer):
    """Drafts whole blocks with the layers of a head as a pass, and its frame."""

    head: BlockFrame

    def __init__(
        self,
        frame: BlockFrame,
        layers: BlockPass,
        pool: KVPool,
        target: OwnDecoder,
        *,
        independent: bool,
    ) -> None:
        """``pool``: with the spare pages of `PackedHead`, where a pass keeps blocks."""
        super().__init__(frame, pool, target, independent=independent)
        self._layers, self._pairs = layers, _Pairs.of(frame)
        num_rows = BLOCKS_A_PASS * frame.config.block_size
        self._first_spare = pool.num_pages - -(-num_rows // pool.page_size)

    def write_head_kv(self, written: Written) -> None:
        """Write the injected KV: of each position alone."""
        vectors = self.head.context_vectors(written.taps).contiguous()
        self._layers.write_context(self.pool, vectors, ContextRows.of(written))

    def begin(self, starts: Sequence[DraftStart], num_drafted: int) -> Drafting:
        """One pass for the whole block."""
        page_size = self.pool.page_size
        blocks = [Block(start.scheduled, start.first // page_size) for start in starts]
        parts = [
            self._layers.hidden(self.pool, self._first_spare, blocks[at : at + BLOCKS_A_PASS])
            for at in range(0, len(blocks), BLOCKS_A_PASS)
        ]
        hidden = torch.cat(parts) if len(parts) > 1 else parts[0]
        first = not self.head.config.predicts_at_anchor
        return _BlockDrafting(self.head, hidden[:, first : first + num_drafted], self._pairs)

    def _start(self, scheduled: ScheduledRequest) -> DraftStart | None:
        """A pass leaves out whole pages, and needs a position that its blocks see."""
        start = super()._start(scheduled)
        if start is None:
            return None
        first = -(-start.first // self.pool.page_size) * self.pool.page_size
        return start._replace(first=first) if first < len(scheduled.tokens) - 1 else None


class CopyingBlockProposer(CopyingProposer):
    """Drafts whole blocks with a `BlockHead` over copies of its KV."""

    head: BlockHead

    def __init__(
        self, head: BlockHead, pool: KVPool, target: OwnDecoder, *, independent: bool
    ) -> None:
        super().__init__(head, pool, target, independent=independent)
        self._pairs = _Pairs.of(head)

    def keys_values(self, written: Written) -> tuple[list[KeysValues], None]:
        """The injected KV: of each position alone."""
        return self.head.context(written.taps, written.positions), None

    def begin(self, starts: Sequence[DraftStart], num_drafted: int) -> Drafting:
        """One pass for the whole block."""
        anchors = self.anchors(starts)
        ids, positions = anchors.token_ids.unsqueeze(1), anchors.positions.unsqueeze(1)
        hidden = self.head.block(ids, positions, anchors.context, anchors.seen.unsqueeze(1))
        return _BlockDrafting(self.head, hidden[:, 0, :num_drafted], self._pairs)


class _BlockDrafting(Drafting):
    """``hidden`` [b, num, hidden]: of the tokens behind each anchor.

    ``pairs``: looks up what the token before says, where nothing but that token matters.
    """

    def __init__(self, head: BlockFrame, hidden: Tensor, pairs: _Pairs | None) -> None:
        self._head, self._num, self._pairs = head, hidden.shape[1], pairs
        self._hidden = hidden.flatten(0, 1)
        self._unary = head.project(self._hidden)  # [b * num, draft_vocab]
        self._state: Tensor | None = None  # of the queries of the call before

    def logits(self, queries: Sequence[Query]) -> Tensor:
        """Add up what the pass found for this position and what the token before says."""
        level, markov = queries[0].level, self._head.markov_head
        rows = [each.request * self._num + level for each in queries]
        if markov is None:
            return self._unary.index_select(0, self._ids(rows))
        if self._pairs is not None:
            return self._pairs.added(self._unary, rows, [each.token_id for each in queries])
        at = self._ids(rows)
        hidden = self._hidden.index_select(0, at)
        if self._state is None:
            state = self._head.first_state(hidden)
        else:
            state = self._state.index_select(0, self._ids([each.parent for each in queries]))
        before = self._head.markov_ids(self._ids([each.token_id for each in queries]))
        bias: Tensor
        bias, self._state = markov(before, hidden, state)
        return bias.add_(self._unary.index_select(0, at))

    def _ids(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self._hidden.device)


class _Pairs:
    """The Markov head of the kind "vanilla" on a CPU: for few rows NumPy looks up in less time."""

    def __init__(self, head: BlockFrame, markov: MarkovHead) -> None:
        rows = markov.markov_w1.weight.detach()
        self._dtype, self._w2 = rows.dtype, markov.markov_w2
        self._rows = rows.view(_SAME_SIZE[rows.itemsize]).numpy()  # which has no bfloat16
        ids = torch.arange(head.config.vocab_size)
        self._known: IntArray = head.markov_ids(ids).numpy()

    @classmethod
    def of(cls, head: BlockFrame) -> _Pairs | None:
        """Build it; None where more than the token before matters, or a device has the weights."""
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


# -- the layers as a pass -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    """The block of a request, behind its last token."""

    scheduled: ScheduledRequest
    first_page: int  # of those that hold head KV without a hole from there on

    @property
    def anchor(self) -> int:
        """Position of the last token."""
        return len(self.scheduled.tokens) - 1


class BlockPass:
    """The layers of a `BlockHead` by the kernels of its target, its KV read where it lies.

    A block is a ragged batch of segments of one row. Each stands at the block's last position, so
    it sees the context and all rows of the block, whose keys and values lie in the segment's tail;
    only its rotation is that of its own position. So the kernels that know causal attention alone
    compute a block in one call, as they compute a decoder's layers.
    """

    def __init__(self, head: BlockHead, target: OwnDecoder) -> None:
        """The head has its dtype already, and has borrowed its embedding."""
        config, ops = head.config, target.ops
        self._ops = ops
        self._size, self._mask = config.block_size, config.mask_token_id
        self._heads = head_layout(config)
        self._rope = RopeTable(config.rope, config.head_dim, target.device)
        layers = tuple(
            _packed_layer(layer, ops, KvPlace(0, index), has_bias=config.attention_bias)
            for index, layer in enumerate(head.decoder_layers())
        )
        self._weights = DecoderWeights(
            embedding=head.table.detach(),
            layers=layers,
            final_norm=plain_norm(head.norm),
            lm_head=target.weights.lm_head,  # logits are the head's business
        )
        compiled = ops.compile_forward(self._weights)
        assert compiled is not None
        self._compiled = compiled

    def write_context(self, pool: KVPool, vectors: Tensor, rows: ContextRows) -> None:
        """Write keys and values of positions that the target has computed.

        ``vectors`` [n, hidden]: `BlockFrame.context_vectors` of these positions.
        """
        plan = self._ops.plan(rows.batch(pool.page_size), pool, self._heads, self._rope)
        for index, layer in enumerate(self._weights.layers):
            qkv = self._ops.linear(vectors, layer.qkv)
            self._ops.rope_write(qkv, index, plan, layer.head_norm)

    def hidden(self, pool: KVPool, first_spare_page: int, blocks: Sequence[Block]) -> Tensor:
        """Hidden states ``[b, block_size, hidden]``, normed, of at most `BLOCKS_A_PASS` blocks.

        Their own keys and values go to pages from ``first_spare_page`` on.
        """
        batch = self._block_batch(pool.page_size, first_spare_page, blocks)
        self._rope.table(int(batch.positions.max()) + 1)  # beyond `stops` where pages are left out
        plan = self._ops.plan(batch, pool, self._heads, self._rope)
        found = self._compiled(batch.token_ids, (plan,), NOTHING_MORE).hidden
        return found.view(len(blocks), self._size, -1)

    def _block_batch(
        self, page_size: int, first_spare_page: int, blocks: Sequence[Block]
    ) -> RaggedBatch:
        size, count = self._size, len(blocks)
        same = _frame(size, count, first_spare_page * page_size)
        anchors = np.array([each.anchor for each in blocks], dtype=np.int64)
        left_out = np.array([each.first_page * page_size for each in blocks], dtype=np.int64)
        in_pages = anchors - left_out
        page_counts = -(-in_pages // page_size)
        token_ids = np.full((count, size), self._mask, dtype=np.int64)
        token_ids[:, 0] = [each.scheduled.tokens[-1] for each in blocks]
        pages = list[IntArray]()
        for each, num_pages in zip(blocks, page_counts.tolist(), strict=True):
            page_ids = each.scheduled.page_ids[each.first_page : each.first_page + num_pages]
            pages += [np.frombuffer(page_ids, np.int64)] * size
        return RaggedBatch(
            token_ids=torch.from_numpy(token_ids.ravel()),
            positions=torch.from_numpy((anchors[:, None] + same.behind).ravel()),
            slots=same.slots,
            logit_rows=same.logit_rows,
            num_logits=0,
            page_size=page_size,
            starts=np.repeat(in_pages + (size - 1), size),
            lens=same.lens,
            first_rows=same.first_rows,
            page_counts=np.repeat(page_counts, size),
            pages=np.concatenate(pages),
            tail_lens=same.tail_lens,
            tails=same.tails,
        )


class _Frame(NamedTuple):
    """The common part of the batches of so many blocks; read only."""

    behind: IntArray  # [size] rows behind the anchor
    slots: Tensor
    logit_rows: Tensor
    lens: IntArray
    first_rows: IntArray
    tail_lens: IntArray
    tails: IntArray


@lru_cache(maxsize=4 * BLOCKS_A_PASS)
def _frame(size: int, count: int, first_slot: int) -> _Frame:
    slots = np.arange(size * count, dtype=np.int64) + first_slot
    return _Frame(
        behind=np.arange(size, dtype=np.int64),
        slots=torch.from_numpy(slots),
        logit_rows=torch.empty(0, dtype=torch.int64),
        lens=np.ones(size * count, dtype=np.int64),
        first_rows=np.arange(size * count, dtype=np.int64),
        tail_lens=np.full(size * count, size, dtype=np.int64),
        tails=np.repeat(slots.reshape(count, size), size, axis=0).ravel(),
    )


def _packed_layer(layer: BlockLayer, ops: Ops, place: KvPlace, *, has_bias: bool) -> LayerWeights:
    attention = layer.self_attn
    return LayerWeights(
        attention_norm=plain_norm(layer.input_layernorm),
        qkv=pack_qkv(attention, ops, has_bias=has_bias),
        head_norm=head_norm(attention),
        o=ops.pack_linear(attention.o_proj.weight.detach().contiguous()),
        mlp_norm=plain_norm(layer.post_attention_layernorm),
        mlp=pack_mlp(layer.mlp, ops),
        window=None,
        place=place,
    )


BLOCK = HeadKind(
    name=BlockConfig.kind,
    words=("dflash", "dspark"),
    recognises=_is_dflash,
    parse=_parse,
    load=_load,
    to_json=_to_json,
    pack=_pack,
)
