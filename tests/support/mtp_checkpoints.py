"""Tiny checkpoints, GLM-4.5's by default, with a layer that predicts a further token (MTP)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from support.tiny_models import save_tiny

NUM_LAYERS = 2
BEHIND = f"model.layers.{NUM_LAYERS}."  # prefix of its tensors
SHARED = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the model's


def save_mtp(folder: Path, model_type: str = "glm4_moe", **more: Any) -> Path:
    """A checkpoint as the hub has GLM-4.5: the layer lies behind the last one."""
    save_tiny(folder, model_type, num_nextn_predict_layers=1, **more)
    add_tensors(folder, random_layer(tensors_of(folder)))
    return folder


def save_copied(folder: Path) -> Path:
    """The same with a layer that is the last one again."""
    save_tiny(folder, "glm4_moe", num_nextn_predict_layers=1)
    add_tensors(folder, copied_layer(tensors_of(folder)))
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    return load_file(folder / "model.safetensors")


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors to a checkpoint besides those that it has."""
    save_file(tensors_of(folder) | tensors, folder / "model.safetensors", {"format": "pt"})


def random_layer(model: dict[str, Tensor]) -> dict[str, Tensor]:
    """A layer of the shapes of the last one, and what joins its inputs."""
    generator = torch.Generator().manual_seed(100)
    made = copied_layer(model)
    for name, tensor in made.items():
        if name.endswith(SHARED):
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        made[name] = (
            noise * 1.2 / tensor.shape[-1] ** 0.5 if tensor.ndim > 1 else tensor + 0.1 * noise
        )
    return made


def copied_layer(model: dict[str, Tensor]) -> dict[str, Tensor]:
    """The last layer and the final norm again, as the layer behind the last.

    Its projection adds up the embedding and the state before.
    """
    last = f"model.layers.{NUM_LAYERS - 1}."
    made = {
        BEHIND + name.removeprefix(last): tensor.clone()
        for name, tensor in model.items()
        if name.startswith(last)
    }
    embedding, norm = model["model.embed_tokens.weight"], model["model.norm.weight"]
    hidden = embedding.shape[1]
    return made | {
        f"{BEHIND}enorm.weight": torch.ones(hidden),
        f"{BEHIND}hnorm.weight": torch.ones(hidden),
        f"{BEHIND}eh_proj.weight": torch.cat((torch.eye(hidden), torch.eye(hidden)), dim=1),
        f"{BEHIND}shared_head.norm.weight": norm.clone(),
        BEHIND + SHARED[0]: embedding.clone(),
        BEHIND + SHARED[1]: model["lm_head.weight"].clone(),
    }


def drop_tensor(folder: Path, name: str) -> None:
    """Write a checkpoint without one of its tensors."""
    tensors = tensors_of(folder)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def rename_tensors(folder: Path, names: dict[str, str]) -> None:
    """Write a checkpoint whose tensors have other names, by their beginnings."""
    renamed = {}
    for name, tensor in tensors_of(folder).items():
        old = next((old for old in names if name.startswith(old)), "")
        renamed[names.get(old, "") + name.removeprefix(old)] = tensor
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})


class MtpReference:
    """The model and its layer as transformers computes them, in float32."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        # the pattern of real checkpoints has the numbers of their layers
        self.model._keys_to_ignore_on_load_unexpected = [re.escape(BEHIND) + ".*"]
        self.layer: Any = MtpModel.from_pretrained(self.model).float().eval()

    @torch.inference_mode()
    def levels(self, token_ids: list[int], drafted: list[int]) -> list[Tensor]:
        """Logits ``[vocab]`` behind a text, and behind each of the tokens drafted behind it."""
        ids = torch.tensor([token_ids])
        states = self.model.model(ids[:, :-1]).last_hidden_state
        cache = MtpCache(config=self.model.config.get_mtp_config())
        found, last = [], ids[:, 1:]
        positions = torch.arange(1, len(token_ids))[None]
        for token_id in [*drafted, None]:
            states = self.layer.forward_layer(0, states, positions, cache, input_ids=last)[:, -1:]
            found.append(self.layer._project_to_logits(states)[0, 0])
            positions = positions[:, -1:] + 1
            if token_id is not None:
                last = torch.tensor([[token_id]])
        return found
