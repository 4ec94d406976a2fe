"""Token ids of a conversation: rendered text, with earlier answers by their original ids.

The tokens of a sampled answer often differ from the encoding of its text. If the ids are known, the
template renders the conversation with a placeholder in place of the answer; the text around the
placeholder is encoded and the ids are spliced in. The conversation is also rendered without
placeholders. Its text in place of a placeholder is the message as the template renders it, which
shows whether the template keeps the whole answer, drops its reasoning, or changes it.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from ....core.errors import InvalidRequest
from ...parsing.formats.harmony import marked_call, without_calls
from ...parsing.output_format import Syntax
from ...parsing.output_parser import (
    CallArguments,
    CallBegin,
    Content,
    OutputParser,
    PlainParser,
    Reasoning,
)
from ...text.detokenizer import Detokenizer
from ...text.tokenizer import Tokenizer
from ...types.request_context import owner_of, random_id
from ...types.results import Tool
from ...types.sampling_params import SamplingParams
from ..preprocess import PromptTokens
from .answer_match import AnswerMatch, match_answer, openings
from .chat_input import ChatInput, Handle, splice_mark
from .shield import NO_SHIELD, Shield
from .token_history import Key, PrefixDigest, TokenHistory, message_digest

TAIL_IDS = 32  # tokens at the end of a prompt that are searched for the start of reasoning
MAX_ENDS = 16  # maximum number of positions that are tried as the end of a message
MAX_TRIES = 8  # maximum number of renderings with placeholders for answers from the history
NOT_WRITTEN = (
    "the chat template does not render this message as it was generated; leave token_ids out"
)
Write = Callable[[ChatInput], Awaitable[str]]
"""Renders a conversation with the chat template."""


@dataclass(slots=True, eq=False)
class Slot:
    """An assistant's message whose token ids are known, from the caller or from the history."""

    index: int
    message: Mapping[str, Any]
    digest: bytes
    handle: Handle | None = None
    # remembered token ids of the message, by the digest of the ids before the message
    ids_by_prefix: Mapping[bytes, bytes] = field(default_factory=dict)
    mark: str = ""

    @property
    def has_calls(self) -> bool:
        """Whether the message has tool calls."""
        return bool(self.message.get("tool_calls"))


class ConversationTokens:
    """Renders conversations for one model.

    ``end_ids``: tokens that end an answer, which the template adds. ``history``: earlier answers,
    which are looked up by their text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        syntax: Syntax,
        *,
        vocab_size: int,
        end_ids: frozenset[int],
        history: TokenHistory | None = None,
    ) -> None:
        self.tokenizer, self.syntax = tokenizer, syntax
        self.vocab_size, self.end_ids = vocab_size, end_ids
        self._history = history

    async def render(
        self, chat: ChatInput, write: Write, shield: Shield = NO_SHIELD
    ) -> PromptTokens:
        """Return the prompt's token ids.

        ``write`` renders the conversation, with its special tokens escaped by ``shield``. Raises
        `InvalidRequest` if token ids in the body do not match their message.
        """
        text = await write(chat)
        slots = await self.tokenizer.apart(len(text), partial(self._slots, chat))
        tries = MAX_TRIES
        while slots:
            splicer = Splicer(self, chat, text, slots, shield)
            try:
                marked = await self._write_marked(chat, slots, write)
            except InvalidRequest:  # some templates reject results without calls
                failed: Slot | None = next((each for each in slots if each.has_calls), slots[0])
            else:
                size = max(len(text), shield.num_chars)
                failed = await self.tokenizer.work(size, partial(splicer.splice, marked))
            if failed is None:
                for key in splicer.used:
                    self._touch(key)
                return PromptTokens(splicer.token_ids, splicer.num_spliced)
            tries -= 1
            slots = _without(slots, failed, most=bool(tries))
        return PromptTokens(await shield.encode_all(self.tokenizer, text))

    async def can_splice(self, messages: Sequence[Mapping[str, Any]], write: Write) -> bool:
        """Whether token ids can replace the second of ``messages`` in the rendered text."""
        chat = ChatInput(messages=messages, params=SamplingParams())
        slot = Slot(1, messages[1], b"")
        try:
            text, marked = await write(chat), await self._write_marked(chat, [slot], write)
        except InvalidRequest:
            return False
        pieces = _split(marked, [slot])
        return isinstance(pieces, list) and _fits_around(text, *pieces)

    async def _write_marked(self, chat: ChatInput, slots: Sequence[Slot], write: Write) -> str:
        """Render the conversation with a placeholder in place of each message in ``slots``."""
        if self.syntax.tool_parser != "harmony":
            return await write(_marked(chat, slots))
        text = await write(_marked(chat, slots, marked_call))
        return without_calls(text, [slot.mark for slot in slots])

    def _touch(self, key: Key) -> None:
        if self._history is not None:
            self._history.touch(key)

    def _slots(self, chat: ChatInput) -> list[Slot]:
        """Return the messages whose token ids are given or remembered, in order."""
        handles = {each.index: each for each in chat.handles}
        owner = owner_of(chat.params.cache_salt)
        history = self._history
        if not handles and (history is None or not history.has_any(owner)):
            return []
        is_open = bool(chat.template.get("continue_final_message"))
        slots = []
        for index, message in enumerate(chat.messages):
            handle = handles.get(index)
            if is_open and index == len(chat.messages) - 1:
                if handle is not None and handle.is_given:
                    message_ = f"{handle.param} is not supported in a message that is continued"
                    raise InvalidRequest(message_, param=handle.param)
            elif message.get("role") == "assistant" and (
                slot := self._slot(index, message, handle, owner)
            ):
                slots.append(slot)
        return slots

    def _slot(
        self, index: int, message: Mapping[str, Any], handle: Handle | None, owner: bytes
    ) -> Slot | None:
        digest = message_digest(message)
        if handle is not None and (digest is not None or handle.is_given):
            return Slot(index, message, digest or b"", handle)
        if digest is None or self._history is None:
            return None
        found = self._history.ids_by_prefix(owner, digest)
        return Slot(index, message, digest, ids_by_prefix=found) if found else None


class Splicer:
    """Splices the known token ids of answers into one rendered conversation."""

    def __init__(
        self,
        model: ConversationTokens,
        chat: ChatInput,
        text: str,
        slots: Sequence[Slot],
        shield: Shield = NO_SHIELD,
    ) -> None:
        self._shield = shield
        self._model, self._chat, self._text, self._slots = model, chat, text, slots
        self._tokenizer = model.tokenizer
        # read here, since the request context is not available in worker threads
        self._owner = owner_of(chat.params.cache_salt)
        self._known_ids: dict[str, list[int]] = {}  # encodings of texts after `token_ids`
        self._pending = ""  # text after `token_ids` that is not encoded yet
        self._prefix = PrefixDigest()  # digest of the ids so far
        self._looks = True  # whether the prefix so far may still match answers in the history
        self.token_ids: list[int] = []
        self.num_spliced = 0
        self.used: list[Key] = []

    def splice(self, marked: str) -> Slot | None:
        """Assemble ``token_ids``. Return None, or the first message that ids cannot replace.

        ``marked``: the conversation rendered with placeholders. Raises `InvalidRequest` if ids from
        the caller do not match their message.
        """
        pieces = _split(marked, self._slots)
        if isinstance(pieces, Slot):
            return pieces
        at = 0
        for number, slot in enumerate(self._slots):
            before, after = pieces[number], pieces[number + 1]
            if not self._text.startswith(before, at):
                return slot
            self._pending += before
            at += len(before)
            is_last = number == len(self._slots) - 1
            ends = [*islice(_ends(self._text, after, at, is_last=is_last), MAX_ENDS)]
            if not ends:
                return slot
            texts = [self._text[at:end] for end in ends]
            taken = self._given(slot, texts) if slot.handle else self._known(slot, texts)
            if taken is None and slot.handle is not None:
                return slot
            if taken is None:
                self._looks = False
                taken = texts[0]
                self._pending += taken
            at += len(taken)
        self._pending += pieces[-1]
        self._commit()
        return None

    def _given(self, slot: Slot, texts: Sequence[str]) -> str | None:
        """Splice in the ids of the slot's handle and return the text that they replace.

        Return None if they match none of ``texts``.
        """
        assert slot.handle is not None
        ids = self._checked(slot.handle)
        raw = self._read(slot, ids)
        if raw is None and slot.handle.is_given:
            message = (
                f"{slot.handle.param} do not decode to the content, reasoning and tool calls of "
                "their message"
            )
            raise InvalidRequest(message, param=slot.handle.param)
        if raw is None:
            return None
        for text in texts:
            found = self._match(slot, text, raw)
            if found is not None and (kept := self._from(ids, found.start, slot)) is not None:
                self._pending += found.opening
                self._put(kept)
                return text
        return None

    def _known(self, slot: Slot, texts: Sequence[str]) -> str | None:
        """Splice in the ids of a remembered answer to this prompt; return the text they replace.

        Return None if no remembered answer matches.
        """
        if not self._looks:
            return None
        for text in texts:
            for opening in openings(self._shield.plain(text), self._model.syntax.thinking):
                for has_space in (True, False):
                    if (taken := self._at(slot, text, opening, has_space=has_space)) is not None:
                        return taken
        return None

    def _at(self, slot: Slot, text: str, opening: str, *, has_space: bool) -> str | None:
        pending = self._pending + opening
        if not has_space:
            if not pending.endswith(" "):
                return None
            pending = pending[:-1]
        prefix = self._prefix.after(self._encoded(pending))
        data = slot.ids_by_prefix.get(prefix)
        if data is None:
            return None
        ids = array("i", data).tolist()
        raw = self._raw(ids, tools=slot.has_calls or bool(self._chat.tools))
        if raw is None:
            return None
        found = self._match(slot, text, raw)
        if found is None or found.opening != opening:
            return None
        kept = self._from(ids, found.start, slot)
        if kept is None:
            return None
        self._pending = pending
        self._put(kept, is_exact=True)
        self.used.append((self._owner, slot.digest, prefix))
        return text

    def _match(self, slot: Slot, text: str, raw: str) -> AnswerMatch | None:
        """Return how the text ``raw`` of an answer's token ids matches the rendered ``text``.

        Return None if it does not match.
        """
        plain, marks = self._shield.plain(text), self._model.syntax.thought_marks
        found = match_answer(plain, raw, slot.message, marks)
        if found is None or not found.opening:
            return found
        return replace(found, opening=self._shield.head(text, len(found.opening)))

    # -- token ids from the caller ---------------------------------------------------------------

    def _checked(self, handle: Handle) -> list[int]:
        """Return the ids of a handle, without the end token if they end with one.

        Raises `InvalidRequest` for an id out of range.
        """
        ids = list(handle.token_ids)
        param = handle.param or "token_ids"
        self._tokenizer.check_ids(ids, self._model.vocab_size, param)
        return ids[:-1] if ids and ids[-1] in self._model.end_ids else ids

    def _read(self, slot: Slot, ids: Sequence[int]) -> str | None:
        """Return the text of ids if it parses to the slot's message, else None.

        It is parsed in the model's output format, then as plain text.
        """
        for tools in (self._chat.tools or _called_tools(slot.message), ()):
            raw = self._raw(ids, tools=bool(tools))
            for tail in self._tails():
                parser = self._model.syntax.parser(tools=tools, prompt_tail=tail)
                if raw is not None and _says(parser, raw) == slot.digest:
                    return raw
        raw = self._raw(ids, tools=None)
        return raw if raw is not None and _says(PlainParser(), raw) == slot.digest else None

    def _tails(self) -> list[str]:
        """Return the texts with which the prompt before the answer may have ended.

        They are the rendered text, and the rendered text with reasoning opened.
        """
        thinking = self._model.syntax.thinking
        if thinking is None:
            return [""]
        tail = self._pending[-4 * TAIL_IDS :]
        return [tail, tail + thinking.begin + thinking.label]

    def _raw(self, ids: Sequence[int], *, tools: bool | None) -> str | None:
        """Return the text of an answer with its reasoning delimiters; if ``tools``, also of calls.

        If ``tools`` is None, special tokens are not shown. Return None if a token has no text,
        since the text would not show whether the token belongs to the message.
        """
        if self._tokenizer.has_silent(ids, self._shown(tools=tools)):
            return None
        text = self._detokenizer(tools=tools)
        return text.decode_all(ids) + text.finish()

    def _shown(self, *, tools: bool | None) -> frozenset[int]:
        return frozenset() if tools is None else self._model.syntax.shown_ids(tools=tools)

    def _detokenizer(self, *, tools: bool | None) -> Detokenizer:
        context: Sequence[int] = ()
        if not self._tokenizer.is_byte_level:
            context = [*self.token_ids[-TAIL_IDS:], *self._encoded(self._pending)[-TAIL_IDS:]]
        return self._tokenizer.detokenizer(context, self._shown(tools=tools))

    def _from(self, ids: Sequence[int], start: int, slot: Slot) -> Sequence[int] | None:
        """Return the ids whose text begins at character ``start`` of the text of ``ids``.

        Return None if no token begins there.
        """
        if not start:
            return ids
        text = self._detokenizer(tools=slot.has_calls or bool(self._chat.tools))
        length = 0
        for index, token_id in enumerate(ids):
            if length >= start:
                return ids[index:] if length == start else None
            length += len(text.decode(token_id))
        return [] if length + len(text.finish()) == start else None

    # -- the prompt -----------------------------------------------------------------------------

    def _encoded(self, text: str) -> list[int]:
        """Return the token ids of a text that follows ``token_ids``."""
        if text not in self._known_ids:
            is_first = not self.token_ids
            ids = self._shield.encode(self._tokenizer, text, is_first=is_first)
            self._known_ids[text] = ids
        return self._known_ids[text]

    def _commit(self) -> None:
        """Encode the pending text and append its ids."""
        self._append(self._encoded(self._pending))
        self._pending = ""

    def _put(self, ids: Sequence[int], *, is_exact: bool = False) -> None:
        """Append the pending text and the ids of an answer.

        A space before the answer is dropped if the first token begins with a space, unless
        ``is_exact``.
        """
        has_space = ids and self._tokenizer.token_bytes(ids[0]).startswith(b" ")
        if has_space and not is_exact:
            self._pending = self._pending.removesuffix(" ")
        self._commit()
        self._append(ids)
        self.num_spliced += len(ids)

    def _append(self, ids: Sequence[int]) -> None:
        self.token_ids += ids
        self._prefix.add(ids)
        self._known_ids.clear()


# -- texts -------------------------------------------------------------------------------------


def _marked(
    chat: ChatInput,
    slots: Sequence[Slot],
    mark_call: Callable[[Mapping[str, Any], str], dict[str, Any]] | None = None,
) -> ChatInput:
    """Return the conversation with a placeholder in place of each message in ``slots``.

    ``mark_call`` makes the message that replaces a message with calls. Without it, and for other
    messages, the replacement is an assistant's message whose content is the placeholder.
    """
    # random, so that no caller's text contains it
    nonce, messages = random_id(), list(chat.messages)
    for slot in slots:
        slot.mark = splice_mark(nonce, slot.index)
        if mark_call is not None and slot.has_calls:
            messages[slot.index] = mark_call(slot.message, slot.mark)
            continue
        kept = {name: each for name, each in slot.message.items() if name == "name"}
        messages[slot.index] = {"role": "assistant", "content": slot.mark, **kept}
    return replace(chat, messages=messages)


def _split(marked: str, slots: Sequence[Slot]) -> list[str] | Slot:
    """Return the texts around the placeholders, or a message whose placeholder is missing or out of
    order.

    A placeholder that appears a second time stays in a text, so `Splicer.splice` will not find that
    text.
    """
    pieces, at = [], 0
    for slot in slots:
        found = marked.find(slot.mark, at)
        if found < 0:
            return slot
        pieces.append(marked[at:found])
        at = found + len(slot.mark)
    return [*pieces, marked[at:]]


def _ends(text: str, after: str, at: int, *, is_last: bool) -> Iterator[int]:
    """Yield the positions in ``text``, from ``at`` on, at which the text ``after`` begins.

    A message may end at each of them. ``is_last``: only the end of ``text`` is considered.
    """
    if is_last:
        if len(text) - len(after) >= at and text.endswith(after):
            yield len(text) - len(after)
        return
    end = text.find(after, at)
    while end >= 0:
        yield end
        end = text.find(after, end + 1)


def _fits_around(text: str, before: str, after: str) -> bool:
    return (
        text.startswith(before) and text.endswith(after) and len(text) >= len(before) + len(after)
    )


def _without(slots: Sequence[Slot], failed: Slot, *, most: bool) -> list[Slot]:
    """Return the messages to try next after the template did not reproduce ``failed``.

    Other remembered answers that, like ``failed``, have calls or have none are dropped too, since
    the template treats them alike. If ``most`` is false, only messages whose ids the caller gave
    are kept. Raises `InvalidRequest` if the caller gave the ids of ``failed``.
    """
    if failed.handle is not None and failed.handle.is_given:
        param = failed.handle.param
        raise InvalidRequest(f"{param}: {NOT_WRITTEN}", param=param)
    if not most:
        return [slot for slot in slots if slot.handle is not None and slot.handle.is_given]
    if failed.handle is not None:
        return [slot for slot in slots if slot is not failed]
    return [slot for slot in slots if slot.handle is not None or slot.has_calls != failed.has_calls]


def _called_tools(message: Mapping[str, Any]) -> list[Tool]:
    """Return a tool for each call of a message, in case the conversation no longer lists tools."""
    functions = [call.get("function") or call for call in message.get("tool_calls") or ()]
    return [Tool(name=str(function.get("name"))) for function in functions]


def _says(parser: OutputParser, raw: str) -> bytes | None:
    """Return the digest of the message that a parser reads from a text."""
    content, reasoning = [], []
    calls: list[dict[str, str]] = []
    for event in (*parser.feed(raw), *parser.end()):
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallBegin(name):
                calls.append({"name": name, "arguments": ""})
            case CallArguments(text):
                calls[-1]["arguments"] += text
    return message_digest(
        {
            "content": "".join(content),
            "reasoning_content": "".join(reasoning),
            "tool_calls": calls,
        }
    )
