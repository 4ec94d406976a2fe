"""Names and shapes of a decoder's tensors, in the spelling of transformers."""

from __future__ import annotations

from collections.abc import Iterable

from ...ops.weights import LatentShape
from .config import (
    ConvSpec,
    DecoderConfig,
    DeltaSpec,
    ExpertsSpec,
    Mamba2Spec,
    MixerSpec,
    MlpNames,
)

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
FUSED_GATE_UP = "gate_up_proj"
TOKEN_TABLE = "model.embed_tokens_per_layer.weight"
TOKEN_PROJECTION = "model.per_layer_model_projection"
TOKEN_NORM = "model.per_layer_projection_norm.weight"
# Of a layer.
TOKEN_GATE, TOKEN_OUT = "per_layer_input_gate", "per_layer_projection"
TOKEN_OUT_NORM = "post_per_layer_input_norm"
# Of a layer that predicts a further token, beside the layer's own.
MTP_EMBEDDING_NORM, MTP_HIDDEN_NORM = "model.mtp.enorm.weight", "model.mtp.hnorm.weight"
MTP_PROJECTION = "model.mtp.eh_proj"
# Of an assistant, beside its layers.
PRE_PROJECTION, POST_PROJECTION = "pre_projection", "post_projection"
CENTROIDS, TOKEN_ORDERING = "masked_embedding.centroids", "masked_embedding.token_ordering"
DELTA, MAMBA, CONV = "linear_attn.", "mamba.", "conv."
_OF_KEYS = ("k_proj", "v_proj", "k_norm", "v_norm")


def layer_prefix(layer: int) -> str:
    """Prefix of the names of a layer's tensors."""
    return f"model.layers.{layer}."


def ignored(config: DecoderConfig, names: Iterable[str]) -> tuple[str, ...]:
    """Tensors that a checkpoint may hold and nothing reads.

    Some tied checkpoints store the embedding as the output matrix, too. Layers behind the last,
    or beside the model, predict further tokens: mtp.py reads them. Layers that read the keys of
    others may come with matrices of keys.
    """
    unread = tuple(
        f"{layer_prefix(layer)}self_attn.{name}."
        for layer, spec in enumerate(config.layers)
        if spec.kv_of is not None
        for name in _OF_KEYS
    )
    names = list(names)
    further = set(further_tensors(config, names))
    return tuple(
        name
        for name in names
        if (name == LM_HEAD and config.tie_embeddings) or name in further or name.startswith(unread)
    )


def further_tensors(config: DecoderConfig, names: Iterable[str]) -> list[str]:
    """The tensors of layers that predict further tokens, in checkpoints that may have such."""
    if config.mtp is None:
        return []
    return [
        name for name in names if name.startswith("mtp.") or _layer_of(name) >= config.num_layers
    ]


def _layer_of(name: str) -> int:
    """The number of a tensor's layer; -1: it is of none."""
    number = name.removeprefix("model.layers.").partition(".")[0]
    return int(number) if name.startswith("model.layers.") and number.isdigit() else -1


def tensor_shapes(config: DecoderConfig) -> Shapes:
    """Every tensor that a checkpoint must hold."""
    shapes: Shapes = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        FINAL_NORM: (config.hidden_size,),
    }
    shapes |= _norm_biases(config, shapes)
    if not config.tie_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    if config.token_input_size:
        width = config.num_layers * config.token_input_size
        shapes[TOKEN_TABLE] = (config.vocab_size, width)
        shapes[f"{TOKEN_PROJECTION}.weight"] = (width, config.hidden_size)
        shapes[TOKEN_NORM] = (config.token_input_size,)
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(config, layer).items()}
    return shapes


def _layer_shapes(config: DecoderConfig, layer: int) -> Shapes:
    hidden, spec = config.hidden_size, config.layers[layer]
    norms = [f"{name}.weight" for name in config.norms if name is not None]
    shapes: Shapes = dict.fromkeys(norms, (hidden,))
    shapes |= _norm_biases(config, shapes)
    if spec.has_attention:
        shapes |= _attention_shapes(config, layer)
    if spec.mixer is not None:
        shapes |= _recurrent_shapes(hidden, spec.mixer)
    if config.layer_factor is not None:
        shapes[config.layer_factor] = (1,)
    if config.token_input_size:
        shapes[f"{TOKEN_GATE}.weight"] = (config.token_input_size, hidden)
        shapes[f"{TOKEN_OUT}.weight"] = (hidden, config.token_input_size)
        shapes[f"{TOKEN_OUT_NORM}.weight"] = (hidden,)
    experts = {} if spec.experts is None else _expert_shapes(config, spec.experts)
    if spec.parts != "mixer" and (spec.experts is None or spec.experts.beside is not None):
        shapes |= _mlp_shapes(config, spec.width or config.intermediate_size)
    return shapes | _biases(config, shapes) | experts


def _attention_shapes(config: DecoderConfig, layer: int) -> Shapes:
    if config.latent is not None:
        return _latent_shapes(config, config.latent)
    hidden, spec = config.hidden_size, config.layers[layer]
    num_heads, num_kv_heads, head_dim = config.heads_of(layer)
    q_width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
    shapes: Shapes = {"self_attn.o_proj.weight": (hidden, q_width)}
    if config.fold.fused_qkv:
        shapes["self_attn.qkv_proj.weight"] = (q_width + 2 * kv_width, hidden)
    else:
        shapes["self_attn.q_proj.weight"] = (q_width * (1 + config.has_gate), hidden)
        if spec.kv_of is None:
            shapes["self_attn.k_proj.weight"] = (kv_width, hidden)
        if spec.kv_of is None and not spec.keys_as_values:
            shapes["self_attn.v_proj.weight"] = (kv_width, hidden)
    if config.head_norm != "none":
        whole = config.head_norm == "whole"
        q_norm, k_norm = (f"self_attn.{name}.weight" for name in config.head_norm_names)
        shapes[q_norm] = (q_width if whole else head_dim,)
        if spec.kv_of is None:
            shapes[k_norm] = (kv_width if whole else head_dim,)
    if config.has_sinks:
        shapes["self_attn.sinks"] = (num_heads,)
    return shapes


def _latent_shapes(config: DecoderConfig, shape: LatentShape) -> Shapes:
    hidden, heads = config.hidden_size, config.num_heads
    found: Shapes = {
        "self_attn.kv_a_proj_with_mqa.weight": (shape.key_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (shape.rank,),
        "self_attn.o_proj.weight": (hidden, heads * shape.value_dim),
    }
    if config.has_split_latents:
        found["self_attn.k_b_proj.weight"] = (heads, shape.rank, shape.nope_dim)
        found["self_attn.v_b_proj.weight"] = (heads, shape.value_dim, shape.rank)
    else:
        width = shape.nope_dim + shape.value_dim
        found["self_attn.kv_b_proj.weight"] = (heads * width, shape.rank)
    if not shape.q_rank:
        return found | {"self_attn.q_proj.weight": (heads * shape.query_dim, hidden)}
    return found | {
        "self_attn.q_a_proj.weight": (shape.q_rank, hidden),
        "self_attn.q_a_layernorm.weight": (shape.q_rank,),
        "self_attn.q_b_proj.weight": (heads * shape.query_dim, shape.q_rank),
    }


def _recurrent_shapes(hidden: int, spec: MixerSpec) -> Shapes:
    if isinstance(spec, DeltaSpec):
        return _delta_shapes(hidden, spec)
    if isinstance(spec, ConvSpec):
        return _conv_shapes(hidden, spec)
    return _mamba_shapes(hidden, spec)


def _delta_shapes(hidden: int, spec: DeltaSpec) -> Shapes:
    shape, at = spec.shape, DELTA
    heads, mixed = shape.num_value_heads, shape.conv_channels
    value_width = heads * shape.value_dim
    shapes: Shapes = {
        f"{at}A_log": (heads,),
        f"{at}dt_bias": (heads,),
        f"{at}conv1d.weight": (mixed, 1, shape.conv_len),
        f"{at}norm.weight": (shape.value_dim,),
        f"{at}out_proj.weight": (hidden, value_width),
    }
    if spec.fused_qkvz:
        shapes[f"{at}in_proj_qkvz.weight"] = (mixed + value_width, hidden)
    else:
        shapes[f"{at}in_proj_qkv.weight"] = (mixed, hidden)
        shapes[f"{at}in_proj_z.weight"] = (value_width, hidden)
    if spec.fused_ba:
        return shapes | {f"{at}in_proj_ba.weight": (2 * heads, hidden)}
    return shapes | {f"{at}in_proj_{name}.weight": (heads, hidden) for name in "ba"}


def _mamba_shapes(hidden: int, spec: Mamba2Spec) -> Shapes:
    shape, at = spec.shape, MAMBA
    heads, values = shape.num_value_heads, shape.value_width
    rows = values + shape.conv_channels + heads
    shapes: Shapes = dict.fromkeys((f"{at}A_log", f"{at}D", f"{at}dt_bias"), (heads,))
    shapes |= {
        f"{at}conv1d.weight": (shape.conv_channels, 1, shape.conv_len),
        f"{at}in_proj.weight": (rows, hidden),
        f"{at}out_proj.weight": (hidden, values),
    }
    if spec.num_norms:
        shapes[f"{at}norm.weight"] = (values,)
    if spec.has_conv_bias:
        shapes[f"{at}conv1d.bias"] = (shape.conv_channels,)
    if spec.has_bias:
        shapes |= {f"{at}in_proj.bias": (rows,), f"{at}out_proj.bias": (hidden,)}
    return shapes


def _conv_shapes(hidden: int, spec: ConvSpec) -> Shapes:
    channels, conv_len = spec.shape
    shapes: Shapes = {
        f"{CONV}in_proj.weight": (3 * channels, hidden),
        f"{CONV}conv.weight": (channels, 1, conv_len),
        f"{CONV}out_proj.weight": (hidden, channels),
    }
    if spec.has_bias:
        biases = {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items()}
        return shapes | biases
    return shapes


def _expert_shapes(config: DecoderConfig, spec: ExpertsSpec) -> Shapes:
    hidden, names = config.hidden_size, spec.names
    shapes: Shapes = {f"{names.router}.weight": (spec.count, hidden)}
    if spec.router_bias:
        shapes[f"{names.router}.bias"] = (spec.count,)
    if names.choice_bias is not None:
        shapes[names.choice_bias] = (spec.count,)
    if names.factors is not None:
        shapes[names.factors] = (spec.count,)
    if spec.beside is not None:
        norms = (spec.beside.norm, spec.beside.out_norm, spec.beside.mlp_out_norm)
        shapes |= {f"{name}.weight": (hidden,) for name in norms}
        shapes[spec.beside.router_norm] = (hidden,)
    if names.stacked != "none":
        shapes |= stacked_shapes(hidden, spec)
    else:
        for number in range(spec.count):
            shapes |= _mlp_of(names.expert.format(number), names.mlp, hidden, spec.width)
    if spec.shared_width:
        fused = config.fold.fused_gate_up
        shapes |= _mlp_of(names.shared, names.shared_mlp, hidden, spec.shared_width, fused=fused)
        if names.shared_gate is not None:
            shapes[f"{names.shared_gate}.weight"] = (1, hidden)
    return shapes


def _mlp_of(
    prefix: str, names: MlpNames, hidden: int, width: int, *, fused: bool = False
) -> Shapes:
    shapes: Shapes = {f"{prefix}{names.down}.weight": (hidden, width)}
    if fused:
        return shapes | {f"{prefix}{FUSED_GATE_UP}.weight": (2 * width, hidden)}
    first = [names.up] if names.gate is None else [names.gate, names.up]
    return shapes | {f"{prefix}{name}.weight": (width, hidden) for name in first}


def stacked_shapes(hidden: int, spec: ExpertsSpec) -> Shapes:
    """Experts in one tensor of each kind, by their names behind the layer's prefix."""
    prefix, count, width = spec.names.expert, spec.count, spec.width
    if spec.names.stacked == "rows":
        return {
            f"{prefix}gate_up_proj": (count, 2 * width, hidden),
            f"{prefix}down_proj": (count, hidden, width),
        }
    turned: Shapes = {
        f"{prefix}gate_up_proj": (count, hidden, 2 * width),
        f"{prefix}down_proj": (count, width, hidden),
    }
    if spec.names.stacked == "columns":
        return turned
    return turned | {
        f"{prefix}gate_up_proj_bias": (count, 2 * width),
        f"{prefix}down_proj_bias": (count, hidden),
    }


def _norm_biases(config: DecoderConfig, norms: Shapes) -> Shapes:
    if config.layer_norm != "bias":
        return {}
    named = {name: shape for name, shape in norms.items() if len(shape) == 1}
    return {f"{name.removesuffix('weight')}bias": shape for name, shape in named.items()}


def _mlp_shapes(config: DecoderConfig, width: int) -> Shapes:
    hidden, fused = config.hidden_size, config.fold.fused_gate_up
    return _mlp_of("mlp.", config.mlp_names, hidden, width, fused=fused)


def _biases(config: DecoderConfig, shapes: Shapes) -> Shapes:
    """A bias is as long as its weight has rows."""
    of_stream = ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj_with_mqa")
    biased = dict.fromkeys(of_stream, config.qkv_bias)
    biased = {f"self_attn.{name}": has for name, has in biased.items()}
    biased["self_attn.o_proj"] = config.o_bias
    mlp = (*config.mlp_names, FUSED_GATE_UP)
    biased |= {f"mlp.{name}": config.mlp_bias for name in mlp if name is not None}
    return {
        f"{name}.bias": (shapes[f"{name}.weight"][0],)
        for name, has in biased.items()
        if has and f"{name}.weight" in shapes
    }
