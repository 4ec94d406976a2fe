"""Writing a text in tokens that a grammar allows: the tokenizer's own where the text is forced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .protocols import Matcher, Tokens

Ids = Sequence[int]


class Speller:
    """Writes texts on a matcher, which is behind what it has written then."""

    def __init__(self, matcher: Matcher, tokens: Tokens) -> None:
        self._matcher = matcher
        self._tokens = tokens

    def rewritten(self, ids: Ids) -> list[int]:
        """The text of these tokens again, in few tokens; shorter where the grammar refuses them."""
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
        forced: Ids = self._matcher.compute_ff_tokens()
        if forced and text.startswith(self._tokens.texts[forced[0]]):
            return forced[:1]
        token_id = self._tokens.longest(text)
        return () if token_id is None else (token_id,)


def text_of(tokens: Tokens, ids: Iterable[int]) -> bytes:
    """The bytes of these tokens, without special ones."""
    return b"".join(tokens.texts[token_id] for token_id in ids)
