"""Tiny GGUF files, written from checkpoints as llama.cpp's converters write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as GgmlType
from numpy.typing import NDArray
from safetensors.torch import load_file

Array = NDArray[Any]
# Architectures by model type, and the names of leaves that gguf's table places elsewhere.
ARCHS = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "phi3": "phi3", "granite": "granite",
    "ernie4_5": "ernie4_5", "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "glm4": "glm4", "smollm3": "smollm3", "olmo2": "olmo2", "olmo3": "olmo2",
    "cohere": "command-r", "cohere2": "cohere2", "exaone4": "exaone4", "starcoder2": "starcoder2",
    "seed_oss": "seed_oss", "gpt_oss": "gpt-oss", "glm4_moe": "glm4moe", "dots1": "dots1",
    "minimax_m2": "minimax-m2", "olmoe": "olmoe", "ministral3": "mistral3", "arcee": "arcee",
    "hunyuan_v1_dense": "hunyuan-dense", "hunyuan_v1_moe": "hunyuan-moe",
    "ernie4_5_moe": "ernie4_5-moe", "olmo": "olmo",
    "granitemoe": "granitemoe", "nemotron": "nemotron", "stablelm": "stablelm", "phi": "phi2",
    "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "youtu": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "lfm2": "lfm2", "lfm2_moe": "lfm2moe", "granitemoehybrid": "granitehybrid",
    "nemotron_h": "nemotron_h_moe", "falcon_h1": "falcon-h1",
}  # fmt: skip
TURNED = (
    "llama", "mistral", "mixtral", "granite", "smollm3", "ministral3", "arcee", "olmo",
    "granitemoe", "granitemoehybrid",
)  # fmt: skip
VOCABULARY: dict[str, tuple[str, Any]] = {
    "tokenizer__ggml__model": ("add_string", "gpt2"),
    "tokenizer__ggml__tokens": ("add_array", ["a", "b", "ab"]),
    "tokenizer__ggml__merges": ("add_array", ["a b"]),
}
DENSE = {"nemotron_h": "nemotron_h"}  # architectures of the same types without experts
_CONVS = ("conv1d.weight", "shortconv.conv.weight")  # stay float32
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
LARGER_NORMS = ("gemma", "gemma2", "gemma3_text", "nemotron", *_HYBRIDS)
_JOINING = {  # the layer that predicts a further token, beside Qwen's models
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}


_UNQUANTISED = (".bias", ".scale", *_CONVS, "ssm_a", "ssm_d", "ssm_norm.weight")
_MAMBA_LEAVES = (
    "A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias", "norm.weight", "in_proj.weight",
    "out_proj.weight",
)  # fmt: skip


def interleaved(rows: Array, num_heads: int) -> Array:
    """Rows of queries or keys as GGUF orders Llama's: turned pairs side by side."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def rounded(values: torch.Tensor, kind: GgmlType) -> torch.Tensor:
    """Quantise a matrix row by row, and return its values then."""
    raw = gguf.quantize(np.ascontiguousarray(values.float().numpy()), kind)
    return torch.from_numpy(np.array(gguf.dequantize(raw, kind))).view(values.shape)


def write_gguf(
    folder: Path,
    file: Path,
    *,
    kind: GgmlType | Callable[[str], GgmlType] = GgmlType.F32,
    **more: tuple[str, Any],
) -> Path:
    """A checkpoint in Hugging Face layout as a GGUF file, its matrices quantised.

    ``kind``: of all matrices, or of each by its name in the file.
    """
    config = json.loads((folder / "config.json").read_text())
    if "layers_block_type" in config:  # Nemotron-H's, which names no number and has no RoPE
        config["num_hidden_layers"] = len(config["layers_block_type"])
        config["rope_parameters"] = {"rope_theta": 10000.0}
    model_type = config["model_type"]
    arch = ARCHS[model_type]
    if "moe" not in config.get("layers_block_type", ["moe"]):
        arch = DENSE[model_type]
    writer = gguf.GGUFWriter(file, arch)
    _metadata(writer, config, arch)
    for name, (method, value) in (VOCABULARY | more).items():
        getattr(writer, method)(name.replace("__", "."), value)
    model_arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(model_arch, config["num_hidden_layers"] + _further(config))
    for name, values in _tensors(folder, config).items():
        own = names.get_name(name, try_suffixes=(".weight", ".bias", ".scale")) or _nextn(name)
        assert own is not None, name
        if values.ndim < 2 or own.endswith(_UNQUANTISED):
            writer.add_tensor(own, np.ascontiguousarray(values, np.float32))
            continue
        own_kind = kind if isinstance(kind, GgmlType) else kind(own)
        raw = gguf.quantize(np.ascontiguousarray(values), own_kind)
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(
            own.split(".")[-2]
        )
        if model_type in TURNED and heads:
            raw = interleaved(raw, config[heads])
        writer.add_tensor(own, raw, raw_dtype=own_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _nextn(name: str) -> str | None:
    """Names that llama.cpp's table has for Qwen's hybrids, and the package's not yet."""
    leaf = next((leaf for leaf in _JOINING.values() if name.endswith(f".{leaf}.weight")), None)
    if leaf is None:
        return None
    return f"blk.{name.split('.')[2]}.nextn.{leaf.replace('.', '_')}.weight"


def _behind_the_last(tensors: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The layer beside a model, by names of one behind its last."""
    found, prefix = {}, f"model.layers.{config['num_hidden_layers']}."
    for name, tensor in tensors.items():
        leaf = name.removeprefix("mtp.").removesuffix(".weight")
        if name.startswith("mtp.layers.0."):
            name = prefix + name.removeprefix("mtp.layers.0.")
        elif name.startswith("mtp."):
            name = f"{prefix}{_JOINING[leaf]}.weight"
        found[name] = tensor
    return found


def _tensors(folder: Path, config: dict[str, Any]) -> dict[str, Array]:
    """By names of transformers, or of gguf's table; experts stacked, norms as files have them."""
    found: dict[str, Array] = {}
    experts: dict[str, list[Array]] = {}
    tied = config.get("tie_word_embeddings")
    turned = config["model_type"] in TURNED
    stored = _behind_the_last(load_file(folder / "model.safetensors"), config)
    for name, tensor in _sorted(stored).items():
        values = tensor.float().numpy()
        if name == "lm_head.weight" and tied:
            continue
        if ".shared_mlp." in name and "num_local_experts" in config:
            found |= _shared_tensors(name, values, config)
            continue
        if ".mamba." in name or name.rpartition(".mixer.")[2] in _MAMBA_LEAVES:
            found |= _mamba_tensors(name, values, config)
            continue
        if ".linear_attn." in name:
            found |= _hybrid_tensors(name, values, config)
            continue
        if config["model_type"] == "falcon_h1":
            values = values * np.float32(_falcon_factor(name, config))
        if name.endswith("kv_b_proj.weight"):
            found |= _keys_and_values(name, values, config)
            continue
        if config["model_type"] in LARGER_NORMS and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if turned and name.endswith(("q_proj.bias", "k_proj.bias")):
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            values = interleaved(values, config[heads])
        if config["model_type"] == "gemma4_text":
            found[_gemma4_name(name)] = values
        elif ".experts." in name and config["model_type"] != "gpt_oss":
            before, _, after = name.partition(".experts.")
            experts.setdefault(f"{before}.experts.{after.partition('.')[2]}", []).append(values)
        elif config["model_type"] == "gpt_oss" and ".experts." in name:
            found |= _gpt_oss(name, values)
        elif name.endswith("e_score_correction_bias"):
            stem = name.removesuffix("_bias").replace("block_sparse_moe", "mlp.gate")
            found[f"{stem.replace('mlp.moe_statics', 'mlp.gate')}.bias"] = values
        elif name.endswith("expert_bias"):
            found[f"{name}.bias"] = values
        elif name.endswith("conv.conv.weight"):
            found[name] = values.squeeze(1)
        elif name.endswith("input_linear.weight"):
            for part, rows in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                own = name.replace("input_linear", f"experts.{part}_proj")
                found[own.replace("block_sparse_moe", "mlp")] = np.ascontiguousarray(rows)
        else:
            found[f"{name}.weight" if name.endswith("sinks") else name] = values
    for name, parts in experts.items():
        name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
        name = name.replace("block_sparse_moe.experts", "feed_forward.experts")
        is_bare = "feed_forward.experts" in name  # in gguf's table
        found[name.removeprefix("model.") if is_bare else name] = np.stack(parts)
    return found


def _keys_and_values(name: str, values: Array, config: dict[str, Any]) -> dict[str, Array]:
    """By head; those of keys are transposed."""
    by_head = values.reshape(config["num_attention_heads"], -1, values.shape[1])
    keys, plain = np.split(by_head, [config["qk_nope_head_dim"]], axis=1)
    turned = np.ascontiguousarray(keys.swapaxes(1, 2))
    return {
        name.replace("kv_b_proj", "k_b_proj"): turned,
        name.replace("kv_b_proj", "v_b_proj"): np.ascontiguousarray(plain),
    }


def _shared_tensors(name: str, values: Array, config: dict[str, Any]) -> dict[str, Array]:
    """Granite's MLP beside experts, or alone: gate and factor apart."""
    stem = name.partition(".shared_mlp.")[0]
    at = f"{stem}.mlp.{'shared_experts.' if config['num_local_experts'] else ''}"
    if "output_linear" in name:
        return {f"{at}down_proj.weight": values}
    gate, up = np.split(values, 2)
    return {f"{at}gate_proj.weight": gate, f"{at}up_proj.weight": up}


def _mamba_tensors(name: str, values: Array, config: dict[str, Any]) -> dict[str, Array]:
    """Log decays as decays, what is of the heads as columns, the norm as a row a group."""
    stem, _, leaf = name.rpartition(".")
    if leaf == "A_log":
        return {name: -np.exp(values)[:, None]}
    if leaf == "D":
        return {name: values[:, None]}
    if leaf == "dt_bias":
        return {f"{stem}.dt_proj.bias": values}
    if name.endswith("conv1d.weight"):
        return {name: values.squeeze(1)}
    if name.endswith("norm.weight"):
        groups = config.get("mamba_n_groups") or config["n_groups"]
        return {name: values.reshape(groups, -1)}
    if config["model_type"] == "falcon_h1" and leaf == "weight":
        return {name: values * _falcon_mamba_factors(name, config)}
    return {name: values}


def _falcon_mamba_factors(name: str, config: dict[str, Any]) -> Array:
    """Factors of the rows of a matrix of Mamba-2: gates, values, keys, queries, steps."""
    if name.endswith("out_proj.weight"):
        return np.full((1, 1), config["ssm_out_multiplier"], np.float32)
    width, groups = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    counts = [width, width, groups, groups, config["mamba_n_heads"]]
    factors = np.array(config["ssm_multipliers"], np.float32) * config["ssm_in_multiplier"]
    return np.repeat(factors, counts)[:, None].astype(np.float32)


def _falcon_factor(name: str, config: dict[str, Any]) -> float:
    """The factor of a matrix outside of Mamba-2, which files have in its weights."""
    into, (gate, down) = config["attention_in_multiplier"], config["mlp_multipliers"]
    factors = {
        "q_proj": into,
        "k_proj": into * config["key_multiplier"],
        "v_proj": into,
        "o_proj": config["attention_out_multiplier"],
        "gate_proj": gate,
        "down_proj": down,
        "embed_tokens": config["embedding_multiplier"],
        "lm_head": config["lm_head_multiplier"],
    }
    return float(factors.get(name.split(".")[-2], 1.0))


def _hybrid_tensors(name: str, values: Array, config: dict[str, Any]) -> dict[str, Array]:
    """Log decays as decays, the taps as a matrix; qkvz cut apart; value heads tiled."""
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    group, key_rows = heads // key_heads, 2 * key_heads * key_dim
    stem, _, leaf = name.rpartition(".linear_attn.")
    if leaf == "A_log":
        values = -np.exp(values)
    elif leaf == "dt_bias":
        name = f"{stem}.linear_attn.dt_proj.bias"
    elif leaf == "conv1d.weight":
        values = values.squeeze(1)
    elif leaf == "in_proj_qkvz.weight":
        width = group * value_dim
        by_head = values.reshape(key_heads, -1, values.shape[1])
        parts = np.split(by_head, [key_dim, 2 * key_dim, 2 * key_dim + width], axis=1)
        rows = [part.reshape(-1, values.shape[1]) for part in parts]
        at = f"{stem}.linear_attn.in_proj_"
        return {f"{at}qkv.weight": np.concatenate(rows[:3]), f"{at}z.weight": rows[3]}
    if config["model_type"] == "qwen3_next":
        return {name: values}
    if leaf in ("in_proj_qkv.weight", "conv1d.weight"):
        tiled = _tiled(values[key_rows:], key_heads, group)
        return {name: np.concatenate((values[:key_rows], tiled))}
    if leaf == "out_proj.weight":
        return {name: np.ascontiguousarray(_tiled(values.T, key_heads, group).T)}
    return {name: values if leaf == "norm.weight" else _tiled(values, key_heads, group)}


def _tiled(rows: Array, key_heads: int, group: int) -> Array:
    """Value heads one of each key head after the other, instead of all of a key head together."""
    by_head = rows.reshape(key_heads, group, -1, *rows.shape[1:])
    return np.ascontiguousarray(by_head.swapaxes(0, 1)).reshape(rows.shape)


def _gemma4_name(name: str) -> str:
    """Names of the table; scales of routers and experts are those of matrices."""
    name = name.replace("router.per_expert_scale", "experts.down_proj.scale")
    name = name.replace("router.scale", "router.proj.scale")
    return name if name.endswith((".weight", ".scale")) else f"{name}.weight"


def _sorted(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    def key(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]

    return {name: tensors[name] for name in sorted(tensors, key=key)}


def _gpt_oss(name: str, values: Array) -> dict[str, Array]:
    is_bias = name.endswith("_bias")
    stem = name.removesuffix("_bias").rpartition(".")[0]
    ending = "bias" if is_bias else "weight"
    rows = values if is_bias else np.ascontiguousarray(values.swapaxes(1, 2))
    if "gate_up_proj" not in name:
        return {f"{stem}.down_proj.{ending}": rows}
    return {
        f"{stem}.gate_proj.{ending}": np.ascontiguousarray(rows[:, 0::2]),
        f"{stem}.up_proj.{ending}": np.ascontiguousarray(rows[:, 1::2]),
    }


# -- metadata -------------------------------------------------------------------------------------


def _metadata(writer: Any, config: dict[str, Any], arch: str) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    further = _further(config)
    writer.add_block_count(config["num_hidden_layers"] + further)
    if further:
        writer.add_nextn_predict_layers(further)
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    rope = config["rope_parameters"]
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(full["rope_theta"])
    share = full.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if share != 1.0 or "rotary_dim" in config:
        writer.add_rope_dimension_count(config.get("rotary_dim") or int(head_dim * share))
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    eps = config.get("layer_norm_eps") or config.get("norm_epsilon") or config.get("norm_eps")
    if eps:
        writer.add_layer_norm_eps(eps)
    eos = config.get("eos_token_id")
    if isinstance(eos, int):
        writer.add_eos_token_id(eos)
    writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
    writer.add_array("tokenizer.ggml.token_type", [1] * config["vocab_size"])
    _MORE.get(config["model_type"], _nothing)(writer, config)


def _further(config: dict[str, Any]) -> int:
    """Layers behind the last one, or beside the model."""
    return config.get("num_nextn_predict_layers") or config.get("mtp_num_hidden_layers") or 0


def _nothing(writer: Any, config: dict[str, Any]) -> None:
    pass


def _window(writer: Any, config: dict[str, Any]) -> None:
    writer.add_sliding_window(config.get("sliding_window") or 0)


def _phi3(writer: Any, config: dict[str, Any]) -> None:
    _window(writer, config)
    rope = config["rope_parameters"]
    original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    writer.add_rope_scaling_orig_ctx_len(original)
    for name in ("long", "short"):
        if f"{name}_factor" in rope:
            factors = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)


def _granite(writer: Any, config: dict[str, Any]) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _gemma2(writer: Any, config: dict[str, Any]) -> None:
    _window(writer, config)
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _gemma4(writer: Any, config: dict[str, Any]) -> None:
    _pattern(writer, config)
    listed, types = config["per_layer_config"], config["layer_types"]
    full = listed[str(types.index("full_attention"))]
    size, heads = full["head_dim"], config["num_key_value_heads"]
    writer.add_key_length(size)
    writer.add_key_length_swa(config["head_dim"])
    counts = [listed.get(str(i), {}).get("num_key_value_heads", heads) for i in range(len(types))]
    writer.add_head_count_kv(counts if len(set(counts)) > 1 else heads)
    shared = config["num_kv_shared_layers"]
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count(size)
    if config["use_double_wide_mlp"]:
        width, own = config["intermediate_size"], len(types) - shared
        writer.add_feed_forward_length([width] * own + [2 * width] * shared)
    turning = int(config["rope_parameters"]["full_attention"]["partial_rotary_factor"] * size / 2)
    divisors = [1.0] * turning + [1e30] * (size // 2 - turning)
    writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    if config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _pattern(writer: Any, config: dict[str, Any]) -> None:
    if config.get("sliding_window"):
        _window(writer, config)
        flags = [each == "sliding_attention" for each in config["layer_types"]]
        writer.add_sliding_window_pattern(flags)


def _cohere(writer: Any, config: dict[str, Any]) -> None:
    writer.add_logit_scale(config["logit_scale"])
    if "sliding_window" in config:
        _window(writer, config)


def _experts(writer: Any, config: dict[str, Any]) -> None:
    writer.add_expert_count(next(config[n] for n in _COUNTS if config.get(n)))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("n_shared_experts"):
        writer.add_expert_shared_count(config["n_shared_experts"])
    if "first_k_dense_replace" in config:
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _hunyuan_moe(writer: Any, config: dict[str, Any]) -> None:
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["moe_topk"])
    writer.add_expert_shared_feed_forward_length(config["intermediate_size"])


def _ernie_moe(writer: Any, config: dict[str, Any]) -> None:
    writer.add_expert_count(config["moe_num_experts"])
    writer.add_expert_used_count(config["moe_k"])
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])


def _granite_moe(writer: Any, config: dict[str, Any]) -> None:
    _granite(writer, config)
    _experts(writer, config)


def _ministral3(writer: Any, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _deepseek2(writer: Any, config: dict[str, Any]) -> None:
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + turned)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + turned)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(turned)
    rope = config["rope_parameters"]
    if "factor" in rope:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if "n_routed_experts" not in config:
        writer.add_leading_dense_block_count(config["num_hidden_layers"])
        return
    if "mlp_layer_types" in config:
        config = config | {"first_k_dense_replace": config["mlp_layer_types"].count("dense")}
    _experts(writer, config)
    is_sigmoid = config["model_type"] != "deepseek_v2"
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SIGMOID if is_sigmoid else kinds.SOFTMAX)
    if config.get("n_group"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def _hybrid(writer: Any, config: dict[str, Any]) -> None:
    heads = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * heads)
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    if "num_experts" in config:
        _experts(writer, config)


def _lfm2(writer: Any, config: dict[str, Any]) -> None:
    """The width of the MLP as it is; no heads of keys in layers of convolutions."""
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([0 if kind == "conv" else heads for kind in config["layer_types"]])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    if "num_experts" in config:
        _experts(writer, config)
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        return
    width, multiple = int(2 * config["intermediate_size"] / 3), config["block_multiple_of"]
    writer.add_feed_forward_length(multiple * -(-width // multiple))


def _mamba(writer: Any, config: dict[str, Any], heads: int, head_dim: int, groups: int) -> None:
    writer.add_ssm_group_count(groups)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * head_dim)
    kinds = config.get("layers_block_type") or config["layer_types"]
    counts = [config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds]
    writer.add_head_count_kv(counts)


def _granite_hybrid(writer: Any, config: dict[str, Any]) -> None:
    _granite(writer, config)
    _mamba(
        writer, config, config["mamba_n_heads"], config["mamba_d_head"], config["mamba_n_groups"]
    )
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    if not config["num_local_experts"]:
        writer.add_feed_forward_length(config["shared_intermediate_size"])
        return
    _experts(writer, config)
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])


def _nemotron_h(writer: Any, config: dict[str, Any]) -> None:
    _mamba(writer, config, config["mamba_num_heads"], config["mamba_head_dim"], config["n_groups"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    kinds = config["layers_block_type"]
    writer.add_feed_forward_length([config["intermediate_size"] * (k == "mlp") for k in kinds])
    if "moe" not in kinds:
        return
    _experts(writer, config)
    shared = config["moe_shared_expert_intermediate_size"]
    writer.add_expert_shared_feed_forward_length(shared)
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])


def _falcon_h1(writer: Any, config: dict[str, Any]) -> None:
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_ssm_inner_size(config["mamba_d_ssm"])


def _stablelm(writer: Any, config: dict[str, Any]) -> None:
    writer.add_parallel_residual(config["use_parallel_residual"])


def _gpt_oss_metadata(writer: Any, config: dict[str, Any]) -> None:
    _window(writer, config)
    _experts(writer, config)
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    rope = config["rope_parameters"]
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


_MORE: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "phi3": _phi3,
    "granite": _granite,
    "gemma2": _gemma2,
    "gemma3_text": _window,
    "gemma4_text": _gemma4,
    "olmo3": _pattern,
    "exaone4": _pattern,
    "cohere": _cohere,
    "cohere2": _cohere,
    "mixtral": _experts,
    "qwen2_moe": _experts,
    "qwen3_moe": _experts,
    "gpt_oss": _gpt_oss_metadata,
    "glm4_moe": _experts,
    "dots1": _experts,
    "minimax_m2": _experts,
    "olmoe": _experts,
    "ernie4_5_moe": _ernie_moe,
    "hunyuan_v1_moe": _hunyuan_moe,
    "granitemoe": _granite_moe,
    "ministral3": _ministral3,
    "stablelm": _stablelm,
    "granitemoehybrid": _granite_hybrid,
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    **dict.fromkeys(_HYBRIDS, _hybrid),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), _deepseek2),
}
