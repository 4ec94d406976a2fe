"""Tiny random models that see images, one of each class, and images for them as numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import CONFIG_MAPPING

from foretoken.core.interface.extras.images import (
    PromptImage,
    TowerInput,
    content_hash,
    image_key,
    with_image_rows,
)
from support.checkpoints import HYBRIDS, save
from support.tiny_models import VOCAB, tiny_config

IMAGE = VOCAB - 1  # the placeholder's token id
SIDE, PATCH = 56, 14  # pixels: 16 patches
CLASSES = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
}
MUTUAL = ("gemma3", "gemma4")  # rows see each other
GRIDS = ("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl")  # rows have lines and columns
# The names of inputs that say of which kind each token is.
TYPE_IDS = {"gemma3": "token_type_ids"} | dict.fromkeys((*GRIDS, "gemma4"), "mm_token_type_ids")
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_TEXTS: dict[str, dict[str, Any]] = {
    "gemma3": {"pad_token_id": 0},
    "gemma4": {
        "pad_token_id": 0,
        "use_bidirectional_attention": "vision",
        # A full layer in the middle: what rows of images see in the last one, no token shows.
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "llava": {"num_key_value_heads": 4},
    "qwen2_5_vl": {"rope_parameters": _MROPE},
    "qwen2_vl": {"rope_parameters": _MROPE},
    "qwen3_vl": {"rope_parameters": _MROPE | {"mrope_interleaved": True}},
    "qwen3_5": HYBRIDS["qwen3_5"][1]
    | {
        "rope_parameters": _MROPE
        | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    },
}
# Of an image of one tile; the others merge four patches. More than a window of Gemma 3's.
ROWS = {"llava": SIDE**2 // PATCH**2, "gemma3": SIDE**2 // PATCH**2}
SMALL_GEMMA4: dict[str, Any] = {
    "use_bidirectional_attention": None,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
}
"""Text of the Gemma 4 whose rows of images are as those of texts, and whose tokens have inputs."""


def image_config(
    model_type: str, *, image: int = IMAGE, whole: dict[str, Any] | None = None, **text: Any
) -> Any:
    """A small config of a type, with that image token; ``text``: fields of its text model.

    ``whole``: fields of the whole config.
    """
    made = CONFIG_MAPPING[model_type]
    default = made(**({"vision_config": {}} if model_type == "gemma4" else {}))
    kind = default.get_text_config(decoder=True).model_type
    values = tiny_config(kind, **(_TEXTS.get(model_type, {}) | text)).to_dict()
    is_listed = model_type == "internvl"
    tower = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "depth": 2,
        "embed_dim": 32,
        "num_attention_heads": 2,
        "num_heads": 2,
        "head_dim": 16,
        "window_size": 2 * 2 * PATCH,
        "fullatt_block_indexes": [1],
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
        "position_embedding_size": 40,
        "pooling_kernel_size": 2,
        "num_key_value_heads": 2,
        "out_hidden_size": values["hidden_size"],
        "image_size": [SIDE, SIDE] if is_listed else SIDE,
        "patch_size": [PATCH, PATCH] if is_listed else PATCH,
    }
    tower = {name: each for name, each in tower.items() if hasattr(default.vision_config, name)}
    if model_type == "qwen2_vl":  # whose tower gives vectors of that size
        tower["hidden_size"] = values["hidden_size"]
    tower["model_type"] = default.vision_config.model_type
    more = {
        name: image for name in ("image_token_id", "image_token_index") if hasattr(default, name)
    }
    if model_type == "gemma3":
        more |= {"mm_tokens_per_image": ROWS["gemma3"], "image_token_index": image}
    if model_type == "gemma4":
        more |= dict.fromkeys(("audio_token_id", "video_token_id"), image)  # no other token
    if hasattr(default, "vision_feature_layer"):
        more["vision_feature_layer"] = default.vision_feature_layer
    more |= whole or {}
    return made(text_config=values, vision_config=tower, tie_word_embeddings=False, **more)


def image_model(
    model_type: str, *, image: int = IMAGE, whole: dict[str, Any] | None = None, **text: Any
) -> Any:
    """A random model, float32, whose outputs differ clearly between tokens and between images."""
    torch.manual_seed(1)
    model = getattr(transformers, CLASSES[model_type])(
        image_config(model_type, image=image, whole=whole, **text)
    )
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 1.2 / parameter[0].numel() ** 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if any(each in name for each in ("projector", "connector", "merger")):
                parameter.mul_(3.0 if "merger" in name else 2.0)
        model.get_output_embeddings().weight[image] = 0.0  # so that it is never the best
    model.generation_config = transformers.GenerationConfig()
    return model


def save_image_model(folder: Path, model_type: str, **text: Any) -> tuple[Path, Any]:
    model = image_model(model_type, **text)
    return save(model, folder), model


def random_inputs(model_type: str, seed: int, *, num_tiles: int = 1) -> dict[str, Any]:
    """One image as a processor gives it to the tower, as arrays."""
    rng = np.random.default_rng(seed)
    if model_type in GRIDS:
        lines, columns = (2, 3, 1)[seed % 3], (3, 1, 2)[seed % 3]
        shape = (4 * lines * columns, 3 * 2 * PATCH**2)
        grid = np.array([[1, 2 * lines, 2 * columns]], np.int64)
        return {"pixel_values": rng.normal(size=shape).astype(np.float32), "image_grid_thw": grid}
    if model_type == "gemma4":
        return _patches_at_places(rng, 2 * (2, 3, 1)[seed % 3], 2 * (5, 1, 2)[seed % 3])
    tiles = rng.normal(size=(num_tiles, 3, SIDE, SIDE)).astype(np.float32)
    if model_type in ("idefics3", "smolvlm"):
        return {"pixel_values": tiles[None]}
    if model_type == "mistral3":
        sizes = np.array([[SIDE, SIDE]] * num_tiles, np.int64)
        return {"pixel_values": tiles, "image_sizes": sizes}
    return {"pixel_values": tiles}


def _patches_at_places(rng: np.random.Generator, lines: int, columns: int) -> dict[str, Any]:
    """Patches of a picture with their places, filled up to 40, as Gemma 4's processor gives."""
    pixels = np.zeros((1, 40, 3 * PATCH**2), np.float32)
    pixels[0, : lines * columns] = rng.random(size=(lines * columns, 3 * PATCH**2))
    places = np.full((1, 40, 2), -1, np.int64)
    places[0, : lines * columns] = [(x, y) for y in range(lines) for x in range(columns)]
    return {"pixel_values": pixels, "image_position_ids": places}


def tower_inputs(arrays: dict[str, Any]) -> tuple[TowerInput, ...]:
    return tuple(
        TowerInput(name, str(each.dtype), each.shape, each.tobytes())
        for name, each in arrays.items()
    )


def joined_inputs(model_type: str, images: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """All images of one prompt, as `generate` takes them."""
    axis = 1 if model_type in ("idefics3", "smolvlm") else 0
    return {
        name: torch.from_numpy(np.concatenate([each[name] for each in images], axis=axis))
        for name in images[0]
    }


def make_prompt(
    model_type: str,
    pieces: list[list[int] | dict[str, Any]],
    *,
    salt: str | None = None,
    is_mutual: bool = False,
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Token ids with placeholders of texts and images, and the images in their places.

    An image of several tiles has a token of text between their rows, as processors write them.
    """
    ids: list[int] = []
    images = []
    rows = ROWS.get(model_type, SIDE**2 // PATCH**2 // 4)
    for piece in pieces:
        if isinstance(piece, list):
            ids += piece
            continue
        inputs, runs = tower_inputs(piece), []
        key = image_key(salt, content_hash(inputs))
        if model_type in GRIDS:
            _, lines, columns = (int(each) for each in piece["image_grid_thw"][0] // (1, 2, 2))
            run = (len(ids), lines * columns)
            images.append(PromptImage(key, (run,), inputs, (lines, columns)))
            ids += [IMAGE] * (lines * columns)
            continue
        if model_type == "gemma4":
            run = (len(ids), int((piece["image_position_ids"] >= 0).all(-1).sum()) // 4)
            images.append(PromptImage(key, (run,), inputs, is_mutual=is_mutual))
            ids += [IMAGE] * run[1]
            continue
        num_tiles = piece["pixel_values"].size // (3 * SIDE**2)
        for tile in range(num_tiles):
            ids += [5] * bool(tile)
            runs.append((len(ids), rows))
            ids += [IMAGE] * rows
        images.append(PromptImage(key, tuple(runs), inputs, is_mutual=is_mutual))
    return ids, tuple(images)


def prompt_tokens(ids: list[int], images: tuple[PromptImage, ...]) -> Any:
    return with_image_rows(ids, images)


def reference_tokens(
    model: Any, model_type: str, ids: list[int], images: list[dict[str, Any]], num_new: int
) -> list[int]:
    """Greedy tokens of transformers' `generate`."""
    given = torch.tensor([ids])
    more = {TYPE_IDS[model_type]: (given == IMAGE).int()} if model_type in TYPE_IDS else {}
    out = model.generate(
        input_ids=given,
        attention_mask=torch.ones_like(given),
        do_sample=False,
        max_new_tokens=num_new,
        eos_token_id=None,
        pad_token_id=0,
        **(joined_inputs(model_type, images) | more if images else {}),
    )
    found: list[int] = out[0, len(ids) :].tolist()
    return found
