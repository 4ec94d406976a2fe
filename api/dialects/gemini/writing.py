"""Encode answers in the format of Gemini's API, whole and as server-sent events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import UNSET

from ....core.interface.output import TokenLogprob
from ....core.interface.request import Usage
from ...runtime.chat import ChatAnswer
from ...runtime.segments import Segments
from ...serving.answers import AnswerReply, AnswerWriter, refuse_aborted, speculation_body
from ...serving.serving_context import Service
from ...serving.sse import event
from ...serving.whole_calls import WholeCall, closed_calls, whole_calls
from ...types.results import Choice, TextDelta
from .answers import (
    AnsweredContent,
    AnsweredPart,
    CallPart,
    Candidate,
    ChosenToken,
    GenerateAnswer,
    LogprobsResult,
    ModalityTokens,
    TopTokens,
    UsageMetadata,
)

REASONS = {"length": "MAX_TOKENS", "abort": "MAX_TOKENS"}  # all other reasons become STOP
LOWEST = -1e9  # replaces infinite log-probabilities, which JSON does not support


class GeminiReply(AnswerReply[ChatAnswer]):
    """The reply to a request of Gemini's API."""

    _writer: CandidateWriter

    async def whole(self) -> object:
        """Return all candidates in one body."""
        return self._writer.body(self._answer, await self._answer.collect())


class CandidateWriter(AnswerWriter[ChatAnswer]):
    """Encodes one answer. ``shows_thoughts``: whether to include the reasoning."""

    def __init__(self, service: Service, answer_id: str, *, shows_thoughts: bool) -> None:
        self._service, self._id = service, answer_id
        self._shows_thoughts = shows_thoughts
        self._segments: defaultdict[int, Segments] = defaultdict(Segments)  # segments by choice
        self._usage_so_far: Callable[[], Usage] = Usage

    def body(self, answer: ChatAnswer, choices: Sequence[Choice]) -> GenerateAnswer:
        """Return all candidates in one body."""
        candidates = [self._candidate(each) for each in choices]
        return self._body(candidates, self._usage(answer.usage))

    def begin(self, answer: ChatAnswer) -> Iterable[bytes]:
        """Return no events. The last event will report the answer's usage."""
        self._usage_so_far = lambda: answer.usage
        return ()

    def write(self, delta: TextDelta) -> Iterator[bytes]:
        """Yield an event for each step that adds something, and for the end of a candidate."""
        candidate = self._step(delta)
        is_last = delta.finish_reason is not None
        if candidate.content.parts or is_last:
            usage = self._usage(self._usage_so_far()) if is_last else None
            yield event(self._body([candidate], usage))

    def _body(self, candidates: list[Candidate], usage: UsageMetadata | None) -> GenerateAnswer:
        return GenerateAnswer(
            candidates=candidates,
            usage_metadata=UNSET if usage is None else usage,
            model_version=self._service.model,
            response_id=self._id,
        )

    def _candidate(self, choice: Choice) -> Candidate:
        refuse_aborted(self._service, choice.finish_reason, len(choice.token_ids))
        calls = whole_calls(choice.tool_calls)
        made = self._made(choice.index, choice.reasoning, choice.text, calls)
        made.finish_reason = REASONS.get(choice.finish_reason, "STOP")
        if choice.logprobs is not None:
            made.logprobs_result = self._logprobs(choice.logprobs)
        return made

    def _step(self, delta: TextDelta) -> Candidate:
        calls = closed_calls(self._segments[delta.index].take(delta))
        made = self._made(delta.index, delta.reasoning, delta.text, calls)
        if delta.finish_reason is not None:
            made.finish_reason = REASONS.get(delta.finish_reason, "STOP")
        if delta.logprobs:
            made.logprobs_result = self._logprobs(delta.logprobs)
        return made

    def _made(self, index: int, thoughts: str, text: str, calls: Iterable[WholeCall]) -> Candidate:
        parts = []
        if thoughts and self._shows_thoughts:
            parts.append(AnsweredPart(text=thoughts, thought=True))
        if text:
            parts.append(AnsweredPart(text=text))
        parts += [
            AnsweredPart(function_call=CallPart(id=each.id, name=each.name, args=each.arguments))
            for each in calls
        ]
        return Candidate(content=AnsweredContent(parts=parts), index=index)

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> LogprobsResult:
        return LogprobsResult(
            chosen_candidates=[self._token(each.token_id, each.logprob) for each in logprobs],
            top_candidates=[
                TopTokens(candidates=[self._token(*top) for top in each.top]) for each in logprobs
            ],
        )

    def _token(self, token_id: int, logprob: float) -> ChosenToken:
        text = self._service.llm.tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        number = max(logprob, LOWEST)
        return ChosenToken(token=text, token_id=token_id, log_probability=number)

    def _usage(self, usage: Usage) -> UsageMetadata:
        tokens = {"TEXT": usage.prompt_tokens - usage.image_tokens, "IMAGE": usage.image_tokens}
        return UsageMetadata(
            prompt_tokens_details=[
                ModalityTokens(modality=name, token_count=count)
                for name, count in tokens.items()
                if count
            ],
            prompt_token_count=usage.prompt_tokens,
            candidates_token_count=usage.completion_tokens,
            total_token_count=usage.prompt_tokens + usage.completion_tokens,
            cached_content_token_count=usage.cached_tokens,
            speculation=speculation_body(usage),
            cost=self._service.cost(usage),
        )
