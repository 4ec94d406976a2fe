"""Parts that several families share: common fields, windows, activations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast, get_args

from ...ops.weights import Activation
from ..description.config import DecoderConfig, DtypeName, LayerSpec
from ..description.fields import Fields
from ..description.rope import NO_ROPE, RopeSpec, parse_rope

_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh", "relu2"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}


def base_config(
    fields: Fields,
    *,
    partial: float | None = None,
    theta: float = 10000.0,
    eps: float = 1e-6,
    tied: bool = False,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    is_gated: bool = True,
    attention_bias: bool | None = None,
    **differences: Any,  # noqa: ANN401 - declared fields
) -> DecoderConfig:
    """Build a config from the fields common to all families, and from ``differences``.

    ``partial``: default share of a head that RoPE rotates; None: the family rotates whole heads.
    ``theta``, ``eps``, ``tied``: the family's defaults. ``activation``: its field and its default.
    ``attention_bias``: default for all linears of attention; None: ``differences`` declare the
    biases. ``differences``: fields of `DecoderConfig`.
    """
    num_layers = fields.positive("num_hidden_layers")
    num_heads = fields.positive("num_attention_heads")
    hidden_size = fields.positive("hidden_size")
    max_len = fields.positive("max_position_embeddings", 2048)
    rope = differences.pop("rope", None)
    if rope is None:
        rope = parse_rope(fields, max_len=max_len, partial=partial, theta=theta)
    if rope.kind == "longrope":  # Longer texts would need another table for all positions.
        max_len = rope.original_max_len
    stretched = int(rope.factor * rope.original_max_len) if rope.kind == "yarn" else 0
    shape: dict[str, Any] = {
        "model_type": fields.text("model_type"),
        "vocab_size": fields.positive("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.positive("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": fields.positive("num_key_value_heads", num_heads),
        "head_dim": fields.positive("head_dim", hidden_size // num_heads),
        "norm_eps": fields.number("rms_norm_eps", eps),
        "rope": rope,
        "max_model_len": max(max_len, stretched),
        "layers": (LayerSpec(),) * num_layers,
        "dtype": _dtype(fields),
        "eos_token_ids": fields.integers("eos_token_id"),
        "tie_embeddings": fields.flag("tie_word_embeddings", tied),
        "activation": activation_of(fields, *activation, is_gated=is_gated),
    }
    if attention_bias is not None:
        has_bias = fields.flag("attention_bias", attention_bias)
        shape |= {"qkv_bias": has_bias, "o_bias": has_bias}
    return DecoderConfig(**(shape | differences))


def with_defaults(fields: Fields, defaults: Mapping[str, Any]) -> Fields:
    """Return the fields of a config.json, with ``defaults`` for absent and null ones."""
    given = {name: value for name, value in fields.values.items() if value is not None}
    return Fields({**defaults, **given}, fields.where)


def with_alpha(fields: Fields, head_dim: int) -> Fields:
    """Return fields with a plain RoPE for Hunyuan's "dynamic" kind with a fixed ``alpha``.

    This kind equals a RoPE with another theta.
    """
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    rope = fields.object(name)
    alpha = rope.number("alpha", 0.0)
    if rope.text("rope_type", rope.text("type", "default")) != "dynamic" or not alpha:
        return fields
    theta = rope.above_zero("rope_theta", fields.number("rope_theta", 10000.0))
    theta *= alpha ** (head_dim / (head_dim - 2))
    values = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    return Fields({**fields.values, **values}, fields.where)


def layer_kinds(fields: Fields, known: tuple[str, str], default: Sequence[str]) -> Sequence[str]:
    """Return the kind of each layer, by ``layer_types``, else ``default``.

    Raises `ModelLoadError` for a kind outside ``known``, and without any of the first one.
    """
    types, num_layers = fields.values.get("layer_types"), fields.positive("num_hidden_layers")
    types = default if types is None else types
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.error(
            "layer_types", f"must be a list of {num_layers} names from {', '.join(known)}"
        )
    unknown = next((kind for kind in types if kind not in known), None)
    if unknown is not None:
        raise fields.error(
            "layer_types", f"has {unknown!r}, which is not one of {', '.join(known)}"
        )
    if known[0] not in types:
        raise fields.error("layer_types", f"must have at least one {known[0]}")
    return types


def window_of(fields: Fields) -> int | None:
    """Return the size of the sliding window in positions; None without a window."""
    return fields.positive("sliding_window") if fields.has("sliding_window") else None


def windowed(fields: Fields, window: int | None) -> tuple[LayerSpec, ...]:
    """Return the specs of all layers, each with the same window."""
    return (LayerSpec(window=window),) * fields.positive("num_hidden_layers")


def qwen_layers(fields: Fields) -> tuple[LayerSpec, ...]:
    """Return layers with windows as in ``layer_types``, or from ``max_window_layers`` on."""
    num_layers = fields.positive("num_hidden_layers")
    window = window_of(fields) if fields.flag("use_sliding_window", False) else None
    first = fields.integer("max_window_layers", 28)
    kinds = kinds_of(fields, (layer >= first for layer in range(num_layers)))
    if window is None and fields.has("layer_types") and any(kinds):
        raise fields.error(
            "sliding_window", "is missing, but layer_types has sliding-window layers"
        )
    return tuple(LayerSpec(window=window if is_sliding else None) for is_sliding in kinds)


def sliding(
    fields: Fields, pattern: int, *, window: int, local: RopeSpec | None = None
) -> tuple[LayerSpec, ...]:
    """Return layers with a window, where by default every ``pattern``-th layer has none.

    ``window``: the default window. ``local``: RoPE of layers with a window, if it differs.
    """
    num_layers = fields.positive("num_hidden_layers")
    kinds = kinds_of(fields, ((layer + 1) % pattern != 0 for layer in range(num_layers)))
    if any(kinds) and fields.values.get("sliding_window", window) is None:
        raise fields.error("sliding_window", "is missing, but some layers have sliding windows")
    sliding = LayerSpec(window=fields.positive("sliding_window", window), rope=local)
    return tuple(sliding if is_sliding else LayerSpec() for is_sliding in kinds)


def without_rope_unless_windowed(layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Return the layers, without RoPE in layers that have no window."""
    return tuple(replace(each, rope=None if each.window else NO_ROPE) for each in layers)


def kinds_of(fields: Fields, default: Iterable[bool]) -> tuple[bool, ...]:
    """Return whether each layer has a window: as in ``layer_types``, otherwise ``default``."""
    types = fields.values.get("layer_types")
    if types is None:
        return tuple(default)
    num_layers = fields.positive("num_hidden_layers")
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= set(known):
        raise fields.error(
            "layer_types", f"must be a list of {num_layers} names from {', '.join(known)}"
        )
    return tuple(name == "sliding_attention" for name in types)


def rope_flags(fields: Fields) -> tuple[bool, ...]:
    """Return whether each layer has RoPE: its number in ``no_rope_layers`` is not 0."""
    num_layers = fields.positive("num_hidden_layers")
    found = fields.integers("no_rope_layers")
    if not found:
        every = fields.positive("no_rope_layer_interval", 4)
        return tuple((layer + 1) % every != 0 for layer in range(num_layers))
    if len(found) != num_layers:
        raise fields.error("no_rope_layers", f"must be {num_layers} integers")
    return tuple(each != 0 for each in found)


def cap_of(fields: Fields, name: str, default: float) -> float | None:
    """Return a soft cap; None if the field is null. Absent fields have the default."""
    if name in fields.values and not fields.has(name):
        return None
    return fields.above_zero(name, default)


def activation_of(fields: Fields, field: str, default: str, *, is_gated: bool) -> Activation:
    """Return the activation named by ``field``, else ``default``. Raises `UnsupportedConfig`."""
    name = fields.text(field, default)
    kind = _ACTIVATIONS.get(name)
    if kind is None:
        supported = ", ".join(_ACTIVATIONS)
        raise fields.unsupported(field, f"{name!r} is not supported; supported: {supported}")
    return Activation(kind, is_gated)


def _dtype(fields: Fields) -> DtypeName:
    """Return ``dtype``, which transformers called ``torch_dtype`` before v5."""
    name = fields.text("dtype", fields.text("torch_dtype", "float32"))
    if name not in get_args(DtypeName):
        supported = ", ".join(get_args(DtypeName))
        raise fields.error("dtype", f"{name!r} is not supported; supported: {supported}")
    return cast(DtypeName, name)
