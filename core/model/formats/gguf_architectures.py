"""What GGUF files of each architecture hold: fields of a config.json, and whose tensors they are.

Sources: llama.cpp's converters, whose names and reorderings are undone here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

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
}
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
_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BEFORE_AND_AFTER = _AFTER | {"ffn_norm": "pre_feedforward_layernorm"}


class Metadata(Protocol):
    """Fields by name without the architecture's prefix."""

    def number(self, name: str) -> Any:  # noqa: ANN401 - an int or a float, as the file has it
        """A required number."""

    def optional(self, name: str, default: Any) -> Any:  # noqa: ANN401
        """The same, or text, where the file has it."""

    def flags(self, name: str) -> list[bool]:
        """An array of them; empty where the file has none."""

    def tensor(self, name: str) -> list[float]:
        """The numbers of a small tensor; empty where the file has none."""


Fields = Callable[[Metadata], dict[str, Any]]


def _nothing(meta: Metadata) -> dict[str, Any]:  # noqa: ARG001 - as the others
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """``fields``: of config.json, besides those that all have. ``names``: where a layer's tensors
    have others than Llama's; those with ``{}`` are stacked experts.

    ``turns_part``: RoPE may turn a part of each head. ``is_turned``: rows of queries and keys lie
    in the pairs that RoPE turns, not in halves. ``norm_offset``: what the file's norms have more
    than the model's.
    """

    model_type: str
    fields: Fields = _nothing
    names: Mapping[str, str] = field(default_factory=dict)
    turns_part: bool = False
    is_turned: bool = False
    norm_offset: float = 0.0
    experts: Literal["none", "each", "gpt_oss"] = "none"


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
    """What scores are divided by the root of; the largest of a family, by its layers, differs."""
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


_LLAMA = Architecture(model_type="llama", is_turned=True)
_MIXTRAL = Architecture(
    model_type="mixtral", fields=_experts, names=_MIXTRAL_EXPERTS, is_turned=True, experts="each"
)

ARCHITECTURES: dict[str, Architecture] = {
    "cohere2": Architecture(model_type="cohere2", fields=_cohere2),
    "command-r": Architecture(model_type="cohere", fields=_cohere),
    "ernie4_5": Architecture(model_type="ernie4_5"),
    "exaone4": Architecture(model_type="exaone4", fields=_exaone4, names=_AFTER),
    "gemma": Architecture(model_type="gemma", fields=_gelu, norm_offset=1.0),
    "gemma2": Architecture(
        model_type="gemma2", fields=_gemma2, names=_BEFORE_AND_AFTER, norm_offset=1.0
    ),
    "gemma3": Architecture(
        model_type="gemma3_text", fields=_gemma3, names=_BEFORE_AND_AFTER, norm_offset=1.0
    ),
    "glm4": Architecture(
        model_type="glm4",
        turns_part=True,
        names={
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
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
    "llama": _LLAMA,
    "olmo2": Architecture(model_type="olmo2", fields=_olmo2, names=_AFTER),
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
    "qwen3moe": Architecture(
        model_type="qwen3_moe", fields=_qwen3_moe, names=_EXPERTS, experts="each"
    ),
    "seed_oss": Architecture(
        model_type="seed_oss", names={"post_attention_norm": "post_attention_layernorm"}
    ),
    "smollm3": Architecture(model_type="smollm3", is_turned=True),
    "starcoder2": Architecture(
        model_type="starcoder2",
        fields=_starcoder2,
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
}


# Of files of these architectures; Mistral's say that they are Llama's.
GGUF_TYPES = frozenset(each.model_type for each in ARCHITECTURES.values()) | {
    "mistral",
    "mixtral",
    "olmo3",
}


def architecture_of(name: str, meta: Metadata) -> Architecture | None:
    """What a file of this architecture holds; None for one that is not known."""
    if name == "llama" and meta.optional("expert_count", 0):
        return _MIXTRAL
    return ARCHITECTURES.get(name)
