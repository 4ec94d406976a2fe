"""LiteralEncoder: encodes texts in which special tokens that are spelt out stay text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from ...core.errors import InvalidRequest
from .marks import Marks

ANCHOR = "\ue000"  # a private-use character, which no vocabulary merges with other text


class _Segment(NamedTuple):
    """A part of a text between two special tokens, and the ids of the part in the whole text.

    ``mark``: the id of the special token after it; None at the end of the text.
    """

    text: str
    ids: list[int]
    mark: int | None


class Encoder:
    """Encodes texts with a tokenizer of the library tokenizers, alone or after other text."""

    def __init__(self, backend: Any) -> None:  # noqa: ANN401 - tokenizers is untyped
        self.backend = backend

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text."""
        # The batch call releases the interpreter lock; `encode` holds it.
        try:
            batch = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:
            text.encode()  # raises UnicodeEncodeError for a lone surrogate
            raise
        return list(batch[0].ids)

    def encode_after(self, text: str) -> list[int]:
        """Return the token ids of a text that follows other text: no space is added before it."""
        if not self._adds_prefix:
            return self.encode(text)
        anchor, ids = self.encode(ANCHOR), self.encode(ANCHOR + text)
        if ids[: len(anchor)] != anchor:
            raise InvalidRequest("the prompt cannot be tokenised in parts", param="prompt")
        return ids[len(anchor) :]

    @cached_property
    def _adds_prefix(self) -> bool:
        """Whether a space is added before a text, as by SentencePiece."""
        alone, anchor, both = (self.encode(each) for each in ("a", ANCHOR, f"{ANCHOR}a"))
        return both != [*anchor, *alone]


class LiteralEncoder(Encoder):
    """A copy of a tokenizer that encodes the ``names`` of special tokens in a text as text."""

    def __init__(self, plain: Encoder, names: frozenset[str]) -> None:
        made = json.loads(plain.backend.to_str())
        for token in made["added_tokens"]:
            token["special"] = token["content"] in names
        backend = type(plain.backend).from_str(json.dumps(made))
        backend.encode_special_tokens = True
        super().__init__(backend)
        self._plain, self._names, self._marks = plain, names, Marks(names)
        self._ids = frozenset(backend.token_to_id(name) for name in names)

    def encode_with(
        self, text: str, replaced: Mapping[str, str], *, is_first: bool = True
    ) -> list[int]:
        """Return the token ids of a text after replacing some pieces of it.

        ``replaced``: the replacement of each piece. Names of special tokens are encoded as text in
        replacements and as tokens elsewhere. A part between two such tokens in which nothing is
        replaced is encoded as by the plain tokenizer. ``is_first``: the text begins the prompt.
        """
        pieces = re.compile("|".join(map(re.escape, replaced)))
        ids: list[int] = []
        for number, segment in enumerate(self._segments(text)):
            begins = is_first if number == 0 else self._begins_anew
            if pieces.search(segment.text) is not None:
                literal = pieces.sub(lambda found: replaced[found[0]], segment.text)
                ids += self._literal_ids(literal, begins=begins)
            elif number or is_first:
                ids += segment.ids
            else:
                ids += self._plain.encode_after(segment.text)
            if segment.mark is not None:
                ids.append(segment.mark)
        return ids

    def _segments(self, text: str) -> Iterator[_Segment]:
        """Yield the parts of a text between special tokens, which are encoded separately."""
        (whole,) = self._plain.backend.encode_batch([text], add_special_tokens=False)
        ids, at, first = list(whole.ids), 0, 0
        for number, (token_id, (start, end)) in enumerate(zip(ids, whole.offsets, strict=True)):
            # The token for unknown characters may also be among the names.
            if token_id in self._ids and text[start:end].strip() in self._names:
                yield _Segment(text[at:start], ids[first:number], token_id)
                at, first = end, number + 1
        yield _Segment(text[at:], ids[first:], None)

    def _literal_ids(self, text: str, *, begins: bool) -> list[int]:
        encode = self.encode if begins else self.encode_after
        ids = encode(text)
        if self._ids.isdisjoint(ids):
            return ids
        # The vocabulary also has the name as an ordinary token, so encode the text in two parts.
        first, *rest = self._marks.parts(text)
        return [*encode(first), *(each for part in rest for each in self.encode_after(part))]

    @cached_property
    def _begins_anew(self) -> bool:
        """Whether text after a special token is encoded like text that stands alone."""
        return self._plain.encode(f"{min(self._names)}a")[1:] == self._plain.encode("a")
