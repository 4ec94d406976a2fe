"""Mistakes in grammars, and calls of tools."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "matcher-lets-special-tokens-in",
        "GrammarMatcher._mask",
        "for token_id in special[mask[special]].tolist():",
        "for token_id in special[:0].tolist():",
        ("test_padding_and_special_tokens_are_never_allowed",),
        "special tokens are no text",
    ),
)
