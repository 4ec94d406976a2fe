"""Families whose layers are of two kinds: attention, and a recurrent state in its place."""

from __future__ import annotations

from dataclasses import replace

from ...ops.weights import RecurrentShape, Routing
from ..description.config import BESIDE_THE_MODEL, DecoderConfig, DeltaSpec, ExpertNames, LayerSpec
from ..description.fields import Fields
from ..description.fold import Fold
from .experts import renorm_of, top_k_of, with_experts
from .shared import base_config, with_defaults

_NAMES = ExpertNames(shared="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate")
_DEFAULT_MAX_LEN = 32768  # of the classes' configs
_KINDS = ("full_attention", "linear_attention")


def qwen3_next(fields: Fields) -> DecoderConfig:
    """Qwen3-Next: the gated delta rule in three of four layers, gated attention in the others."""
    layers = _layers(fields, is_fused=True)
    return _config(fields, _with_experts(fields, layers, renorm_of(fields, True)))


def qwen3_5(fields: Fields) -> DecoderConfig:
    """Qwen 3.5 to 3.8: `qwen3_next` with an MLP in the place of experts."""
    return _config(fields, _layers(fields, is_fused=False))


def qwen3_5_moe(fields: Fields) -> DecoderConfig:
    """Qwen 3.5 and 3.6 with experts, whose weights are always divided by their sum."""
    return _config(fields, _with_experts(fields, _layers(fields, is_fused=False), 0.0))


def _config(fields: Fields, layers: tuple[LayerSpec, ...]) -> DecoderConfig:
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise fields.error("hidden_act", f"{activation!r} is not supported; silu is")
    width = fields.integer("shared_expert_intermediate_size", 1)  # all layers may have experts
    defaults = {"max_position_embeddings": _DEFAULT_MAX_LEN, "intermediate_size": width}
    return base_config(
        with_defaults(fields, defaults),
        partial=0.25,
        head_dim=fields.positive("head_dim", 256),
        head_norm="each",
        has_gate=True,
        mtp=BESIDE_THE_MODEL,
        attention_bias=False,
        fold=Fold(norm_offset=1.0),
        layers=layers,
    )


def _layers(fields: Fields, *, is_fused: bool) -> tuple[LayerSpec, ...]:
    delta = LayerSpec(mixer=DeltaSpec(_shape(fields), is_fused, is_fused))
    return tuple(LayerSpec() if is_full else delta for is_full in _full_layers(fields))


def _shape(fields: Fields) -> RecurrentShape:
    num_key_heads = fields.positive("linear_num_key_heads", 16)
    num_value_heads = fields.positive("linear_num_value_heads", 32)
    if num_value_heads % num_key_heads:
        problem = f"{num_value_heads} is no multiple of linear_num_key_heads, {num_key_heads}"
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
    """Whether each layer has attention: by ``layer_types``, else every fourth by default."""
    num_layers = fields.positive("num_hidden_layers")
    types = fields.values.get("layer_types")
    if types is None:
        every = fields.positive("full_attention_interval", 4)
        types = [_KINDS[(layer + 1) % every != 0] for layer in range(num_layers)]
    is_known = isinstance(types, list) and all(kind in _KINDS for kind in types)
    if not is_known or len(types) != num_layers:
        raise fields.error("layer_types", f"must be {num_layers} of {', '.join(_KINDS)}")
    if _KINDS[0] not in types:
        raise fields.error("layer_types", f"without any {_KINDS[0]} is not supported")
    return tuple(kind == _KINDS[0] for kind in types)


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


def as_stored(config: DecoderConfig, names: set[str]) -> DecoderConfig:
    """The config with the matrices that the files hold: fused or not, experts stacked or not."""
    endings = (
        "in_proj_qkvz.weight",
        "in_proj_ba.weight",
        "mlp.experts.gate_up_proj",
        "mlp.gate_up_proj.weight",
    )
    fused_qkvz, fused_ba, is_stacked, fused_gate_up = (
        any(name.endswith(ending) for name in names) for ending in endings
    )

    def stored(layer: LayerSpec) -> LayerSpec:
        if isinstance(layer.mixer, DeltaSpec):
            mixer = layer.mixer._replace(fused_qkvz=fused_qkvz, fused_ba=fused_ba)
            layer = replace(layer, mixer=mixer)
        if layer.experts is not None and is_stacked:
            names = layer.experts.names._replace(expert="mlp.experts.", stacked="rows")
            layer = replace(layer, experts=replace(layer.experts, names=names))
        return layer

    fold = replace(config.fold, fused_gate_up=fused_gate_up)
    return replace(config, layers=tuple(map(stored, config.layers)), fold=fold)


def tiled(config: DecoderConfig) -> DecoderConfig:
    """The config where value heads that read one key head do not lie side by side."""
    return replace(config, layers=tuple(_tiled_layer(each) for each in config.layers))


def _tiled_layer(layer: LayerSpec) -> LayerSpec:
    if not isinstance(layer.mixer, DeltaSpec):
        return layer
    shape = layer.mixer.shape._replace(is_tiled=True)
    return replace(layer, mixer=layer.mixer._replace(shape=shape))
