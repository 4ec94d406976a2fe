"""End tokens: the tokens that end an answer of a model with a chat template.

The files of a model may name too few of them: many GGUF files of fine-tunes name only the end token
of the base model, and their answers would run on into the next turn. So a token also ends an answer
if its name is that of an end, or if the chat template writes it behind an assistant's message. Only
special tokens count, never ordinary text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise, takewhile
from typing import Any

from ..parsing.families import FAMILIES
from ..parsing.formats.harmony import CALL, RETURN
from ..text.tokenizer import Tokenizer

NAMES = frozenset(
    {
        "<|endoftext|>", "<|end_of_text|>", "<|eos|>", "<eos>", "</s>", "[EOS]", "<|EOT|>",
        "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end_of_turn|>",
        "<end_of_turn>", "<turn|>", "<|tool_response>", "[|endofturn|]", "<|endofturn|>",
        "<|END_OF_TURN_TOKEN|>",
        "<end_of_utterance>", "<｜end▁of▁sentence｜>", RETURN, CALL,
    }
)  # fmt: skip
"""Names of tokens that end a text, a turn or a message for a tool, in every family of models."""

_ASKED, _SAID, _THOUGHT, _NEXT, _RESULT = "Quokka?", "Wombat.", "Numbat.", "Dingo?", "Bilby."
_VALUES = ("Possum", "Potoroo")  # arguments of calls
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at it.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


def end_token_ids(tokenizer: Tokenizer, named: Collection[int]) -> frozenset[int]:
    """Return the ids of the tokens that end an answer.

    ``named``: the ids in the model's files; a model without a chat template has no others.
    """
    if not tokenizer.chat_template:
        return frozenset(named)
    added = tokenizer.added_tokens
    known = {*named, *tokenizer.eos_ids, *(added[name] for name in NAMES if name in added)}
    found = known | _Conversations(tokenizer).ends(known)
    return frozenset(found - _marks(tokenizer) or found)


def _marks(tokenizer: Tokenizer) -> set[int]:
    """Return the ids of the marks inside an answer, by the formats of calls in the template."""
    template, added = tokenizer.chat_template, tokenizer.added_tokens
    return {
        added[mark]
        for family in FAMILIES.values()
        if family.clues and all(clue in template for clue in family.clues)
        for mark in family.marks
        if mark in added and mark not in NAMES
    }


class _Conversations:
    """Short conversations as a chat template writes them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._inside = {*self._between_parts()}

    def ends(self, known: Collection[int]) -> set[int]:
        """Return what ends a text and what ends a call, unless a ``known`` token does."""
        said, asked = _answer(content=_SAID), {"role": "user", "content": _NEXT}
        called, value = self._calling()
        result = {"role": "tool", "tool_call_id": _id(0), "name": "look", "content": _RESULT}
        return {
            *self._behind(said, _SAID, asked, _NEXT, known)[:1],
            *self._behind(called, value, result, _RESULT, known)[-1:],  # behind marks of calls
        }

    def _behind(
        self,
        message: Mapping[str, Any],
        said: str,
        reply: Mapping[str, Any],
        replied: str,
        known: Collection[int],
    ) -> list[int]:
        """Return the special tokens behind a message; none if a known one is among them.

        These are the tokens that the template writes whether a reply follows or not, else those
        that it writes behind the last message alone, else the first one of the reply.
        """
        alone = self._outside(self._write(message), said)
        before = self._outside(self._write(message, reply), said, replied)
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(alone, before, strict=False))
        shared = [each for each, _ in pairs]
        found = shared or alone or before[:1]
        return [] if any(each in known for each in found) else found

    def _calling(self) -> tuple[Mapping[str, Any], str]:
        """Return a message with calls, and the last value: two, or one for some templates."""
        for values in (_VALUES, _VALUES[:1]):
            called = _answer(*values)
            if values[-1] in self._write(called):
                break
        return called, values[-1]

    def _between_parts(self) -> Iterator[int]:
        """Yield special tokens between the parts of an answer: thoughts, a text and calls."""
        for message in (
            _answer(reasoning_content=_THOUGHT, content=_SAID),
            _answer(*_VALUES, reasoning_content=_THOUGHT),
            _answer(*_VALUES, content=_SAID),
        ):
            written = self._write(message)
            for start, stop in pairwise((_THOUGHT, _SAID, *_VALUES)):
                yield from self._special(written, start, stop, is_between=True)
            yield from self._special(written, _THOUGHT, _VALUES[0], is_between=True)

    def _write(self, *messages: Mapping[str, Any]) -> str:
        """Write a user's message and these behind it; "" if the template refuses them."""
        tools = (_TOOL,) if "tool_calls" in messages[0] else ()
        asked = {"role": "user", "content": _ASKED}
        written = self._tokenizer.written([asked, *messages], tools)
        if written and (_SAID in written or not messages[0]["content"]):
            return written
        return self._tokenizer.written([_in_parts(each) for each in (asked, *messages)], tools)

    def _outside(self, written: str, start: str, stop: str = "") -> list[int]:
        """Return the tokens of `_special` that never stand inside an answer."""
        found = self._special(written, start, stop)
        return [each for each in found if each not in self._inside]

    def _special(
        self, written: str, start: str, stop: str = "", *, is_between: bool = False
    ) -> list[int]:
        """Return the special tokens from the last ``start`` to ``stop``, or to the end."""
        _, has_begun, behind = written.rpartition(start)
        piece, has_ended, _ = behind.partition(stop) if stop else (behind, "", "")
        if not has_begun or (is_between and not has_ended):
            return []
        return self._tokenizer.special_in(piece)


def _answer(*values: str, content: str = "", **fields: str) -> dict[str, Any]:
    """Return an assistant's message, with a call for each of these arguments."""
    calls = [_call(number, value) for number, value in enumerate(values)]
    given = {"role": "assistant", "content": content, **fields}
    return {**given, "tool_calls": calls} if calls else given


def _call(number: int, value: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": {"at": value}}
    return {"id": _id(number), "type": "function", "function": function}


def _id(number: int) -> str:
    """Return an id of nine letters and digits, which some templates insist on."""
    return f"call0000{number}"


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message for templates that take lists of parts alone."""
    return {**message, "content": [{"type": "text", "text": message.get("content", "")}]}
