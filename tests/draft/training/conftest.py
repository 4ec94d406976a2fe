"""The built-in target, and answers of its own to learn from."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken.api.build.model_files import BUILTIN
from foretoken.core.model.loader import load_decoder
from foretoken.draft.training.answers import AnswerStore, answer_prompts
from foretoken.draft.training.conversations import Conversation
from foretoken.draft.training.making import Target
from foretoken.draft.training.records import read_records
from support.draft_training import ASKING


@pytest.fixture(scope="session")
def target() -> Target:
    """The built-in target, computed by torch in float32."""
    path = BUILTIN / "target"
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
