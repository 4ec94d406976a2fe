"""Conversion of token ids to text, token by token: detokenizers, and the text of one answer."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
MAX_CHAR_TOKENS = 4  # a UTF-8 character has at most 4 bytes, so it needs at most 4 tokens
CODE_BITS = 21  # number of bits of a Unicode code point
UTF8 = codecs.getincrementaldecoder("utf-8")
NUM_TABLES = 16  # number of cached tables: clients send the same stop strings with every request


class StopTable:
    """An automaton for all stop strings at once (Aho and Corasick, 1975).

    A state is a number that stands for a prefix of a stop string; state 0 is the empty prefix. The
    table takes about 150 bytes per character of the stop strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.depths = array("i", [0])  # length of each state in characters
        self._edges: dict[int, int] = {}  # next state by state and character
        self._fails = array("i", [0])  # for each state, its longest proper suffix that is a state
        self.stops: dict[int, str] = {}  # the longest stop string that ends at a state, if any
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            found = self._edges.setdefault(state << CODE_BITS | ord(char), len(self.depths))
            if found == len(self.depths):
                self.depths.append(self.depths[state] + 1)
                self._fails.append(0)
            state = found
        self.stops[state] = stop

    def _link(self) -> None:
        depths, fails = self.depths, self._fails
        for edge, state in sorted(self._edges.items(), key=lambda each: depths[each[1]]):
            parent, code = edge >> CODE_BITS, edge & ((1 << CODE_BITS) - 1)
            fails[state] = self.step(fails[parent], code) if parent else 0
            if state not in self.stops and (stop := self.stops.get(fails[state])) is not None:
                self.stops[state] = stop

    def step(self, state: int, code: int) -> int:
        """Return the state after one more character. O(1) amortised over a text."""
        while (found := self._edges.get(state << CODE_BITS | code)) is None:
            if not state:
                return 0
            state = self._fails[state]
        return found


stop_table = lru_cache(NUM_TABLES)(StopTable)


class StopStrings:
    """Finds stop strings in one text. O(1) amortised per character, for any number of stop strings.

    The match that ends first is found; if several end at the same character, the longest one. The
    result does not depend on how the text is split into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._table = stop_table(tuple(stops))
        self._state = 0

    @property
    def held(self) -> int:
        """Number of characters at the end of the text that may begin a stop string."""
        return self._table.depths[self._state]

    def feed(self, text: str, *, count: bool = True) -> tuple[str, int] | None:
        """Append ``text``. Return the first stop string that ends in it; None if none does.

        Also return the number of characters of ``text`` up to the end of the stop string. If
        ``count`` is false, complete matches are ignored.
        """
        step, stops = self._table.step, self._table.stops
        for consumed, char in enumerate(text, 1):
            self._state = step(self._state, ord(char))
            if count and self._state in stops:
                return stops[self._state], consumed
        return None


class Detokenizer(Protocol):
    """A converter of a growing answer to text.

    The results of `decode`, `decode_all` and `finish`, joined in order, are the text.
    """

    def decode(self, token_id: int) -> str:
        """Return the characters that this token completes."""

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the characters that these tokens complete."""

    def finish(self) -> str:
        """Return the rest of the text at its end; U+FFFD for an incomplete character."""


class ByteDetokenizer:
    """A detokenizer for byte-level vocabularies, in which each token is a sequence of bytes."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._utf8 = UTF8("replace")

    def decode(self, token_id: int) -> str:
        """Return the characters that this token completes."""
        return self._utf8.decode(self._piece(token_id))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the characters that these tokens complete."""
        return self._utf8.decode(b"".join(map(self._piece, token_ids)))

    def finish(self) -> str:
        """Return the rest of the text at its end."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """A detokenizer for other vocabularies, which decodes each token together with the one before.

    A decoder may treat the first token differently (SentencePiece strips its space), so each token
    is decoded after its predecessor, and the first token after the last tokens of the prompt. Byte
    tokens (``<0xE2>``) are assembled here: decoders return one U+FFFD per byte of an invalid run,
    which would change text that was already sent.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        context_ids: Sequence[int],
        skipped: frozenset[int],
        byte_values: Mapping[int, int],
    ) -> None:
        self._decode = decode
        self._context = [token_id for token_id in context_ids if token_id not in skipped]
        self._skipped = skipped
        self._byte_values = byte_values
        self._pending: list[int] = []
        self._utf8 = UTF8("replace")

    def decode(self, token_id: int) -> str:
        """Return the characters that this token completes."""
        if token_id in self._skipped:
            return ""
        if token_id in self._byte_values:
            return self._decode_byte(token_id)
        head = self._end_bytes()
        self._pending.append(token_id)
        text = self._pending_text()
        if text.endswith(REPLACEMENT) and len(self._pending) < MAX_CHAR_TOKENS:
            return head
        return head + self._settle(text)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the characters that these tokens complete."""
        return "".join(map(self.decode, token_ids))

    def finish(self) -> str:
        """Return the rest of the text at its end."""
        return self._settle(self._pending_text()) + self._end_bytes()

    def _decode_byte(self, token_id: int) -> str:
        head = self._settle(self._pending_text())
        self._context = [token_id]
        return head + self._utf8.decode(bytes([self._byte_values[token_id]]))

    def _end_bytes(self) -> str:
        return self._utf8.decode(b"", final=True)

    def _pending_text(self) -> str:
        if not self._pending:
            return ""
        before = self._decode(self._context) if self._context else ""
        return self._decode([*self._context, *self._pending])[len(before) :]

    def _settle(self, text: str) -> str:
        if self._pending:
            self._context, self._pending = self._pending, []
        return text


class AnswerText:
    """The text of one answer, to which tokens are added and from which a reader takes text.

    If there are stop strings, the scheduler adds the tokens at every step; otherwise the reader can
    add them while the next step runs. A possible beginning of a stop string is held back. The text
    ends before the first character of a stop string, which counts only after ``min_tokens`` tokens.
    """

    def __init__(
        self, detokenizer: Detokenizer, *, stops: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops) if stops else None
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._parts: list[str] = []  # text not taken yet; its end may be held back
        self._stopped = False

    @property
    def watches(self) -> bool:
        """Whether there are stop strings, which may end the answer."""
        return self._stops is not None

    def add_token(self, token_id: int) -> str | None:
        """Add a served token. Return the stop string that it completes, if any."""
        self._num_tokens += 1
        text = self._detokenizer.decode(token_id)
        if not text:
            return None
        self._parts.append(text)
        if self._stops is None:
            return None
        found = self._stops.feed(text, count=self._num_tokens >= self._min_tokens)
        return self._cut(text, *found) if found else None

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """Add served tokens of an answer without stop strings."""
        self._num_tokens += len(token_ids)
        if text := self._detokenizer.decode_all(token_ids):
            self._parts.append(text)

    def _cut(self, text: str, stop: str, consumed: int) -> str:
        whole = "".join(self._parts)
        self._parts = [whole[: len(whole) - (len(text) - consumed) - len(stop)]]
        self._stopped = True
        return stop

    def take(self, *, final: bool = False) -> str:
        """Return the text that was not taken yet, without text that is held back.

        ``final``: the answer has ended, so nothing is held back.
        """
        whole, held = "".join(self._parts), 0
        if final and not self._stopped:
            whole += self._detokenizer.finish()
        elif not final and not self._stopped and self._stops is not None:
            held = self._stops.held
        shown = len(whole) - held
        self._parts = [whole[shown:]]
        return whole[:shown]


def _alphabet() -> dict[str, int]:
    """Return the byte that each character of GPT-2's alphabet stands for.

    A printable byte has its own character; other bytes have the characters from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(256) if value not in printable]
    return {
        **{chr(value): value for value in sorted(printable)},
        **{chr(256 + index): value for index, value in enumerate(others)},
    }


BYTE_OF_CHAR = _alphabet()


def is_byte_level(decoder: Mapping[str, Any]) -> bool:
    """Whether a tokenizer's decoder reads tokens as bytes in GPT-2's alphabet.

    ``decoder``: its description in tokenizer.json.
    """
    members = decoder.get("decoders", ())
    if decoder["type"] == "Sequence" and len(members) == 1:
        return is_byte_level(members[0])
    return bool(decoder["type"] == "ByteLevel")
