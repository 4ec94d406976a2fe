"""Configs of well-known models, written down from their published shapes; fields that nothing reads
are left out.
"""

from __future__ import annotations

from typing import Any

_BF16 = {"dtype": "bfloat16"}


def _shape(
    model_type: str, hidden: int, width: int, layers: int, heads: int, kv_heads: int, vocab: int,
    max_len: int, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": max_len,
        **_BF16,
        **more,
    }


def _compressed(form: str, bits: int, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int"}
    group = {"targets": ["Linear"], "weights": weights, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
    }


def _conv_but(num_layers: int, full: set[int]) -> list[str]:
    return ["full_attention" if layer in full else "conv" for layer in range(num_layers)]


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN3_5 = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
}
_GEMMA3_1B = _shape(
    "gemma3_text", 1152, 6912, 26, 4, 1, 262144, 32768, head_dim=256, sliding_window=512,
    query_pre_attn_scalar=256, tie_word_embeddings=True,
)  # fmt: skip
_GEMMA3_4B = _shape(
    "gemma3_text", 2560, 10240, 34, 8, 4, 262208, 131072, head_dim=256, sliding_window=1024,
    query_pre_attn_scalar=256, tie_word_embeddings=True,
)  # fmt: skip

KNOWN: dict[str, dict[str, Any]] = {
    "Llama 3.1 8B": _shape("llama", 4096, 14336, 32, 32, 8, 128256, 131072, rope_scaling=_LLAMA3),
    "Llama 3.2 1B": _shape(
        "llama", 2048, 8192, 16, 32, 8, 128256, 131072, head_dim=64,
        rope_scaling=_LLAMA3 | {"factor": 32.0}, tie_word_embeddings=True,
    ),
    "Qwen3 0.6B": _shape(
        "qwen3", 1024, 3072, 28, 16, 8, 151936, 40960, head_dim=128, tie_word_embeddings=True
    ),
    "Qwen3 8B": _shape("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, head_dim=128),
    "Qwen2.5 7B": _shape("qwen2", 3584, 18944, 28, 28, 4, 152064, 32768),
    "Mistral 7B v0.3": _shape("mistral", 4096, 14336, 32, 32, 8, 32768, 32768, sliding_window=None),
    "Gemma 2 9B": _shape(
        "gemma2", 3584, 14336, 42, 16, 8, 256000, 8192, head_dim=256, tie_word_embeddings=True
    ),
    "Gemma 3 1B": _GEMMA3_1B,
    "Gemma 3 4B": {"model_type": "gemma3", "text_config": _GEMMA3_4B, **_BF16},
    "Gemma 4 31B": _shape(
        "gemma4_text", 5376, 21504, 60, 32, 16, 262144, 262144, head_dim=256, global_head_dim=512,
        num_global_key_value_heads=4, attention_k_eq_v=True, sliding_window=1024,
        hidden_size_per_layer_input=0, tie_word_embeddings=True,
    ),
    "Gemma 4 26B-A4B": _shape(
        "gemma4_text", 2816, 2112, 30, 16, 8, 262144, 262144, head_dim=256, global_head_dim=512,
        num_global_key_value_heads=2, attention_k_eq_v=True, sliding_window=1024,
        hidden_size_per_layer_input=0, tie_word_embeddings=True, enable_moe_block=True,
        num_experts=128, top_k_experts=8, moe_intermediate_size=704,
    ),
    "Gemma 4 E2B": _shape(
        "gemma4_text", 1536, 6144, 35, 8, 1, 262144, 131072, head_dim=256, global_head_dim=512,
        sliding_window=512, hidden_size_per_layer_input=256, vocab_size_per_layer_input=262144,
        num_kv_shared_layers=20, use_double_wide_mlp=True, tie_word_embeddings=True,
        layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
    ),
    "Hunyuan 7B": _shape(
        "hunyuan_v1_dense", 4096, 14336, 32, 32, 8, 128167, 262144, head_dim=128,
        tie_word_embeddings=True, rms_norm_eps=1e-5,
        rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    ),
    "gpt-oss 20B": _shape(
        "gpt_oss", 2880, 2880, 24, 64, 8, 201088, 131072, head_dim=64, num_local_experts=32,
        num_experts_per_tok=4, sliding_window=128, quantization_config={"quant_method": "mxfp4"},
    ),
    "Phi-4": _shape("phi3", 5120, 17920, 40, 40, 10, 100352, 16384, pad_token_id=100257),
    "SmolLM3 3B": _shape(
        "smollm3", 2048, 11008, 36, 16, 4, 128256, 65536, tie_word_embeddings=True
    ),
    "Granite 3.3 8B": _shape(
        "granite", 4096, 12800, 40, 32, 8, 49159, 131072, tie_word_embeddings=True
    ),
    "OLMo 2 7B": _shape("olmo2", 4096, 11008, 32, 32, 32, 100352, 4096),
    "GLM-4 9B 0414": _shape("glm4", 4096, 13696, 40, 32, 2, 151552, 32768, head_dim=128),
    "Command R7B": _shape(
        "cohere2", 4096, 14336, 32, 32, 8, 256000, 132096, sliding_window=4096, head_dim=128,
        tie_word_embeddings=True,
    ),
    "EXAONE 4.0 1.2B": _shape(
        "exaone4", 2048, 4096, 30, 32, 8, 102400, 65536, head_dim=64, sliding_window=None,
        layer_types=["full_attention"] * 30, tie_word_embeddings=True,
    ),
    "StarCoder2 7B": _shape(
        "starcoder2", 4608, 18432, 32, 36, 4, 49152, 16384, sliding_window=4096,
        tie_word_embeddings=True,
    ),
    "Qwen3.5 9B": _shape(
        "qwen3_5_text", 4096, 12288, 32, 16, 4, 248320, 262144, head_dim=256,
        rope_parameters=_QWEN3_5,
    ),
    "Qwen3.5 27B": _shape(
        "qwen3_5_text", 5120, 17408, 64, 24, 4, 248320, 262144, head_dim=256,
        linear_num_value_heads=48, rope_parameters=_QWEN3_5,
    ),
    "Qwen3.5 35B-A3B": _shape(
        "qwen3_5_moe_text", 2048, 512, 40, 16, 2, 248320, 262144, head_dim=256, num_experts=256,
        num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        rope_parameters=_QWEN3_5,
    ),
    "Qwen3-Next 80B-A3B": _shape(
        "qwen3_next", 2048, 5120, 48, 16, 2, 151936, 262144, head_dim=256, num_experts=512,
        num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        rope_theta=1e7, partial_rotary_factor=0.25,
    ),
    "Granite 4.0 H-Tiny": _shape(
        "granitemoehybrid", 1536, 512, 40, 12, 4, 100352, 131072, tie_word_embeddings=True,
        layer_types=["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
        num_local_experts=64, num_experts_per_tok=6, shared_intermediate_size=1024,
        mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128, position_embedding_type="nope",
    ),
    "Nemotron 3 Nano 30B-A3B": _shape(
        "nemotron_h", 2688, 1856, 52, 32, 2, 131072, 262144, head_dim=128,
        hybrid_override_pattern="MEMEM*E" * 5 + "MEMEMEM*E" + "MEMEMEME",
        mamba_num_heads=64, n_routed_experts=128, num_experts_per_tok=6,
        moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
        routed_scaling_factor=2.5,
    ),
    "OLMo Hybrid 7B": _shape(
        "olmo_hybrid", 3840, 11008, 32, 30, 30, 100352, 65536,
        rope_parameters={"rope_type": "default", "rope_theta": None},
    ),
    "MiniMax-Text-01": _shape(
        "minimax", 6144, 9216, 80, 64, 8, 200064, 10240000, head_dim=128, rotary_dim=64,
        num_local_experts=32, num_experts_per_tok=2, rope_theta=1e7,
        layer_types=(["linear_attention"] * 7 + ["full_attention"]) * 10,
    ),
    "LFM2 1.2B": _shape(
        "lfm2", 2048, 12288, 16, 32, 8, 65536, 128000, full_attn_idxs=[2, 5, 8, 10, 12, 14]
    ),
    "LFM2 8B-A1B": _shape(
        "lfm2_moe", 2048, 7168, 24, 32, 8, 65536, 128000, moe_intermediate_size=1792,
        num_experts=32, num_experts_per_tok=4, num_dense_layers=2,
        layer_types=_conv_but(24, {2, 6, 10, 14, 18, 21}),
    ),
    "Qwen3 30B-A3B": _shape(
        "qwen3_moe", 2048, 6144, 48, 32, 4, 151936, 40960, head_dim=128, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768,
    ),
    "Mixtral 8x7B": _shape(
        "mixtral", 4096, 14336, 32, 32, 8, 32000, 32768, num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "DeepSeek V2 Lite": _shape(
        "deepseek_v2", 2048, 10944, 27, 16, 16, 102400, 163840, kv_lora_rank=512,
        q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6,
        moe_intermediate_size=1408, first_k_dense_replace=1, topk_method="greedy",
    ),
    "GLM-4.7-Flash": _shape(
        "glm4_moe_lite", 2048, 10240, 47, 20, 20, 154880, 202752, kv_lora_rank=512,
        q_lora_rank=768, qk_rope_head_dim=64, qk_nope_head_dim=192, v_head_dim=256,
        n_routed_experts=64, n_shared_experts=1, num_experts_per_tok=4,
        moe_intermediate_size=1536, first_k_dense_replace=1,
    ),
    "Qwen3 32B AWQ": _shape(
        "qwen3", 5120, 25600, 64, 64, 8, 151936, 40960, head_dim=128,
        quantization_config={
            "quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm",
        },
    ),
    "Qwen2.5 7B GPTQ": _shape(
        "qwen2", 3584, 18944, 28, 28, 4, 152064, 32768,
        quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128},
    ),
    "Llama 3.1 8B W4A16": _shape(
        "llama", 4096, 14336, 32, 32, 8, 128256, 131072, rope_scaling=_LLAMA3,
        quantization_config=_compressed("pack-quantized", 4),
    ),
    "Llama 3.1 8B W8A8": _shape(
        "llama", 4096, 14336, 32, 32, 8, 128256, 131072, rope_scaling=_LLAMA3,
        quantization_config=_compressed("int-quantized", 8, input_activations={"num_bits": 8}),
    ),
    "Qwen3 8B FP8": _shape(
        "qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, head_dim=128,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    "Falcon Mamba 7B": {
        "model_type": "falcon_mamba", "hidden_size": 4096, "num_hidden_layers": 64,
        "state_size": 16, "vocab_size": 65024, "tie_word_embeddings": False, **_BF16,
    },
    "Jamba 52B": _shape("jamba", 4096, 14336, 32, 32, 8, 65536, 262144),
    "Kimi Linear 48B-A3B": _shape("kimi_linear", 2304, 9216, 27, 32, 32, 163840, 1048576),
    "DeepSeek V3.2": {"model_type": "deepseek_v32", **_BF16},
}  # fmt: skip
