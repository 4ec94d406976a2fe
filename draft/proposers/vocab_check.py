"""Checks that a draft model has the target's vocabulary: each id must be the same text in both.

Another vocabulary would change no output, but hardly a draft would be accepted. How text is cut
into tokens (merges, normaliser, pre-tokeniser) does not matter: the draft model reads and writes
ids. Special tokens may exist in one of the two only; an ordinary token must exist in both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from ...core.errors import ModelLoadError


class OtherTokensError(ModelLoadError):
    """The tokens of a draft model are not those of its target."""


def check_same_tokens(draft: Path, target: Path, *, read: Callable[[Path], str | None]) -> None:
    """Compare the tokenizers of two models.

    Raises `OtherTokensError` where they differ, and `ModelLoadError` where one cannot be read.

    ``read`` gives the text of a model's tokenizer.json, or None where it has none. Two models
    without any tokenizer are taken at their word.
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
            pair = f"{ours.get(token_id)!r}, there {theirs.get(token_id)!r}"
            message = f"the draft's tokenizer differs from the target's: token {token_id} is {pair}"
            raise OtherTokensError(f"{draft}: {message}")


def _texts(path: Path, text: str | None) -> tuple[dict[int, str], set[int]]:
    """The text of each id, and which ids were added to the model's own vocabulary."""
    if text is None:
        raise ModelLoadError(f"{path}: no tokenizer.json to compare draft and target by")
    try:
        content = json.loads(text)
        texts = _own_texts(content["model"]["vocab"])
        added = {int(token["id"]): token["content"] for token in content.get("added_tokens", ())}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path}: not a tokenizer that can be compared") from error
    return texts | added, set(added)


def _own_texts(vocab: Mapping[str, int] | list[tuple[str, float]]) -> dict[int, str]:
    if isinstance(vocab, list):  # SentencePiece's unigram model: [text, score] by id
        return {token_id: text for token_id, (text, _) in enumerate(vocab)}
    return {token_id: text for text, token_id in vocab.items()}
