"""Encoding of texts in tokens that a grammar allows.

Text that the grammar forces is encoded as the tokenizer encodes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .protocols import Matcher, Tokens

Ids = Sequence[int]
# maximum number of bytes of a forced text that are taken with one query
AT_ONCE = 128


class Speller:
    """Encodes texts in tokens that a matcher allows. The matcher consumes these tokens."""

    def __init__(self, matcher: Matcher, tokens: Tokens) -> None:
        self._matcher = matcher
        self._tokens = tokens

    def rewritten(self, ids: Ids) -> list[int]:
        """Return the text of ``ids`` in few tokens. It ends where the grammar rejects the rest."""
        written: list[int] = []
        for piece in self._pieces(ids):
            rest = piece if isinstance(piece, bytes) else b""
            step: Ids = () if isinstance(piece, bytes) else (piece,)
            while rest or step:
                step = step or self._next(rest)
                if not step or self._matcher.try_consume_tokens(list(step)) < len(step):
                    return written
                written += step
                rest = rest[sum(len(self._tokens.texts[token_id]) for token_id in step) :]
                step = ()
        return written

    def _pieces(self, ids: Ids) -> Iterator[bytes | int]:
        """Yield the texts between special tokens, and the ids of the special tokens."""
        text = b""
        for token_id in ids:
            if self._tokens.texts[token_id]:
                text += self._tokens.texts[token_id]
            else:
                yield from (text, token_id)
                text = b""
        yield text

    def _next(self, text: bytes) -> Ids:
        """Return one or more tokens that begin the text; empty if there are none.

        Several tokens of a long forced text are taken at once, since each query about it costs time
        proportional to its length.
        """
        begun: list[int] = []
        length = 0
        for token_id in self._matcher.compute_ff_tokens():
            step = self._tokens.texts[token_id]
            is_enough = begun and (not step or length + len(step) > AT_ONCE)
            if is_enough or not text.startswith(step, length):
                break
            begun.append(token_id)
            length += len(step)
        if begun:
            return begun
        longest = self._tokens.longest(text)
        return () if longest is None else (longest,)


def text_of(tokens: Tokens, ids: Iterable[int]) -> bytes:
    """Return the bytes of the given tokens. Special tokens have no bytes."""
    return b"".join(tokens.texts[token_id] for token_id in ids)
