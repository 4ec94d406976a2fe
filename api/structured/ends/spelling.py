"""Writing a text in tokens that a grammar allows: the tokenizer's own where the text is forced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .protocols import Matcher, Tokens

Ids = Sequence[int]
AT_ONCE = 128  # bytes of a forced text: only the first 256 are in the tokenizer's own tokens


class Speller:
    """Writes texts on a matcher, which is behind what it has written then."""

    def __init__(self, matcher: Matcher, tokens: Tokens) -> None:
        self._matcher = matcher
        self._tokens = tokens

    def rewritten(self, ids: Ids) -> list[int]:
        """Return the text of these tokens again, in few tokens; shorter where the grammar
        refuses them.
        """
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
        """Texts, and the special tokens between them."""
        text = b""
        for token_id in ids:
            if self._tokens.texts[token_id]:
                text += self._tokens.texts[token_id]
            else:
                yield from (text, token_id)
                text = b""
        yield text

    def _next(self, text: bytes) -> Ids:
        """Tokens that the text begins with: at least one, where there is one.

        Of a long forced text many are taken at once, for each question about it costs its length.
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
    """Return the bytes of these tokens, without special ones."""
    return b"".join(tokens.texts[token_id] for token_id in ids)
