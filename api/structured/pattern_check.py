"""Check a text against a pattern in linear time, which Python's backtracking ``re`` does not."""

from __future__ import annotations

from functools import cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper


class _Bytes:
    """A tokenizer with one token for each byte."""

    bos_token_id, eos_token_id = None, 256
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def _tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))


def matches(pattern: str, text: str) -> bool:
    """Whether a pattern in Rust's syntax matches the whole text; False for an invalid pattern."""
    grammar = LLMatcher.grammar_from_regex(pattern)
    matcher = LLMatcher(_tokenizer(), grammar, log_level=0)
    ids = list(text.encode(errors="replace"))
    return (
        not matcher.is_error()
        and matcher.try_consume_tokens(ids) == len(ids)
        and matcher.is_accepting()
    )
