"""ChatInput: a chat request, independent of the API."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....core.interface.request import DEFAULT_CACHE, CacheOptions
from ...media.sources import ImageSource
from ...parsing.reasoning import Thinking
from ...types.results import Tool, ToolChoice
from ...types.sampling_params import SamplingParams
from .prompt_history import PromptNote, conversation_parts, option_texts

_SPLICE_MARK = re.compile("\ue000[0-9a-f]+[.][0-9]+\ue001")


def splice_mark(nonce: str, index: int) -> str:
    """Return the text that stands for a message's token ids while a conversation is rendered."""
    return f"\ue000{nonce}.{index}\ue001"


def is_splice_mark(text: str) -> bool:
    """Whether a text is a `splice_mark`."""
    return _SPLICE_MARK.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Handle:
    """The token ids of an assistant's message, rendered in place of its text."""

    index: int  # index of the message
    token_ids: Sequence[int]
    param: str = ""  # field of the body; "" for ids from a store, which are optional

    @property
    def is_given(self) -> bool:
        """Whether the caller gave the ids. Given ids that do not match the message are an error."""
        return bool(self.param)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput:
    """A chat request.

    - ``messages``: the conversation in the shape that chat templates read, as in OpenAI's API.
    - ``images``: the images whose placeholders are in the messages, in order.
    - ``warms_next``: compute the beginning of the next turn when the answer has ended.
    - ``handles``: token ids of messages, which are rendered in place of the messages' text.
    - ``params``: sampling parameters, including those for structured output (json_schema, regex,
      grammar, choice).
    """

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    images: Sequence[ImageSource] = ()
    handles: Sequence[Handle] = ()
    paths: Sequence[str] = ()  # paths of the messages in the body; default: their indices
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    template: Mapping[str, object] = field(default_factory=dict)  # options of the chat template
    cache: CacheOptions = DEFAULT_CACHE
    warms_next: bool = False
    cache_key: str | None = None  # ``prompt_cache_key``, reported in explanations of cache misses

    def path(self, index: int) -> str:
        """Return the path of a message in the request's body."""
        return self.paths[index] if self.paths else f"messages[{index}]"

    @property
    def shown_tools(self) -> Sequence[Tool]:
        """The tools that the template renders before the conversation."""
        return [tool for tool in self.tools if not tool.is_loaded] if self.tools else ()

    def note(self, thinking: Thinking | None = None) -> PromptNote:
        """Return the record of the prompt for later explanations of cache misses.

        ``thinking``: the delimiters of the model's reasoning.
        """
        parts = conversation_parts(self.messages, [tool.body for tool in self.shown_tools])
        return PromptNote(
            parts=parts,
            cache_key=self.cache_key,
            thinking=thinking,
            options=option_texts(self.template),
        )

    @property
    def callable_tools(self) -> Sequence[Tool]:
        """The tools that the model may call in this answer."""
        choice = self.tool_choice
        if choice.mode == "none" or choice.allowed is None:
            return () if choice.mode == "none" else self.tools
        return [tool for tool in self.tools if tool.name in choice.allowed]
