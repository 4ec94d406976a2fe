"""End tokens: the tokens that end an answer of a model with a chat template.

Model files may list too few end tokens: many GGUF files of fine-tunes list only the end token of
the base model, so answers would continue into the next turn. A special token is therefore also an
end token if it has a known name, or if the chat template writes it after an assistant's message. A
token that is not special never becomes an end token.
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
"""Names of tokens that end a text, a turn or a call, in all model families."""

_ASKED, _SAID, _THOUGHT, _NEXT, _RESULT = "Quokka?", "Wombat.", "Numbat.", "Dingo?", "Bilby."
_VALUES = ("Possum", "Potoroo")  # arguments of the calls in the short conversations
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

    ``named``: the ids in the model's files. They are returned unchanged for a model without a chat
    template.
    """
    if not tokenizer.chat_template:
        return frozenset(named)
    added = tokenizer.added_tokens
    known = {*named, *tokenizer.eos_ids, *(added[name] for name in NAMES if name in added)}
    found = known | _Conversations(tokenizer).ends(known)
    return frozenset(found - _marks(tokenizer) or found)


def _marks(tokenizer: Tokenizer) -> set[int]:
    """Return the ids of tokens that mark parts of calls in the formats that the template uses."""
    template, added = tokenizer.chat_template, tokenizer.added_tokens
    return {
        added[mark]
        for family in FAMILIES.values()
        if family.clues and all(clue in template for clue in family.clues)
        for mark in family.marks
        if mark in added and mark not in (CALL, RETURN)
    }


class _Conversations:
    """Short conversations rendered with a chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._inside = {*self._between_parts()}

    def ends(self, known: Collection[int]) -> set[int]:
        """Return the special tokens that end an answer of text and an answer with calls.

        An answer that the template ends with a token in ``known`` yields none.
        """
        said, asked = _answer(content=_SAID), {"role": "user", "content": _NEXT}
        called, value = self._calling()
        result = {"role": "tool", "tool_call_id": _id(0), "name": "look", "content": _RESULT}
        return {
            *self._end_marks(said, _SAID, asked, _NEXT, known)[:1],
            # the last one, since marks of calls may come before the end token
            *self._end_marks(called, value, result, _RESULT, known)[-1:],
        }

    def _end_marks(
        self,
        message: Mapping[str, Any],
        said: str,
        reply: Mapping[str, Any],
        replied: str,
        known: Collection[int],
    ) -> list[int]:
        """Return the special tokens with which the template ends a message.

        They are the tokens that follow the message both with and without a reply. If there are no
        such tokens, they are those that follow it without a reply, and else the first token that
        follows it with a reply. The list is empty if one of the tokens is in ``known``.
        """
        alone = self._outside(self._write(message), said)
        before = self._outside(self._write(message, reply), said, replied)
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(alone, before, strict=False))
        shared = [each for each, _ in pairs]
        found = shared or alone or before[:1]
        return [] if any(each in known for each in found) else found

    def _calling(self) -> tuple[Mapping[str, Any], str]:
        """Return a message with two calls, and the argument of its last call.

        If the template does not render two calls, the message has one call.
        """
        for values in (_VALUES, _VALUES[:1]):
            called = _answer(*values)
            if values[-1] in self._write(called):
                break
        return called, values[-1]

    def _between_parts(self) -> Iterator[int]:
        """Yield the special tokens between reasoning, text and calls of an answer."""
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
        """Return the rendered text of a user message followed by these messages.

        Return "" if the template rejects them.
        """
        tools = (_TOOL,) if "tool_calls" in messages[0] else ()
        asked = {"role": "user", "content": _ASKED}
        written = self._tokenizer.written([asked, *messages], tools)
        if written and (_SAID in written or not messages[0]["content"]):
            return written
        return self._tokenizer.written([_in_parts(each) for each in (asked, *messages)], tools)

    def _outside(self, written: str, start: str, stop: str = "") -> list[int]:
        """Return the special tokens between ``start`` and ``stop`` that never occur in answers."""
        found = self._special(written, start, stop)
        return [each for each in found if each not in self._inside]

    def _special(
        self, written: str, start: str, stop: str = "", *, is_between: bool = False
    ) -> list[int]:
        """Return the special tokens in the text after the last ``start`` and before ``stop``.

        If ``stop`` does not occur, the text extends to the end, or is empty if ``is_between``.
        """
        _, has_begun, behind = written.rpartition(start)
        piece, has_ended, _ = behind.partition(stop) if stop else (behind, "", "")
        if not has_begun or (is_between and not has_ended):
            return []
        return self._tokenizer.special_in(piece)


def _answer(*values: str, content: str = "", **fields: str) -> dict[str, Any]:
    """Return an assistant's message, with a call for each value."""
    calls = [_call(number, value) for number, value in enumerate(values)]
    given = {"role": "assistant", "content": content, **fields}
    return {**given, "tool_calls": calls} if calls else given


def _call(number: int, value: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": {"at": value}}
    return {"id": _id(number), "type": "function", "function": function}


def _id(number: int) -> str:
    """Return a call id of nine letters and digits, which some templates require."""
    return f"call0000{number}"


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a list of parts, which some templates require."""
    return {**message, "content": [{"type": "text", "text": message.get("content", "")}]}
