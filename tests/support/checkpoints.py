"""Tiny random checkpoints in Hugging Face layout, and a driver that feeds a Decoder by hand."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from foretoken.core.interface.extras.adapter import Adapter
from foretoken.core.interface.kv_codec import KvDtype
from foretoken.core.model.decoder import Decoder
from foretoken.core.ops.batch import Segment
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.ops.row_extras import RowExtras, SegmentState

VOCAB_SIZE = 261
ORIGINAL_LEN = 64  # of the checkpoints with stretched RoPE; tests go far beyond

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def _rope(rope_type: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **more}}


def _yarn(**more: Any) -> dict[str, Any]:
    return _rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL_LEN, **more)


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": ORIGINAL_LEN}

_PARTIAL = _rope("default", partial_rotary_factor=0.75)
_LONGROPE = _rope(
    "longrope",
    short_factor=[1.0 + 0.25 * i for i in range(8)],
    long_factor=[3.0] * 8,
    original_max_position_embeddings=256,
) | {"original_max_position_embeddings": 256}

_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "pad_token_id": None}
_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_ROPES = {
    "full_attention": _yarn()["rope_parameters"] | {"rope_theta": 3e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}

_GEMMA4_TYPES = ["full_attention", "sliding_attention", "full_attention"]
_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "sliding_window": 50,
    "layer_types": _GEMMA4_TYPES,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 3e4}
        | {"partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    },
    "pad_token_id": None,
}

_EXPERTS = {
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 36,
}
_GROUPS = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.6,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "pad_token_id": None,
}
_LATENT_EXPERTS = _LATENT | _EXPERTS | _GROUPS | {"n_shared_experts": 1, "first_k_dense_replace": 1}


def _many_heads(count: int) -> dict[str, Any]:
    return {"num_attention_heads": count, "num_key_value_heads": count}


# Every family and every kind of RoPE: model type and what differs from SHAPE.
# fmt: off
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_no_gqa": ("llama", {"num_key_value_heads": 4}),
    "llama_linear": ("llama", _rope("linear", factor=3.0)),
    "llama_llama3": ("llama", _rope("llama3", factor=8.0, **_LLAMA3)),
    "llama_yarn": ("llama", _yarn()),
    "llama_yarn_untruncated": ("llama", _yarn(truncate=False, beta_fast=16.0, beta_slow=2.0)),
    "llama_yarn_attention_factor": ("llama", _yarn(attention_factor=1.4)),
    "llama_yarn_mscale": ("llama", _yarn(mscale=1.0, mscale_all_dim=0.5)),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "mistral_window": ("mistral", {"sliding_window": 50}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1},
    ),
    "phi3": ("phi3", {"pad_token_id": None, "sliding_window": 50}),
    "phi3_partial": (
        "phi3",
        {"pad_token_id": None, "sliding_window": None, "head_dim": 16, **_PARTIAL},
    ),
    "phi3_longrope": ("phi3", {"pad_token_id": None, "sliding_window": None, **_LONGROPE}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.3,
            "logits_scaling": 4.0,
            "attention_multiplier": 0.4,
        },
    ),
    "granite_tied": (
        "granite",
        {"tie_word_embeddings": True, "embedding_multiplier": 3.0, "logits_scaling": 2.0}
        | {"attention_multiplier": 0.25, "attention_bias": True, "mlp_bias": True},
    ),
    "glm": ("glm", {"head_dim": 16, "attention_bias": True, "pad_token_id": None}),
    "helium": ("helium", {"head_dim": 16, "pad_token_id": None}),
    "ernie4_5": ("ernie4_5", {"head_dim": 16, "use_bias": True}),
    "gemma": ("gemma", {"head_dim": 16, "pad_token_id": None}),
    "gemma2": ("gemma2", _GEMMA | {"sliding_window": 50, "tie_word_embeddings": True}
               | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", _GEMMA | {"sliding_window": 50, "layer_types": _TYPES}
               | {"final_logit_softcapping": 4.0, "rope_parameters": _ROPES}),
    "gemma4": ("gemma4_text", _GEMMA4 | {"attention_k_eq_v": True}
               | {"num_global_key_value_heads": 1, "final_logit_softcapping": 4.0}),
    "gemma4_shared": ("gemma4_text", _GEMMA4 | {"tie_word_embeddings": True}
                      | {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}
                      | {"num_hidden_layers": 5, "use_double_wide_mlp": True}
                      | {"layer_types": [*_TYPES[:1], *_TYPES[:2], *_TYPES[:2]]}),
    "gemma4_experts": ("gemma4_text", _GEMMA4 | {"enable_moe_block": True, "num_experts": 8}
                       | {"top_k_experts": 3, "moe_intermediate_size": 36}),
    "glm4": ("glm4", {"head_dim": 16, "attention_bias": True, "pad_token_id": None}),
    "olmo2": ("olmo2", {"attention_bias": True, "pad_token_id": None, "intermediate_size": 140}),
    "olmo3": ("olmo3", {"sliding_window": 50, "layer_types": _TYPES, "pad_token_id": None}
              | {"rope_parameters": _ROPES}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1], "pad_token_id": None}),
    "smollm3_window": ("smollm3", {"no_rope_layers": [1, 0, 1], "pad_token_id": None}
                       | {"use_sliding_window": True, "sliding_window": 50}),
    "cohere": ("cohere", {"logit_scale": 0.5, "pad_token_id": None}),
    "cohere2": ("cohere2", {"logit_scale": 0.5, "pad_token_id": None, "attention_bias": True}
                | {"sliding_window": 50, "layer_types": _TYPES}),
    "exaone4": ("exaone4", {"sliding_window": 50, "layer_types": _TYPES, "pad_token_id": None}),
    "exaone4_full": ("exaone4", {"sliding_window": None, "pad_token_id": None}
                     | {"layer_types": ["full_attention"] * 3}),
    "starcoder2": ("starcoder2", {"sliding_window": 50, "pad_token_id": None}
                   | {"intermediate_size": 140}),
    "arcee": ("arcee", {"intermediate_size": 140, "mlp_bias": True, "pad_token_id": None}),
    "nemotron": ("nemotron", {"intermediate_size": 140, "head_dim": 16, "pad_token_id": None}
                 | _rope("default", partial_rotary_factor=0.5)),
    "ministral3": ("ministral3", {"head_dim": 16, "pad_token_id": None}
                   | _yarn(llama_4_scaling_beta=0.3)),
    "mixtral": ("mixtral", {"head_dim": 16, "sliding_window": 50} | _EXPERTS),
    "qwen2_moe": ("qwen2_moe", _EXPERTS | {"shared_expert_intermediate_size": 40}
                  | {"mlp_only_layers": [1]}),
    "qwen2_moe_renorm": ("qwen2_moe", _EXPERTS | {"shared_expert_intermediate_size": 40}
                         | {"norm_topk_prob": True, "qkv_bias": False}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 16, "norm_topk_prob": True} | _EXPERTS),
    "olmoe": ("olmoe", {"pad_token_id": None} | _EXPERTS),
    "glm4_moe": ("glm4_moe", _EXPERTS | _GROUPS | {"use_qk_norm": True, "pad_token_id": None}
                 | {"first_k_dense_replace": 1, "n_shared_experts": 1, "attention_bias": True}),
    "dots1": ("dots1", _EXPERTS | _GROUPS | {"n_shared_experts": 2, "norm_topk_prob": False}
              | {"sliding_window": 50, "layer_types": _TYPES, "head_dim": 16}),
    "minimax_m2": ("minimax_m2", {"head_dim": 16, "pad_token_id": None} | _EXPERTS
                   | _rope("default", partial_rotary_factor=0.5)),
    "gpt_oss": ("gpt_oss", {"head_dim": 16, "sliding_window": 50, "layer_types": _TYPES}
                | {"swiglu_limit": 0.6, "pad_token_id": None} | _EXPERTS | _yarn(truncate=False)),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 16, "attention_bias": True}
                | _rope("dynamic", alpha=50.0, factor=1.0)),
    "hunyuan_moe": ("hunyuan_v1_moe", {"head_dim": 16, "num_experts": 8, "moe_topk": 3}),
    "hunyuan_linear": ("hunyuan_v1_dense", {"head_dim": 16} | _rope("linear", factor=3.0)),
    "deepseek_v2": ("deepseek_v2", _LATENT_EXPERTS | {"n_shared_experts": 2, "q_lora_rank": None}
                    | {"topk_method": "group_limited_greedy"} | _many_heads(16)),
    "deepseek_v2_greedy": ("deepseek_v2", _LATENT_EXPERTS | {"attention_bias": True}
                           | _yarn(mscale=0.707, mscale_all_dim=0.707)),
    "deepseek_v3": ("deepseek_v3", _LATENT_EXPERTS | {"attention_bias": True}
                    | {"num_nextn_predict_layers": 0}),
    "deepseek_v3_yarn": ("deepseek_v3", _LATENT_EXPERTS | {"rope_interleave": False}
                         | {"num_nextn_predict_layers": 0} | _yarn(mscale=1.0, mscale_all_dim=0.5)),
    "glm4_moe_lite": ("glm4_moe_lite", _LATENT_EXPERTS | {"n_group": 1, "topk_group": 1}
                      | _many_heads(20)),
    "minicpm3": ("minicpm3", _LATENT | {"scale_emb": 3.0, "dim_model_base": 32}),
    "youtu": ("youtu", _LATENT | {"v_head_dim": 6}
              | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4} | _many_heads(128)),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_gelu": ("qwen3", {"head_dim": 32, "hidden_act": "gelu_pytorch_tanh"}),
    "qwen3_biased": ("qwen3", {"head_dim": 32, "attention_bias": True}),
    "qwen3_layer_types": (
        "qwen3",
        {
            "head_dim": 32,
            "use_sliding_window": True,
            "sliding_window": 50,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
# fmt: on

# Two key heads for four value heads, heads of two sizes, layers of both kinds at both ends.
_DELTA = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
    "head_dim": 16,
    "pad_token_id": None,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
_POSITIVE = {"linear_allow_neg_eigval": False, "attention_bias": True}
_DELTA_EXPERTS = _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 40}
# Two groups of four heads, layers of all kinds at either end of each other.
_BAMBA = {
    "num_hidden_layers": 4,
    "pad_token_id": None,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
_GRANITE = _BAMBA | {
    "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
    "shared_intermediate_size": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.3,
    "logits_scaling": 4.0,
    "attention_multiplier": 0.4,
}
# transformers clamps dt in the form for prompts alone: never here.
_NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "mlp"]
    + ["linear_attention"] * 2,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
    "conv_kernel": 4,
    "chunk_size": 16,
    "time_step_min": 1e-30,
    "n_routed_experts": 8,
    "n_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 36,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.6,
}
_CONV = {
    "num_hidden_layers": 4,
    "layer_types": ["conv"] * 2 + ["full_attention", "conv"],
    "pad_token_id": None,
    "conv_L_cache": 3,
}
_LIGHTNING = _EXPERTS | {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"],
    "head_dim": 24,
    "pad_token_id": None,
    "block_size": 32,
}
# Families with a recurrent state: their driver and their pools need more than those of `KINDS`.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", _DELTA_EXPERTS | {"mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3_5": ("qwen3_5_text", _DELTA | {"attention_bias": True}),
    "qwen3_5_alike": (
        "qwen3_5_text",
        _DELTA
        | {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True}
        | _rope("default", partial_rotary_factor=1.0),
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", _DELTA_EXPERTS),
    "olmo_hybrid": ("olmo_hybrid", _DELTA | {"linear_num_value_heads": 2}),
    "olmo_hybrid_unturned": (
        "olmo_hybrid",
        _DELTA | {"rope_parameters": {"rope_type": "default", "rope_theta": None}} | _POSITIVE,
    ),
    "granite_hybrid": ("granitemoehybrid", _GRANITE),
    "granite_hybrid_dense": (
        "granitemoehybrid",
        _GRANITE
        | {"num_local_experts": 0, "position_embedding_type": "rope", "tie_word_embeddings": True}
        | {"mamba_d_conv": 3, "mamba_conv_bias": False, "attention_bias": True},
    ),
    "nemotron_h": ("nemotron_h", _NEMOTRON),
    "nemotron_h_biased": (
        "nemotron_h",
        _NEMOTRON
        | {"layers_block_type": ["mlp", "linear_attention", "mlp", "full_attention"]}
        | {"use_bias": True, "mlp_bias": True, "n_groups": 1},
    ),
    "falcon_h1": (
        "falcon_h1",
        _BAMBA
        | {"num_hidden_layers": 3, "mamba_d_ssm": 96, "ssm_multipliers": [0.7, 1.3, 0.8, 1.2, 0.9]}
        | {"mlp_multipliers": [1.4, 0.6], "key_multiplier": 0.7, "lm_head_multiplier": 0.8}
        | {"embedding_multiplier": 3.0, "attention_in_multiplier": 1.2, "ssm_in_multiplier": 0.8}
        | {"attention_out_multiplier": 0.9, "ssm_out_multiplier": 0.7},
    ),
    "falcon_h1_normed": (
        "falcon_h1",
        _BAMBA | {"mamba_d_ssm": 96, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "lfm2": ("lfm2", _CONV | {"intermediate_size": 140, "block_multiple_of": 32}),
    "lfm2_biased": (
        "lfm2",
        _CONV
        | {"conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": True}
        | {"block_auto_adjust_ff_dim": False},
    ),
    "lfm2_moe": (
        "lfm2_moe",
        _CONV | _EXPERTS | {"num_dense_layers": 1, "routed_scaling_factor": 1.6},
    ),
    "minimax": ("minimax", _LIGHTNING),
    "minimax_scaled": (
        "minimax",
        _LIGHTNING
        | {"layer_types": ["full_attention", "linear_attention"] * 2, "sliding_window": 50}
        | {"linear_attn_alpha_factor": 1.4, "linear_attn_beta_factor": 0.9}
        | {"full_attn_alpha_factor": 1.3, "full_attn_beta_factor": 1.1}
        | {"mlp_alpha_factor": 1.6, "mlp_beta_factor": 0.8}
        # A factor on the stream changes its norm by the eps alone.
        | {"rms_norm_eps": 0.05},
    ),
    "bamba": ("bamba", _BAMBA | {"attn_layer_indices": [2], "mamba_proj_bias": True}),
}


_AROUND_ONE = ("norm.weight", "norm_f.weight", "norm_1.weight", "norm_2.weight", "scale", ".D")


def make_reference(kind: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A random transformers model, float32, whose outputs differ clearly between tokens."""
    model_type, differences = (KINDS | HYBRIDS)[kind]
    config = transformers.AutoConfig.for_model(model_type, **(SHAPE | differences | overrides))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.12, generator=generator)
            if name.endswith(_AROUND_ONE):
                parameter.add_(1.0)
            elif name.endswith("A_log"):  # log decays of a token from 0.001 to 8
                parameter.copy_(torch.linspace(-7.0, 2.0, len(parameter)))
            elif name.endswith(("conv1d.weight", "conv.conv.weight")):
                parameter.mul_(5.0)
        for name, buffer in model.named_buffers():  # which begin at 0 or 1
            if name.endswith(("correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.3, generator=generator)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5, generator=generator)
    return model.eval()


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Write a transformers model as a checkpoint, without a progress bar."""
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, **options)
    return folder


def make_checkpoint(folder: Path, kind: str = "qwen3", *, seed: int = 0, **overrides: Any) -> Path:
    """A tiny random checkpoint of a kind of `KINDS`; ``overrides`` are config fields."""
    return save(make_reference(kind, seed=seed, **overrides), folder)


@dataclass(eq=False)
class Stream:
    """Tokens, their pages, and how many positions have KV; the slot and log of its state."""

    tokens: array[int]
    pages: array[int]
    num_computed: int = 0
    state: int = 0


@dataclass(eq=False)
class ModelDriver:
    """Owns a pool and hands out shuffled pages; void slots hold NaN before every step.

    Of a decoder with states each sequence has a slot and a log, of the same number.
    """

    decoder: Decoder
    page_size: int = 16
    num_pages: int = 400
    seed: int = 0
    kv_dtype: KvDtype = "auto"
    num_states: int = 24
    adapter: Adapter | None = None  # of all sequences
    sequences: list[Stream] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.states = None
        if self.decoder.states:
            self.states = self.decoder.make_state_pool(
                self.num_states, self.num_states, page_size=self.page_size
            )
        self.pool = self.decoder.make_pool(
            self.num_pages, page_size=self.page_size, kv_dtype=self.kv_dtype, states=self.states
        )
        self.pool.data.fill_(void_item(self.pool))
        self._free = list(range(self.num_pages))
        random.Random(self.seed).shuffle(self._free)

    def add(
        self, tokens: Sequence[int], *, capacity: int = 0, prefix: Stream | None = None
    ) -> Stream:
        """A new sequence; the whole pages that it shares with ``prefix`` are borrowed.

        With states, those up to where the other's state stands, which is copied.
        """
        num_pages = -(-max(capacity, len(tokens)) // self.page_size)
        shared = 0
        if prefix is not None:
            limit = min(prefix.num_computed, len(tokens) - 1)
            same = (i for i in range(limit) if tokens[i] != prefix.tokens[i])
            shared = next(same, limit) // self.page_size
        state = len(self.sequences)
        if self.states is not None:
            shared = self._resumed(state, prefix, shared)
        borrowed = list(prefix.pages[:shared]) if prefix is not None else []
        own = [self._free.pop() for _ in range(num_pages - shared)]
        made = Stream(
            array("q", tokens), array("q", borrowed + own), shared * self.page_size, state
        )
        self.sequences.append(made)
        return made

    def _resumed(self, state: int, prefix: Stream | None, shared: int) -> int:
        """The pages of a prefix with whose state a sequence begins: all that it shares, or none."""
        assert self.states is not None
        self.states.reset(state)
        if prefix is None:
            return 0
        positions = {int(at) for at in self.states.at[prefix.state]}
        assert len(positions) == 1
        at = positions.pop() // self.page_size
        if not 0 < at <= shared:
            return 0
        self.states.copy_slot(prefix.state, state)
        return at

    def drop(self, sequence: Stream) -> None:
        """Give a sequence's pages back; only for one that shares none."""
        self.sequences.remove(sequence)
        self._free.extend(sequence.pages)

    def step(
        self, rows: Sequence[tuple[Stream, Sequence[int], int]], num_drafts: Sequence[int] = ()
    ) -> list[Tensor]:
        """Compute (sequence, token ids, number of logits) rows; logits of each row.

        Positions behind ``num_computed`` are void and poisoned first. The caller moves
        ``num_computed``. ``num_drafts``: how many of each row's tokens are a draft.
        """
        for sequence, *_ in rows:
            self._poison(sequence)
        drafts = num_drafts or [0] * len(rows)
        segments = [
            Segment(
                ids,
                s.num_computed,
                s.pages,
                wanted,
                extras=RowExtras(state=self._state(s, len(ids) - draft), adapter=self.adapter),
            )
            for (s, ids, wanted), draft in zip(rows, drafts, strict=True)
        ]
        batch = self.decoder.batch(segments, page_size=self.page_size)
        output = self.decoder.forward(batch, self.pool)
        logits = output.logits.clone()  # it holds until the next pass
        assert logits.dtype == torch.float32
        return list(logits.split([wanted for *_, wanted in rows]))

    def _state(self, sequence: Stream, num_final: int) -> SegmentState | None:
        if self.states is None:
            return None
        return SegmentState(sequence.state, sequence.state, sequence.num_computed + num_final)

    def prefill(self, sequence: Stream, *stops: int) -> Tensor:
        """Logits of all positions up to the last stop, one chunk for each stop."""
        chunks = []
        for stop in stops:
            ids = sequence.tokens[sequence.num_computed : stop]
            chunks += self.step([(sequence, ids, len(ids))])
            sequence.num_computed = stop
        return torch.cat(chunks)

    def _poison(self, sequence: Stream) -> None:
        page, offset = divmod(sequence.num_computed, self.page_size)
        self.pool.data[list(sequence.pages[page + 1 :])] = void_item(self.pool)
        for part in self.pool.parts if page < len(sequence.pages) else ():
            blocks = part.data[sequence.pages[page]].view(-1, part.block.num_items)
            vectors, scales = part.split(blocks[: part.own_blocks])
            (vectors if scales is None else scales)[:, offset:] = torch.nan


def void_item(pool: KVPool) -> float:
    """Return the item that fills a pool so that all of it reads as NaN.

    Bytes of -1 make scales of NaN.
    """
    return -1 if pool.data.dtype == torch.int8 else torch.nan
