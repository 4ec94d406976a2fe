"""Families that mix Mamba-2 layers with attention layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...ops.mixers.recurrent import RecurrentShape
from ...ops.weights import Routing
from ..description.config import (
    DecoderConfig,
    ExpertNames,
    LayerSpec,
    Mamba2Spec,
    MlpNames,
    NormNames,
)
from ..description.fields import Fields
from ..description.fold import Fold
from ..description.rope import NO_ROPE
from .experts import renorm_of, top_k_of, with_experts
from .shared import activation_of, base_config, with_defaults

# Layer kinds have three spellings: the names of transformers since version 5, its older names, and
# the letters of Nemotron-H's pattern.
_ATTENTION, _MAMBA, _MLP, _EXPERTS = "full_attention", "linear_attention", "mlp", "moe"
_KINDS = {
    _ATTENTION: _ATTENTION,
    _MAMBA: _MAMBA,
    _MLP: _MLP,
    _EXPERTS: _EXPERTS,
    "attention": _ATTENTION,
    "mamba": _MAMBA,
}
_PATTERN = {"*": _ATTENTION, "M": _MAMBA, "-": _MLP, "E": _EXPERTS}
_LISTS = ("layers_block_type", "layer_types")
_UNGATED = MlpNames(gate=None)


class _Names(NamedTuple):
    """Names of Mamba-2's fields in a config.json."""

    heads: str
    groups: str
    key_dim: str
    value_dim: str
    conv_len: str
    conv_bias: str
    bias: str
    activation: str


_BAMBA = _Names(
    "mamba_n_heads",
    "mamba_n_groups",
    "mamba_d_state",
    "mamba_d_head",
    "mamba_d_conv",
    "mamba_conv_bias",
    "mamba_proj_bias",
    "hidden_act",
)
_NEMOTRON = _Names(
    "mamba_num_heads",
    "n_groups",
    "ssm_state_size",
    "mamba_head_dim",
    "conv_kernel",
    "use_conv_bias",
    "use_bias",
    "mamba_hidden_act",
)
# These are the defaults of the config classes.
_BAMBA_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_NEMOTRON_DEFAULTS = {
    "mamba_num_heads": 128,
    "n_groups": 8,
    "ssm_state_size": 128,
    "mamba_head_dim": 64,
    "conv_kernel": 4,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "intermediate_size": 21504,
    "max_position_embeddings": 4096,
}
_GRANITE_NAMES = (
    (".shared_mlp.input_linear.", ".mlp.gate_up_proj."),
    (".shared_mlp.output_linear.", ".mlp.down_proj."),
    (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
    (".block_sparse_moe.experts.", ".mlp.experts."),
    (".block_sparse_moe.router.layer.", ".mlp.gate."),
    (".block_sparse_moe.router.", ".mlp.gate."),
)
_BAMBA_NAMES = ((".feed_forward.", ".mlp."), ("model.final_layernorm.", "model.norm."))
_NEMOTRON_NAMES = (
    ("backbone.", "model."),
    ("model.embeddings.", "model.embed_tokens."),
    ("model.norm_f.", "model.norm."),
    *((f".mixer.{name}_proj.", f".self_attn.{name}_proj.") for name in "qkvo"),
    *(
        (f".mixer.{name}.", f".mlp.{name}.")
        for name in ("up_proj", "down_proj", "gate", "experts", "shared_experts")
    ),
    (".mixer.", ".mamba."),
)


def granite_hybrid(fields: Fields) -> DecoderConfig:
    """Describe Granite 4: Mamba-2 or attention, then experts beside an MLP, or an MLP alone."""
    width = fields.positive("shared_intermediate_size", 1024)
    residual = fields.number("residual_multiplier", 1.0)
    layers = _layers(
        fields, {_MAMBA: LayerSpec(mixer=_bamba_spec(fields)), _ATTENTION: LayerSpec()}
    )
    if fields.integer("num_local_experts", 8):
        layers = with_experts(
            fields,
            layers,
            # The routing weights include the factor, so that experts stay packed; the shared
            # expert's matrix is multiplied by it.
            Routing(top_k_of(fields), of_chosen=True, factor=residual),
            names=ExpertNames(shared="mlp."),
            width="intermediate_size",
            shared_width=width,
        )
    more: dict[str, Any] = {}
    if fields.text("position_embedding_type", "nope") != "rope":
        more["rope"] = NO_ROPE
    return base_config(
        fields,
        intermediate_size=width,
        layers=layers,
        attention_bias=False,
        attention_scale=fields.number("attention_multiplier", 1.0),
        fold=Fold(
            embed_scale=fields.number("embedding_multiplier", 1.0),
            residual_scale=residual,
            logit_scale=1 / fields.above_zero("logits_scaling", 1.0),
        ),
        stored_names=_GRANITE_NAMES,
        **more,
    )


def bamba(fields: Fields) -> DecoderConfig:
    """Describe Bamba: Mamba-2, and in a few layers attention whose RoPE rotates half of a head."""
    attending = set(fields.integers("attn_layer_indices"))
    num_layers = fields.positive("num_hidden_layers")
    beyond = sorted(layer for layer in attending if not 0 <= layer < num_layers)
    if beyond:
        raise fields.error(
            "attn_layer_indices", f"has {beyond[0]}, but the model has only {num_layers} layers"
        )
    mamba = LayerSpec(mixer=_bamba_spec(fields))
    layers = tuple(LayerSpec() if layer in attending else mamba for layer in range(num_layers))
    return base_config(
        fields,
        layers=_with_attention(fields, "attn_layer_indices", layers),
        eps=1e-5,
        partial=0.5,
        attention_bias=False,
        mlp_bias=fields.flag("mlp_bias", False),
        norms=NormNames(mlp="pre_ff_layernorm"),
        stored_names=_BAMBA_NAMES,
    )


def falcon_h1(fields: Fields) -> DecoderConfig:
    """Describe Falcon-H1: attention beside Mamba-2 in each layer; factors on nearly every output.

    All factors are folded into weights (arXiv 2507.22448).
    """
    for name in ("mamba_proj_bias", "projectors_bias", "attention_bias"):
        if fields.flag(name, False):
            raise fields.error(name, "is not supported in a model of this type")
    num_heads = fields.positive("num_attention_heads")
    head_dim = fields.positive("head_dim", fields.positive("hidden_size") // num_heads)
    into = fields.above_zero("attention_in_multiplier", 1.0)
    gate, down = _factors(fields, "mlp_multipliers", 2)
    layer = LayerSpec(mixer=_falcon_spec(fields), beside_attention=True)
    return base_config(
        fields,
        layers=(layer,) * fields.positive("num_hidden_layers"),
        eps=1e-5,
        head_dim=head_dim,
        attention_scale=head_dim**-0.5 * into**2 * fields.above_zero("key_multiplier", 1.0),
        mlp_bias=fields.flag("mlp_bias", False),
        norms=NormNames(mlp="pre_ff_layernorm"),
        fold=Fold(
            embed_scale=fields.number("embedding_multiplier", 1.0),
            logit_scale=fields.number("lm_head_multiplier", 1.0),
            attention_out_scale=into * fields.number("attention_out_multiplier", 1.0),
            mixer_out_scale=fields.number("ssm_out_multiplier", 1.0),
            gate_scale=gate,
            mlp_out_scale=down,
        ),
        stored_names=_BAMBA_NAMES,
    )


def nemotron_h(fields: Fields) -> DecoderConfig:
    """Describe Nemotron-H and Nemotron 3: each layer is Mamba-2, attention, an MLP or experts.

    An MLP has a squared ReLU and no gate; attention has no RoPE (arXiv 2504.03624).
    """
    fields = with_defaults(fields, _NEMOTRON_DEFAULTS)
    has_bias = fields.flag("mlp_bias", False)
    kinds = {
        _MAMBA: LayerSpec(mixer=_spec(fields, _NEMOTRON), parts="mixer"),
        _ATTENTION: LayerSpec(parts="mixer"),
        _MLP: LayerSpec(parts="mlp"),
    }
    found = _found_kinds(fields, (*kinds, _EXPERTS))
    fields = Fields({**fields.values, "num_hidden_layers": len(found)}, fields.where)
    if _EXPERTS in found:
        if has_bias:
            raise fields.error("mlp_bias", "is not supported in a model with experts")
        kinds[_EXPERTS] = _nemotron_experts(fields)
    return base_config(
        fields,
        layers=_layers(fields, kinds),
        rope=NO_ROPE,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        activation=("mlp_hidden_act", "relu2"),
        is_gated=False,
        mlp_bias=has_bias,
        mlp_names=_UNGATED,
        norms=NormNames(attention="norm", mlp=None),
        stored_names=_NEMOTRON_NAMES,
    )


# -- kinds of layers ------------------------------------------------------------------------------


def _layers(fields: Fields, kinds: Mapping[str, LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return the layers by their kinds. Raises `ModelLoadError` for a kind outside ``kinds``."""
    layers = tuple(kinds[kind] for kind in _found_kinds(fields, tuple(kinds)))
    return _with_attention(fields, _kinds_field(fields), layers)


def _with_attention(
    fields: Fields, name: str, layers: tuple[LayerSpec, ...]
) -> tuple[LayerSpec, ...]:
    if not any(layer.has_attention for layer in layers):
        raise fields.error(name, f"must have at least one {_ATTENTION}")
    return layers


def _kinds_field(fields: Fields) -> str:
    return next((name for name in _LISTS if fields.has(name)), "hybrid_override_pattern")


def _found_kinds(fields: Fields, known: Sequence[str]) -> list[str]:
    """Return the kind of each layer, from a list or from a pattern of one letter a layer.

    Raises `ModelLoadError` for a kind outside ``known``.
    """
    name = _kinds_field(fields)
    found = fields.values.get(name)
    names = _PATTERN if name == "hybrid_override_pattern" else _KINDS
    if not isinstance(found, (list, str)) or not found:
        raise fields.error(name, "must name the kind of each layer")
    for layer, kind in enumerate(found):
        if names.get(str(kind)) not in known:
            supported = ", ".join(each for each, kind in names.items() if kind in known)
            problem = f"has {kind!r} for layer {layer}, which is not one of {supported}"
            raise fields.error(name, problem)
    num_layers = fields.integer("num_hidden_layers", len(found))
    if len(found) != num_layers:
        raise fields.error(
            name, f"names {len(found)} layers, but num_hidden_layers is {num_layers}"
        )
    return [names[kind] for kind in found]


# -- their shapes ---------------------------------------------------------------------------------


def _spec(fields: Fields, names: _Names) -> Mamba2Spec:
    """Return the `Mamba2Spec` of a config; ``fields`` must include the defaults."""
    num_heads, num_groups = fields.positive(names.heads), fields.positive(names.groups)
    if num_heads % num_groups:
        problem = f"is {num_heads}, not a multiple of {names.groups}, {num_groups}"
        raise fields.error(names.heads, problem)
    conv_len = fields.positive(names.conv_len)
    if conv_len < 2:
        raise fields.error(names.conv_len, f"must be at least 2, not {conv_len}")
    activation = fields.text(names.activation, "silu")
    if activation != "silu":
        raise fields.error(names.activation, f"{activation!r} is not supported; only silu is")
    _refuse_limits(fields)
    return Mamba2Spec(
        RecurrentShape(
            num_key_heads=num_groups,
            num_value_heads=num_heads,
            key_dim=fields.positive(names.key_dim),
            value_dim=fields.positive(names.value_dim),
            conv_len=conv_len,
        ),
        num_norms=num_groups,
        has_conv_bias=fields.flag(names.conv_bias, True),
        has_bias=fields.flag(names.bias, False),
    )


def _falcon_spec(fields: Fields) -> Mamba2Spec:
    width = None
    if fields.has("mamba_d_ssm") or "mamba_d_ssm" not in fields.values:
        width = fields.positive("mamba_d_ssm", 1024)
    spec = _bamba_spec(fields, width)
    has_norm = fields.flag("mamba_rms_norm", False)
    if has_norm and fields.flag("mamba_norm_before_gate", True):
        raise fields.error("mamba_norm_before_gate", "with mamba_rms_norm is not supported")
    into = fields.number("ssm_in_multiplier", 1.0)
    z, x, b, c, dt = (into * factor for factor in _factors(fields, "ssm_multipliers", 5))
    return spec._replace(num_norms=spec.num_norms if has_norm else 0, factors=(z, x, b, c, dt))


def _factors(fields: Fields, name: str, count: int) -> list[float]:
    """Return a list of ``count`` factors; all 1 by default."""
    found = fields.values.get(name)
    if found is None:
        return [1.0] * count
    numbers = [_as_float(each) for each in found] if isinstance(found, list) else []
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise fields.error(name, f"must be {count} numbers")
    return numbers


def _bamba_spec(fields: Fields, width: int | None = None) -> Mamba2Spec:
    """Return the `Mamba2Spec` of Bamba, and of families with the same field names.

    ``width``: inner width of all heads together; None: ``mamba_expand`` times the hidden size.
    """
    fields = with_defaults(fields, _BAMBA_DEFAULTS)
    num_heads, of = fields.positive(_BAMBA.heads), "mamba_d_ssm"
    if width is None:
        width = fields.positive("mamba_expand") * fields.positive("hidden_size")
        of = "mamba_expand times hidden_size"
    if fields.values[_BAMBA.value_dim] == "auto":
        fields = Fields({**fields.values, _BAMBA.value_dim: width // num_heads}, fields.where)
    value_dim = fields.positive(_BAMBA.value_dim)
    if num_heads * value_dim != width:
        problem = (
            f"is {num_heads}, but times {_BAMBA.value_dim}, {value_dim}, it must be {of}, {width}"
        )
        raise fields.error(_BAMBA.heads, problem)
    return _spec(fields, _BAMBA)


def _refuse_limits(fields: Fields) -> None:
    """Raise `ModelLoadError` for limits of dt, which transformers applies to prompts only."""
    limits = fields.values.get("time_step_limit")
    if limits is None:
        return
    if not isinstance(limits, list) or len(limits) != 2:
        raise fields.error("time_step_limit", "must be two numbers")
    low, high = (_as_float(limit) for limit in limits)
    if low != 0.0 or high != math.inf:
        problem = f"must be from 0 to Infinity, not from {low} to {high}"
        raise fields.error("time_step_limit", problem)


def _as_float(value: object) -> float:
    """Return a number, or NaN for an invalid value.

    transformers may write a number that is not finite as an object.
    """
    if isinstance(value, dict):
        value = value.get("__float__")
    try:
        return float(value)  # type: ignore[arg-type] # float raises for other types
    except (TypeError, ValueError):
        return math.nan


def _nemotron_experts(fields: Fields) -> LayerSpec:
    """Return experts without gates, one of them shared, with the router of DeepSeek V3."""
    if fields.has("moe_latent_size"):
        raise fields.error(
            "moe_latent_size", "is not supported: the experts would read projected inputs"
        )
    names = ExpertNames(
        mlp=_UNGATED, shared_mlp=_UNGATED, choice_bias="mlp.gate.e_score_correction_bias"
    )
    routing = Routing(
        top_k_of(fields),
        score="sigmoid",
        num_groups=fields.positive("n_group", 1),
        kept_groups=fields.positive("topk_group", 1),
        renorm=1e-20 if renorm_of(fields, True) is not None else None,
        factor=fields.number("routed_scaling_factor", 1.0),
    )
    (layer,) = with_experts(
        fields,
        (LayerSpec(parts="mlp"),),
        routing,
        names=names,
        activation=activation_of(fields, "mlp_hidden_act", "relu2", is_gated=False),
        shared_width=fields.positive("moe_shared_expert_intermediate_size", 7688),
    )
    return layer
