"""Writer: encodes OpenAI's chat and text completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import time
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ...._version import __version__
from ....core.interface.output import TokenLogprob
from ....core.interface.request import Usage
from ...receipts.receipt import Receipt
from ...receipts.signer import ReceiptSigner
from ...runtime.generation import EndedChoice
from ...serving.answers import AnswerWriter, RunningAnswer, refuse_aborted, speculation_body
from ...serving.caching.breakpoints import Breakpoints, write_details
from ...serving.serving_context import Service
from ...serving.sse import DONE, ReadyReply, Reply, event
from ...text.tokenizer import Tokenizer
from ...types.request_context import random_id
from ...types.results import Choice, TextDelta, batch_usage
from .answers import (
    CompletionDetails,
    MetricsBody,
    PromptDetails,
    SpeculationMetrics,
    TokenInfo,
    TokenInfoTop,
    UsageBody,
)
from .bodies import AnyRequest

FINGERPRINT = f"foretoken-{__version__}"
LOWEST_LOGPROB = -9999.0  # replaces infinite values, which JSON does not support


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Fields that all chunks of an answer share."""

    prefix: str
    model: str
    created: int = field(default_factory=lambda: int(time()))
    key: str = field(default_factory=random_id)

    @property
    def id(self) -> str:
        """The id of the answer, which is also the id of its request in the engine."""
        return f"{self.prefix}-{self.key}"

    def fields(self, kind: str) -> dict[str, Any]:
        """Return the fields of `answers.AnswerHead`."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }


def usage_body(
    usage: Usage, breakpoints: Breakpoints | None = None, cost: float | UnsetType = UNSET
) -> UsageBody:
    """Return ``usage``, with details of the cache, the prediction and speculation.

    ``breakpoints``: the prompt's pins, to report cache writes by lifetime.
    """
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptDetails(
            cached_tokens=usage.cached_tokens,
            loaded_tokens=usage.loaded_tokens,
            cache_write_tokens=usage.cache_write_tokens,
            cache_write_tokens_details=(
                UNSET if breakpoints is None else write_details(usage, breakpoints)
            ),
            image_tokens=usage.image_tokens or UNSET,
            spliced_tokens=usage.spliced_tokens,
            normalized=[*usage.normalized] or UNSET,
        ),
        completion_tokens_details=CompletionDetails(
            accepted_prediction_tokens=usage.accepted_prediction_tokens,
            rejected_prediction_tokens=usage.rejected_prediction_tokens,
        ),
        closed_early=usage.closed_early,
        moves=usage.moves,
        evicted_tokens=usage.evicted_tokens or UNSET,
        speculation=speculation_body(usage),
        cost=cost,
    )


def metrics_body(usage: Usage, depth: object) -> MetricsBody | UnsetType:
    """Return ``metrics`` of an answer; UNSET without drafts.

    ``depth``: the requested draft depth, if it is a number.
    """
    steps = usage.draft_steps
    if not steps:
        return UNSET
    by_accepted = dict(usage.steps_by_accepted)
    # Steps without a draft are not counted.
    by_accepted[0] = by_accepted.get(0, 0) - (usage.verify_steps - steps)
    most = max(by_accepted, default=0)
    if isinstance(depth, int):
        most = max(most, depth)
    return MetricsBody(
        speculative_decoding=SpeculationMetrics(
            mean_acceptance_length=1 + usage.accepted_tokens / steps,
            draft_acceptance_rate=usage.accepted_tokens / usage.proposed_tokens,
            acceptance_histogram=[by_accepted.get(count, 0) for count in range(most + 1)],
            num_spec_steps=steps,
            num_accepted_draft_tokens=usage.accepted_tokens,
            num_draft_tokens=usage.proposed_tokens,
            num_spec_tokens=most,
        )
    )


def reason_body(reason: str) -> str:
    """Return OpenAI's ``finish_reason``: "abort", the reason after a deadline, becomes "length".

    Clients accept only OpenAI's values; ``stop_reason`` still reports "deadline".
    """
    return "length" if reason == "abort" else reason


def token_infos(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> list[TokenInfo]:
    """Return one entry per token, with its bytes."""
    return [
        TokenInfo(
            **_entry(tokenizer, each.token_id, each.logprob),
            top_logprobs=[TokenInfoTop(**_entry(tokenizer, *top)) for top in each.top],
        )
        for each in logprobs
    ]


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": finite(logprob),
        "bytes": list(data),
    }


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token as a unique JSON key: a part of a character is written as escaped bytes."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{value:02x}" for value in data)


def finite(logprob: float) -> float:
    """Return a log-probability as a finite number, since JSON has no infinity."""
    # max() would return NaN unchanged.
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


class Counted(RunningAnswer, Protocol):
    """An answer that reports its number of choices."""

    @property
    def num_choices(self) -> int:
        """Number of choices."""

    def ended_choices(self) -> Iterator[EndedChoice]:
        """Yield all choices, once the answer is read to its end."""


A = TypeVar("A", bound=Counted)
C = TypeVar("C", bound=Struct)
D = TypeVar("D", bound=Struct)


class Writer(AnswerWriter[A], Generic[A, C, D]):
    """Encodes the answer to one request, as one body or in chunks.

    Type parameters: the answer ``A``, a choice ``C`` of a body, a choice ``D`` of a chunk.
    """

    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    whole_type: ClassVar[type[Struct]]
    chunk_type: ClassVar[type[Struct]]

    def __init__(self, service: Service, head: Head, body: AnyRequest) -> None:
        self._service = service
        self.head = head
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)
        # whether every chunk reports the usage
        self._reports_usage = bool(options and options.continuous_usage_stats)
        self._usage_so_far: Callable[[], Usage] = Usage
        self._num_sent = 0  # number of tokens sent so far
        given = body.speculation
        self._depth = service.llm.built.settings.get("speculation") if given is None else given
        self._explains = bool(body.explain_cache)
        self.prompt_ids: Sequence[str] = [head.id]  # request ids of the prompts
        # Pins of the prompt, if the body has options of the prompt cache.
        self.breakpoints: Breakpoints | None = None

    def refuse_aborted(self, choice: Choice) -> None:
        """Raise `ApiError` if the answer was aborted by a shutdown or before its first token."""
        refuse_aborted(self._service, choice.finish_reason, len(choice.token_ids))

    def reason(self, ended: Choice | TextDelta) -> str:
        """Return the ``finish_reason`` of an ended choice."""
        return reason_body(ended.finish_reason or "")

    def nothing(self, index: int) -> C:
        """Return the empty choice of a prompt that was only cached."""
        raise NotImplementedError

    def nothing_chunks(self, index: int) -> list[bytes]:
        """Return the events of an empty choice, for a prompt that was only cached."""
        raise NotImplementedError

    def answer(self, choices: list[C], usage: Usage, **more: object) -> Struct:
        """Return all choices in one body."""
        fields = self.head.fields(self.whole_kind)
        return self.whole_type(**fields, choices=choices, usage=self.usage(usage), **more)

    def metrics(self, usage: Usage, num_answers: int) -> MetricsBody | UnsetType:
        """Return ``metrics``; UNSET unless there is a single answer."""
        return metrics_body(usage, self._depth) if num_answers == 1 else UNSET

    def receipts(self, answer: A) -> list[Receipt] | UnsetType:
        """Return the receipts of an answer that was read to its end; UNSET without receipts."""
        if self._service.settings.receipts is None:
            return UNSET
        signer = ReceiptSigner.of(self._service)
        return UNSET if signer is None else signer.receipts(self.head.id, answer.ended_choices())

    def set_usage(self, usage: Callable[[], Usage]) -> None:
        """Set the function that returns the usage so far, which chunks may report."""
        self._usage_so_far = usage

    def count_sent(self, delta: TextDelta) -> None:
        """Add the tokens of a delta to the number of tokens sent so far."""
        self._num_sent += len(delta.token_ids)

    def chunk(self, choice: D) -> bytes:
        """Return a chunk with one choice."""
        return self.event([choice])

    def event(self, choices: list[D], **more: object) -> bytes:
        """Return a chunk with these choices. ``more``: other fields of the chunk."""
        usage = None
        if self._reports_usage:  # The engine may have computed more tokens than were sent.
            so_far = replace(self._usage_so_far(), completion_tokens=self._num_sent)
            usage = usage_body(so_far, cost=self._service.cost(so_far))
        return self._event(choices, usage, **more)

    def end(self, answer: A) -> Iterator[bytes]:
        """Yield the events after the last choice. The last one has the receipts, if there are any.

        Without a usage at the end, receipts have an event of their own.
        """
        return self._end(answer.usage, answer.num_choices, self.receipts(answer))

    def _end(
        self,
        usage: Usage,
        num_answers: int = 0,
        receipts: list[Receipt] | UnsetType = UNSET,
    ) -> Iterator[bytes]:
        if self._include_usage:
            metrics = self.metrics(usage, num_answers)
            yield self._event([], self.usage(usage), metrics=metrics, receipts=receipts)
        elif receipts is not UNSET:
            yield self._event([], None, receipts=receipts)
        yield DONE

    def warmed(self, usages: Sequence[Usage]) -> Reply:
        """Return the answer to prompts that were only cached, with an empty choice for each."""
        usage, indices = batch_usage(usages), range(len(usages))
        chunks = [chunk for index in indices for chunk in self.nothing_chunks(index)]
        whole = self.answer([self.nothing(index) for index in indices], usage)
        return ReadyReply(whole, [*chunks, *self._end(usage)])

    def usage(self, usage: Usage) -> UsageBody:
        """Return ``usage``, with an explanation of cache misses for each prompt if requested."""
        spent = usage_body(usage, self.breakpoints, self._service.cost(usage))
        if not self._explains:
            return spent
        found = [self._service.llm.explain(each) for each in self.prompt_ids]
        reasons = [None if each is None else each.body() for each in found]
        if len(reasons) > 1:
            spent.cache_explanations = reasons
        elif reasons[0] is not None:
            spent.cache_explanation = reasons[0]
        return spent

    def _event(self, choices: list[D], usage: UsageBody | None, **more: object) -> bytes:
        chunk = self._chunk
        chunk.choices = choices
        if self._include_usage or self._reports_usage:
            chunk.usage = usage
        return event(msgspec.structs.replace(chunk, **more) if more else chunk)

    @cached_property
    def _chunk(self) -> Any:  # noqa: ANN401 - a `chunk_type`
        """The reusable chunk of this answer. Only its choices and usage change."""
        return self.chunk_type(**self.head.fields(self.chunk_kind), choices=[])
