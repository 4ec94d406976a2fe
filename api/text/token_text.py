"""TokenText: conversion of tokens to text and back, for a draft model with another tokenizer."""

from __future__ import annotations

from pathlib import Path

from .tokenizer import Tokenizer


class TokenText:
    """Converts the tokens of one tokenizer to text and back. Belongs to one thread.

    ``reads_special``: whether special tokens that a text spells out are encoded as special tokens.
    ``shown``: names of the special tokens that are converted to text.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, reads_special: bool, shown: frozenset[str] = frozenset()
    ) -> None:
        self._tokenizer, self._is_literal = tokenizer, not reads_special
        self.first_ids = tokenizer.first_ids()
        self.special_ids = tokenizer.special_ids
        self._pieces: dict[int, bytes] = {}
        self._shown = {tokenizer.vocab[name] for name in shown if name in tokenizer.vocab}

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for a special token that is not shown."""
        piece = self._pieces.get(token_id)
        if piece is None:
            is_text = token_id in self._shown or token_id not in self.special_ids
            piece = self._tokenizer.token_bytes(token_id) if is_text else b""
            self._pieces[token_id] = piece
        return piece

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text that follows other text."""
        return self._tokenizer.encode_after(text, is_literal=self._is_literal)


def texts_of_both(target: Path, draft: Path, *, max_model_len: int) -> tuple[TokenText, TokenText]:
    """Return the `TokenText` of a target and the `TokenText` of its draft model.

    Special tokens with the same name in both tokenizers are shown to the draft model. Raises
    `ModelLoadError` if a tokenizer is missing.
    """
    theirs, ours = (Tokenizer.load(path, max_model_len=max_model_len) for path in (target, draft))
    shared = _special_names(theirs) & _special_names(ours)
    return (
        TokenText(theirs, reads_special=False, shown=shared),
        TokenText(ours, reads_special=True),
    )


def _special_names(tokenizer: Tokenizer) -> frozenset[str]:
    special = tokenizer.special_ids
    return frozenset(name for name, token_id in tokenizer.vocab.items() if token_id in special)
