"""Results of generation: deltas while a request runs, a `Completion` at the end."""

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
        """Return the message that passes the tool's result to the model."""
        return {"role": "tool", "tool_call_id": self.id, "content": content}


def message_of(
    text: str, reasoning: str, calls: Sequence[ToolCall], token_ids: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return an answer as an OpenAI message, to be appended to its conversation.

    ``token_ids``: the answer's tokens, which are then rendered in place of its text.
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
    """The next part of a tool call. Only the first delta of a call has ``id`` and ``name``."""

    index: int  # index of the call within its choice
    id: str = ""
    name: str = ""
    arguments: str = ""
    is_done: bool = False  # the call is complete


class TextDelta(Struct, kw_only=True):
    """The output of one step, or of several steps if the reader is slow.

    ``text`` may lag behind ``token_ids``: incomplete characters and possible beginnings of a stop
    string are held back. ``index`` is the choice for n > 1. ``sources`` names the draft source of
    each token, "" for a token of the target model. In a conversation, ``reasoning`` and
    ``tool_calls`` are separated from ``text``, as in `Choice`.
    """

    text: str = ""
    token_ids: list[int] = []
    sources: list[str] = []
    index: int = 0
    finish_reason: str | None = None  # see `Choice`; set in the last delta only
    stop_reason: int | str | None = None  # the stop token id or the stop string
    logprobs: list[TokenLogprob] | None = None  # one per token id, if requested
    prompt_logprobs: list[TokenLogprob] = []
    reasoning: str = ""
    tool_calls: list[CallDelta] = []
    message_ids: list[int] | None = None  # see `Choice`; set in the last delta only


class Choice(Struct, kw_only=True):
    """One of the n answers to a prompt.

    In a conversation, ``text`` is the content, ``reasoning`` the text of the model's thinking and
    ``tool_calls`` the calls. ``finish_reason``: "stop", "length", "abort" or "tool_calls".
    ``message_ids``: the tokens of the message without the stop token, with which later turns can
    render it. None if the message was cut at a stop string or after its only allowed call, or if
    the chat template cannot render a message from its ids.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str = ""
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] = []  # one entry per prompt token except the first
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
    """The answers to one prompt. Attributes such as ``text`` return the first choice's value.

    ``prompt_logprobs`` has one entry per prompt token; the first entry is None. ``usage`` counts
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
        """One entry per token, if requested."""
        return self.choices[0].logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """The embedding of one text, normalised to length 1, and its usage."""

    embedding: list[float]
    prompt_token_ids: list[int]
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedDocument:
    """A document, its index in the request, its relevance from 0 to 1, and its usage."""

    index: int
    relevance_score: float
    document: str
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The answer to one question.

    - ``value``: the probability of a predicate; the value of the most likely choice; the expected
      level of a score, as an index from 0.
    - ``confidence``: the probability of the most likely label.
    - ``probabilities``: by choice, by index of a level, or by True and False. Their sum is 1.
    """

    name: str | None
    kind: Literal["predicate", "choice", "score"]
    value: float | str | bool
    confidence: float
    probabilities: Mapping[str | bool | int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """The answers in the order of the questions.

    ``usage`` counts the tokens of the input once, and the tokens of every question.
    """

    answers: Sequence[Decision]
    usage: Usage


def total_usage(usages: Sequence[Usage]) -> Usage:
    """Return the usage of all choices of a prompt. The prompt tokens are counted once."""
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
    """Return the number of prompt tokens written to the cache: at most those not cached before."""
    missing = usages[0].prompt_tokens - usages[0].cached_tokens
    return min(missing, sum(usage.cache_write_tokens for usage in usages))


def batch_usage(usages: Sequence[Usage]) -> Usage:
    """Return the usage of several prompts in one body: the sum of each count."""
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
    """Add the counts of generated tokens, steps and draft tokens of ``usage`` to ``total``."""
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
    """A function that the model may call. ``parameters`` is the JSON schema of an object."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # None: any object
    strict: bool = False  # enforce valid arguments even if the model is free not to call the tool
    is_loaded: bool = False  # defined by a tool-search result inside the conversation
    input_pattern: str | None = None  # pattern of a custom tool's argument, ``input``

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
    """The tool calls that are allowed: auto, none, required, or one tool by name."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None  # the tool to call; only with mode "required"
    parallel: bool = True  # False: at most one call
    allowed: frozenset[str] | None = None  # names of the tools that may be called; None: all

    @property
    def is_single(self) -> bool:
        """Whether the turn ends after its first tool call."""
        return not self.parallel or self.name is not None
