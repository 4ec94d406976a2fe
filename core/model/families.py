"""Families of decoders: functions that read a config.json and declare what differs.

Families are not copies of the decoder: one decoder computes all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from ..errors import ModelLoadError
from ..ops.base import Activation, Routing
from .checkpoint import gguf_file
from .config import (
    DecoderConfig,
    DtypeName,
    ExpertNames,
    ExpertsSpec,
    LayerSpec,
    MlpNames,
    NormNames,
)
from .fields import Fields, read_json
from .fold import Fold
from .formats.quantized import read_scheme
from .nested import is_nested, text_fields
from .rope import NO_ROPE, RopeSpec, parse_rope, parse_ropes

_BEFORE_AND_AFTER = NormNames(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_AFTER = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh", "relu2"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}


def read_config(path: str | Path) -> DecoderConfig:
    """The config of a checkpoint. Raises `ModelLoadError` for what is not supported."""
    file = gguf_file(Path(path))
    if file is None:
        return read_folder_config(Path(path))
    from .formats.gguf import GgufCheckpoint

    return GgufCheckpoint(file).config


def read_folder_config(folder: Path) -> DecoderConfig:
    """The config of a folder in Hugging Face layout."""
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is not a folder")
    fields = Fields(read_json(folder / "config.json"), str(folder / "config.json"))
    if is_nested(fields) and fields.values.get("model_type") not in FAMILIES:
        config = replace(parse_config(text_fields(folder, fields)), is_nested=True)
    else:
        config = parse_config(fields)
    generation = folder / "generation_config.json"
    if not generation.exists():
        return config
    more = Fields(read_json(generation), str(generation)).integers("eos_token_id")
    return _with_eos(config, more)


def parse_config(fields: Fields) -> DecoderConfig:
    """The config of one config.json."""
    model_type = fields.text("model_type")
    family = FAMILIES.get(model_type)
    if family is None:
        supported = ", ".join(sorted(FAMILIES))
        raise fields.unsupported("model_type", f"{model_type!r} is not supported; {supported} are")
    _refuse_unsupported(fields)
    return _check(family(fields), fields)


def _base(
    fields: Fields,
    *,
    partial: float | None = None,
    theta: float = 10000.0,
    eps: float = 1e-6,
    tied: bool = False,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    is_gated: bool = True,
    **differences: Any,  # noqa: ANN401 - declared fields
) -> DecoderConfig:
    """What all families write alike; ``differences`` are fields of `DecoderConfig`.

    ``partial``: the share of a head's items that RoPE turns where the config does not say it;
    None: the family turns all of them. ``theta``, ``eps``, ``tied``: likewise the family's
    defaults. ``activation``: its field, and the default.
    """
    num_layers = fields.positive("num_hidden_layers")
    num_heads = fields.positive("num_attention_heads")
    hidden_size = fields.positive("hidden_size")
    max_len = fields.positive("max_position_embeddings", 2048)
    rope = differences.pop("rope", None)
    if rope is None:
        rope = parse_rope(fields, max_len=max_len, partial=partial, theta=theta)
    if rope.kind == "longrope":  # beyond it another table turns all positions
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
        "activation": _activation(fields, *activation, is_gated=is_gated),
    }
    return DecoderConfig(**(shape | differences))


# -- the families ---------------------------------------------------------------------------------


def _llama(fields: Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    mlp_bias = fields.flag("mlp_bias", False)
    return _base(fields, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def _mistral(fields: Fields) -> DecoderConfig:
    # The class default applies where the key is absent; null means full attention.
    absent = "sliding_window" not in fields.values
    return _base(fields, layers=_windowed(fields, 4096 if absent else _window(fields)))


def _ministral3(fields: Fields) -> DecoderConfig:
    if not fields.has("rope_parameters"):
        raise fields.unsupported("rope_parameters", "is missing")
    rope = parse_rope(fields, max_len=fields.positive("max_position_embeddings", 262144))
    beta = fields.object("rope_parameters").number("llama_4_scaling_beta", 0.0)
    if beta and not rope.original_max_len:
        raise fields.error("rope_parameters", "lacks original_max_position_embeddings")
    return _base(
        fields,
        eps=1e-5,
        head_dim=fields.positive("head_dim", 128),
        rope=replace(rope, query_beta=beta),
        layers=_windowed(fields, _window(fields)),
    )


def _qwen2(fields: Fields) -> DecoderConfig:
    return _base(fields, qkv_bias=True, layers=_qwen_layers(fields))


def _qwen3(fields: Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    head_dim = fields.positive("head_dim", 128)
    return _base(
        fields,
        head_norm="each",
        qkv_bias=bias,
        o_bias=bias,
        layers=_qwen_layers(fields),
        head_dim=head_dim,
    )


def _phi3(fields: Fields) -> DecoderConfig:
    fold = Fold(fused_qkv=True, fused_gate_up=True)
    layers = _windowed(fields, _window(fields))
    return _base(fields, eps=1e-5, partial=1.0, layers=layers, fold=fold)


def _granite(fields: Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    fold = Fold(
        embed_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1 / fields.above_zero("logits_scaling", 1.0),
    )
    return _base(
        fields,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        attention_scale=fields.number("attention_multiplier", 1.0),
        fold=fold,
    )


def _glm(fields: Fields, **differences: Any) -> DecoderConfig:  # noqa: ANN401 - declared fields
    return _base(
        fields,
        partial=0.5,
        eps=1.5625e-07,
        qkv_bias=fields.flag("attention_bias", True),
        head_dim=fields.positive("head_dim", 128),
        fold=Fold(fused_gate_up=True, interleaved=True),
        **differences,
    )


def _glm4(fields: Fields) -> DecoderConfig:
    norms = NormNames(
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )
    return _glm(fields, norms=norms)


def _helium(fields: Fields) -> DecoderConfig:
    return _base(
        fields,
        theta=1e5,
        eps=1e-8,
        qkv_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        head_dim=fields.positive("head_dim", 128),
        fold=Fold(interleaved=True),
    )


def _ernie(fields: Fields) -> DecoderConfig:
    bias = fields.flag("use_bias", False)
    return _base(
        fields,
        theta=5e5,
        eps=1e-5,
        tied=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        head_dim=fields.positive("head_dim", 128),
        fold=Fold(interleaved=True),
    )


def _gemma(fields: Fields, **differences: Any) -> DecoderConfig:  # noqa: ANN401 - declared fields
    if fields.values.get("hidden_act") == "gelu":  # of the first release, which meant the other
        fields = Fields({**fields.values, "hidden_act": "gelu_pytorch_tanh"}, fields.where)
    bias = fields.flag("attention_bias", False)
    shape: dict[str, Any] = {
        "tied": True,
        "activation": ("hidden_act", "gelu_pytorch_tanh"),
        "qkv_bias": bias,
        "o_bias": bias,
        "head_dim": fields.positive("head_dim", 256),
        "fold": Fold(
            embed_scale=fields.positive("hidden_size") ** 0.5,
            rounds_embed_scale=True,
            norm_offset=1.0,
        ),
    }
    return _base(fields, **(shape | differences))


def _gemma2(fields: Fields, **differences: Any) -> DecoderConfig:  # noqa: ANN401 - declared fields
    if fields.flag("use_bidirectional_attention", False):
        raise fields.unsupported("use_bidirectional_attention", "is not supported")
    shape: dict[str, Any] = {
        "activation": ("hidden_activation", "gelu_pytorch_tanh"),
        "norms": _BEFORE_AND_AFTER,
        "layers": _sliding(fields, 2, window=4096),
        "attention_scale": fields.above_zero("query_pre_attn_scalar", 256) ** -0.5,
        "attention_cap": _cap(fields, "attn_logit_softcapping", 50.0),
        "logit_cap": _cap(fields, "final_logit_softcapping", 30.0),
    }
    return _gemma(fields, **(shape | differences))


def _gemma3(fields: Fields) -> DecoderConfig:
    max_len = fields.positive("max_position_embeddings", 131072)
    full, local = parse_ropes(fields, max_len=max_len, theta=1e6, local_theta=1e4)
    pattern = fields.positive("sliding_window_pattern", 6)
    return _gemma2(
        fields,
        head_norm="each",
        rope=full,
        layers=_sliding(fields, pattern, window=4096, local=local),
        attention_cap=None,
        logit_cap=fields.optional_number("final_logit_softcapping"),
    )


def _olmo2(fields: Fields, **differences: Any) -> DecoderConfig:  # noqa: ANN401 - declared fields
    bias = fields.flag("attention_bias", False)
    return _base(
        fields,
        eps=1e-5,
        norms=_AFTER,
        head_norm="whole",
        qkv_bias=bias,
        o_bias=bias,
        **differences,
    )


def _olmo3(fields: Fields) -> DecoderConfig:
    max_len = fields.positive("max_position_embeddings", 2048)
    full, local = parse_ropes(fields, max_len=max_len, theta=5e5)
    return _olmo2(fields, rope=full, layers=_sliding(fields, 4, window=4096, local=local))


def _smollm3(fields: Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    turns = _turns(fields)
    window = _window(fields) if fields.flag("use_sliding_window", False) else None
    kinds = _kinds(fields, (window is not None and not turn for turn in turns))
    layers = tuple(
        LayerSpec(window=window if is_sliding else None, rope=None if turn else NO_ROPE)
        for is_sliding, turn in zip(kinds, turns, strict=True)
    )
    return _base(
        fields,
        theta=2e6,
        tied=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        layers=layers,
    )


def _cohere(fields: Fields, **differences: Any) -> DecoderConfig:  # noqa: ANN401 - declared fields
    if fields.flag("use_qk_norm", False):
        raise fields.unsupported("use_qk_norm", "is not supported")
    bias = fields.flag("attention_bias", False)
    hidden_size, num_heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    shape: dict[str, Any] = {"theta": 5e5} | differences
    return _base(
        fields,
        tied=True,
        norms=NormNames(mlp=None),
        layer_norm="plain",
        is_parallel=True,
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        qkv_bias=bias,
        o_bias=bias,
        head_dim=hidden_size // num_heads,
        fold=Fold(interleaved=True, logit_scale=fields.number("logit_scale", 0.0625)),
        **shape,
    )


def _cohere2(fields: Fields) -> DecoderConfig:
    pattern = fields.positive("sliding_window_pattern", 4)
    layers = _sliding(fields, pattern, window=4096)
    return _cohere(fields, theta=1e4, layers=_without_rope_unless_windowed(layers))


def _exaone4(fields: Fields) -> DecoderConfig:
    absent = "sliding_window" not in fields.values
    window = 4096 if absent else _window(fields)
    layers = (LayerSpec(),) * fields.positive("num_hidden_layers")
    if window is not None:
        pattern = 4 if fields.has("layer_types") else fields.positive("sliding_window_pattern", 4)
        layers = _without_rope_unless_windowed(_sliding(fields, pattern, window=window))
    return _base(fields, eps=1e-5, norms=_AFTER, head_norm="each", layers=layers)


def _starcoder2(fields: Fields) -> DecoderConfig:
    bias = fields.flag("use_bias", True)
    return _base(
        fields,
        tied=True,
        activation=("hidden_act", "gelu_pytorch_tanh"),
        is_gated=False,
        norm_eps=fields.number("norm_epsilon", 1e-5),
        layer_norm="bias",
        mlp_names=MlpNames(None, "c_fc", "c_proj"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        layers=_windowed(fields, _window(fields)),
    )


def _arcee(fields: Fields, **differences: Any) -> DecoderConfig:  # noqa: ANN401 - declared fields
    bias = fields.flag("attention_bias", False)
    shape: dict[str, Any] = {"eps": 1e-5} | differences
    return _base(
        fields,
        activation=("hidden_act", "relu2"),
        is_gated=False,
        mlp_names=MlpNames(None),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        **shape,
    )


def _nemotron(fields: Fields) -> DecoderConfig:
    return _arcee(
        fields,
        partial=0.5,
        norm_eps=fields.number("norm_eps", 1e-5),
        layer_norm="bias",
        fold=Fold(norm_offset=1.0),
    )


# -- families with experts ------------------------------------------------------------------------


def _mixtral(fields: Fields, **differences: Any) -> DecoderConfig:  # noqa: ANN401 - declared fields
    names = ExpertNames(
        "block_sparse_moe.gate", "block_sparse_moe.experts.{}.", MlpNames("w1", "w3", "w2")
    )
    layers = _windowed(fields, _window(fields))
    routing = Routing(_top_k(fields), renorm=0.0)
    shape: dict[str, Any] = {
        "theta": 1e6,
        "eps": 1e-5,
        "layers": _with_experts(fields, layers, routing, names=names, width="intermediate_size"),
    }
    return _base(fields, **(shape | differences))


def _minimax_m2(fields: Fields) -> DecoderConfig:
    names = ExpertNames(
        "block_sparse_moe.gate",
        "block_sparse_moe.experts.{}.",
        MlpNames("w1", "w3", "w2"),
        choice_bias="block_sparse_moe.e_score_correction_bias",
    )
    head_dim = fields.positive("head_dim", 128)
    layers = _windowed(fields, None)
    routing = Routing(_top_k(fields), score="sigmoid", renorm=0.0)
    return _base(
        fields,
        theta=5e6,
        partial=fields.positive("rotary_dim", head_dim) / head_dim,
        head_dim=head_dim,
        head_norm="whole",
        has_further_layers=True,
        layers=_with_experts(fields, layers, routing, names=names, width="intermediate_size"),
    )


def _qwen2_moe(fields: Fields) -> DecoderConfig:
    if fields.flag("use_sliding_window", False) and not fields.has("layer_types"):
        raise fields.unsupported("use_sliding_window", "is not supported without layer_types")
    names = ExpertNames(shared="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate")
    routing = Routing(_top_k(fields), renorm=_renorm(fields, False))
    layers = _with_experts(
        fields,
        _qwen_layers(fields),
        routing,
        names=names,
        shared_width=fields.positive("shared_expert_intermediate_size"),
    )
    return _base(fields, qkv_bias=fields.flag("qkv_bias", True), layers=layers)


def _qwen3_moe(fields: Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    window = _window(fields) if fields.flag("use_sliding_window", False) else None
    routing = Routing(_top_k(fields), renorm=_renorm(fields, False))
    return _base(
        fields,
        head_norm="each",
        qkv_bias=bias,
        o_bias=bias,
        layers=_with_experts(fields, _windowed(fields, window), routing),
    )


def _olmoe(fields: Fields) -> DecoderConfig:
    if fields.has("clip_qkv"):
        raise fields.unsupported("clip_qkv", "is not supported")
    bias = fields.flag("attention_bias", False)
    routing = Routing(_top_k(fields), renorm=_renorm(fields, False))
    layers = _windowed(fields, None)
    return _base(
        fields,
        eps=1e-5,
        head_norm="whole",
        qkv_bias=bias,
        o_bias=bias,
        layers=_with_experts(fields, layers, routing, width="intermediate_size"),
    )


def _glm4_moe(fields: Fields) -> DecoderConfig:
    return _base(
        fields,
        eps=1e-5,
        partial=0.5,
        head_norm="each" if fields.flag("use_qk_norm", False) else "none",
        qkv_bias=fields.flag("attention_bias", False),
        has_further_layers=True,
        layers=_like_deepseek(fields, _windowed(fields, None), renorms=True, num_default=1),
    )


def _dots1(fields: Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    window = _window(fields)
    first = fields.integer("max_window_layers", 62)
    num_layers = fields.positive("num_hidden_layers")
    kinds = _kinds(fields, (window is not None and i >= first for i in range(num_layers)))
    layers = tuple(LayerSpec(window=window if is_sliding else None) for is_sliding in kinds)
    return _base(
        fields,
        head_norm="each",
        qkv_bias=bias,
        o_bias=bias,
        layers=_like_deepseek(fields, layers, renorms=False, num_default=0),
    )


def _gpt_oss(fields: Fields) -> DecoderConfig:
    if fields.number("swiglu_alpha", 1.702) != 1.702:
        raise fields.unsupported("swiglu_alpha", "other than 1.702 is not supported")
    limit = fields.above_zero("swiglu_limit", 7.0)
    bias = fields.flag("attention_bias", True)
    differences: dict[str, Any] = {}
    if not fields.has("rope_parameters") and not fields.has("rope_scaling"):
        differences["rope"] = RopeSpec(
            kind="yarn", theta=15e4, factor=32.0, original_max_len=4096, truncate=False
        )
    layers = _with_experts(
        fields,
        _sliding(fields, 2, window=128),
        Routing(_top_k(fields), of_chosen=True),
        names=ExpertNames("mlp.router", "mlp.experts.", is_stacked=True),
        width="intermediate_size",
        activation=Activation("clamped_swiglu", True, limit),
        router_bias=True,
    )
    return _base(
        fields,
        theta=15e4,
        eps=1e-5,
        head_dim=fields.positive("head_dim", 64),
        qkv_bias=bias,
        o_bias=bias,
        has_sinks=True,
        layers=layers,
        **differences,
    )


FAMILIES: dict[str, Callable[[Fields], DecoderConfig]] = {
    "arcee": _arcee,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "dots1": _dots1,
    "ernie4_5": _ernie,
    "exaone4": _exaone4,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm": _glm,
    "glm4": _glm4,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "granite": _granite,
    "helium": _helium,
    "llama": _llama,
    "minimax_m2": _minimax_m2,
    "ministral3": _ministral3,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "nemotron": _nemotron,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "olmoe": _olmoe,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
}


# -- fields that several families have ------------------------------------------------------------


def _window(fields: Fields) -> int | None:
    return fields.positive("sliding_window") if fields.has("sliding_window") else None


def _windowed(fields: Fields, window: int | None) -> tuple[LayerSpec, ...]:
    """The same window in all layers."""
    return (LayerSpec(window=window),) * fields.positive("num_hidden_layers")


def _qwen_layers(fields: Fields) -> tuple[LayerSpec, ...]:
    """Windows by ``layer_types`` where given, else of the layers from max_window_layers on."""
    num_layers = fields.positive("num_hidden_layers")
    window = _window(fields) if fields.flag("use_sliding_window", False) else None
    first = fields.integer("max_window_layers", 28)
    kinds = _kinds(fields, (layer >= first for layer in range(num_layers)))
    if window is None and fields.has("layer_types") and any(kinds):
        raise fields.error("sliding_window", "is missing, though layer_types has sliding layers")
    return tuple(LayerSpec(window=window if is_sliding else None) for is_sliding in kinds)


def _sliding(
    fields: Fields, pattern: int, *, window: int, local: RopeSpec | None = None
) -> tuple[LayerSpec, ...]:
    """Layers with a window, and by default every ``pattern``-th without.

    ``window``: the default. ``local``: RoPE of the layers with a window, where they have their own.
    """
    num_layers = fields.positive("num_hidden_layers")
    kinds = _kinds(fields, ((layer + 1) % pattern != 0 for layer in range(num_layers)))
    if any(kinds) and fields.values.get("sliding_window", window) is None:
        raise fields.error("sliding_window", "is missing, though there are sliding layers")
    sliding = LayerSpec(window=fields.positive("sliding_window", window), rope=local)
    return tuple(sliding if is_sliding else LayerSpec() for is_sliding in kinds)


def _without_rope_unless_windowed(layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    return tuple(replace(each, rope=None if each.window else NO_ROPE) for each in layers)


def _kinds(fields: Fields, default: Iterable[bool]) -> tuple[bool, ...]:
    """Whether each layer has a window, by ``layer_types`` where given."""
    types = fields.values.get("layer_types")
    if types is None:
        return tuple(default)
    num_layers = fields.positive("num_hidden_layers")
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= set(known):
        raise fields.error("layer_types", f"must be {num_layers} of {', '.join(known)}")
    return tuple(name == "sliding_attention" for name in types)


def _turns(fields: Fields) -> tuple[bool, ...]:
    """Whether RoPE turns each layer's heads: 1 in ``no_rope_layers``."""
    num_layers = fields.positive("num_hidden_layers")
    found = fields.integers("no_rope_layers")
    if not found:
        every = fields.positive("no_rope_layer_interval", 4)
        return tuple((layer + 1) % every != 0 for layer in range(num_layers))
    if len(found) != num_layers:
        raise fields.error("no_rope_layers", f"must be {num_layers} integers")
    return tuple(each != 0 for each in found)


def _top_k(fields: Fields) -> int:
    return fields.positive("num_experts_per_tok")


def _renorm(fields: Fields, default: bool) -> float | None:
    return 0.0 if fields.flag("norm_topk_prob", default) else None


def _like_deepseek(
    fields: Fields, layers: tuple[LayerSpec, ...], *, renorms: bool, num_default: int
) -> tuple[LayerSpec, ...]:
    """The router of DeepSeek V3 (arXiv 2412.19437); the first layers are dense.

    ``num_default``: of dense layers, and of shared experts, where the config does not say it.
    """
    routing = Routing(
        _top_k(fields),
        score="sigmoid",
        num_groups=fields.positive("n_group", 1),
        kept_groups=fields.positive("topk_group", 1),
        renorm=1e-20 if fields.flag("norm_topk_prob", renorms) else None,
        factor=fields.number("routed_scaling_factor", 1.0),
    )
    width = fields.positive("moe_intermediate_size") * fields.integer(
        "n_shared_experts", num_default
    )
    return _with_experts(
        fields,
        layers,
        routing,
        names=ExpertNames(choice_bias="mlp.gate.e_score_correction_bias"),
        num_dense=num_default,
        shared_width=width,
    )


def _with_experts(
    fields: Fields,
    layers: tuple[LayerSpec, ...],
    routing: Routing,
    *,
    names: ExpertNames = ExpertNames(),  # noqa: B008 - immutable
    width: str = "moe_intermediate_size",
    num_dense: int = 0,
    **differences: Any,  # noqa: ANN401 - fields of `ExpertsSpec`
) -> tuple[LayerSpec, ...]:
    """Experts in all layers but those that the config says are dense."""
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    count = fields.positive(next((name for name in counts if fields.has(name)), counts[0]))
    groups, kept = routing.num_groups, routing.kept_groups
    if count % groups or kept > groups or routing.top_k > count // groups * kept:
        problem = f"{routing.top_k} of {count}, in {kept} of {groups} groups, cannot be chosen"
        raise fields.error("num_experts_per_tok", problem)
    activation = _activation(fields, "hidden_act", "silu", is_gated=True)
    values = {"activation": activation, **differences}
    spec = ExpertsSpec(
        count=count, width=fields.positive(width), routing=routing, names=names, **values
    )
    step = fields.positive("decoder_sparse_step", 1)
    first = fields.integer("first_k_dense_replace", num_dense)
    dense = fields.integers("mlp_only_layers")
    return tuple(
        replace(layer, experts=spec)
        if index >= first and (index + 1) % step == 0 and index not in dense
        else layer
        for index, layer in enumerate(layers)
    )


def _cap(fields: Fields, name: str, default: float) -> float | None:
    """A soft cap; null: none. The class default applies where the key is absent."""
    if name in fields.values and not fields.has(name):
        return None
    return fields.above_zero(name, default)


def _activation(fields: Fields, field: str, default: str, *, is_gated: bool) -> Activation:
    name = fields.text(field, default)
    kind = _ACTIVATIONS.get(name)
    if kind is None:
        supported = ", ".join(_ACTIVATIONS)
        raise fields.unsupported(field, f"{name!r} is not supported; {supported} are")
    return Activation(kind, is_gated)


def _dtype(fields: Fields) -> DtypeName:
    """``dtype`` since transformers v5, ``torch_dtype`` before."""
    name = fields.text("dtype", fields.text("torch_dtype", "float32"))
    if name not in get_args(DtypeName):
        supported = ", ".join(get_args(DtypeName))
        raise fields.error("dtype", f"{name!r} is not supported; {supported} are")
    return cast(DtypeName, name)


def _refuse_unsupported(fields: Fields) -> None:
    """Refuse what would otherwise be computed wrongly without a word."""
    read_scheme(fields)
    if fields.flag("is_encoder_decoder", False):
        raise fields.error("is_encoder_decoder", "is not supported: decoders only")


def _check(config: DecoderConfig, fields: Fields) -> DecoderConfig:
    if config.num_heads % config.num_kv_heads:
        problem = f"{config.num_kv_heads} does not divide {config.num_heads} attention heads"
        raise fields.error("num_key_value_heads", problem)
    if config.head_dim % 2:
        raise fields.error("head_dim", f"must be even, not {config.head_dim}")
    return config


def _with_eos(config: DecoderConfig, more: tuple[int, ...]) -> DecoderConfig:
    """Chat models name further end tokens in generation_config.json only."""
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))
