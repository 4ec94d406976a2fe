"""Config fields from GGUF metadata, for models with experts and recurrent layers."""

from __future__ import annotations

from typing import Any

from .gguf_fields import granite, layer_kinds
from .gguf_metadata import Metadata


def experts(meta: Metadata) -> dict[str, Any]:
    """Return the fields for numbers and width of experts, under the names of several families."""
    width = meta.optional("expert_feed_forward_length", 0) or meta.number("feed_forward_length")
    return {
        "num_experts": meta.number("expert_count"),
        "num_local_experts": meta.number("expert_count"),
        "num_experts_per_tok": meta.number("expert_used_count"),
        "moe_intermediate_size": width,
    }


def qwen3_moe(meta: Metadata) -> dict[str, Any]:
    """Return the fields of Qwen3 with experts."""
    return experts(meta) | {"norm_topk_prob": True}


def qwen2_moe(meta: Metadata) -> dict[str, Any]:
    """Return the fields of Qwen2 with experts, one of them shared."""
    shared = meta.number("expert_shared_feed_forward_length")
    return experts(meta) | {"shared_expert_intermediate_size": shared, "norm_topk_prob": False}


def hybrid(meta: Metadata) -> dict[str, Any]:
    """Return the fields of layers with a gated delta rule, as in Qwen3.5."""
    heads = meta.number("ssm.time_step_rank")
    return {
        "linear_conv_kernel_dim": meta.number("ssm.conv_kernel"),
        "linear_key_head_dim": meta.number("ssm.state_size"),
        "linear_num_key_heads": meta.number("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": meta.number("ssm.inner_size") // max(1, heads),
        "full_attention_interval": meta.optional("full_attention_interval", 4),
    }


def hybrid_moe(meta: Metadata) -> dict[str, Any]:
    """Return the fields of layers with a gated delta rule and experts."""
    return hybrid(meta) | qwen2_moe(meta) | {"norm_topk_prob": True}


def _mamba(meta: Metadata) -> dict[str, Any]:
    """Return Mamba-2's fields under Bamba's names, and layer kinds according to the tensors."""
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


def granite_hybrid(meta: Metadata) -> dict[str, Any]:
    """Return the fields of Granite 4, with Mamba-2 and optional experts."""
    count = meta.optional("expert_count", 0)
    shared = meta.optional("expert_shared_feed_forward_length", 0)
    found: dict[str, Any] = {**_mamba(meta), **granite(meta), "num_local_experts": count}
    found["mamba_expand"] = meta.number("ssm.inner_size") // meta.number("embedding_length")
    found["shared_intermediate_size"] = shared or meta.number("feed_forward_length")
    if count:
        found["num_experts_per_tok"] = meta.number("expert_used_count")
    if meta.optional("rope.scaling.finetuned", True):  # The converter sets it for models with RoPE.
        found["position_embedding_type"] = "rope"
    return found


def falcon_h1(meta: Metadata) -> dict[str, Any]:
    """Return the fields of Falcon-H1: attention and Mamba-2 in each layer, factors in weights.

    Raises `ModelLoadError` without an output matrix: the stored embedding includes its own factor,
    and the factor of the logits is not stored.
    """
    if not meta.has_tensor("output.weight"):
        raise meta.error(
            "output.weight is missing (tied embeddings), so the scale of the logits is unknown"
        )
    found = _mamba(meta)
    del found["layer_types"]
    return found | {
        "mamba_d_ssm": meta.number("ssm.inner_size"),
        "mamba_rms_norm": meta.has_tensor("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def nemotron_h(meta: Metadata) -> dict[str, Any]:
    """Return the fields of Nemotron-H, whose layers have one part each."""
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


def nemotron_h_moe(meta: Metadata) -> dict[str, Any]:
    """Return the fields of Nemotron-H with experts."""
    shared = meta.number("expert_shared_feed_forward_length")
    if meta.optional("moe_latent_size", 0):
        return nemotron_h(meta) | {"moe_latent_size": meta.number("moe_latent_size")}
    return {
        **nemotron_h(meta),
        **experts(meta),
        "moe_shared_expert_intermediate_size": shared,
        "norm_topk_prob": meta.optional("expert_weights_norm", True),
        "routed_scaling_factor": meta.optional("expert_weights_scale", 1.0) or 1.0,
        "n_group": meta.optional("expert_group_count", 1) or 1,
        "topk_group": meta.optional("expert_group_used_count", 1) or 1,
    }


def lfm2(meta: Metadata) -> dict[str, Any]:
    """Return the fields of LFM2, where layers without KV heads are convolutions.

    The stored MLP width needs no adjustment.
    """
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


def lfm2_moe(meta: Metadata) -> dict[str, Any]:
    """Return the fields of LFM2 with experts."""
    return {
        **lfm2(meta),
        **experts(meta),
        "norm_topk_prob": True,
        "num_dense_layers": meta.number("leading_dense_block_count"),
        "routed_scaling_factor": meta.optional("expert_weights_scale", 1.0) or 1.0,
    }


def gpt_oss(meta: Metadata) -> dict[str, Any]:
    """Return the fields of gpt-oss: windows in every second layer, YaRN."""
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
    types = layer_kinds(meta.number("block_count"), lambda layer: layer % 2 == 0)
    return experts(meta) | {
        "intermediate_size": width,
        "attention_bias": True,
        "layer_types": types,
        "sliding_window": meta.number("attention.sliding_window"),
        "rope_parameters": rope,
    }


def hunyuan_moe(meta: Metadata) -> dict[str, Any]:
    """Return the fields of Hunyuan with experts."""
    found = experts(meta)
    found |= {"moe_topk": found["num_experts_per_tok"]}
    return found | {"intermediate_size": found["moe_intermediate_size"]}


def like_deepseek(meta: Metadata) -> dict[str, Any]:
    """Return the fields of experts as in DeepSeek: in groups, with shared ones and dense layers."""
    return experts(meta) | {
        "n_routed_experts": meta.number("expert_count"),
        "n_shared_experts": meta.optional("expert_shared_count", 0),
        "first_k_dense_replace": meta.optional("leading_dense_block_count", 0),
        "routed_scaling_factor": meta.optional("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(meta.optional("expert_weights_norm", False)),
        "n_group": meta.optional("expert_group_count", 1),
        "topk_group": meta.optional("expert_group_used_count", 1),
    }


_SIGMOID = 2  # value of the gating function in GGUF that means sigmoid


def deepseek2(meta: Metadata) -> dict[str, Any]:
    """Return the fields of DeepSeek V3 or V2, or of Youtu, which has no experts.

    V3 has sigmoid scores or a bias for the choice. The lengths of keys and values belong to the
    expanded heads; older files store them under other names.
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
    if log_multiplier := meta.optional(stretch, 0.0):  # the file has a tenth of the value
        mscale = 10 * log_multiplier
        found["rope_parameters"] = {"mscale": mscale, "mscale_all_dim": mscale}
    if not meta.optional("expert_count", 0):
        return found | {"model_type": "youtu"}
    found |= like_deepseek(meta)
    first = f"blk.{found['first_k_dense_replace']}"
    if meta.optional("expert_gating_func", 0) == _SIGMOID or meta.has_tensor(
        f"{first}.exp_probs_b.bias"
    ):
        return found
    method = "greedy" if found["n_group"] == 1 else "group_limited_greedy"
    return found | {"model_type": "deepseek_v2", "topk_method": method}


def dots1(meta: Metadata) -> dict[str, Any]:
    """Return the fields of dots.llm1."""
    return like_deepseek(meta) | {"sliding_window": None}


def minimax_m2(meta: Metadata) -> dict[str, Any]:
    """Return the fields of MiniMax M2."""
    width = meta.optional("expert_feed_forward_length", 0) or meta.number("feed_forward_length")
    return experts(meta) | {
        "intermediate_size": width,
        "rotary_dim": meta.optional("rope.dimension_count", meta.number("attention.key_length")),
        "use_qk_norm": True,
    }


def olmoe(meta: Metadata) -> dict[str, Any]:
    """Return the fields of OLMoE."""
    found = experts(meta) | {"norm_topk_prob": False}
    found["intermediate_size"] = found["moe_intermediate_size"]
    return found | {"clip_qkv": meta.optional("attention.clamp_kqv", None)}


def granite_moe(meta: Metadata) -> dict[str, Any]:
    """Return the fields of Granite with experts."""
    return granite(meta) | experts(meta)


def ernie_moe(meta: Metadata) -> dict[str, Any]:
    """Return the fields of ERNIE 4.5 with experts."""
    return {
        "moe_num_experts": meta.number("expert_count"),
        "moe_k": meta.number("expert_used_count"),
        "moe_intermediate_size": meta.number("expert_feed_forward_length"),
        "moe_num_shared_experts": meta.optional("expert_shared_count", 0),
        "moe_layer_start_index": meta.optional("leading_dense_block_count", 0),
        "moe_layer_interval": meta.optional("interleave_moe_layer_step", 1),
    }
