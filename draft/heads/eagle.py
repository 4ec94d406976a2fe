"""EAGLE-3 heads: their files, and how they draft (`ColumnProposer`).

The network is in eagle_network.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.model.config import DecoderConfig
from ...core.model.decoder import OwnDecoder
from ...core.model.fields import Fields
from ...core.ops.batch import Taps
from ...core.ops.kv_pool import KVPool
from ...core.ops.layers import run_mlp
from .base import HeadKind, PackedHead, ParsedHead, Tensors
from .columns import ColumnProposer, Columns
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
from .packing import (
    HeadPass,
    PassRows,
    filled,
    pack_linears,
    pack_mlp,
    pack_qkv,
    plain_norm,
)

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
    layers, frame = EaglePass(head, target), head.frame()
    pack_linears(frame, target.ops)
    return PackedHead(partial(EagleProposer, frame, layers))


class EagleProposer(ColumnProposer):
    """Drafts with the layer of a head as a pass, and its frame."""

    head: EagleFrame

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

    def features(self, taps: Tensor) -> Tensor:
        """``fc`` of the taps."""
        return self.head.features(taps)

    def write_columns(self, before: Tensor, written: Written) -> None:
        """Write columns; ``before`` [n, hidden]: features of the positions before."""
        self._layers.write_context(self.pool, before, written)

    def compute(self, features: Tensor, rows: Sequence[PassRows]) -> Columns:
        """A pass of the layer; the next features are normed in EAGLE-3.1 alone."""
        normed, hidden = self._layers.hidden(self.pool, features, rows)
        following = normed if self.head.config.norm_output else hidden
        return Columns(self.head.project(normed), following)


# -- the layer as a pass --------------------------------------------------------------------------


class EaglePass(HeadPass):
    """The layer of an `EagleHead`; each column is a row."""

    def __init__(self, head: EagleHead, target: OwnDecoder) -> None:
        """The head has its dtype already, and has borrowed its embedding."""
        super().__init__(head.config, target)
        config, layer, ops = head.config, head.midlayer, self._ops
        self._embedding = head.table.detach()
        self._embedding_norm = plain_norm(layer.input_layernorm)
        self._feature_norm = plain_norm(layer.hidden_norm)
        self._mlp_norm = plain_norm(layer.post_attention_layernorm)
        self._final_norm = plain_norm(head.norm)
        self._qkv = pack_qkv(layer.self_attn, ops, has_bias=config.attention_bias)
        self._o = ops.pack_linear(layer.self_attn.o_proj.weight.detach().contiguous())
        self._mlp = pack_mlp(layer.mlp, ops)
        self._norms_residual = config.norm_before_residual

    def write_context(self, pool: KVPool, before: Tensor, written: Written) -> None:
        """Write columns; ``before`` [n, hidden]: features of the positions before."""
        plan = self._plan_writing(pool, written)
        num_rows = self._ops.min_rows
        qkv, _ = self._projected(filled(before, num_rows), filled(written.token_ids, num_rows))
        self._ops.rope_write(qkv, 0, plan, None)

    def hidden(
        self, pool: KVPool, features: Tensor, rows: Sequence[PassRows]
    ) -> tuple[Tensor, Tensor]:
        """Hidden states ``[n, hidden]`` of columns, behind the final norm and before it.

        ``features`` [n, hidden] of the positions before.
        """
        ops, (token_ids, plan) = self._ops, self._plan_rows(pool, rows)
        features = filled(features, len(token_ids))
        qkv, normed = self._projected(features, token_ids)
        attended = ops.attention(ops.rope_write(qkv, 0, plan, None), 0, plan, None)
        residual = normed if self._norms_residual else features
        x, residual = ops.add_norm(ops.linear(attended, self._o), residual, self._mlp_norm)
        found = ops.add_norm(run_mlp(ops, x, self._mlp), residual, self._final_norm)
        return (
            found if len(rows) == len(token_ids) else (found[0][: len(rows)], found[1][: len(rows)])
        )

    def _projected(self, features: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys and values of columns, and their normed features."""
        ops = self._ops
        embedded = ops.norm(ops.embedding(token_ids, self._embedding), self._embedding_norm)
        normed = ops.norm(features, self._feature_norm)
        return ops.linear(torch.cat((embedded, normed), dim=-1), self._qkv), normed


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
