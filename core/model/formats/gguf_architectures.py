"""Contents of GGUF files by architecture: fields of a config.json, and names of tensors.

Sources: llama.cpp's converters, whose names and reorderings are undone here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .gguf_metadata import Metadata

# Of a layer of Llama; other families differ in some.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
STACKED = ("experts.gate_up_proj", "experts.down_proj")  # in transformers, too
# Of experts one by one, of which the file stacks all.
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_SHARED_MLP = {
    "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
    "ffn_up_shexp": "mlp.shared_mlp.up_proj",
    "ffn_down_shexp": "mlp.shared_mlp.down_proj",
}
_HUNYUAN = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
# Of a layer that predicts a further token, besides those that all layers have.
NEXTN_NAMES = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
}
# Latent attention; files of before latents were kept have keys and values in one matrix.
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_CHOICE_BIAS = {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
_PHI = {
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BEFORE_AND_AFTER = _AFTER | {"ffn_norm": "pre_feedforward_layernorm"}


_LFM = {
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
}
_HYBRID = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
} | NEXTN_NAMES
_MAMBA = {
    "ssm_in": "mamba.in_proj",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt": "mamba.dt_bias",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_SHARED_GRANITE = {
    "ffn_gate_shexp": "mlp.gate_proj",
    "ffn_up_shexp": "mlp.up_proj",
    "ffn_down_shexp": "mlp.down_proj",
}
_NEMOTRON_H = _MAMBA | {"attn_norm": "norm"}
_HYBRID_EXPERTS = _HYBRID | _EXPERTS | _SHARED_EXPERT
_GEMMA4 = _BEFORE_AND_AFTER | {
    "layer_output_scale": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps": STACKED[0],
    "ffn_down_exps": STACKED[1],
    "ffn_down_exps.scale": "router.per_expert_scale",
}


_AT_REST = 1e20  # a divisor of at least so much stops what it divides
Fields = Callable[[Metadata], dict[str, Any]]


def _nothing(meta: Metadata) -> dict[str, Any]:  # noqa: ARG001 - as the others
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """``fields``: of config.json, besides those that all have. ``names``: where a layer's tensors
    have others than Llama's; those with ``{}`` are stacked experts.

    ``turns_part``: RoPE may turn a part of each head. ``is_turned``: rows of queries and keys lie
    in the pairs that RoPE turns, not in halves. ``norm_offset``: what the file's norms have more
    than the model's. ``has_tiled_heads``: value head j reads key head ``j % num_key_heads``.
    ``is_latent``: attention is over latents, and RoPE's dimensions are heads of their own.
    """

    model_type: str
    fields: Fields = _nothing
    names: Mapping[str, str] = field(default_factory=dict)
    turns_part: bool = False
    is_turned: bool = False
    norm_offset: float = 0.0
    has_tiled_heads: bool = False
    is_latent: bool = False
    experts: Literal["none", "each", "gpt_oss", "granite"] = "none"
    final_norm: str = "model.norm"
    own_final_norm: str = "output_norm"  # its name in the file


# -- fields ---------------------------------------------------------------------------------------


def _types(num_layers: int, is_sliding: Callable[[int], bool]) -> list[str]:
    names = ("full_attention", "sliding_attention")
    return [names[is_sliding(layer)] for layer in range(num_layers)]


def _every(meta: Metadata, period: int) -> dict[str, Any]:
    """Windows in all layers but every ``period``-th."""
    types = _types(meta.number("block_count"), lambda layer: (layer + 1) % period != 0)
    return {"sliding_window": meta.number("attention.sliding_window"), "layer_types": types}


def _pattern(meta: Metadata, model_type: str) -> dict[str, Any]:
    """Windows as the file lists them."""
    flags = meta.flags("attention.sliding_window_pattern")
    if not flags:
        return {"sliding_window": None}
    window = meta.number("attention.sliding_window")
    types = _types(len(flags), lambda layer: flags[layer])
    return {"model_type": model_type, "sliding_window": window, "layer_types": types}


def _phi3(meta: Metadata) -> dict[str, Any]:
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


def _granite(meta: Metadata) -> dict[str, Any]:
    return {
        "attention_multiplier": meta.optional("attention.scale", 1.0),
        "embedding_multiplier": meta.optional("embedding_scale", 1.0),
        "residual_multiplier": meta.optional("residual_scale", 1.0),
        "logits_scaling": meta.optional("logit_scale", 1.0),
    }


def _gelu(meta: Metadata) -> dict[str, Any]:  # noqa: ARG001 - as the others
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _query_scalar(meta: Metadata, large: int) -> int:
    """The number whose root divides the scores; a family's largest model has another one.

    ``large``: number of layers of that model.
    """
    if meta.number("block_count") == large:
        return int(meta.number("embedding_length") // meta.number("attention.head_count"))
    return int(meta.number("attention.key_length"))


def _gemma2(meta: Metadata) -> dict[str, Any]:
    return {
        **_gelu(meta),
        **_every(meta, 2),
        "query_pre_attn_scalar": _query_scalar(meta, 46),
        "attn_logit_softcapping": meta.optional("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.optional("final_logit_softcapping", 30.0),
    }


def _gemma3(meta: Metadata) -> dict[str, Any]:
    full = {"rope_type": "default", "rope_theta": meta.optional("rope.freq_base", 1e6)}
    if meta.optional("rope.scaling.type", "none") == "linear":
        full |= {"rope_type": "linear", "factor": meta.number("rope.scaling.factor")}
    local = {"rope_type": "default", "rope_theta": meta.optional("rope.freq_base_swa", 1e4)}
    return {
        **_gelu(meta),
        **_every(meta, 6),
        "query_pre_attn_scalar": _query_scalar(meta, 62),
        "final_logit_softcapping": meta.optional("final_logit_softcapping", None),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


def _gemma4(meta: Metadata) -> dict[str, Any]:
    """Heads by layer; RoPE's divisors are 1, or so large that what they divide is at rest."""
    flags = meta.flags("attention.sliding_window_pattern")
    heads, widths = meta.by_layer("attention.head_count_kv"), meta.by_layer("feed_forward_length")
    heads = heads if len(heads) > 1 else heads * len(flags)
    full = [layer for layer, is_sliding in enumerate(flags) if not is_sliding]
    divisors = meta.tensor("rope_freqs.weight") or [1.0]
    turning = sum(each < _AT_REST for each in divisors) / len(divisors)
    size, count = meta.number("attention.key_length"), meta.optional("expert_count", 0)
    found: dict[str, Any] = {
        **_gelu(meta),
        "sliding_window": meta.number("attention.sliding_window"),
        "layer_types": _types(len(flags), lambda layer: flags[layer]),
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


def _olmo2(meta: Metadata) -> dict[str, Any]:
    return _pattern(meta, "olmo3")


def _exaone4(meta: Metadata) -> dict[str, Any]:
    return _pattern(meta, "exaone4")


def _cohere(meta: Metadata) -> dict[str, Any]:
    eps = meta.number("attention.layer_norm_epsilon")
    return {"layer_norm_eps": eps, "logit_scale": meta.number("logit_scale")}


def _cohere2(meta: Metadata) -> dict[str, Any]:
    return _cohere(meta) | _every(meta, 4)


def _starcoder2(meta: Metadata) -> dict[str, Any]:
    eps = meta.number("attention.layer_norm_epsilon")
    return {"norm_epsilon": eps, "use_bias": True, "sliding_window": None, **_gelu(meta)}


def _experts(meta: Metadata) -> dict[str, Any]:
    width = meta.optional("expert_feed_forward_length", 0) or meta.number("feed_forward_length")
    return {
        "num_experts": meta.number("expert_count"),
        "num_local_experts": meta.number("expert_count"),
        "num_experts_per_tok": meta.number("expert_used_count"),
        "moe_intermediate_size": width,
    }


def _qwen3_moe(meta: Metadata) -> dict[str, Any]:
    return _experts(meta) | {"norm_topk_prob": True}


def _qwen2_moe(meta: Metadata) -> dict[str, Any]:
    shared = meta.number("expert_shared_feed_forward_length")
    return _experts(meta) | {"shared_expert_intermediate_size": shared, "norm_topk_prob": False}


def _hybrid(meta: Metadata) -> dict[str, Any]:
    heads = meta.number("ssm.time_step_rank")
    return {
        "linear_conv_kernel_dim": meta.number("ssm.conv_kernel"),
        "linear_key_head_dim": meta.number("ssm.state_size"),
        "linear_num_key_heads": meta.number("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": meta.number("ssm.inner_size") // max(1, heads),
        "full_attention_interval": meta.optional("full_attention_interval", 4),
    }


def _hybrid_moe(meta: Metadata) -> dict[str, Any]:
    return _hybrid(meta) | _qwen2_moe(meta) | {"norm_topk_prob": True}


def _mamba(meta: Metadata) -> dict[str, Any]:
    """Mamba-2 by the names of Bamba's fields, and the kinds of layers by their tensors."""
    inner, heads = meta.number("ssm.inner_size"), meta.number("ssm.time_step_rank")
    layers = range(meta.number("block_count"))
    return {
        "layer_types": [_kind_of(meta, layer) for layer in layers],
        "mamba_d_conv": meta.number("ssm.conv_kernel"),
        "mamba_d_state": meta.number("ssm.state_size"),
        "mamba_n_groups": meta.number("ssm.group_count"),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // max(1, heads),
        "mamba_conv_bias": any(meta.has_tensor(f"blk.{n}.ssm_conv1d.bias") for n in layers),
    }


def _kind_of(meta: Metadata, layer: int) -> str:
    tensors = {
        "attn_q": "full_attention",
        "ssm_in": "linear_attention",
        "ffn_gate_inp": "moe",
        "ffn_up": "mlp",
    }
    found = (
        kind for name, kind in tensors.items() if meta.has_tensor(f"blk.{layer}.{name}.weight")
    )
    return next(found, "unknown")


def _granite_hybrid(meta: Metadata) -> dict[str, Any]:
    count = meta.optional("expert_count", 0)
    shared = meta.optional("expert_shared_feed_forward_length", 0)
    found: dict[str, Any] = {**_mamba(meta), **_granite(meta), "num_local_experts": count}
    found["mamba_expand"] = meta.number("ssm.inner_size") // meta.number("embedding_length")
    found["shared_intermediate_size"] = shared or meta.number("feed_forward_length")
    if count:
        found["num_experts_per_tok"] = meta.number("expert_used_count")
    if meta.optional("rope.scaling.finetuned", True):  # the converter's flag for RoPE
        found["position_embedding_type"] = "rope"
    return found


def _nemotron_h(meta: Metadata) -> dict[str, Any]:
    mamba = _mamba(meta)
    return {
        "layers_block_type": mamba["layer_types"],
        "conv_kernel": mamba["mamba_d_conv"],
        "ssm_state_size": mamba["mamba_d_state"],
        "n_groups": mamba["mamba_n_groups"],
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "use_conv_bias": mamba["mamba_conv_bias"],
        "use_bias": False,
        "layer_norm_epsilon": meta.number("attention.layer_norm_rms_epsilon"),
    }


def _nemotron_h_moe(meta: Metadata) -> dict[str, Any]:
    shared = meta.number("expert_shared_feed_forward_length")
    if meta.optional("moe_latent_size", 0):
        return _nemotron_h(meta) | {"moe_latent_size": meta.number("moe_latent_size")}
    return {
        **_nemotron_h(meta),
        **_experts(meta),
        "moe_shared_expert_intermediate_size": shared,
        "norm_topk_prob": meta.optional("expert_weights_norm", True),
        "routed_scaling_factor": meta.optional("expert_weights_scale", 1.0) or 1.0,
        "n_group": meta.optional("expert_group_count", 1) or 1,
        "topk_group": meta.optional("expert_group_used_count", 1) or 1,
    }


def _lfm2(meta: Metadata) -> dict[str, Any]:
    """Layers without heads of keys are convolutions; the width of the MLP is its own already."""
    heads = meta.by_layer("attention.head_count_kv")
    attention = "full_attention"
    if meta.optional("attention.sliding_window", 0):
        attention = "sliding_attention"
    if not meta.optional("attention.causal", True):
        attention = "bidirectional_attention"
    return {
        "num_key_value_heads": max(heads),
        "layer_types": [attention if count else "conv" for count in heads],
        "conv_L_cache": meta.number("shortconv.l_cache"),
        "norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_moe(meta: Metadata) -> dict[str, Any]:
    return {
        **_lfm2(meta),
        **_experts(meta),
        "norm_topk_prob": True,
        "num_dense_layers": meta.number("leading_dense_block_count"),
        "routed_scaling_factor": meta.optional("expert_weights_scale", 1.0) or 1.0,
    }


def _gpt_oss(meta: Metadata) -> dict[str, Any]:
    width = meta.optional("expert_feed_forward_length", 0) or meta.number("feed_forward_length")
    rope = {
        "rope_type": "yarn",
        "rope_theta": meta.number("rope.freq_base"),
        "factor": meta.optional("rope.scaling.factor", 32.0),
        "original_max_position_embeddings": meta.optional(
            "rope.scaling.original_context_length", 4096
        ),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
    types = _types(meta.number("block_count"), lambda layer: layer % 2 == 0)
    return _experts(meta) | {
        "intermediate_size": width,
        "attention_bias": True,
        "layer_types": types,
        "sliding_window": meta.number("attention.sliding_window"),
        "rope_parameters": rope,
    }


def _hunyuan_moe(meta: Metadata) -> dict[str, Any]:
    found = _experts(meta)
    found |= {"moe_topk": found["num_experts_per_tok"]}
    return found | {"intermediate_size": found["moe_intermediate_size"]}


def _like_deepseek(meta: Metadata) -> dict[str, Any]:
    return _experts(meta) | {
        "n_routed_experts": meta.number("expert_count"),
        "n_shared_experts": meta.optional("expert_shared_count", 0),
        "first_k_dense_replace": meta.optional("leading_dense_block_count", 0),
        "routed_scaling_factor": meta.optional("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(meta.optional("expert_weights_norm", False)),
        "n_group": meta.optional("expert_group_count", 1),
        "topk_group": meta.optional("expert_group_used_count", 1),
    }


_SIGMOID = 2  # of the kinds of gating


def _deepseek2(meta: Metadata) -> dict[str, Any]:
    """DeepSeek V3 and what is like it where scores are sigmoids, else V2; Youtu without experts.

    Files of before latents were kept have the lengths of heads that are made of them.
    """
    turned, stretch = meta.number("rope.dimension_count"), "rope.scaling.yarn_log_multiplier"
    key, value = (
        meta.optional(f"attention.{name}_length_mla", 0) or meta.number(f"attention.{name}_length")
        for name in ("key", "value")
    )
    found: dict[str, Any] = {
        "kv_lora_rank": meta.number("attention.kv_lora_rank"),
        "q_lora_rank": meta.optional("attention.q_lora_rank", 0) or None,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": key - turned,
        "v_head_dim": value,
    }
    if log_multiplier := meta.optional(stretch, 0.0):  # a tenth of what the model has
        mscale = 10 * log_multiplier
        found["rope_parameters"] = {"mscale": mscale, "mscale_all_dim": mscale}
    if not meta.optional("expert_count", 0):
        return found | {"model_type": "youtu"}
    found |= _like_deepseek(meta)
    first = f"blk.{found['first_k_dense_replace']}"
    if meta.optional("expert_gating_func", 0) == _SIGMOID or meta.has_tensor(
        f"{first}.exp_probs_b.bias"
    ):
        return found
    method = "greedy" if found["n_group"] == 1 else "group_limited_greedy"
    return found | {"model_type": "deepseek_v2", "topk_method": method}


def _dots1(meta: Metadata) -> dict[str, Any]:
    return _like_deepseek(meta) | {"sliding_window": None}


def _minimax_m2(meta: Metadata) -> dict[str, Any]:
    width = meta.optional("expert_feed_forward_length", 0) or meta.number("feed_forward_length")
    return _experts(meta) | {
        "intermediate_size": width,
        "rotary_dim": meta.optional("rope.dimension_count", meta.number("attention.key_length")),
        "use_qk_norm": True,
    }


def _olmoe(meta: Metadata) -> dict[str, Any]:
    found = _experts(meta) | {"norm_topk_prob": False}
    found["intermediate_size"] = found["moe_intermediate_size"]
    return found | {"clip_qkv": meta.optional("attention.clamp_kqv", None)}


def _olmo(meta: Metadata) -> dict[str, Any]:
    return {"clip_qkv": meta.optional("attention.clamp_kqv", None)}


def _granite_moe(meta: Metadata) -> dict[str, Any]:
    return _granite(meta) | _experts(meta)


def _ernie_moe(meta: Metadata) -> dict[str, Any]:
    return {
        "moe_num_experts": meta.number("expert_count"),
        "moe_k": meta.number("expert_used_count"),
        "moe_intermediate_size": meta.number("expert_feed_forward_length"),
        "moe_num_shared_experts": meta.optional("expert_shared_count", 0),
        "moe_layer_start_index": meta.optional("leading_dense_block_count", 0),
        "moe_layer_interval": meta.optional("interleave_moe_layer_step", 1),
    }


def _mistral3(meta: Metadata) -> dict[str, Any]:
    """Ministral 3, whose queries grow with the position; without that, Mistral's earlier models."""
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


def _nemotron(meta: Metadata) -> dict[str, Any]:
    return {"hidden_act": "relu2", "norm_eps": meta.number("attention.layer_norm_epsilon")}


def _arcee(meta: Metadata) -> dict[str, Any]:  # noqa: ARG001 - as the others
    return {"hidden_act": "relu2"}


def _layer_norm(meta: Metadata) -> dict[str, Any]:
    return {"layer_norm_eps": meta.number("attention.layer_norm_epsilon")}


def _stablelm(meta: Metadata) -> dict[str, Any]:
    is_parallel = bool(meta.optional("use_parallel_residual", False))
    return _layer_norm(meta) | {"use_parallel_residual": is_parallel}


def _phi2(meta: Metadata) -> dict[str, Any]:
    return _layer_norm(meta) | {"hidden_act": "gelu_new"}


_LLAMA = Architecture(model_type="llama", is_turned=True)
_MIXTRAL = Architecture(
    model_type="mixtral", fields=_experts, names=_MIXTRAL_EXPERTS, is_turned=True, experts="each"
)

ARCHITECTURES: dict[str, Architecture] = {
    "arcee": Architecture(model_type="arcee", fields=_arcee, is_turned=True),
    "cohere2": Architecture(model_type="cohere2", fields=_cohere2),
    "command-r": Architecture(model_type="cohere", fields=_cohere),
    "deepseek2": Architecture(
        model_type="deepseek_v3",
        fields=_deepseek2,
        names=_EXPERTS | _SHARED_EXPERTS | _CHOICE_BIAS | _LATENT,
        is_latent=True,
        experts="each",
    ),
    "dots1": Architecture(
        model_type="dots1",
        fields=_dots1,
        names=_EXPERTS | _SHARED_EXPERTS | _CHOICE_BIAS,
        experts="each",
    ),
    "ernie4_5": Architecture(model_type="ernie4_5"),
    "ernie4_5-moe": Architecture(
        model_type="ernie4_5_moe",
        fields=_ernie_moe,
        names=_EXPERTS
        | _SHARED_EXPERTS
        | {"exp_probs_b": "mlp.moe_statics.e_score_correction_bias"},
        experts="each",
    ),
    "exaone4": Architecture(model_type="exaone4", fields=_exaone4, names=_AFTER),
    "gemma": Architecture(model_type="gemma", fields=_gelu, norm_offset=1.0),
    "gemma2": Architecture(
        model_type="gemma2", fields=_gemma2, names=_BEFORE_AND_AFTER, norm_offset=1.0
    ),
    "gemma3": Architecture(
        model_type="gemma3_text", fields=_gemma3, names=_BEFORE_AND_AFTER, norm_offset=1.0
    ),
    "gemma4": Architecture(model_type="gemma4_text", fields=_gemma4, names=_GEMMA4),
    "glm4": Architecture(
        model_type="glm4",
        turns_part=True,
        names={
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "glm4moe": Architecture(
        model_type="glm4_moe",
        fields=_like_deepseek,
        turns_part=True,
        names=_EXPERTS
        | _SHARED_EXPERTS
        | _CHOICE_BIAS
        | NEXTN_NAMES
        | {"post_attention_norm": "post_attention_layernorm"},
        experts="each",
    ),
    "gpt-oss": Architecture(
        model_type="gpt_oss",
        fields=_gpt_oss,
        names={
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        experts="gpt_oss",
    ),
    "granite": Architecture(model_type="granite", fields=_granite, is_turned=True),
    "granitehybrid": Architecture(
        model_type="granitemoehybrid",
        fields=_granite_hybrid,
        names=_MAMBA | _EXPERTS | _SHARED_GRANITE,
        turns_part=True,
        is_turned=True,
        experts="each",
    ),
    "granitemoe": Architecture(
        model_type="granitemoe",
        fields=_granite_moe,
        names={"ffn_gate_inp": "block_sparse_moe.router.layer"},
        is_turned=True,
        experts="granite",
    ),
    "hunyuan-dense": Architecture(model_type="hunyuan_v1_dense", names=_HUNYUAN),
    "hunyuan-moe": Architecture(
        model_type="hunyuan_v1_moe",
        fields=_hunyuan_moe,
        names=_HUNYUAN | _EXPERTS | _SHARED_MLP | {"ffn_gate_inp": "mlp.gate.wg"},
        experts="each",
    ),
    "lfm2": Architecture(
        model_type="lfm2",
        fields=_lfm2,
        names=_LFM,
        own_final_norm="token_embd_norm",
    ),
    "lfm2moe": Architecture(
        model_type="lfm2_moe",
        fields=_lfm2_moe,
        names=_LFM | _EXPERTS | {"exp_probs_b": "mlp.expert_bias"},
        experts="each",
        own_final_norm="token_embd_norm",
    ),
    "llama": _LLAMA,
    "minimax-m2": Architecture(
        model_type="minimax_m2",
        fields=_minimax_m2,
        names=_MIXTRAL_EXPERTS | {"exp_probs_b": "block_sparse_moe.e_score_correction_bias"},
        turns_part=True,
        experts="each",
    ),
    "mistral3": Architecture(model_type="ministral3", fields=_mistral3, is_turned=True),
    "nemotron": Architecture(
        model_type="nemotron", fields=_nemotron, turns_part=True, norm_offset=1.0
    ),
    "nemotron_h": Architecture(
        model_type="nemotron_h", fields=_nemotron_h, names=_NEMOTRON_H, turns_part=True
    ),
    "nemotron_h_moe": Architecture(
        model_type="nemotron_h",
        fields=_nemotron_h_moe,
        names=_NEMOTRON_H | _EXPERTS | _SHARED_EXPERTS | _CHOICE_BIAS,
        turns_part=True,
        experts="each",
    ),
    "olmo": Architecture(model_type="olmo", fields=_olmo, is_turned=True),
    "olmoe": Architecture(model_type="olmoe", fields=_olmoe, names=_EXPERTS, experts="each"),
    "olmo2": Architecture(model_type="olmo2", fields=_olmo2, names=_AFTER),
    "phi2": Architecture(
        model_type="phi",
        fields=_phi2,
        names=_PHI,
        turns_part=True,
        final_norm="model.final_layernorm",
    ),
    "phi3": Architecture(
        model_type="phi3",
        fields=_phi3,
        names={"ffn_up": "mlp.gate_up_proj"},
        turns_part=True,
    ),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen2moe": Architecture(
        model_type="qwen2_moe", fields=_qwen2_moe, names=_EXPERTS | _SHARED_EXPERT, experts="each"
    ),
    "qwen3": Architecture(model_type="qwen3"),
    "qwen35": Architecture(
        model_type="qwen3_5_text",
        fields=_hybrid,
        names=_HYBRID,
        turns_part=True,
        norm_offset=1.0,
        has_tiled_heads=True,
    ),
    "qwen35moe": Architecture(
        model_type="qwen3_5_moe_text",
        fields=_hybrid_moe,
        names=_HYBRID_EXPERTS,
        turns_part=True,
        norm_offset=1.0,
        has_tiled_heads=True,
        experts="each",
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe", fields=_qwen3_moe, names=_EXPERTS, experts="each"
    ),
    "qwen3next": Architecture(
        model_type="qwen3_next",
        fields=_hybrid_moe,
        names=_HYBRID_EXPERTS,
        turns_part=True,
        norm_offset=1.0,
        experts="each",
    ),
    "seed_oss": Architecture(
        model_type="seed_oss", names={"post_attention_norm": "post_attention_layernorm"}
    ),
    "smollm3": Architecture(model_type="smollm3", is_turned=True),
    "stablelm": Architecture(model_type="stablelm", fields=_stablelm, turns_part=True),
    "starcoder2": Architecture(
        model_type="starcoder2",
        fields=_starcoder2,
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
}


# Of files of these architectures; Mistral's say that they are Llama's.
GGUF_TYPES = frozenset(each.model_type for each in ARCHITECTURES.values()) | {
    "deepseek_v2",
    "glm4_moe_lite",
    "mistral",
    "mixtral",
    "olmo3",
    "youtu",
}
# The text model of a multimodal file; other names of what is Llama's.
ALIASES = {
    "qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe", "internlm2": "llama",
    "xverse": "llama",
}  # fmt: skip
_STATE = "the names of its recurrent layers' tensors in GGUF files are not known"
_ALIBI = "its scores are biased by distance (ALiBi)"
_NO_DECODER = "it does not predict text token by token"
# Architectures that are refused, whatever names their tensors have.
REFUSED = dict.fromkeys(
    (
        "arwkv7", "falcon-h1", "jamba", "kimi-linear", "mamba", "mamba2", "plamo2", "plamo3",
        "rwkv6", "rwkv6qwen2", "rwkv7",
    ),
    _STATE,
) | dict.fromkeys(
    (
        "bert", "clip", "dream", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3",
        "llada", "llada-moe", "llama-embed", "modern-bert", "neo-bert", "nomic-bert",
        "nomic-bert-moe", "rnd1", "t5", "t5encoder", "wavtokenizer-dec",
    ),
    _NO_DECODER,
)  # fmt: skip
REFUSED |= {"bloom": _ALIBI, "mpt": _ALIBI, "glm-dsa": "an indexer chooses the keys of each row"}


def architecture_of(name: str, meta: Metadata) -> Architecture | None:
    """Look up an architecture; None for one that is not known."""
    if name == "llama" and meta.optional("expert_count", 0):
        return _MIXTRAL
    return ARCHITECTURES.get(ALIASES.get(name, name))
