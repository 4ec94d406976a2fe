"""The shapes of the pair, and how they are saved."""

import copy
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from .data import END_OF_TEXT, IM_END
from .tokenizer import MAX_POSITIONS, SPECIAL_TOKENS, VOCAB_SIZE

Role = Literal["target", "draft"]

SHAPES: dict[Role, dict[str, Any]] = {
    "target": {
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "intermediate_size": 768,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "draft": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "intermediate_size": 432,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}


def build(role: Role, seed: int) -> Qwen3ForCausalLM:
    """A fresh model in fp32; embeddings and output share one matrix [vocab, hidden]."""
    torch.manual_seed(seed)
    end_ids = [SPECIAL_TOKENS.index(IM_END), SPECIAL_TOKENS.index(END_OF_TEXT)]
    config = Qwen3Config(
        **SHAPES[role],
        vocab_size=VOCAB_SIZE,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        eos_token_id=end_ids[0],
        pad_token_id=end_ids[1],
        bos_token_id=None,
        use_cache=True,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig.from_dict(
        {"eos_token_id": end_ids, "pad_token_id": end_ids[1], "max_new_tokens": 512}
    )
    return model


def load(folder: Path) -> Qwen3ForCausalLM:
    """A saved model, in fp32."""
    model: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


def num_parameters(model: Qwen3ForCausalLM) -> int:
    """Parameters, the tied embedding counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def name_plain_tokenizer_class(folder: Path) -> None:
    """Name the class that every release of transformers can load."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for private in ("backend", "is_local", "local_files_only"):
        config.pop(private, None)
    path.write_text(
        json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2) + "\n"
    )


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write bf16 weights, configuration and tokenizer; each file is replaced whole, never half."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".saving-") as name:
        draft = Path(name)
        copy.deepcopy(model).bfloat16().save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        name_plain_tokenizer_class(draft)
        for path in sorted(draft.iterdir()):
            path.chmod(0o644)
            os.replace(path, folder / path.name)
