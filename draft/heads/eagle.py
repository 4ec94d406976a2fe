"""EAGLE-3 heads: their files and their proposer (a `ColumnProposer`).

The network is in eagle_network.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from ...core.model.decoder import OwnDecoder
from ...core.model.description.config import DecoderConfig
from ...core.model.description.fields import Fields
from ...core.ops.base import LayersOutput
from ...core.ops.batch import DeviceTokens, SamplingPlan, Taps, Wanted
from ...core.ops.kv_pool import KvLayer, KVPool
from ...core.ops.layers import join, run_layers
from ...core.ops.mixers.attention import AttentionWeights
from ...core.ops.weights import DecoderWeights, JoinedInputs, LayerWeights, PackedLinear
from ..proposers.tree_grower import Scored
from .common.base import HeadKind, PackedHead, ParsedHead, Tensors
from .common.columns import ColumnProposer, Columns
from .common.files import (
    OWN_KEY,
    PICKLES,
    WEIGHTS,
    check_taps,
    fill_vocabulary,
    own_taps,
    parse_shape,
    shape_json,
)
from .common.head_kv import Written
from .common.packing import (
    HeadPass,
    PassRows,
    filled,
    pack_linears,
    pack_mlp,
    pack_qkv,
    packed_output,
    plain_norm,
)
from .eagle_network import EagleConfig, EagleFrame, EagleHead
from .eagle_training import EAGLE_RECIPE

_NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_BEHIND_LAYER: Taps = (1,)
_LEAST_LAYERS = 8  # number of a target's layers below which the default boundaries coincide

# -- files ----------------------------------------------------------------------------------------


def _is_plain_eagle(values: Mapping[str, Any], folder: Path) -> bool:
    """Whether a config that names the architecture of a plain model belongs to an EAGLE-3 head.

    Early heads have such a config. It has a draft vocabulary, which plain models lack.
    """
    return "draft_vocab_size" in values and any(
        (folder / name).is_file() for name in (WEIGHTS, PICKLES[0])
    )


def _parse(fields: Fields, target: DecoderConfig, names: set[str]) -> ParsedHead:
    """Parse an EAGLE-3 config.

    Engines disagree on whether tap ids count layers or the boundaries between layers. If the ids
    are ambiguous, the result contains both possible taps.
    """
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
    """Return the taps of an EAGLE-3 head whose config has no tap ids."""
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
    # All engines agree on the default boundaries, but not on the meaning of ids, so default
    # boundaries are left out.
    if not _are_default(config.taps):
        values["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": list(config.taps),
            "use_aux_hidden_state": True,
        }
    return values


def _are_default(taps: Taps) -> bool:
    """Whether the taps are the `default_taps` of any target with at least 8 layers."""
    num_layers = taps[-1] + 3
    return num_layers >= _LEAST_LAYERS and taps == default_taps(num_layers)


def _guess(head: EagleHead, token_ids: Tensor, taps: Tensor) -> Tensor:
    hidden = head(token_ids, taps, 1)[0]  # Column i predicts token i + 2.
    return head.target_ids(head.logits(hidden).argmax(-1))


# -- drafting -------------------------------------------------------------------------------------


def _pack(head: EagleHead, target: OwnDecoder) -> PackedHead:
    frame = head.frame()
    pack_linears(frame, target.ops)
    layers = EaglePass(head, target, packed_output(frame))
    return PackedHead(partial(EagleProposer, frame, layers))


class EagleProposer(ColumnProposer):
    """Drafts with an EAGLE-3 head whose layer is packed for the target's kernels."""

    head: EagleFrame
    takes_device_tokens = True

    def __init__(
        self,
        frame: EagleFrame,
        layers: EaglePass,
        pool: KVPool,
        target: OwnDecoder,
    ) -> None:
        super().__init__(frame, pool, target)
        self._layers = layers

    @override
    def warm_up(self, max_len: int, num_best: int) -> None:
        self._layers.warm_up(self.pool, max_len, self.wanted(num_best))

    def features(self, taps: Tensor) -> Tensor:
        """Project taps to features, ``[n, num_taps * target_hidden] -> [n, hidden]``."""
        return self.head.features(taps)

    @override
    def write_columns(self, before: Tensor, written: Written) -> None:
        self._layers.write_context(self.pool, before, written)

    def compute(
        self,
        features: Tensor,
        rows: Sequence[PassRows],
        draws: SamplingPlan | None,
        device_tokens: DeviceTokens | None,
    ) -> Columns:
        """Compute columns with the head's layer.

        The next features are its hidden states, which an EAGLE-3.1 head also normalises.
        """
        found = self._layers.compute(self.pool, features, rows, draws, device_tokens)
        normed, hidden = found.hidden[: len(rows)], found.taps
        assert hidden is not None
        following = normed if self.head.config.norm_output else hidden[: len(rows)]
        logits = self.head.project(normed) if found.logits is None else found.logits
        return Columns(Scored(logits, found.tokens, found.best), following)


# -- the layer as a pass --------------------------------------------------------------------------


class EaglePass(HeadPass):
    """The layer of an `EagleHead`, computed by the target's kernels; each column is a row.

    ``output``: the packed output layer and the soft cap of its logits. If it is None, passes return
    no logits.
    """

    def __init__(
        self,
        head: EagleHead,
        target: OwnDecoder,
        output: tuple[PackedLinear, float | None] | None = None,
    ) -> None:
        """Pack the layer; the head must have its final dtype and an embedding."""
        super().__init__(head.config, target)
        config, layer, ops = head.config, head.midlayer, self._ops
        self._joined = JoinedInputs(
            embedding_norm=plain_norm(layer.input_layernorm),
            given_norm=plain_norm(layer.hidden_norm),
            norms_residual=config.norm_before_residual,
        )
        self._qkv = pack_qkv(layer.self_attn, ops, has_bias=config.attention_bias)
        attention = AttentionWeights(
            qkv=self._qkv,
            head_norm=None,
            o=ops.pack_linear(layer.self_attn.o_proj.weight.detach().contiguous()),
            window=None,
            kv=KvLayer(0, 0),
        )
        mlp_norm, mlp = plain_norm(layer.post_attention_layernorm), pack_mlp(layer.mlp, ops)
        self._makes_logits = output is not None
        lm_head, cap = output or (target.weights.lm_head, None)
        self._weights = DecoderWeights(
            embedding=head.table,
            layers=(LayerWeights(None, attention, mlp_norm, mlp),),
            final_norm=plain_norm(head.norm),
            lm_head=lm_head,
            logit_cap=cap,
            joined=self._joined,
        )
        self._compiled = ops.compile_forward(self._weights)

    def warm_up(self, pool: KVPool, max_len: int, wanted: Wanted) -> None:
        """Compute RoPE's table for ``max_len`` tokens; on a GPU also capture the graphs."""
        self._rope.table(max_len)
        if self._compiled is not None:
            self._compiled.warm_up(pool, self._heads, (self._rope,), self._wanted(wanted))

    def _wanted(self, wanted: Wanted) -> Wanted:
        draws = wanted.draws if self._makes_logits else None
        return wanted._replace(draws=draws, taps=_BEHIND_LAYER)

    def write_context(self, pool: KVPool, before: Tensor, written: Written) -> None:
        """Write the KV of columns; ``before`` [n, hidden]: features of the preceding positions."""
        ops, num_rows = self._ops, self._ops.min_rows
        plan = self._plan_writing(pool, written)
        token_ids = filled(written.token_ids, num_rows)
        embedded = ops.embedding(token_ids, self._weights.embedding)
        x, _ = join(ops, self._joined, embedded, filled(before, num_rows))
        ops.rope_write(ops.linear(x, self._qkv), 0, plan, None)

    def compute(
        self,
        pool: KVPool,
        features: Tensor,
        rows: Sequence[PassRows],
        draws: SamplingPlan | None = None,
        device_tokens: DeviceTokens | None = None,
    ) -> LayersOutput:
        """Return the hidden states of columns after the final norm; ``taps`` has those before it.

        ``features`` [n, hidden]: features of the preceding positions. The output may have more rows
        than there are columns.
        """
        batch = self._layout.rows(pool.page_size, rows, wants_logits=True)
        if device_tokens is not None:
            batch = replace(batch, device_tokens=device_tokens)
        plan = self._ops.plan(batch, pool, self._heads, self._rope)
        wanted = self._wanted(Wanted(draws, inputs=filled(features, batch.num_rows)))
        if self._compiled is not None:
            return self._compiled(batch.token_ids, (plan,), wanted)
        token_ids = batch.token_ids.to(self._device)
        return run_layers(
            self._ops, self._weights, token_ids, (plan,), wanted.taps, given=wanted.inputs
        )


EAGLE = HeadKind(
    name=EagleConfig.kind,
    words=("eagle3",),
    recognises=_is_plain_eagle,
    parse=_parse,
    load=_load,
    to_json=_to_json,
    pack=_pack,
    guess=_guess,
    recipe=EAGLE_RECIPE,
)
