"""Summarizer: asks the model for a summary of a conversation.

The request is the conversation itself, with its tools, followed by one user message that asks for
the summary. Its prompt therefore begins like the prompt of the last turn and reads that part from
the prefix cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from ....core.errors import DeadlineExceeded, EngineDead, PromptTooLong, Unavailable
from ....core.interface.request import Usage
from ...media.sources import ImageSource, split_marks
from ...types.results import ToolChoice, batch_usage
from ...types.sampling_params import SamplingParams
from ..chat import ChatClient
from ..conversation.chat_input import ChatInput
from ..engine_client import EngineClient

INSTRUCTIONS = (
    "Stop here and do not continue the task. Write a summary of this conversation, which will "
    "replace it: whoever reads the summary does not see the conversation. Keep what is needed to "
    "continue: the user's requests and constraints in their own words, decisions and their "
    "reasons, facts, names, numbers and file paths, what was done and with which result, errors "
    "and how they were solved, and the next steps. Write plain text, without calling tools."
)
HEAD = "The earlier part of this conversation was replaced by this summary:"
MAX_SUMMARY_TOKENS = 4096
SHARE = 4  # a summary has at most this fraction of the context, 1 / SHARE
DEFAULT_THRESHOLD = 150_000  # tokens
CARRIED = ("cache_salt", "lora", "deadline", "priority", "seed", "temperature", "top_p", "top_k",
           "min_p", "repetition_penalty", "speculation")  # fmt: skip
FRAME = ("add_generation_prompt", "continue_final_message")  # template options for a prompt's end


@dataclass(frozen=True, slots=True)
class Summary:
    """A summary, and the usage of the requests that wrote it."""

    text: str
    usage: Usage


def summary_text(summary: str) -> str:
    """Return the user message that replaces the summarized part of a conversation."""
    return f"{HEAD}\n\n{summary}"


class Summarizer:
    """Writes summaries of conversations with the model that answers them."""

    def __init__(self, llm: EngineClient, client: ChatClient) -> None:
        self._llm, self._client = llm, client

    @property
    def context(self) -> int:
        """Number of tokens of a prompt and its answer together."""
        return self._llm.built.max_model_len

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a summary, with the reasoning of a model that reasons."""
        most = max(1, min(MAX_SUMMARY_TOKENS, self.context // SHARE))
        return most if self._client.syntax.thinking is None else 2 * most

    def threshold(self, asked: int | None) -> int:
        """Return the number of prompt tokens from which a conversation is compacted.

        ``asked``: the caller's threshold; None for the default, the smaller of 150,000 tokens and
        four fifths of the context. It is at most the longest prompt that the model can answer.
        """
        if asked is None:
            asked = min(DEFAULT_THRESHOLD, self.context * 4 // 5)
        return min(asked, self.context - 1)

    async def count(self, chat: ChatInput) -> int:
        """Return the number of prompt tokens of a conversation. Raises `InvalidRequest`.

        For a text that is far longer than the context, the result is a lower bound.
        """
        try:
            return len((await self._client.render(chat)).token_ids)
        except PromptTooLong as error:
            return error.num_tokens

    async def summarize(self, chat: ChatInput, instructions: str | None = None) -> Summary:
        """Return a summary of the whole conversation.

        ``instructions``: the text that asks for the summary, by default `INSTRUCTIONS`. A
        conversation that does not fit the context is summarized in several passes: each summarizes
        the longest part that fits, and the next one continues after that summary. Raises
        `PromptTooLong` if a single message does not fit, `DeadlineExceeded`, `QueueFull`,
        `EngineDead`, and `Unavailable` if the model writes no summary.
        """
        asked = instructions or INSTRUCTIONS
        usages: list[Usage] = []
        left = chat
        while True:
            end = await self._num_fitting(left, asked)
            summary = await self._ask(_question(left, end, asked))
            usages.append(summary.usage)
            if end == len(left.messages):
                return Summary(summary.text, batch_usage(usages))
            left = _with_summary(left, end, summary.text)

    async def _ask(self, question: ChatInput) -> Summary:
        params = {name: getattr(question.params, name) for name in CARRIED}
        params["max_tokens"] = self.max_tokens
        question = dataclasses.replace(
            question,
            params=SamplingParams(**params),
            cache=replace(question.cache, pins=()),
            warms_next=False,
        )
        answer = await self._client.open(question)
        done = await answer.completion()
        if done.finish_reason == "abort":
            if self._llm.draining or self._llm.engine.draining:
                raise EngineDead("the server is shutting down")
            raise DeadlineExceeded("the deadline passed before the summary was complete")
        text = done.text.strip()
        if not text:
            raise Unavailable("the model wrote no summary of the conversation")
        return Summary(text, done.usage)

    async def _num_fitting(self, chat: ChatInput, asked: str) -> int:
        """Return how many messages fit the context together with a summary. O(log(messages))
        renderings.

        Raises `PromptTooLong` if not even the first message after the system messages fits.
        """
        room = self.context - self.max_tokens
        least, most = _num_fixed(chat.messages), len(chat.messages)
        if (found := await self.count(_question(chat, most, asked))) <= room:
            return most
        begin = least
        while least + 1 < most:
            middle = (least + most) // 2
            if await self.count(_question(chat, middle, asked)) <= room:
                least = middle
            else:
                most = middle
        end = _before_results(chat.messages, least)
        if end <= begin:
            raise PromptTooLong(found, room, param="messages", context=self.context)
        return end


def _num_fixed(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of leading messages that need no summary.

    These are the system messages and, if the next message is a summary, that message.
    """
    count = 0
    while count < len(messages) and messages[count].get("role") == "system":
        count += 1
    rest = messages[count:]
    return count + bool(rest and str(rest[0].get("content")).startswith(HEAD))


def _before_results(messages: Sequence[Mapping[str, Any]], end: int) -> int:
    """Return the largest number up to ``end`` that does not separate a call from its result."""
    while 0 < end < len(messages) and messages[end].get("role") == "tool":
        end -= 1
    return end


def _question(chat: ChatInput, end: int, asked: str) -> ChatInput:
    """Return the conversation's first ``end`` messages, followed by the request for a summary."""
    paths = [chat.path(index) for index in range(end)]
    return dataclasses.replace(
        chat,
        messages=[*chat.messages[:end], {"role": "user", "content": asked}],
        images=_images(chat, range(end)),
        handles=[each for each in chat.handles if each.index < end],
        paths=[*paths, paths[-1] if paths else "messages"],
        tool_choice=ToolChoice(mode="none"),
        template={name: each for name, each in chat.template.items() if name not in FRAME},
    )


def _with_summary(chat: ChatInput, end: int, summary: str) -> ChatInput:
    """Return the conversation with its first ``end`` messages replaced by their summary."""
    fixed = 0
    while chat.messages[fixed].get("role") == "system":
        fixed += 1
    kept = [*range(fixed), *range(end, len(chat.messages))]
    message = {"role": "user", "content": summary_text(summary)}
    messages: list[Mapping[str, Any]] = [chat.messages[index] for index in kept]
    messages.insert(fixed, message)
    paths = [chat.path(index) for index in kept]
    paths.insert(fixed, chat.path(end - 1))
    moved = {index: place + (place >= fixed) for place, index in enumerate(kept)}
    handles = [
        dataclasses.replace(each, index=moved[each.index])
        for each in chat.handles
        if each.index in moved
    ]
    return dataclasses.replace(
        chat, messages=messages, images=_images(chat, {*kept}), paths=paths, handles=handles
    )


def _images(chat: ChatInput, kept: Collection[int]) -> list[ImageSource]:
    """Return the images of the messages ``kept`` of a conversation, in order."""
    known, left = {each.digest: each for each in chat.images}, iter(chat.images)
    found: list[ImageSource] = []
    for index, message in enumerate(chat.messages):
        content = message.get("content")
        parts = split_marks(content, known) if known and isinstance(content, str) else []
        images = [next(left) for part in parts if isinstance(part, ImageSource)]
        found += images if index in kept else []
    return found
