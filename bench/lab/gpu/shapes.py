"""The models that are measured: real shapes, whose weights are drawn on the spot."""

from __future__ import annotations

import json
from pathlib import Path

SMALL, QWEN, LLAMA, TINY = "qwen3-0.6b", "qwen3-8b", "llama-8b", "tiny"

_QWEN3: dict[str, object] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
SHAPES: dict[str, dict[str, object]] = {
    SMALL: _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    QWEN: _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    LLAMA: {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": False,
    },
    TINY: _QWEN3
    | {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
}
"""``config.json`` by name; `TINY` is for rehearsals."""


def write_shape(folder: Path, name: str, **changes: object) -> Path:
    """A folder with a ``config.json``, all that random weights need; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[name] | {"dtype": "bfloat16", "eos_token_id": 2} | changes
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder
