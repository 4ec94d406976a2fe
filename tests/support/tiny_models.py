"""Tiny random models of any type that transformers knows, saved as the hub has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from support.checkpoints import save

VOCAB = 199
WINDOW = 12

# One of each mechanism: windows and caps, sinks and experts, layers of two shapes, latent
# attention, parallel blocks without RoPE, learned positions, a norm of whole rows, a plain MLP.
FEW = (
    "gemma2", "gpt_oss", "gemma4_text", "deepseek_v3", "cohere2", "gpt2", "olmo3", "starcoder2",
)  # fmt: skip
_MORE = (
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "beam", "biogpt", "bitnet", "cohere",
    "cohere2_moe", "cwm", "deepseek_v2", "dots1", "ernie4_5", "ernie4_5_moe",
    "exaone4", "exaone_moe", "flex_olmo", "flint", "gemma", "gemma3_text", "gemma3n_text",
    "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_bigcode", "gpt_neox", "granite",
    "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "iquestcoder",
    "jais2", "jetmoe", "kolibri1", "laguna", "llama", "llama4_text", "longcat_flash", "mellum",
    "mimo_v2_flash", "minicpm3", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3",
    "mistral", "mixtral", "modernbert-decoder", "nanochat", "nemotron", "olmo", "olmo2",
    "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "vaultgemma", "youtu",
)  # fmt: skip
TYPES = (*FEW, *_MORE)

# Types without a decoder here, some of whose layers keep a recurrent state.
RECURRENT = (
    "bailing_hybrid", "falcon_mamba", "jamba", "kimi_linear", "lfm3", "mamba", "mamba2",
    "olmo_hybrid", "zamba", "zamba2", "zaya",
)  # fmt: skip

# What a config is given where it has such a field: small, and odd enough that a mistake shows.
FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "pad_vocab_size": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # width and depth
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "d_model": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "max_position_embeddings": 512,
    # heads
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "kv_channels": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "attention_chunk_size": 512,
    "partial_rotary_factor": None,
    # latent attention
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    # experts
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 48,
    "expert_ffn_hidden_size": 32,
    "intermediate_size_mlp": 96,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "num_nextn_predict_layers": 0,
    # of single families
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "num_kv_shared_layers": 0,
    "dim_model_base": 64,
}
_GIVEN_NO_VALUE = ("pad_vocab_size", "partial_rotary_factor")

# What single types need besides.
DIFFERENCES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
        "activation_sparsity_pattern": None,
        "intermediate_size": 96,
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
    },
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
    "llama4_text": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "moe_layers": [1, 3]},
    "longcat_flash": {"num_layers": 2, "head_dim": 8, "zero_expert_num": 2},
    "mimo_v2_flash": {"v_head_dim": 8, "swa_num_key_value_heads": 4},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "sliding_window": 12},
    "stablelm": {"partial_rotary_factor": 0.25},
}


DIFFERENCES |= {
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8},
    "falcon_mamba": {"state_size": 8, "intermediate_size": 128},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba": {"state_size": 8, "intermediate_size": 128},
    "mamba2": {"state_size": 8, "num_heads": 8, "n_groups": 2, "chunk_size": 16},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "mamba_d_state": 8,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"],
        "num_mem_blocks": 2,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "use_mem_rope": True,
        "time_step_min": 1e-9,  # below it chunks take it, and single rows do not
        "use_shared_attention_adapter": True,
        "adapter_rank": 8,
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "chunk_size": 16,
    },
    "zaya": {"router_hidden_size": 32, "num_experts_per_tok": 1, "tie_word_embeddings": False},
}


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # a field that differs by layer refuses to be read as one
        return True


def tiny_config(model_type: str, **more: Any) -> Any:
    """A small config of a type, with the fields that the type has."""
    made = CONFIG_MAPPING[model_type]
    default = made()
    values = {
        name: value
        for name, value in FIELDS.items()
        if _has(default, name) and name not in _GIVEN_NO_VALUE
    }
    if _has(default, "kv_lora_rank"):  # ``head_dim`` is another name of the part that turns
        values.pop("head_dim", None)
        values["num_key_value_heads"] = values["num_attention_heads"]
    if isinstance(getattr(made, "head_dim", None), property):
        values.pop("head_dim", None)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if name in values and getattr(default, name) is not None:
            values[name] = 0
    return made(**(values | DIFFERENCES.get(model_type, {}) | more))


def tiny_model(model_type: str, *, seed: int = 0, **more: Any) -> Any:
    """A random model, float32, whose outputs differ clearly between tokens.

    Biases, norms, sinks and correction biases are random, too: as they are made they would be
    without effect.
    """
    return random_model(tiny_config(model_type, **more), seed=seed)


def random_model(config: Any, *, seed: int = 0) -> Any:
    """A random model of a config; see `tiny_model`."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    with torch.no_grad():
        for name, tensor in tensors:
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("mup_vector"):  # made of the config, and not saved
                continue
            if tensor.dim() >= 2:
                tensor.copy_(noise * 1.2 / tensor.shape[-1] ** 0.5)
            elif name.endswith("A_log"):  # log decays of a token from 0.02 to 7
                tensor.copy_(torch.linspace(-4.0, 2.0, len(tensor)))
            elif name.endswith("temp"):  # a factor of the keys
                tensor.copy_(4.0 + noise)
            elif name.endswith(("hidden_states_bias", "residual_bias")):
                tensor.copy_(noise * 0.01)
            elif name.endswith(("sinks", "correction_bias", "expert_bias")):
                tensor.copy_(noise * 0.5)
            elif not name.endswith(("inv_freq", "embed_scale", "scale")) and tensor.dim() == 1:
                if "norm" in name and name.endswith("weight") and float(tensor.abs().max()) > 1e3:
                    tensor.fill_(1.0)
                tensor.add_(noise * 0.1)
    model.generation_config = transformers.GenerationConfig()
    return model


def save_tiny(folder: Path, model_type: str, **more: Any) -> Path:
    """A tiny random checkpoint of a type."""
    return save(tiny_model(model_type, **more), folder)
