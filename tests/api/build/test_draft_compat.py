"""Draft models must speak the target's tokens: an id must mean the same text to both.

How text is cut into tokens (merges, normaliser, pre-tokeniser) is no matter: the draft reads ids.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.api.build.drafts import texts_between
from foretoken.api.build.model_files import BUILTIN
from foretoken.core.config import EngineConfig
from foretoken.core.errors import ModelLoadError
from foretoken.draft.proposers.vocab_check import check_same_tokens

VOCAB = {"a": 0, "b": 1, "c": 2, "ab": 3}
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "normalizer": None,
    "added_tokens": [{"id": 4, "content": "<end>", "special": True}],
    "model": {"type": "BPE", "vocab": VOCAB, "merges": [["a", "b"]]},
}
Change = Callable[[dict[str, Any]], object]


def check(folder: Path, draft: object, target: object = TOKENIZER) -> None:
    """Compare tokenizers given as JSON (None: there is none)."""
    contents = {folder / "draft": draft, folder / "target": target}

    def read(path: Path) -> str | None:
        content = contents[path]
        return content if isinstance(content, str | None) else json.dumps(content)

    check_same_tokens(folder / "draft", folder / "target", read=read)


def changed(change: Change) -> dict[str, Any]:
    tokenizer = copy.deepcopy(TOKENIZER)
    change(tokenizer)
    return tokenizer


def in_the_vocabulary(tokenizer: dict[str, Any]) -> None:
    """Some files list their special tokens among the ordinary ones too."""
    tokenizer["model"]["vocab"]["<end>"] = 4


def without_special_tokens(tokenizer: dict[str, Any]) -> None:
    tokenizer["added_tokens"] = []


def with_one_more_special_token(tokenizer: dict[str, Any]) -> None:
    tokenizer["added_tokens"].append({"id": 5, "content": "<think>", "special": True})


def as_old_merges(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["merges"] = ["a b"]


def normalised(tokenizer: dict[str, Any]) -> None:
    tokenizer["normalizer"] = {"type": "NFC"}


def with_special_tokens_elsewhere(tokenizer: dict[str, Any]) -> None:
    tokenizer["added_tokens"][0]["id"] = 5


def reordered(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["vocab"] = dict(reversed(list(VOCAB.items())))


@pytest.mark.parametrize(
    "change",
    [
        lambda _: None, in_the_vocabulary, as_old_merges, normalised, reordered,
        without_special_tokens, with_one_more_special_token, with_special_tokens_elsewhere,
    ],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_ids_with_the_same_text_are_compatible(tmp_path: Path, change: Change) -> None:
    check(tmp_path, changed(change))


def swapped(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["vocab"] |= {"a": 1, "b": 0}


def another_word(tokenizer: dict[str, Any]) -> None:
    vocab = tokenizer["model"]["vocab"]
    del vocab["ab"]
    vocab["ba"] = 3


def another_special_token(tokenizer: dict[str, Any]) -> None:
    tokenizer["added_tokens"][0]["content"] = "<stop>"


def a_word_less(tokenizer: dict[str, Any]) -> None:
    """An ordinary token that only one of them knows is no special token that was never trained."""
    del tokenizer["model"]["vocab"]["ab"]


@pytest.mark.parametrize(
    "change",
    [swapped, another_word, another_special_token, a_word_less],
    ids=lambda change: change.__name__,
)
def test_an_id_with_another_text_is_refused(tmp_path: Path, change: Change) -> None:
    with pytest.raises(ModelLoadError, match="the draft's tokenizer differs from the target's"):
        check(tmp_path, changed(change))


def test_pieces_with_scores_are_compared_by_their_place(tmp_path: Path) -> None:
    """SentencePiece's unigram model keeps its vocabulary as a list."""

    def unigram(score: float, word: str = "b") -> dict[str, Any]:
        return TOKENIZER | {"model": {"type": "Unigram", "vocab": [["a", score], [word, -1.0]]}}

    check(tmp_path / "same", unigram(-2.0), unigram(-3.0))
    with pytest.raises(ModelLoadError, match="differs"):
        check(tmp_path, unigram(-2.0, "x"), unigram(-2.0))


@pytest.mark.parametrize(("draft", "target"), [(None, TOKENIZER), (TOKENIZER, None)])
def test_a_missing_file_is_named(tmp_path: Path, draft: object, target: object) -> None:
    lacking = tmp_path / ("draft" if draft is None else "target")
    with pytest.raises(ModelLoadError) as caught:
        check(tmp_path, draft, target)
    assert f"{lacking} has no tokenizer.json" in str(caught.value)


def test_two_models_without_a_tokenizer_are_taken_at_their_word(tmp_path: Path) -> None:
    """Models made for tests and benchmarks have none; the sizes must do."""
    check(tmp_path, None, None)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model": []}'])
def test_a_broken_file_is_a_load_error_that_names_it(tmp_path: Path, content: str) -> None:
    with pytest.raises(ModelLoadError, match="draft: this kind of tokenizer"):
        check(tmp_path, content)


def model(vocab_size: int, **traits: object) -> Any:
    """A decoder, as far as its tokens matter."""
    config = SimpleNamespace(vocab_size=vocab_size, max_model_len=64)
    return SimpleNamespace(config=config, states=(), **traits)


def texts(draft: Path, vocab_size: int, **options: Any) -> object:
    target, config = model(4096), EngineConfig(**options)
    return texts_between(draft, model(vocab_size), BUILTIN / "target", target, config)


def other_tokenizer(folder: Path) -> Path:
    """Write the built-in pair's tokenizer, two of whose tokens have changed places."""
    content = json.loads((BUILTIN / "draft/tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    first, second = (next(name for name, at in vocab.items() if at == each) for each in (300, 301))
    vocab |= {first: 301, second: 300}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("vocab_size", [4096, 5000])
def test_other_tokens_are_refused_by_a_line_that_names_the_flag(tmp_path, vocab_size) -> None:
    with pytest.raises(ModelLoadError, match="; use --draft-vocab any to draft through text"):
        texts(other_tokenizer(tmp_path), vocab_size)
    assert texts(tmp_path, vocab_size, draft_vocab="any")


def test_a_draft_model_with_the_same_tokens_is_not_translated() -> None:
    assert texts(BUILTIN / "draft", 4096, draft_vocab="any") is None


@pytest.mark.parametrize("vocab_size", [4096, 5000])
def test_a_draft_model_without_a_tokenizer_cannot_be_translated(tmp_path, vocab_size) -> None:
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json|tokenizer\.json is missing"):
        texts(tmp_path, vocab_size, draft_vocab="any")
