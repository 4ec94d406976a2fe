"""Block heads: their files and their proposer. The network is in block_network.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from ...core.errors import ModelLoadError
from ...core.model.decoder import OwnDecoder
from ...core.model.description.config import DecoderConfig
from ...core.model.description.fields import Fields
from ...core.ops.base import Ops
from ...core.ops.batch import DeviceTokens, IntArray, SamplingPlan, Wanted
from ...core.ops.kv_pool import KvLayer, KVPool
from ...core.ops.layers import run_layers
from ...core.ops.mixers.attention import AttentionWeights
from ...core.ops.weights import DecoderWeights, LayerWeights
from ..proposers.tree_grower import Scored
from .block_network import BlockConfig, BlockFrame, BlockHead, BlockLayer, MarkovHead, MarkovKind
from .block_training import BLOCK_RECIPE
from .common.base import HeadKind, PackedHead, ParsedHead, Tensors
from .common.files import (
    OWN_KEY,
    check_taps,
    fill_vocabulary,
    own_taps,
    parse_shape,
    shape_json,
    words_of,
)
from .common.head_kv import Written
from .common.packing import (
    HeadPass,
    PassRows,
    filled,
    head_norm,
    pack_linears,
    pack_mlp,
    pack_qkv,
    plain_norm,
    seen_kv,
)
from .common.proposer import Drafting, DraftStart, HeadProposer, Query

_HIDDEN = Wanted(hidden_alone=True)  # The logits are computed later, level by level.
BLOCKS_A_PASS = 16  # maximum number of requests of one pass; more requests take more passes

# -- files ----------------------------------------------------------------------------------------


def _is_dflash(values: Mapping[str, Any], folder: Path) -> bool:  # noqa: ARG001
    return "dflash_config" in values


def _parse(fields: Fields, target: DecoderConfig, names: set[str]) -> ParsedHead:
    """Parse a config of DFlash or DSpark.

    Its layer ids count from 0, and the tap after layer ``id`` has the number ``id + 1``.
    """
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
    """Return DFlash's default layer ids, spread over the target, for a config without ids."""
    count = fields.positive("num_target_features", 5)
    span = target.num_layers - 4
    return tuple(round(1 + i * span / max(1, count - 1)) for i in range(count))


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    types = fields.values.get("layer_types")
    window = fields.positive("sliding_window") if fields.has("sliding_window") else None
    if not isinstance(types, list):
        return ()
    if len(types) < num_layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise fields.error(
            "layer_types",
            f"must list {num_layers} layers, each full_attention or sliding_attention",
        )
    if "sliding_attention" in types[:num_layers] and window is None:
        raise fields.error(
            "sliding_window", "is missing, but layer_types has sliding-window layers"
        )
    return tuple(window if t == "sliding_attention" else None for t in types[:num_layers])


def _load(where: Path, config: BlockConfig, tensors: Tensors) -> BlockHead:
    return fill_vocabulary(where, BlockHead(_with_markov_size(where, config, tensors)), tensors)


def _with_markov_size(where: Path, config: BlockConfig, tensors: Tensors) -> BlockConfig:
    """Set the size of the Markov head's input vocabulary to the number of rows of its embedding.

    Returns the new config. Raises `ModelLoadError` if the size differs from both the target's
    vocabulary and the draft's.
    """
    table = tensors.get("markov_head.markov_w1.weight")
    if table is None:
        return config
    if len(table) not in (config.vocab_size, config.draft_vocab_size):
        raise ModelLoadError(
            f"{where}: markov_head.markov_w1.weight has {len(table)} rows, but the target has "
            f"{config.vocab_size} tokens and the draft {config.draft_vocab_size}"
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
    layers, frame = BlockPass(head, target), head.frame()
    pack_linears(frame, target.ops)
    num_rows = BLOCKS_A_PASS * head.config.block_size
    return PackedHead(partial(BlockProposer, frame, layers), lambda size: -(-num_rows // size))


class BlockProposer(HeadProposer):
    """Drafts whole blocks with a block head whose layers are packed for the target's kernels."""

    head: BlockFrame

    def __init__(
        self,
        frame: BlockFrame,
        layers: BlockPass,
        pool: KVPool,
        target: OwnDecoder,
    ) -> None:
        """Make a proposer; the last pages of ``pool`` are spare ones and hold the KV of blocks."""
        super().__init__(frame, pool, target)
        self._layers, self._pairs = layers, _NumpyMarkov.of(frame)
        num_rows = BLOCKS_A_PASS * frame.config.block_size
        self._first_spare = pool.num_pages - -(-num_rows // pool.page_size)

    @override
    def warm_up(self, max_len: int, num_best: int) -> None:
        self._layers.warm_up(self.pool, max_len)

    def write_head_kv(self, written: Written) -> None:
        """Compute the keys and values of each position from its taps, and write them."""
        vectors = self.head.context_vectors(written.taps).contiguous()
        self._layers.write_context(self.pool, vectors, written)

    def begin(self, starts: Sequence[DraftStart], num_drafted: int) -> Drafting:
        """Compute the hidden states of whole blocks, `BLOCKS_A_PASS` requests per pass."""
        passes = [starts[at : at + BLOCKS_A_PASS] for at in range(0, len(starts), BLOCKS_A_PASS)]
        if len(passes) == 1:
            hidden = self._layers.hidden(self.pool, self._first_spare, starts)
        else:
            each = (self._layers.hidden(self.pool, self._first_spare, part) for part in passes)
            hidden = torch.cat([found.clone() for found in each])
        first = not self.head.config.predicts_at_anchor
        return _BlockDrafting(self.head, hidden[:, first : first + num_drafted], self._pairs)


class _BlockDrafting(Drafting):
    """Computes logits level by level from ``hidden`` [b, num, hidden], the states of b blocks.

    ``pairs``: a faster implementation of the Markov head's bias, or None.
    """

    def __init__(self, head: BlockFrame, hidden: Tensor, pairs: _NumpyMarkov | None) -> None:
        self._head, self._num, self._pairs = head, hidden.shape[1], pairs
        self._hidden = hidden.flatten(0, 1)
        self._unary = head.project(self._hidden)  # [b * num, draft_vocab]
        self._state: Tensor | None = None  # Markov states of the previous call's queries

    def score(
        self,
        queries: Sequence[Query],
        draws: SamplingPlan | None,  # noqa: ARG002
        device_tokens: DeviceTokens | None = None,  # noqa: ARG002
    ) -> Scored:
        """Return the logits of this level, including the Markov head's bias, for each query."""
        return Scored(self._logits(queries))

    def _logits(self, queries: Sequence[Query]) -> Tensor:
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


class _NumpyMarkov:
    """A NumPy implementation of the "vanilla" Markov head for a CPU.

    NumPy looks up a few rows of a table faster than torch does.
    """

    def __init__(self, head: BlockFrame, markov: MarkovHead) -> None:
        rows = markov.markov_w1.weight.detach()
        self._dtype, self._w2 = rows.dtype, markov.markov_w2
        self._rows = rows.view(_SAME_SIZE[rows.itemsize]).numpy()  # NumPy has no bfloat16.
        ids = torch.arange(head.config.vocab_size)
        self._known: IntArray = head.markov_ids(ids).numpy()

    @classmethod
    def of(cls, head: BlockFrame) -> _NumpyMarkov | None:
        """Return an instance for a "vanilla" Markov head on a CPU, or None for other heads."""
        markov = head.markov_head
        if (
            markov is None
            or markov.kind != "vanilla"
            or markov.markov_w1.weight.device.type != "cpu"
        ):
            return None
        return cls(head, markov)

    def added(self, unary: Tensor, rows: Sequence[int], before: Sequence[int]) -> Tensor:
        """Return the rows of ``unary`` plus the Markov head's bias, [n, draft_vocab].

        ``unary`` [.., draft_vocab]: logits without the bias. ``rows`` [n]: rows to take. ``before``
        [n]: the target's id of the token before each row's token.
        """
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


class BlockPass(HeadPass):
    """The layers of a `BlockHead`, computed by the target's kernels.

    All rows of a block attend to each other.
    """

    def __init__(self, head: BlockHead, target: OwnDecoder) -> None:
        """Pack the layers; the head must have its final dtype and an embedding."""
        config = head.config
        super().__init__(config, target)
        self._size, self._mask = config.block_size, config.mask_token_id
        windows = config.windows or (None,) * config.num_layers
        self._windows = tuple(dict.fromkeys(windows))  # distinct windows, each with its own plan
        layers = tuple(
            _packed_layer(
                layer, self._ops, KvLayer(self._windows.index(window), index),
                has_bias=config.attention_bias,
            )
            for index, (layer, window) in enumerate(
                zip(head.decoder_layers(), windows, strict=True)
            )
        )  # fmt: skip
        self._weights = DecoderWeights(
            embedding=head.table,
            layers=layers,
            final_norm=plain_norm(head.norm),
            lm_head=target.weights.lm_head,  # unused: the `BlockFrame` computes the logits
        )
        # A GPU's graph supports one plan, so all layers must have the same window.
        may_compile = self._ops.batch_device is None or len(self._windows) == 1
        self._compiled = self._ops.compile_forward(self._weights) if may_compile else None

    def warm_up(self, pool: KVPool, max_len: int) -> None:
        """Compute RoPE's table for ``max_len`` tokens and a block; on a GPU capture the graphs."""
        self._rope.table(max_len + self._size)
        if self._compiled is not None:
            self._compiled.warm_up(pool, self._heads, (self._rope,), _HIDDEN)

    def write_context(self, pool: KVPool, vectors: Tensor, written: Written) -> None:
        """Write the keys and values of positions that the target has computed.

        ``vectors`` [n, hidden]: result of `BlockFrame.context_vectors` for the positions.
        """
        plan = self._plan_writing(pool, written)
        vectors = filled(vectors, self._ops.min_rows)
        for index, layer in enumerate(self._weights.layers):
            mixer = layer.mixer
            assert isinstance(mixer, AttentionWeights)
            qkv = self._ops.linear(vectors, mixer.qkv)
            self._ops.rope_write(qkv, index, plan, mixer.head_norm)

    def hidden(self, pool: KVPool, first_spare_page: int, starts: Sequence[DraftStart]) -> Tensor:
        """Return normed hidden states ``[b, block_size, hidden]`` of up to `BLOCKS_A_PASS` blocks.

        The next pass may overwrite them. The blocks' own KV is written to the pages from
        ``first_spare_page`` on.
        """
        page_size, num_rows = pool.page_size, len(starts) * self._size
        slots = np.arange(num_rows) + first_spare_page * page_size
        owns = slots.reshape(len(starts), self._size)
        blocks = list(zip(starts, owns, strict=True))
        planned = [
            self._plan_rows(
                pool,
                [row for each in blocks for row in self._rows(*each, window, page_size)],
            )
            for window in self._windows
        ]
        token_ids, plans = planned[0][0], [plan for _, plan in planned]
        if self._compiled is None:
            found = run_layers(self._ops, self._weights, token_ids, plans)
        else:
            found = self._compiled(token_ids, plans, _HIDDEN)
        return found.hidden[:num_rows].view(len(starts), self._size, -1)

    def _rows(
        self, start: DraftStart, slots: IntArray, window: int | None, page_size: int
    ) -> list[PassRows]:
        """Return the rows of a block, whose KV is written to ``slots`` [block_size]."""
        scheduled = start.scheduled
        anchor = len(scheduled.tokens) - 1
        token_ids = [scheduled.tokens[-1], *[self._mask] * (self._size - 1)]
        low, together = (0, self._size) if window is None else (anchor - window + 1, 1)
        return [
            PassRows(
                token_ids[at : at + together],
                anchor + at,
                slots[at : at + together].tolist(),
                seen_kv(scheduled, max(start.first, low + at), page_size),
                slots,
            )
            for at in range(0, self._size, together)
        ]


def _packed_layer(layer: BlockLayer, ops: Ops, kv: KvLayer, *, has_bias: bool) -> LayerWeights:
    attention = layer.self_attn
    return LayerWeights(
        mixer_norm=plain_norm(layer.input_layernorm),
        mixer=AttentionWeights(
            qkv=pack_qkv(attention, ops, has_bias=has_bias),
            head_norm=head_norm(attention),
            o=ops.pack_linear(attention.o_proj.weight.detach().contiguous()),
            window=None,
            kv=kv,
        ),
        mlp_norm=plain_norm(layer.post_attention_layernorm),
        mlp=pack_mlp(layer.mlp, ops),
    )


BLOCK = HeadKind(
    name=BlockConfig.kind,
    words=("dflash", "dspark"),
    recognises=_is_dflash,
    parse=_parse,
    load=_load,
    to_json=_to_json,
    pack=_pack,
    recipe=BLOCK_RECIPE,
)
