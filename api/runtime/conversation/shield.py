"""Shield: treat special tokens in message contents as text.

A message, a web page in a tool result or a tool description may spell out a special token, such as
the end of a turn, and could thus forge a turn. Such marks are broken up before the template renders
the conversation, and the text between the template's own marks is encoded by a tokenizer without
special tokens (`LiteralEncoder`). Conversations without marks are not changed.

==========================================  =========================================
contents                                    marks treated as text
==========================================  =========================================
user, tool and other roles                  all
system messages and tool definitions        all except answer marks that are not special
                                            tokens: they may describe the answer format
assistant messages                          all except answer marks
==========================================  =========================================

Marks are the special tokens of the vocabulary and the other added tokens that the template writes.
Answer marks are the marks of reasoning and tool calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....core.errors import InvalidRequest
from ...parsing.families import FAMILIES
from ...parsing.formats.generic import RESULT_BEGIN, RESULT_END
from ...parsing.output_format import THINKING, Syntax
from ...text.chat_template import INLINE_CHARS
from ...text.marks import Marks, escape, unused_char
from ...text.tokenizer import Tokenizer
from ...types.results import Tool

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ContentMarks:
    """The special tokens and delimiters that are treated as text, by the role of the content."""

    user: Marks
    system: Marks
    assistant: Marks

    @classmethod
    def of(cls, tokenizer: Tokenizer, syntax: Syntax, written: str) -> ContentMarks:
        """Return the special tokens and delimiters of a tokenizer and its template.

        ``written``: a rendered conversation. Added tokens in it belong to the template.
        """
        added = tokenizer.added_names
        special = {name for name, is_special in added.items() if is_special}
        other = added.keys() - special
        family = syntax.family
        own = set() if family is None or family.reads_thoughts else {*family.marks}
        if syntax.thinking is not None:
            own |= {syntax.thinking.begin, syntax.thinking.end}
        known = {mark for each in FAMILIES.values() for mark in each.marks}
        known |= {mark for each in THINKING.values() for mark in (each.begin, each.end)}
        answer = (own & added.keys()) | (known & other)
        template = f"{tokenizer.chat_template} {written} {RESULT_BEGIN} {RESULT_END}"
        control = special | {name for name in other - answer if name in template}
        found = cls(Marks(control | answer), Marks(control), Marks(control - answer))
        for marks in (found.user, found.system, found.assistant):
            marks.is_in("")  # compile the pattern now
        return found

    def shield(self, messages: Messages, tools: Sequence[Tool]) -> Shield:
        """Return the shield of a conversation; `NO_SHIELD` if it needs none. O(text)."""
        if not self._is_spelled(messages, tools):
            return NO_SHIELD
        contents = [*messages, *(tool.body for tool in tools)]
        breaker = unused_char(texts_of(contents))
        if breaker is None:
            message = "messages: every private-use character of Unicode is used"
            raise InvalidRequest(message, param="messages")
        return Shield(breaker, self)

    def _is_spelled(self, messages: Messages, tools: Sequence[Tool]) -> bool:
        for message in messages:
            if self.of_role(message.get("role")).is_in_any(texts_of(message)):
                return True
        return bool(tools) and any(self.system.is_in_any(texts_of(tool.body)) for tool in tools)

    def of_role(self, role: object) -> Marks:
        """Return the special tokens and delimiters to treat as text in messages of a role."""
        if role in ("system", "developer"):
            return self.system
        return self.assistant if role == "assistant" else self.user


@dataclass(frozen=True, slots=True)
class Shield:
    """Breaks up the marks in the contents of one conversation.

    ``breaker``: a character that the conversation does not contain; it is inserted into each mark.
    """

    breaker: str = ""
    marks: ContentMarks | None = None

    def messages(self, messages: Messages) -> Messages:
        """Return the messages without text that spells a special token of the template."""
        if self.marks is None:
            return messages
        return [self._broken(self.marks.of_role(each.get("role")), each) for each in messages]

    def tools(self, tools: Sequence[Tool]) -> Sequence[Tool]:
        """Return the tools without text that spells a special token of the template."""
        if self.marks is None:
            return tools
        system = self.marks.system
        return [
            replace(
                tool,
                name=self._broken(system, tool.name),
                description=self._broken(system, tool.description),
                parameters=self._broken(system, tool.parameters),
            )
            for tool in tools
        ]

    def _broken(self, marks: Marks, value: Any) -> Any:  # noqa: ANN401 - values of JSON
        try:
            return changed(value, lambda text: marks.broken(text, self.breaker))
        except RecursionError:
            message = "messages and tools are nested too deeply"
            raise InvalidRequest(message, param="messages") from None

    def written(self, text: str) -> str:
        """Return a rendered text in which the breaker itself replaces its JSON escape sequence."""
        return text.replace(escape(self.breaker), self.breaker) if self.breaker else text

    def plain(self, text: str) -> str:
        """Return a text without the breaker."""
        return text.replace(self.breaker, "") if self.breaker else text

    def head(self, text: str, num_chars: int) -> str:
        """Return the first ``num_chars`` characters of a text, and the breakers among them."""
        end = num_chars
        while self.breaker and (missing := num_chars - len(self.plain(text[:end]))):
            end += missing
        return text[:end]

    @property
    def num_chars(self) -> int:
        """Least number of characters to assume when deciding whether to encode in a thread.

        It is 0 if no marks are broken up. Otherwise a short text is encoded in a thread too, since
        the first one creates another tokenizer, which is slow.
        """
        return INLINE_CHARS + 1 if self.breaker else 0

    async def encode_all(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """Return the token ids of a rendered conversation.

        Raises the errors of `Tokenizer.encode`.
        """
        if self.marks is None:
            return await tokenizer.encode(text, add_special_tokens=False)
        names = self.marks.user.names
        return await tokenizer.encode_marked(text, {self.breaker: ""}, names)

    def encode(self, tokenizer: Tokenizer, text: str, *, is_first: bool) -> list[int]:
        """Return the token ids of a part of a rendered conversation.

        ``is_first``: the part begins the conversation.
        """
        if self.marks is None or self.breaker not in text:
            return tokenizer.encode_word(text) if is_first else tokenizer.encode_after(text)
        encoder = tokenizer.literal(self.marks.user.names)
        return encoder.encode_with(text, {self.breaker: ""}, is_first=is_first)


NO_SHIELD = Shield()


def texts_of(value: object) -> list[str]:
    """Return all strings in a JSON value, including keys of objects."""
    texts: list[str] = []
    left: list[Any] = [value]
    for each in left:  # it grows meanwhile
        kind = type(each)  # `isinstance` with an abstract class is slow
        if kind is str:
            texts += (each,)
        elif kind is dict or isinstance(each, Mapping):
            left += [*each, *each.values()]
        elif isinstance(each, str):
            texts.append(str(each))
        elif kind is list or (isinstance(each, Sequence) and not isinstance(each, bytes)):
            left += each
    return texts


def changed(value: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401 - values of JSON
    """Return a copy of a JSON value with all strings changed, including keys of objects."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {changed(name, change): changed(each, change) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [changed(each, change) for each in value]
    return value
