"""Tiny embedding models and rerankers with tokenizers, and what transformers makes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from foretoken.core.config import EngineConfig
from support.checkpoints import make_reference, save

TEXTS = [
    "Which animals sleep in winter? Bears, bats and hedgehogs sleep; the swallow flies south.",
    "Instruct: find the passage that answers the question.\nQuery: how long is a marathon?",
    "yes\nno\nyes\nno\nyes\nno\n",
] * 8
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END = 0  # <|endoftext|>
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
"""The part of Qwen3's chat template that a reranker's prompt needs."""
POOLING = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
CUTS = [16, 32]


class TinyModel:
    """A model in a folder, and transformers' own of it."""

    def __init__(self, folder: Path, model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
        self.folder, self.model, self.tokenizer = folder, model, tokenizer

    def vector(self, text: str | Sequence[int], dimensions: int | None = None) -> list[float]:
        ids = self.tokenizer(text).input_ids if isinstance(text, str) else text
        return unit_vector(self.model, ids, dimensions)


def tiny_config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"draft": "none", "threads": 1, "kv_tokens": 8192} | options)


def is_near(found: Sequence[float], wanted: Sequence[float]) -> bool:
    """Whether all numbers are equal to 1e-5."""
    return len(found) == len(wanted) and all(
        abs(a - b) <= 1e-5 for a, b in zip(found, wanted, strict=True)
    )


def write_tokenizer(folder: Path, *, adds_end: bool) -> PreTrainedTokenizerFast:
    """A byte-level BPE with tokens for yes and no; with an end token behind each text if asked."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if adds_end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {SPECIAL[END]}", special_tokens=[(SPECIAL[END], END)]
        )
    hf = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE
    )
    hf.save_pretrained(folder)
    return hf


def tiny_model(vocab_size: int) -> Any:
    """A random Qwen3 of transformers, float32."""
    return make_reference("qwen3", vocab_size=vocab_size, max_position_embeddings=512)


def write_embedder(folder: Path) -> tuple[Any, PreTrainedTokenizerFast]:
    """An embedding model as Qwen3-Embedding is published: a base model, without ``model.``."""
    tokenizer = write_tokenizer(folder, adds_end=True)
    model = tiny_model(len(tokenizer)).model
    model.config.matryoshka_dimensions = CUTS
    save(model, folder)
    modules = ("Transformer", "Pooling", "Normalize")
    entries = [
        {"idx": index, "path": f"{index}_{name}" * bool(index),
         "type": f"sentence_transformers.models.{name}"}
        for index, name in enumerate(modules)
    ]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(entries), "utf-8")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(POOLING), "utf-8")
    return model, tokenizer


def write_reranker(folder: Path) -> tuple[Any, PreTrainedTokenizerFast]:
    """A reranker that answers yes or no, as Qwen3-Reranker is published."""
    tokenizer = write_tokenizer(folder, adds_end=False)
    model = tiny_model(len(tokenizer))
    save(model, folder)
    return model, tokenizer


@torch.inference_mode()
def unit_vector(model: Any, token_ids: Sequence[int], dimensions: int | None = None) -> list[float]:
    """The last token's hidden state by transformers, of length 1."""
    state = model(torch.tensor([list(token_ids)])).last_hidden_state[0, -1, :dimensions]
    return torch.nn.functional.normalize(state, dim=0).tolist()


@torch.inference_mode()
def relevance(model: Any, tokenizer: Any, query: str, document: str, instruct: str) -> float:
    """The score of Qwen3-Reranker's card: the pair between a fixed prefix and a fixed suffix."""
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    pair = f"<Instruct>: {instruct}\n<Query>: {query}\n<Document>: {document}"
    parts = (tokenizer.encode(text, add_special_tokens=False) for text in (prefix, pair, suffix))
    logits = model(torch.tensor([[*chain(*parts)]])).logits[0, -1]
    both = logits[tokenizer.convert_tokens_to_ids(["no", "yes"])]
    return float(torch.log_softmax(both, dim=0)[1].exp())
