"""Config fields from GGUF metadata, for models with one MLP per layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .gguf_metadata import Metadata

_AT_REST = 1e20  # A divisor of at least this size stops the rotation.


def layer_kinds(num_layers: int, is_sliding: Callable[[int], bool]) -> list[str]:
    """Return the kinds of layers, with windows according to ``is_sliding``."""
    names = ("full_attention", "sliding_attention")
    return [names[is_sliding(layer)] for layer in range(num_layers)]


def _every(meta: Metadata, period: int) -> dict[str, Any]:
    """Return the fields for windows in all layers except every ``period``-th."""
    types = layer_kinds(meta.number("block_count"), lambda layer: (layer + 1) % period != 0)
    return {"sliding_window": meta.number("attention.sliding_window"), "layer_types": types}


def _pattern(meta: Metadata, model_type: str) -> dict[str, Any]:
    """Return the fields for windows in the layers for which the file sets a flag."""
    flags = meta.flags("attention.sliding_window_pattern")
    if not flags:
        return {"sliding_window": None}
    window = meta.number("attention.sliding_window")
    types = layer_kinds(len(flags), lambda layer: flags[layer])
    return {"model_type": model_type, "sliding_window": window, "layer_types": types}


def phi3(meta: Metadata) -> dict[str, Any]:
    """Return the fields of Phi-3, with the factors of LongRoPE if the file has them."""
    found: dict[str, Any] = {"sliding_window": meta.optional("attention.sliding_window", 0) or None}
    long, short = meta.tensor("rope_factors_long.weight"), meta.tensor("rope_factors_short.weight")
    original = meta.optional("rope.scaling.original_context_length", meta.number("context_length"))
    found["original_max_position_embeddings"] = original
    if long or short:
        found["rope_parameters"] = {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
        }
    return found


def granite(meta: Metadata) -> dict[str, Any]:
    """Return the fields of Granite: its four multipliers."""
    return {
        "attention_multiplier": meta.optional("attention.scale", 1.0),
        "embedding_multiplier": meta.optional("embedding_scale", 1.0),
        "residual_multiplier": meta.optional("residual_scale", 1.0),
        "logits_scaling": meta.optional("logit_scale", 1.0),
    }


def gelu(meta: Metadata) -> dict[str, Any]:  # noqa: ARG001 - as the others
    """Return the tanh GELU under both field names that families use."""
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _query_scalar(meta: Metadata, large: int) -> int:
    """Return the number by whose square root attention scores are divided.

    The largest model, which has ``large`` layers, uses a different number.
    """
    if meta.number("block_count") == large:
        return int(meta.number("embedding_length") // meta.number("attention.head_count"))
    return int(meta.number("attention.key_length"))


def gemma2(meta: Metadata) -> dict[str, Any]:
    """Return the fields of Gemma 2: windows in every second layer, caps on scores and logits."""
    return {
        **gelu(meta),
        **_every(meta, 2),
        "query_pre_attn_scalar": _query_scalar(meta, 46),
        "attn_logit_softcapping": meta.optional("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.optional("final_logit_softcapping", 30.0),
    }


def gemma3(meta: Metadata) -> dict[str, Any]:
    """Return the fields of Gemma 3: windows in five of six layers, two kinds of RoPE."""
    full = {"rope_type": "default", "rope_theta": meta.optional("rope.freq_base", 1e6)}
    if meta.optional("rope.scaling.type", "none") == "linear":
        full |= {"rope_type": "linear", "factor": meta.number("rope.scaling.factor")}
    local = {"rope_type": "default", "rope_theta": meta.optional("rope.freq_base_swa", 1e4)}
    return {
        **gelu(meta),
        **_every(meta, 6),
        "query_pre_attn_scalar": _query_scalar(meta, 62),
        "final_logit_softcapping": meta.optional("final_logit_softcapping", None),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


def gemma4(meta: Metadata) -> dict[str, Any]:
    """Return the fields of Gemma 4, with heads by layer.

    The file's divisors of RoPE's frequencies are 1, or so large that a dimension does not rotate.
    """
    flags = meta.flags("attention.sliding_window_pattern")
    heads, widths = meta.by_layer("attention.head_count_kv"), meta.by_layer("feed_forward_length")
    heads = heads if len(heads) > 1 else heads * len(flags)
    full = [layer for layer, is_sliding in enumerate(flags) if not is_sliding]
    divisors = meta.tensor("rope_freqs.weight") or [1.0]
    turning = sum(each < _AT_REST for each in divisors) / len(divisors)
    size, count = meta.number("attention.key_length"), meta.optional("expert_count", 0)
    found: dict[str, Any] = {
        **gelu(meta),
        "sliding_window": meta.number("attention.sliding_window"),
        "layer_types": layer_kinds(len(flags), lambda layer: flags[layer]),
        "head_dim": meta.number("attention.key_length_swa"),
        "num_key_value_heads": next(
            (heads[layer] for layer, is_sliding in enumerate(flags) if is_sliding), heads[0]
        ),
        "per_layer_config": {
            str(layer): {"head_dim": size, "num_key_value_heads": heads[layer]} for layer in full
        },
        "attention_k_eq_v": not all(meta.has_tensor(f"blk.{n}.attn_v.weight") for n in full[:1]),
        "hidden_size_per_layer_input": meta.optional("embedding_length_per_layer_input", 0),
        "num_kv_shared_layers": meta.optional("attention.shared_kv_layers", 0),
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "final_logit_softcapping": meta.optional("final_logit_softcapping", None),
        "enable_moe_block": bool(count),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": meta.optional("rope.freq_base", 1e6),
                "partial_rotary_factor": turning,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": meta.optional("rope.freq_base_swa", 1e4),
            },
        },
    }
    if count:
        found |= {"num_experts": count, "top_k_experts": meta.number("expert_used_count")}
        found["moe_intermediate_size"] = meta.number("expert_feed_forward_length")
    return found


def olmo2(meta: Metadata) -> dict[str, Any]:
    """Return the fields of OLMo 2, or of OLMo 3 if the file has windows."""
    return _pattern(meta, "olmo3")


def exaone4(meta: Metadata) -> dict[str, Any]:
    """Return the fields of EXAONE 4, whose windows the file lists."""
    return _pattern(meta, "exaone4")


def cohere(meta: Metadata) -> dict[str, Any]:
    """Return the fields of Command R."""
    eps = meta.number("attention.layer_norm_epsilon")
    return {"layer_norm_eps": eps, "logit_scale": meta.number("logit_scale")}


def cohere2(meta: Metadata) -> dict[str, Any]:
    """Return the fields of Command R7B: windows in three of four layers."""
    return cohere(meta) | _every(meta, 4)


def starcoder2(meta: Metadata) -> dict[str, Any]:
    """Return the fields of StarCoder 2, without its window, which files lack."""
    eps = meta.number("attention.layer_norm_epsilon")
    return {"norm_epsilon": eps, "use_bias": True, "sliding_window": None, **gelu(meta)}


def olmo(meta: Metadata) -> dict[str, Any]:
    """Return the fields of OLMo: its bound on queries, keys and values, if the file has one."""
    return {"clip_qkv": meta.optional("attention.clamp_kqv", None)}


def mistral3(meta: Metadata) -> dict[str, Any]:
    """Return the fields of Ministral 3, with queries scaled by position, or of earlier Mistrals."""
    beta = meta.optional("attention.temperature_scale", 0.0)
    log_multiplier = meta.optional("rope.scaling.yarn_log_multiplier", 0.0)
    rope = {"llama_4_scaling_beta": beta} if beta else {}
    if log_multiplier:
        rope |= {"mscale": log_multiplier, "mscale_all_dim": log_multiplier}
    return {
        "model_type": "ministral3" if beta else "mistral",
        "sliding_window": None,
        "rope_parameters": rope,
    }


def nemotron(meta: Metadata) -> dict[str, Any]:
    """Return the fields of Nemotron."""
    return {"hidden_act": "relu2", "norm_eps": meta.number("attention.layer_norm_epsilon")}


def arcee(meta: Metadata) -> dict[str, Any]:  # noqa: ARG001 - as the others
    """Return the fields of AFM (Arcee): its activation."""
    return {"hidden_act": "relu2"}


def _layer_norm(meta: Metadata) -> dict[str, Any]:
    return {"layer_norm_eps": meta.number("attention.layer_norm_epsilon")}


def stablelm(meta: Metadata) -> dict[str, Any]:
    """Return the fields of StableLM."""
    is_parallel = bool(meta.optional("use_parallel_residual", False))
    return _layer_norm(meta) | {"use_parallel_residual": is_parallel}


def phi2(meta: Metadata) -> dict[str, Any]:
    """Return the fields of Phi-2."""
    return _layer_norm(meta) | {"hidden_act": "gelu_new"}
