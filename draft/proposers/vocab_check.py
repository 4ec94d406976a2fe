"""Checks that a draft model has the target's vocabulary: each id must have the same text in both.

Another vocabulary would not change any output, but hardly any draft token would be accepted. The
rules that split text into tokens (merges, normaliser, pre-tokeniser) do not matter, because the
draft model reads and writes ids. A special token may exist in one of the two models only; an
ordinary token must exist in both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from ...core.errors import ModelLoadError


class OtherTokensError(ModelLoadError):
    """A draft model has other tokens than its target."""


def check_same_tokens(draft: Path, target: Path, *, read: Callable[[Path], str | None]) -> None:
    """Compare the tokenizers of two models.

    ``read`` returns the text of a model's tokenizer.json, or None if there is no such file. Two
    models without a tokenizer.json are assumed to agree.

    Raises `OtherTokensError` if they differ, and `ModelLoadError` if one cannot be read.
    """
    contents = {path: read(path) for path in (draft, target)}
    if not any(contents.values()):
        return
    (ours, our_special), (theirs, their_special) = (
        _texts(path, content) for path, content in contents.items()
    )
    special = our_special | their_special
    for token_id in ours.keys() | theirs.keys():
        known_to_both = token_id in ours and token_id in theirs
        if ours.get(token_id) != theirs.get(token_id) and (
            known_to_both or token_id not in special
        ):
            pair = f"{ours.get(token_id)!r}, the target's is {theirs.get(token_id)!r}"
            message = f"the draft's tokenizer differs from the target's: token {token_id} is {pair}"
            raise OtherTokensError(f"{draft}: {message}")


def _texts(path: Path, text: str | None) -> tuple[dict[int, str], set[int]]:
    """Return the text of each id, and the ids that were added to the model's own vocabulary.

    Raises `ModelLoadError`.
    """
    if text is None:
        raise ModelLoadError(
            f"{path} has no tokenizer.json, which is needed to compare draft and target"
        )
    try:
        content = json.loads(text)
        texts = _own_texts(content["model"]["vocab"])
        added = {int(token["id"]): token["content"] for token in content.get("added_tokens", ())}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path}: this kind of tokenizer.json cannot be compared") from error
    return texts | added, set(added)


def _own_texts(vocab: Mapping[str, int] | list[tuple[str, float]]) -> dict[int, str]:
    if isinstance(vocab, list):  # SentencePiece's unigram model is a list of [text, score] by id.
        return {token_id: text for token_id, (text, _) in enumerate(vocab)}
    return {token_id: text for text, token_id in vocab.items()}
