"""``token_sources``: the draft source of each token, and the part of the answer it belongs to.

The parser of an answer works on text, not on tokens. The text that it emits is located in the text
of the tokens, so that a delimiter such as ``<think>`` is never reported as text.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections import deque

from ...parsing.reasoning import Thinking
from ...text.tokenizer import Tokenizer
from ...types.results import TextDelta
from .answers import Channel, TokenPiece


class TokenPieces:
    """Computes ``token_sources`` of one choice: text, draft source and channel of each token.

    The texts in the channels "reasoning" and "content" add up to these parts of the answer. A call
    is reported as the model wrote it, in the channel "tool". A token without visible text (a
    delimiter, an end token, a part of a character) has the text "". The source of the target
    model's own tokens is "". The source is None if the text is the rest of a token that an earlier
    piece reported.
    """

    def __init__(self, tokenizer: Tokenizer, thinking: Thinking | None) -> None:
        self._tokenizer = tokenizer
        marks = ("", "") if thinking is None else (thinking.begin, thinking.end)
        self._marks = {"reasoning": marks[0], "content": marks[1]}  # delimiter before a channel
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._raw = ""  # text of tokens not reported yet
        # number of characters and source per token
        self._tokens: deque[tuple[int, str | None]] = deque()
        self._channel: Channel = "content"  # channel of the last piece

    def hold(self, delta: TextDelta) -> None:
        """Add the tokens of a step. Their text may arrive in a later step."""
        special = self._tokenizer.special_ids
        for token_id, source in zip(delta.token_ids, delta.sources, strict=False):
            data = b"" if token_id in special else self._tokenizer.token_bytes(token_id)
            text = self._decoder.decode(data)
            self._raw += text
            self._tokens.append((len(text), source))

    def read(self, delta: TextDelta) -> list[TokenPiece]:
        """Return the pieces for the text of a delta."""
        pieces = []
        if delta.reasoning:
            pieces += self._read(delta.reasoning, "reasoning")
        if delta.text:
            pieces += self._read(delta.text, "content")
        if delta.tool_calls:
            self._channel = "tool"
            pieces += self._take(len(self._raw))
        return pieces

    def rest(self) -> list[TokenPiece]:
        """Return the remaining tokens, whose text is not part of the answer."""
        return self._take(len(self._raw), is_shown=False)

    def _read(self, text: str, channel: Channel) -> list[TokenPiece]:
        self._channel = channel
        at = 0 if self._raw.startswith(text) else self._find(text, self._marks[channel])
        if at < 0:  # the parser rewrote the text
            return [(text, None, channel)]
        return self._take(at, is_shown=False) + self._take(len(text))

    def _find(self, text: str, mark: str) -> int:
        """Return the index of ``text`` in the unreported text, after ``mark`` if it occurs there.

        Return -1 if it is not found.
        """
        at = self._raw.find(mark)
        return self._raw.find(text, at + len(mark) if at >= 0 else 0)

    def _take(self, count: int, *, is_shown: bool = True) -> list[TokenPiece]:
        """Remove and return the next tokens with ``count`` characters in all, and the tokens
        without text that follow.
        """
        pieces: list[TokenPiece] = []
        while self._tokens and (count or not self._tokens[0][0]):
            length, source = self._tokens.popleft()
            size = min(length, count)
            text, self._raw, count = self._raw[:size], self._raw[size:], count - size
            is_cut = size < length
            if is_cut:
                self._tokens.appendleft((length - size, None if is_shown else source))
            if is_shown or (source is not None and not is_cut):
                pieces.append((text if is_shown else "", source, self._channel))
        return pieces
