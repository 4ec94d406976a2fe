"""Architectures of GGUF files, and their mapping to transformers' models.

Source: llama.cpp's converters. This module undoes their renaming and reordering of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from . import gguf_fields as plain
from . import gguf_mixed_fields as mixed
from . import gguf_names as names
from .gguf_metadata import Metadata

Fields = Callable[[Metadata], dict[str, Any]]


def _nothing(meta: Metadata) -> dict[str, Any]:  # noqa: ARG001 - as the others
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The mapping of one GGUF architecture.

    ``fields``: returns the fields of config.json other than the common ones. ``names``: tensor
    names of a layer that differ from Llama's; a name with ``{}`` belongs to stacked experts.
    ``has_partial_rope``: RoPE may rotate only a part of each head. ``has_paired_rows``: the rows of
    queries and keys are stored in neighbouring pairs for RoPE, not in halves. ``norm_offset``:
    number that the converter added to the norms. ``has_tiled_heads``: value head j reads key head
    ``j % num_key_heads``. ``is_latent``: the model has latent attention, in which RoPE has
    dimensions of its own.
    """

    model_type: str
    fields: Fields = _nothing
    names: Mapping[str, str] = field(default_factory=dict)
    has_partial_rope: bool = False
    has_paired_rows: bool = False
    norm_offset: float = 0.0
    has_tiled_heads: bool = False
    is_latent: bool = False
    experts: Literal["none", "each", "gpt_oss", "granite"] = "none"
    final_norm: str = "model.norm"
    own_final_norm: str = "output_norm"  # stored name of the final norm


_LLAMA = Architecture(model_type="llama", has_paired_rows=True)
_MIXTRAL = Architecture(
    model_type="mixtral",
    fields=mixed.experts,
    names=names.MIXTRAL_EXPERTS,
    has_paired_rows=True,
    experts="each",
)

ARCHITECTURES: dict[str, Architecture] = {
    "arcee": Architecture(model_type="arcee", fields=plain.arcee, has_paired_rows=True),
    "cohere2": Architecture(model_type="cohere2", fields=plain.cohere2),
    "command-r": Architecture(model_type="cohere", fields=plain.cohere),
    "deepseek2": Architecture(
        model_type="deepseek_v3",
        fields=mixed.deepseek2,
        names=names.EXPERTS | names.SHARED_EXPERTS | names.CHOICE_BIAS | names.LATENT,
        is_latent=True,
        experts="each",
    ),
    "dots1": Architecture(
        model_type="dots1",
        fields=mixed.dots1,
        names=names.EXPERTS | names.SHARED_EXPERTS | names.CHOICE_BIAS,
        experts="each",
    ),
    "ernie4_5": Architecture(model_type="ernie4_5"),
    "ernie4_5-moe": Architecture(
        model_type="ernie4_5_moe",
        fields=mixed.ernie_moe,
        names=names.EXPERTS
        | names.SHARED_EXPERTS
        | {"exp_probs_b": "mlp.moe_statics.e_score_correction_bias"},
        experts="each",
    ),
    "exaone4": Architecture(model_type="exaone4", fields=plain.exaone4, names=names.AFTER),
    "falcon-h1": Architecture(
        model_type="falcon_h1", fields=mixed.falcon_h1, names=names.FALCON_H1
    ),
    "gemma": Architecture(model_type="gemma", fields=plain.gelu, norm_offset=1.0),
    "gemma2": Architecture(
        model_type="gemma2", fields=plain.gemma2, names=names.BEFORE_AND_AFTER, norm_offset=1.0
    ),
    "gemma3": Architecture(
        model_type="gemma3_text", fields=plain.gemma3, names=names.BEFORE_AND_AFTER, norm_offset=1.0
    ),
    "gemma4": Architecture(model_type="gemma4_text", fields=plain.gemma4, names=names.GEMMA4),
    "glm4": Architecture(
        model_type="glm4",
        has_partial_rope=True,
        names={
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "glm4moe": Architecture(
        model_type="glm4_moe",
        fields=mixed.like_deepseek,
        has_partial_rope=True,
        names=names.EXPERTS
        | names.SHARED_EXPERTS
        | names.CHOICE_BIAS
        | names.NEXTN_NAMES
        | {"post_attention_norm": "post_attention_layernorm"},
        experts="each",
    ),
    "gpt-oss": Architecture(
        model_type="gpt_oss",
        fields=mixed.gpt_oss,
        names={
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        experts="gpt_oss",
    ),
    "granite": Architecture(model_type="granite", fields=plain.granite, has_paired_rows=True),
    "granitehybrid": Architecture(
        model_type="granitemoehybrid",
        fields=mixed.granite_hybrid,
        names=names.MAMBA | names.EXPERTS | names.SHARED_GRANITE,
        has_partial_rope=True,
        has_paired_rows=True,
        experts="each",
    ),
    "granitemoe": Architecture(
        model_type="granitemoe",
        fields=mixed.granite_moe,
        names={"ffn_gate_inp": "block_sparse_moe.router.layer"},
        has_paired_rows=True,
        experts="granite",
    ),
    "hunyuan-dense": Architecture(model_type="hunyuan_v1_dense", names=names.HUNYUAN),
    "hunyuan-moe": Architecture(
        model_type="hunyuan_v1_moe",
        fields=mixed.hunyuan_moe,
        names=names.HUNYUAN | names.EXPERTS | names.SHARED_MLP | {"ffn_gate_inp": "mlp.gate.wg"},
        experts="each",
    ),
    "lfm2": Architecture(
        model_type="lfm2",
        fields=mixed.lfm2,
        names=names.LFM,
        own_final_norm="token_embd_norm",
    ),
    "lfm2moe": Architecture(
        model_type="lfm2_moe",
        fields=mixed.lfm2_moe,
        names=names.LFM | names.EXPERTS | {"exp_probs_b": "mlp.expert_bias"},
        experts="each",
        own_final_norm="token_embd_norm",
    ),
    "llama": _LLAMA,
    "minimax-m2": Architecture(
        model_type="minimax_m2",
        fields=mixed.minimax_m2,
        names=names.MIXTRAL_EXPERTS | {"exp_probs_b": "block_sparse_moe.e_score_correction_bias"},
        has_partial_rope=True,
        experts="each",
    ),
    "mistral3": Architecture(model_type="ministral3", fields=plain.mistral3, has_paired_rows=True),
    "nemotron": Architecture(
        model_type="nemotron", fields=plain.nemotron, has_partial_rope=True, norm_offset=1.0
    ),
    "nemotron_h": Architecture(
        model_type="nemotron_h",
        fields=mixed.nemotron_h,
        names=names.NEMOTRON_H,
        has_partial_rope=True,
    ),
    "nemotron_h_moe": Architecture(
        model_type="nemotron_h",
        fields=mixed.nemotron_h_moe,
        names=names.NEMOTRON_H | names.EXPERTS | names.SHARED_EXPERTS | names.CHOICE_BIAS,
        has_partial_rope=True,
        experts="each",
    ),
    "olmo": Architecture(model_type="olmo", fields=plain.olmo, has_paired_rows=True),
    "olmoe": Architecture(
        model_type="olmoe", fields=mixed.olmoe, names=names.EXPERTS, experts="each"
    ),
    "olmo2": Architecture(model_type="olmo2", fields=plain.olmo2, names=names.AFTER),
    "phi2": Architecture(
        model_type="phi",
        fields=plain.phi2,
        names=names.PHI,
        has_partial_rope=True,
        final_norm="model.final_layernorm",
    ),
    "phi3": Architecture(
        model_type="phi3",
        fields=plain.phi3,
        names={"ffn_up": "mlp.gate_up_proj"},
        has_partial_rope=True,
    ),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen2moe": Architecture(
        model_type="qwen2_moe",
        fields=mixed.qwen2_moe,
        names=names.EXPERTS | names.SHARED_EXPERT,
        experts="each",
    ),
    "qwen3": Architecture(model_type="qwen3"),
    "qwen35": Architecture(
        model_type="qwen3_5_text",
        fields=mixed.hybrid,
        names=names.HYBRID,
        has_partial_rope=True,
        norm_offset=1.0,
        has_tiled_heads=True,
    ),
    "qwen35moe": Architecture(
        model_type="qwen3_5_moe_text",
        fields=mixed.hybrid_moe,
        names=names.HYBRID_EXPERTS,
        has_partial_rope=True,
        norm_offset=1.0,
        has_tiled_heads=True,
        experts="each",
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe", fields=mixed.qwen3_moe, names=names.EXPERTS, experts="each"
    ),
    "qwen3next": Architecture(
        model_type="qwen3_next",
        fields=mixed.hybrid_moe,
        names=names.HYBRID_EXPERTS,
        has_partial_rope=True,
        norm_offset=1.0,
        experts="each",
    ),
    "seed_oss": Architecture(
        model_type="seed_oss", names={"post_attention_norm": "post_attention_layernorm"}
    ),
    "smollm3": Architecture(model_type="smollm3", has_paired_rows=True),
    "stablelm": Architecture(model_type="stablelm", fields=plain.stablelm, has_partial_rope=True),
    "starcoder2": Architecture(
        model_type="starcoder2",
        fields=plain.starcoder2,
        names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
}


# These types can be in GGUF files; Mistral's files declare Llama's architecture.
GGUF_TYPES = frozenset(each.model_type for each in ARCHITECTURES.values()) | {
    "deepseek_v2",
    "glm4_moe_lite",
    "mistral",
    "mixtral",
    "olmo3",
    "youtu",
}
# The first names are multimodal files' names for their text model, the last ones other names for
# Llama's architecture.
ALIASES = {
    "qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe", "internlm2": "llama",
    "xverse": "llama",
}  # fmt: skip
_STATE = "the names of its recurrent layers' tensors in GGUF files are not known"
_ALIBI = "its attention scores depend on the distance (ALiBi)"
_NO_DECODER = "it does not predict text token by token"
# These architectures are refused even if the names of their tensors are known.
REFUSED = dict.fromkeys(
    (
        "arwkv7", "jamba", "kimi-linear", "mamba", "mamba2", "plamo2", "plamo3",
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
REFUSED |= {"bloom": _ALIBI, "mpt": _ALIBI, "glm-dsa": "an indexer selects the keys of each query"}


def architecture_of(name: str, meta: Metadata) -> Architecture | None:
    """Return an architecture by name; None if it is unknown."""
    if name == "llama" and meta.optional("expert_count", 0):
        return _MIXTRAL
    return ARCHITECTURES.get(ALIASES.get(name, name))
