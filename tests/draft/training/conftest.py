"""A tiny target, and answers of its own to learn from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import Qwen3Config, Qwen3ForCausalLM

from foretoken.core.model.loader import load_decoder
from foretoken.draft.training.answers import AnswerStore, answer_prompts
from foretoken.draft.training.conversations import Conversation
from foretoken.draft.training.new_drafts import Target
from foretoken.draft.training.records import read_records
from support.draft_training import ASKING

VOCAB_SIZE = 512


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> Target:
    """Six layers of random weights and a tokenizer, computed by torch in float32."""
    path = tmp_path_factory.mktemp("target")
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=2,
    )
    torch.manual_seed(3)
    with torch.inference_mode():
        model = Qwen3ForCausalLM(config)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter *= 4
        model.get_output_embeddings().weight *= 5  # near-uniform choices would teach little
        model.save_pretrained(path)
    words = {str(token_id): token_id for token_id in range(VOCAB_SIZE)}
    Tokenizer(models.WordLevel(words, unk_token="0")).save(str(path / "tokenizer.json"))
    text = (path / "tokenizer.json").read_text(encoding="utf-8")
    return Target(load_decoder(path, dtype="float32", backend="torch"), path, text)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Sixteen prompts that differ in their first token."""
    return [[100 + index, 17, 300 + 7 * index, 42] for index in range(16)]


@pytest.fixture(scope="session")
def book(target, prompts, tmp_path_factory) -> Path:
    """The target's answers to them, in a file."""
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    answer_prompts(target.decoder, prompts, AnswerStore(path), ASKING, lambda record: True)
    return path


@pytest.fixture(scope="session")
def conversations(book) -> list[Conversation]:
    """The same as conversations."""
    return [Conversation.of(record, "chat") for record in read_records(book)]
