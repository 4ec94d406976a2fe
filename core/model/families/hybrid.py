"""Families with two kinds of layers: attention, and a recurrent state in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import starmap
from typing import Any

from ...ops.mixers.recurrent import RecurrentShape
from ...ops.weights import Routing
from ..description.config import (
    LLAMA_NORMS,
    MTP_BESIDE_MODEL,
    DecoderConfig,
    DeltaSpec,
    ExpertNames,
    LayerSpec,
)
from ..description.fields import Fields
from ..description.fold import Fold
from ..description.rope import NO_ROPE
from ..description.tensors import DELTA, Shape, layer_prefix
from .dense import olmo2
from .experts import renorm_of, top_k_of, with_experts
from .shared import base_config, layer_kinds, with_defaults

_NAMES = ExpertNames(shared="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate")
_DEFAULT_MAX_LEN = 32768  # default of the config classes
_KINDS = ("full_attention", "linear_attention")
_OLMO_NAMES = (
    (".attention_layer_norm.", ".input_layernorm."),
    (".feedforward_layer_norm.", ".post_attention_layernorm."),
    *(
        (f".linear_attn.{name}_proj.", f".linear_attn.in_proj_{own}.")
        for name, own in zip("qkvgba", "qkvzba", strict=True)
    ),
    (".linear_attn.o_proj.", ".linear_attn.out_proj."),
    (".linear_attn.o_norm.", ".linear_attn.norm."),
)


def qwen3_next(fields: Fields) -> DecoderConfig:
    """Describe Qwen3-Next: gated delta rule in three of four layers, else gated attention."""
    layers = _layers(fields, is_fused=True)
    return _config(fields, _with_experts(fields, layers, renorm_of(fields, True)))


def qwen3_5(fields: Fields) -> DecoderConfig:
    """Describe Qwen 3.5 to 3.8: `qwen3_next` with an MLP in place of experts."""
    return _config(fields, _layers(fields, is_fused=False))


def qwen3_5_moe(fields: Fields) -> DecoderConfig:
    """Describe Qwen 3.5 and 3.6 with experts, whose weights are always renormalised."""
    return _config(fields, _with_experts(fields, _layers(fields, is_fused=False), 0.0))


def olmo_hybrid(fields: Fields) -> DecoderConfig:
    """Describe OLMo Hybrid: `dense.olmo2` with the delta rule in three of four layers.

    A norm precedes the delta rule. Its factor beta can be up to 2, so that a state may change its
    sign (arXiv 2411.12537). Attention has no RoPE if the config's RoPE base is null.
    """
    if fields.text("hidden_act", "silu") != "silu":  # The convolutions use this activation, too.
        raise fields.unsupported("hidden_act", "other than silu is not supported")
    ropes = (fields, fields.object("rope_parameters"))
    has_none = any("rope_theta" in each.values for each in ropes)
    has_none = has_none and not any(each.has("rope_theta") for each in ropes)
    more: dict[str, Any] = {"rope": NO_ROPE} if has_none else {}
    num_heads = fields.positive("num_attention_heads")
    hidden_size = fields.positive("hidden_size")
    key_heads = fields.positive("linear_num_key_heads", num_heads)
    key_dim = fields.positive("linear_key_head_dim", int(0.75 * hidden_size / key_heads))
    fields = with_defaults(
        fields,
        {
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": num_heads,
            "linear_key_head_dim": key_dim,
            "linear_value_head_dim": 2 * key_dim,
            "max_position_embeddings": 65536,
        },
    )
    delta = DeltaSpec(
        _shape(fields),
        ("q", "k", "v", "z"),
        most_beta=2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0,
        norm_eps=1e-5,
    )
    linear = LayerSpec(mixer=delta, norms=LLAMA_NORMS)
    layers = tuple(LayerSpec() if is_full else linear for is_full in _full_layers(fields))
    return olmo2(
        fields,
        layers=layers,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        stored_names=_OLMO_NAMES,
        **more,
    )


def _config(fields: Fields, layers: tuple[LayerSpec, ...]) -> DecoderConfig:
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise fields.error("hidden_act", f"{activation!r} is not supported; only silu is")
    width = fields.integer("shared_expert_intermediate_size", 1)  # All layers may have experts.
    defaults = {"max_position_embeddings": _DEFAULT_MAX_LEN, "intermediate_size": width}
    return base_config(
        with_defaults(fields, defaults),
        partial=0.25,
        head_dim=fields.positive("head_dim", 256),
        head_norm="each",
        has_gate=True,
        mtp=MTP_BESIDE_MODEL,
        attention_bias=False,
        fold=Fold(norm_offset=1.0),
        layers=layers,
    )


def _layers(fields: Fields, *, is_fused: bool) -> tuple[LayerSpec, ...]:
    matrices = ("qkvz",) if is_fused else ("qkv", "z")
    delta = LayerSpec(mixer=DeltaSpec(_shape(fields), matrices, is_fused))
    return tuple(LayerSpec() if is_full else delta for is_full in _full_layers(fields))


def _shape(fields: Fields) -> RecurrentShape:
    num_key_heads = fields.positive("linear_num_key_heads", 16)
    num_value_heads = fields.positive("linear_num_value_heads", 32)
    if num_value_heads % num_key_heads:
        problem = f"is {num_value_heads}, not a multiple of linear_num_key_heads, {num_key_heads}"
        raise fields.error("linear_num_value_heads", problem)
    conv_len = fields.positive("linear_conv_kernel_dim", 4)
    if conv_len < 2:
        raise fields.error("linear_conv_kernel_dim", f"must be at least 2, not {conv_len}")
    return RecurrentShape(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=fields.positive("linear_key_head_dim", 128),
        value_dim=fields.positive("linear_value_head_dim", 128),
        conv_len=conv_len,
    )


def _full_layers(fields: Fields) -> tuple[bool, ...]:
    """Return whether each layer has attention: as in ``layer_types``, or every n-th layer."""
    every = fields.positive("full_attention_interval", 4)
    num_layers = fields.positive("num_hidden_layers")
    by_interval = [_KINDS[(layer + 1) % every != 0] for layer in range(num_layers)]
    return tuple(kind == _KINDS[0] for kind in layer_kinds(fields, _KINDS, by_interval))


def _with_experts(
    fields: Fields, layers: tuple[LayerSpec, ...], renorm: float | None
) -> tuple[LayerSpec, ...]:
    return with_experts(
        fields,
        layers,
        Routing(top_k_of(fields), renorm=renorm),
        names=_NAMES,
        shared_width=fields.positive("shared_expert_intermediate_size"),
    )


def as_stored(config: DecoderConfig, shapes: Mapping[str, Shape]) -> DecoderConfig:
    """Return the config adapted to the files: matrices fused or not, experts stacked or not."""

    def has(ending: str) -> bool:
        return any(name.endswith(ending) for name in shapes)

    matrices: tuple[str, ...] = ("qkv", "z")
    for kinds in (("qkvz",), ("q", "k", "v", "z")):
        matrices = kinds if has(f"in_proj_{kinds[0]}.weight") else matrices
    fused_ba = has("in_proj_ba.weight")
    is_stacked, fused_gate_up = has("mlp.experts.gate_up_proj"), has("mlp.gate_up_proj.weight")

    def stored(index: int, layer: LayerSpec) -> LayerSpec:
        if isinstance(layer.mixer, DeltaSpec):
            rows = _conv_rows(layer.mixer.shape, layer_prefix(index), shapes)
            mixer = layer.mixer._replace(matrices=matrices, fused_ba=fused_ba, conv_rows=rows)
            layer = replace(layer, mixer=mixer)
        if layer.experts is not None and is_stacked:
            names = layer.experts.names._replace(expert="mlp.experts.", stacked="rows")
            layer = replace(layer, experts=replace(layer.experts, names=names))
        return layer

    fold = replace(config.fold, fused_gate_up=fused_gate_up)
    return replace(config, layers=tuple(starmap(stored, enumerate(config.layers))), fold=fold)


def _conv_rows(shape: RecurrentShape, prefix: str, shapes: Mapping[str, Shape]) -> tuple[int, ...]:
    """Return the channels in each of a convolution's three tensors; () for a single tensor.

    transformers writes three tensors of about equal size, regardless of where queries and keys end.
    """
    names = [f"{prefix}{DELTA}{kind}_conv1d.weight" for kind in "qkv"]
    if not shapes.keys() & set(names):
        return ()
    rows = tuple(shapes[name][0] for name in names if name in shapes)
    if len(rows) == len(names) and sum(rows) == shape.conv_channels:
        return rows
    keys = shape.num_key_heads * shape.key_dim
    return keys, keys, shape.value_width


def tiled(config: DecoderConfig) -> DecoderConfig:
    """Return the config for tiled value heads: value head j reads key head j % num_key_heads."""
    return replace(config, layers=tuple(_tiled_layer(each) for each in config.layers))


def _tiled_layer(layer: LayerSpec) -> LayerSpec:
    if not isinstance(layer.mixer, DeltaSpec):
        return layer
    shape = layer.mixer.shape._replace(is_tiled=True)
    return replace(layer, mixer=layer.mixer._replace(shape=shape))
