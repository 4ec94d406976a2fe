"""Results of generation: deltas while it runs, a Completion at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from ...core.errors import ForetokenError
from ...core.interface.output import TokenLogprob
from ...core.interface.request import Usage

K = TypeVar("K")


Body = dict[str, object]


class ToolCall(Struct, kw_only=True):
    """A tool call by the model."""

    id: str
    name: str
    arguments: str  # JSON text, as the model wrote it

    def parsed(self) -> dict[str, Any]:
        """Return the arguments as an object.

        Raises `ForetokenError` if they are not a JSON object.
        """
        try:
            return msgspec.json.decode(self.arguments, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise ForetokenError(
                f"the arguments of {self.name} are not a JSON object: {error}"
            ) from None

    def reply(self, content: str) -> dict[str, Any]:
        """Return the message that returns the tool's result to the model."""
        return {"role": "tool", "tool_call_id": self.id, "content": content}


def message_of(
    text: str, reasoning: str, calls: Sequence[ToolCall], token_ids: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return an answer as a message in OpenAI's form, to be appended to its conversation.

    With ``token_ids`` it is rendered by them.
    """
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    if token_ids is not None:
        message["token_ids"] = list(token_ids)
    return message


class CallDelta(Struct, kw_only=True):
    """An addition to a call; only its first delta has ``id`` and ``name``."""

    index: int  # among the calls of its choice
    id: str = ""
    name: str = ""
    arguments: str = ""
    is_done: bool = False  # the call is complete


class TextDelta(Struct, kw_only=True):
    """The addition of one step to an answer, or of several steps to a slow reader.

    ``text`` may lag behind ``token_ids``: incomplete characters and possible beginnings of a stop
    string are held back. ``index`` is the choice for n > 1. ``sources`` has the draft source of
    each token; "" is the target model itself. The answer to a conversation is split, as in
    `Choice`.
    """

    text: str = ""
    token_ids: list[int] = []
    sources: list[str] = []
    index: int = 0
    finish_reason: str | None = None  # as in `Choice`, in its last delta
    stop_reason: int | str | None = None  # the stop token id or the stop string
    logprobs: list[TokenLogprob] | None = None  # one per token id, when asked for
    prompt_logprobs: list[TokenLogprob] = []
    reasoning: str = ""
    tool_calls: list[CallDelta] = []
    message_ids: list[int] | None = None  # as in `Choice`, in its last delta


class Choice(Struct, kw_only=True):
    """One of the n answers to a prompt.

    The answer to a conversation is split: ``text`` is its content, ``reasoning`` is the
    text before it, ``tool_calls`` has the calls. ``finish_reason``: "stop", "length", "abort" or
    "tool_calls". ``message_ids`` are the tokens of the message itself, without the stop token, by
    which it can be rendered later; None if there are none: a stop string or a single call cut it,
    or the chat template cannot.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str = ""
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] = []  # of all prompt tokens but the first
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    message_ids: list[int] | None = None

    def add(self, delta: TextDelta) -> None:
        """Append a delta."""
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        for call in delta.tool_calls:
            if call.index == len(self.tool_calls):
                self.tool_calls.append(ToolCall(id=call.id, name=call.name, arguments=""))
            self.tool_calls[call.index].arguments += call.arguments
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            self.message_ids = delta.message_ids

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to be appended to its conversation."""
        return message_of(self.text, self.reasoning, self.tool_calls, self.message_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The answer to one prompt. The plain attributes are those of the first choice.

    ``prompt_logprobs`` has one entry per prompt token; the first token has none. ``usage`` counts
    the prompt once and the tokens of all choices.
    """

    request_id: str
    prompt_token_ids: list[int]
    choices: list[Choice]
    usage: Usage
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def text(self) -> str:
        """The text, without special tokens and up to a stop string."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        """The tokens, the stop token included."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        """ "stop", "length" or "abort"; for a conversation also "tool_calls"."""
        return self.choices[0].finish_reason

    @property
    def reasoning(self) -> str:
        """The model's reasoning before its answer; for conversations only."""
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tool calls; for conversations only."""
        return self.choices[0].tool_calls

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to be appended to its conversation."""
        return self.choices[0].message

    @property
    def stop_reason(self) -> int | str | None:
        """The stop token id or stop string that ended the answer, if any."""
        return self.choices[0].stop_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """One entry per token, when asked for."""
        return self.choices[0].logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """The vector of one text, of length 1, and what it cost."""

    embedding: list[float]
    prompt_token_ids: list[int]
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedDocument:
    """A document, its place among those given, its score from 0 to 1, and what it cost."""

    index: int
    relevance_score: float
    document: str
    usage: Usage


def total_usage(usages: Sequence[Usage]) -> Usage:
    """Usage of sibling choices: the prompt of the first, the sum of what was generated."""
    first = usages[0]
    total = Usage(
        prompt_tokens=first.prompt_tokens,
        cached_tokens=first.cached_tokens,
        matched_tokens=first.matched_tokens,
        loaded_tokens=first.loaded_tokens,
        cache_write_tokens=_written(usages),
        image_tokens=first.image_tokens,
        spliced_tokens=first.spliced_tokens,
        normalized=first.normalized,
        cache_loss=first.cache_loss,
        queue_time=first.queue_time,
        time_to_first_token=min(usage.time_to_first_token for usage in usages),
        total_time=max(usage.total_time for usage in usages),
    )
    for usage in usages:
        add_counts(total, usage)
    return total


def _written(usages: Sequence[Usage]) -> int:
    """Prompt tokens that siblings wrote: no more than the first did not find."""
    missing = usages[0].prompt_tokens - usages[0].cached_tokens
    return min(missing, sum(usage.cache_write_tokens for usage in usages))


def batch_usage(usages: Sequence[Usage]) -> Usage:
    """Usage of several prompts in one body: everything is summed."""
    total = Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        matched_tokens=sum(usage.matched_tokens for usage in usages),
        loaded_tokens=sum(usage.loaded_tokens for usage in usages),
        cache_write_tokens=sum(usage.cache_write_tokens for usage in usages),
        image_tokens=sum(usage.image_tokens for usage in usages),
        spliced_tokens=sum(usage.spliced_tokens for usage in usages),
    )
    for usage in usages:
        add_counts(total, usage)
    return total


def add_counts(total: Usage, usage: Usage) -> None:
    """Add what was generated, and what that took in steps and drafts."""
    total.closed_early |= usage.closed_early
    total.accepted_prediction_tokens += usage.accepted_prediction_tokens
    total.rejected_prediction_tokens += usage.rejected_prediction_tokens
    total.completion_tokens += usage.completion_tokens
    total.proposed_tokens += usage.proposed_tokens
    total.accepted_tokens += usage.accepted_tokens
    total.verify_steps += usage.verify_steps
    total.draft_steps += usage.draft_steps
    total.tree_steps += usage.tree_steps
    total.moves += usage.moves
    total.evicted_tokens += usage.evicted_tokens
    _add(total.accepted_by_source, usage.accepted_by_source)
    _add(total.proposed_by_source, usage.proposed_by_source)
    _add(total.steps_by_accepted, usage.steps_by_accepted)


def _add(total: dict[K, int], counts: dict[K, int]) -> None:
    for key, count in counts.items():
        total[key] = total.get(key, 0) + count


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. ``parameters`` is a JSON schema of an object."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # None: whatever object
    strict: bool = False  # arguments must be valid, even when the model need not call at all
    is_loaded: bool = False  # a message of the conversation defines it, where it was searched for

    @property
    def body(self) -> Mapping[str, Any]:
        """The tool in OpenAI's shape."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Tool calls that are allowed: auto, none, required, or one tool by name."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None  # with "required": this one
    parallel: bool = True  # False: at most one call
    allowed: frozenset[str] | None = None  # those that may be called; None: all

    @property
    def is_single(self) -> bool:
        """Whether the turn ends with its first call, as for a named tool."""
        return not self.parallel or self.name is not None
