"""A model with an image tower in SmolVLM's shape, and pictures that no engine has seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Idefics3Config, Idefics3ForConditionalGeneration

SIDE = 512  # pixels of a picture, and of the tower's input: one tile
_PROCESSOR = {
    "image_processor_type": "Idefics3ImageProcessor",
    "do_image_splitting": True,
    "size": {"longest_edge": SIDE},
    "max_image_size": {"longest_edge": SIDE},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def smolvlm_256m(**changes: int) -> Idefics3Config:
    """The shape of SmolVLM-256M: a SigLIP tower, a shuffle of 4 x 4 patches, SmolLM2-135M."""
    text: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 49280,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        "pad_token_id": 2,
        "tie_word_embeddings": False,
    }
    vision = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": SIDE,
        "patch_size": 16,
    }
    if layers := changes.get("num_hidden_layers"):
        text["num_hidden_layers"] = vision["num_hidden_layers"] = layers
    return Idefics3Config(
        text_config=text,
        vision_config=vision,
        scale_factor=4,
        image_token_id=49190,
        tie_word_embeddings=False,
    )


def write_smolvlm(target: Path, config: Idefics3Config) -> None:
    """Write the model, unless it is there, and the settings of its image processor."""
    if (target / "preprocessor_config.json").is_file():
        return
    torch.manual_seed(0)
    build: Any = Idefics3ForConditionalGeneration
    model = build._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(target)
    text = json.dumps(_PROCESSOR)
    (target / "preprocessor_config.json").write_text(text, encoding="utf-8")


def write_picture(path: Path, seed: int) -> Path:
    """Write a PNG of coloured clouds, unless it is there; its path."""
    if not path.is_file():
        from PIL import Image

        rng = np.random.default_rng(seed)
        coarse = Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8))
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(path)
    return path
