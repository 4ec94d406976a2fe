"""Gemma 4: heads by layer, shared keys and values, per-layer inputs, experts beside the MLP."""

from __future__ import annotations

from dataclasses import replace

from ...ops.weights import Routing
from ..description.config import (
    BesideNames,
    DecoderConfig,
    ExpertNames,
    ExpertsSpec,
    HeadSpec,
    LayerSpec,
)
from ..description.fields import Fields
from ..description.fold import Fold
from ..description.rope import parse_ropes
from .dense import BEFORE_AND_AFTER, gemma
from .shared import activation_of, sliding

_ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")
_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default"},
}
_NAMES = ExpertNames("router.proj", "experts.", stacked="rows", factors="router.per_expert_scale")


def gemma4(fields: Fields) -> DecoderConfig:
    """Describe Gemma 4: `gemma` with heads and inputs by layer. Raises `UnsupportedConfig`."""
    if fields.values.get("use_bidirectional_attention") == "all":
        raise fields.unsupported("use_bidirectional_attention", "'all' is not supported")
    vocab_size = fields.positive("vocab_size")
    size = fields.integer("hidden_size_per_layer_input", 256)
    if size and fields.positive("vocab_size_per_layer_input", 262144) != vocab_size:
        raise fields.unsupported("vocab_size_per_layer_input", f"must be vocab_size, {vocab_size}")
    if not fields.has("rope_parameters"):
        fields = Fields({**fields.values, "rope_parameters": _ROPES}, fields.where)
    full, local = parse_ropes(fields, max_len=0, theta=1e6, local_theta=1e4, partial=1.0)
    # The last layer has no window, regardless of its declared kind.
    layers = (*sliding(fields, 6, window=512, local=local)[:-1], LayerSpec())
    # Rows of an image attend to each other only in layers with a window, and only in larger models.
    if fields.values.get("use_bidirectional_attention") == "vision":
        layers = tuple(replace(each, is_mutual=each.window is not None) for each in layers)
    return gemma(
        fields,
        activation=_ACTIVATION,
        norms=BEFORE_AND_AFTER,
        head_norm="each",
        norms_values=True,
        rope=full,
        layers=_with_experts(fields, _sharing(fields, _with_heads(fields, layers))),
        token_input_size=size,
        layer_factor="layer_scalar",
        attention_scale=1.0,
        logit_cap=fields.optional_number("final_logit_softcapping"),
        fold=Fold(embed_scale=fields.positive("hidden_size") ** 0.5, rounds_embed_scale=True),
    )


def gemma4_unified(fields: Fields) -> DecoderConfig:
    """Describe Gemma 4 without an image tower: `gemma4` without per-layer inputs."""
    return gemma4(Fields({**fields.values, "hidden_size_per_layer_input": 0}, fields.where))


def _with_heads(fields: Fields, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Return ``layers`` with the heads of each layer set.

    Full-attention layers have heads of their own; with ``per_layer_config``, the layers that it
    lists.
    """
    own = HeadSpec(
        fields.positive("num_attention_heads"),
        fields.positive("num_key_value_heads", 4),
        fields.positive("head_dim", 256),
    )
    keys_as_values = fields.flag("attention_k_eq_v", False)
    wide = own._replace(head_dim=fields.positive("global_head_dim", 512))
    if keys_as_values:
        count = fields.positive("num_global_key_value_heads", own.num_kv_heads)
        wide = wide._replace(num_kv_heads=count)
    listed = _listed(fields, own, len(layers))
    found = []
    for index, layer in enumerate(layers):
        is_full = layer.window is None
        heads = wide if is_full and not fields.has("per_layer_config") else own
        heads = listed.get(index, heads)
        found.append(replace(layer, heads=heads, keys_as_values=keys_as_values and is_full))
    return tuple(found)


def _listed(fields: Fields, own: HeadSpec, num_layers: int) -> dict[int, HeadSpec]:
    """Return the heads that ``per_layer_config`` lists, by layer number.

    Its keys are numbers as text, such as "5" or "05".
    """
    found, listed = {}, fields.object("per_layer_config")
    for name in listed.values:
        if not name.isdigit() or int(name) >= num_layers:
            raise listed.unsupported(name, "is not the number of a layer")
        given = listed.object(name)
        for other in given.values.keys() - {"num_key_value_heads", "head_dim"}:
            raise given.unsupported(other, "is not supported for a layer")
        found[int(name)] = HeadSpec(
            own.num_heads,
            given.positive("num_key_value_heads", own.num_kv_heads),
            given.positive("head_dim", own.head_dim),
        )
    return found


def _sharing(fields: Fields, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Let the last layers read the KV of the last earlier layer of their kind."""
    count, name = fields.integer("num_kv_shared_layers", 0), "num_kv_shared_layers"
    first = len(layers) - count
    if not 0 <= count < len(layers):
        raise fields.error(name, f"must be from 0 to {len(layers) - 1}, not {count}")
    wider = 2 if fields.flag("use_double_wide_mlp", False) else 1
    width = wider * fields.positive("intermediate_size")
    last = {layer.window: index for index, layer in enumerate(layers[:first])}
    if not {layer.window for layer in layers} <= last.keys():
        raise fields.error(
            name,
            f"is {count}, which leaves a kind of layers without one that keeps keys and values",
        )
    for index, layer in enumerate(layers[first:], first):
        source = last[layer.window]
        if layer.heads != layers[source].heads:
            why = f"lets layers {index} and {source} share KV, but their heads differ in shape"
            raise fields.error(name, why)
    shared = (replace(layer, kv_of=last[layer.window], width=width) for layer in layers[first:])
    return (*layers[:first], *shared)


def _with_experts(fields: Fields, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Add experts beside the MLP of each layer, if the config has any."""
    if not fields.flag("enable_moe_block", False):
        return layers
    spec = ExpertsSpec(
        count=fields.positive("num_experts"),
        width=fields.positive("moe_intermediate_size"),
        routing=Routing(fields.positive("top_k_experts"), renorm=0.0),
        names=_NAMES,
        activation=activation_of(fields, *_ACTIVATION, is_gated=True),
        beside=BesideNames(),
    )
    if spec.routing.top_k > spec.count:
        raise fields.error(
            "top_k_experts", f"is {spec.routing.top_k}, but there are only {spec.count} experts"
        )
    return tuple(replace(layer, experts=spec) for layer in layers)
