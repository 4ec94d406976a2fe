"""What generation gives back: deltas while it runs, a Completion at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..core.request import Usage
from ..core.step import TokenLogprob

K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """What one step, or several that a slow reader missed, adds to an answer.

    ``text`` may lag behind ``token_ids``: incomplete characters and possible beginnings of a stop
    string are held back. ``index`` tells the choices of n > 1 apart. ``sources`` says who drafted
    each token; "" is the target model itself.
    """

    text: str
    token_ids: list[int]
    sources: list[str] = field(default_factory=list)
    index: int = 0
    finish_reason: str | None = None  # "stop", "length" or "abort", in the last delta of a choice
    stop_reason: int | str | None = None  # the stop token id or the stop string
    logprobs: list[TokenLogprob] | None = None  # one per token id, when asked for
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the n answers to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None


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
        """ "stop", "length" or "abort"."""
        return self.choices[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The stop token id or stop string that ended it, if one did."""
        return self.choices[0].stop_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """One entry per token, when asked for."""
        return self.choices[0].logprobs


def total_usage(usages: Sequence[Usage]) -> Usage:
    """Usage of sibling choices: the prompt of the first, the sum of what was generated."""
    first = usages[0]
    total = Usage(
        prompt_tokens=first.prompt_tokens,
        cached_tokens=first.cached_tokens,
        queue_time=first.queue_time,
        time_to_first_token=min(usage.time_to_first_token for usage in usages),
        total_time=max(usage.total_time for usage in usages),
    )
    for usage in usages:
        _add_counts(total, usage)
    return total


def batch_usage(usages: Sequence[Usage]) -> Usage:
    """Usage of several prompts in one body: everything is summed."""
    total = Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
    )
    for usage in usages:
        _add_counts(total, usage)
    return total


def _add_counts(total: Usage, usage: Usage) -> None:
    total.completion_tokens += usage.completion_tokens
    total.proposed_tokens += usage.proposed_tokens
    total.accepted_tokens += usage.accepted_tokens
    total.verify_steps += usage.verify_steps
    _add(total.accepted_by_source, usage.accepted_by_source)
    _add(total.proposed_by_source, usage.proposed_by_source)
    _add(total.steps_by_accepted, usage.steps_by_accepted)


def _add(total: dict[K, int], counts: dict[K, int]) -> None:
    for key, count in counts.items():
        total[key] = total.get(key, 0) + count
