"""Tiny Gemma 4 models with assistants, and what transformers drafts with these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    Gemma4AssistantConfig,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedTextConfig,
)

from support.checkpoints import save
from support.tiny_models import random_model, tiny_config, tiny_model

WINDOW = 6
NUM_CENTROIDS, NUM_SCORED = 16, 5
# Layers of both kinds, of which the last keep no keys: what assistants read lies further up.
TARGET: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": WINDOW,
    "global_head_dim": 32,
}
CLUSTERED_VOCAB = 13 * NUM_CENTROIDS
SMALL = {
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size": CLUSTERED_VOCAB,
    "vocab_size_per_layer_input": CLUSTERED_VOCAB,
}
LARGE = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
ASSISTANT: dict[str, Any] = TARGET | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 4,
}


def save_target(folder: Path, model_type: str = "gemma4_text", **more: Any) -> Path:
    """A random target, with a tokenizer of numbers."""
    model = tiny_model(model_type, **(TARGET | more))
    words = {str(token_id): token_id for token_id in range(model.config.vocab_size)}
    save(model, folder)
    Tokenizer(models.WordLevel(words, unk_token="0")).save(str(folder / "tokenizer.json"))
    return folder


def save_assistant(folder: Path, *, is_unified: bool = False, **more: Any) -> Path:
    """A random assistant for a target of that shape; ``more``: of the config of its layers."""
    outer = {name: more.pop(name) for name in list(more) if name in OUTER}
    text_type = "gemma4_unified_text" if is_unified else "gemma4_text"
    made = Gemma4UnifiedAssistantConfig if is_unified else Gemma4AssistantConfig
    text = tiny_config(text_type, **(ASSISTANT | more))
    config = made(text_config=text, **({"backbone_hidden_size": 64} | outer))
    model = random_model(config, seed=5)
    if model.masked_embedding is not None:
        generator = torch.Generator().manual_seed(7)
        model.masked_embedding.token_ordering.copy_(
            torch.randperm(text.vocab_size, generator=generator)
        )
    return save(model, folder)


OUTER = (
    "backbone_hidden_size", "use_ordered_embeddings", "num_centroids",
    "centroid_intermediate_top_k",
)  # fmt: skip
CLUSTERED = {
    "vocab_size": CLUSTERED_VOCAB,
    "use_ordered_embeddings": True,
    "num_centroids": NUM_CENTROIDS,
    "centroid_intermediate_top_k": NUM_SCORED,
}


def _mend(text: Any) -> None:
    """Mend transformers, which knows neither layers that all read another model's, nor that
    such a model's last layers of each kind are read where it shares none itself.
    """
    modes = text.kv_sharing_modes.fget

    def mended(config: Any) -> Any:
        types, count = config.layer_types, config.num_kv_shared_layers
        if count == len(types):
            return ["reuse"] * count
        last = {kind: index for index, kind in enumerate(types)}
        kept = ["store" if index in last.values() else None for index in range(len(types))]
        return modes(config) if count else kept

    text.kv_sharing_modes = property(mended)


for each in (Gemma4TextConfig, Gemma4UnifiedTextConfig):
    _mend(each)


class AssistantReference:
    """A target and its assistant as transformers computes them, in float32."""

    def __init__(self, target: Path, assistant: Path) -> None:
        self.target, self.assistant = (
            transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            for folder in (target, assistant)
        )

    @torch.inference_mode()
    def levels(self, token_ids: list[int], drafted: list[int]) -> list[Tensor]:
        """Logits ``[vocab]`` behind a text, and behind each of the tokens drafted behind it."""
        ids = torch.tensor([token_ids])
        out = self.target.model(ids[:, :-1], use_cache=False, return_shared_kv_states=True)
        state, position = out.last_hidden_state[:, -1:], torch.tensor([[len(token_ids) - 1]])
        embed, found = self.target.get_input_embeddings(), []
        for token_id in [token_ids[-1], *drafted]:
            both = torch.cat((embed(torch.tensor([[token_id]])), state), dim=-1)
            output = self.assistant(
                inputs_embeds=both,
                position_ids=position,
                shared_kv_states=dict(out.shared_kv_states.items()),
                use_cache=False,
            )
            state = output.last_hidden_state
            found.append(output.logits[0, 0])
        return found

    def greedy(self, token_ids: list[int], count: int) -> list[int]:
        """The likeliest chain of so many tokens."""
        drafted: list[int] = []
        for _ in range(count):
            drafted.append(int(self.levels(token_ids, drafted)[-1].argmax()))
        return drafted
