"""The n generations of one prompt: their streams, texts and usage."""

from __future__ import annotations

import asyncio
import logging
from array import array
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, Self, TypeVar

from msgspec.structs import replace

from ...core.engine.inbox import TokenStream
from ...core.errors import DeadlineExceeded, EngineDead, ForetokenError
from ...core.interface.request import Delta, FinishReason, Request, Usage
from ..structured.matcher import GrammarMatcher
from ..text.detokenizer import AnswerText
from ..types.results import Choice, Completion, TextDelta, batch_usage, total_usage
from ..types.sampling_params import SamplingParams
from .adapters import ServedAdapter
from .preprocess import PromptTokens

T = TypeVar("T")
logger = logging.getLogger(__name__)
NO_PROMPT = PromptTokens(())


class EndedChoice(NamedTuple):
    """A choice that has ended, as it was sent. ``number``: its number in the response."""

    number: int
    request: Request
    token_ids: Sequence[int]
    finish_reason: str


class Generation:
    """One request of the engine together with its text."""

    def __init__(
        self,
        request: Request,
        text: AnswerText,
        stream: TokenStream,
        abort: Callable[[str], None],
        *,
        index: int = 0,
    ) -> None:
        self.request = request
        self.index = index
        self.finish_reason: str | None = None  # set when the stream has been read to its end
        self._text = text
        self._stream = stream
        self._abort = abort
        self._served: list[int] = []  # tokens so far, if a prediction is compared with them
        self._has_logprobs = request.sampling.params.logprobs is not None

    @property
    def ended(self) -> bool:
        """Whether the engine has finished, even if output is still unread."""
        return self._stream.ended

    @property
    def usage(self) -> Usage:
        """The usage so far."""
        usage, constraint = self.request.usage, self.request.sampling.constraint
        if (prediction := self.request.prediction) is not None:
            accepted = count_predicted(prediction, self._served)
            usage.accepted_prediction_tokens = accepted
            usage.rejected_prediction_tokens = len(prediction) - accepted
        if isinstance(constraint, GrammarMatcher):
            usage.closed_early |= constraint.closed_early(usage.completion_tokens)
        return usage

    def close(self) -> None:
        """Abort the request unless it has ended. May be called twice."""
        if not self.ended:
            self._abort(self.request.request_id)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        return self._dress(await anext(self._stream))

    async def deltas(self) -> AsyncGenerator[TextDelta]:
        """Yield all deltas of the generation."""
        async for delta in self:
            yield delta

    async def pooled(self) -> array[float]:
        """Return all numbers of a pooling request.

        Raises `DeadlineExceeded`, and `EngineDead` if the request was aborted.
        """
        found = array("f")
        async for delta in self._stream:
            if delta.pooled is not None:
                found += delta.pooled
            if delta.finish_reason is not None:
                self.finish_reason = delta.finish_reason.value
            if delta.finish_reason is FinishReason.STOP:
                return found
            if delta.stop_reason == "deadline":
                raise DeadlineExceeded("the deadline passed before the prompt was computed")
        raise EngineDead("the request was aborted before its prompt was computed")

    def _dress(self, delta: Delta) -> TextDelta:
        if not self._text.watches:
            self._read(delta)
        if self.request.prediction is not None:
            self._served += delta.token_ids
        reason = delta.finish_reason
        if reason is not None:
            self.finish_reason = reason.value
        return TextDelta(
            text=self._text.take(final=reason is not None),
            token_ids=delta.token_ids,
            sources=delta.token_sources,
            index=self.index,
            finish_reason=self.finish_reason,
            stop_reason=delta.stop_reason,
            logprobs=delta.logprobs if self._has_logprobs else None,
            prompt_logprobs=delta.prompt_logprobs,
        )

    def _read(self, delta: Delta) -> None:
        """Convert the tokens of a delta to text. The stop token has no text."""
        token_ids = delta.token_ids
        if delta.finish_reason is FinishReason.STOP:
            token_ids = token_ids[:-1]
        try:
            self._text.add_tokens(token_ids)
        except Exception as error:
            logger.exception(
                "request %s failed while its tokens were read", self.request.request_id
            )
            raise ForetokenError("the answer could not be decoded") from error


class Answer:
    """The n generations of one prompt. Its owner must `close` it in a ``finally``."""

    def __init__(
        self,
        request_id: str,
        params: SamplingParams,
        *,
        adapter: ServedAdapter | None = None,
        in_batch: bool = False,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.adapter = adapter  # None once the answer is forgotten
        self.in_batch = in_batch  # whether the request belongs to a batch
        self.prompt = NO_PROMPT  # set once the prompt is prepared
        self.generations: list[Generation] = []  # empty until the request is submitted
        self.aborted = False  # may be set before the request is submitted

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The token ids of the prompt."""
        return self.prompt.token_ids

    @property
    def request(self) -> Request:
        """The request of the first choice. Available after submission."""
        return self.generations[0].request

    @property
    def ended(self) -> bool:
        """Whether the engine has finished all generations."""
        return bool(self.generations) and all(each.ended for each in self.generations)

    @property
    def finish_reasons(self) -> Sequence[str | None]:
        """The finish reason of each generation; None while it runs."""
        return [each.finish_reason for each in self.generations]

    @property
    def usage(self) -> Usage:
        """The usage so far: the tokens of the prompt, counted once, and of all choices."""
        usages = [generation.usage for generation in self.generations]
        usage = usages[0] if len(usages) == 1 else total_usage(usages)
        usage.spliced_tokens = self.prompt.num_spliced
        usage.normalized = self.prompt.normalized
        return usage

    def close(self) -> None:
        """Abort the generations that still run. May be called twice."""
        for generation in self.generations:
            generation.close()

    def deltas(self) -> AsyncGenerator[TextDelta]:
        """Yield the deltas of all choices as they arrive, each with the index of its choice."""
        if len(self.generations) == 1:
            return self.generations[0].deltas()
        return merge([generation.deltas() for generation in self.generations])

    async def collect(self) -> Completion:
        """Return the whole answer, read to its end. If a choice fails, its error is raised."""
        choices = await each_of([_read(generation) for generation in self.generations])
        return self.completion(choices)

    def completion(self, choices: list[Choice]) -> Completion:
        """Return the completion of all ``choices``, with the prompt and the usage."""
        prompt_logprobs = None
        if self.params.prompt_logprobs is not None:
            prompt_logprobs = [None, *choices[0].prompt_logprobs]
        return Completion(
            request_id=self.request_id,
            prompt_token_ids=list(self.prompt_token_ids),
            choices=choices,
            usage=self.usage,
            prompt_logprobs=prompt_logprobs,
        )


class Answers:
    """The answers to several prompts, with all their choices numbered consecutively."""

    def __init__(self, answers: Sequence[Answer], forget: Callable[[Answer], None]) -> None:
        self.all = answers
        self._forget = forget
        self._n = answers[0].params.n  # number of choices per answer

    @property
    def request(self) -> Request:
        """The request of the first choice."""
        return self.all[0].request

    @property
    def usage(self) -> Usage:
        """The usage of all answers so far."""
        usages = [answer.usage for answer in self.all]
        return usages[0] if len(usages) == 1 else batch_usage(usages)

    @property
    def num_choices(self) -> int:
        """Number of choices of all answers."""
        return len(self.all) * self._n

    def num_tokens(self, index: int) -> int:
        """Return the number of tokens that one choice has so far."""
        prompt_index, index = divmod(index, self._n)
        return self.all[prompt_index].generations[index].usage.completion_tokens

    def deltas(self) -> AsyncGenerator[TextDelta]:
        """Yield the deltas of all choices as they arrive, each with the index of its choice."""
        if len(self.all) == 1:
            return self.all[0].deltas()
        return merge([_shifted(each, self._n * index) for index, each in enumerate(self.all)])

    def ended_choices(self) -> Iterator[EndedChoice]:
        """Yield all choices, once the answers are read to their ends."""
        generations = (each for answer in self.all for each in answer.generations)
        for index, each in enumerate(generations):
            request = each.request
            token_ids = request.tokens[request.prompt_len :]
            yield EndedChoice(index, request, token_ids, each.finish_reason or "")

    async def collect(self) -> list[Completion]:
        """Return all answers, read to their ends, and close them.

        If an answer fails, its error is raised.
        """
        try:
            return await each_of([answer.collect() for answer in self.all])
        finally:
            self.close()

    def close(self) -> None:
        """Abort the answers that still run. May be called twice."""
        for answer in self.all:
            self._forget(answer)


async def _shifted(answer: Answer, first_index: int) -> AsyncGenerator[TextDelta]:
    """Yield an answer's deltas with their choice indices shifted by ``first_index``."""
    async with aclosing(answer.deltas()) as deltas:
        async for delta in deltas:
            yield replace(delta, index=first_index + delta.index)


async def _read(generation: Generation) -> Choice:
    """Read one choice to its end. Raises RuntimeError for a stream without a finish reason."""
    choice = Choice(index=generation.index)
    async for delta in generation:
        choice.add(delta)
    if not choice.finish_reason:
        raise RuntimeError("a stream ended without a terminal event")
    return choice


async def each_of(readings: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently. Return their results, or raise the first failure."""
    if len(readings) == 1:
        return [await readings[0]]
    return await asyncio.gather(*readings)


async def merge(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Yield the items of several streams as they arrive. All streams are closed at the end."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for delta in only:
                yield delta
        return
    waits: dict[asyncio.Task[T], AsyncGenerator[T]] = {}
    try:
        for source in sources:
            waits[_next(source)] = source
        while waits:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in waits if task in done]:
                source = waits.pop(task)
                try:
                    delta = task.result()
                except StopAsyncIteration:
                    continue
                waits[_next(source)] = source
                yield delta
    finally:
        await _cancel(waits)
        for source in sources:
            await source.aclose()


def _next(source: AsyncGenerator[T]) -> asyncio.Task[T]:
    async def read() -> T:
        return await anext(source)

    return asyncio.create_task(read())


async def _cancel(tasks: dict[asyncio.Task[T], AsyncGenerator[T]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


RUN = 3  # number of equal tokens by which the answer is realigned with the prediction


def count_predicted(prediction: Sequence[int], answer: Sequence[int]) -> int:
    """Return how many tokens of the prediction the answer contains, in order.

    After a difference, the answer is realigned at the next `RUN` tokens that occur further on in
    the prediction. O(len(prediction) + len(answer) log len(prediction)).
    """
    places: dict[tuple[int, ...], list[int]] | None = None
    count = at = index = 0
    while index < len(answer) and at < len(prediction):
        if answer[index] == prediction[at]:
            count, at, index = count + 1, at + 1, index + 1
            continue
        places = _places(prediction) if places is None else places
        found = places.get(tuple(answer[index : index + RUN]), ())
        later = bisect_left(found, at)
        if later < len(found):
            at = found[later]
        else:
            index += 1
    return count


def _places(prediction: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
    """Return the positions of each run of `RUN` tokens in the prediction."""
    places: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(prediction) - RUN + 1):
        places.setdefault(tuple(prediction[start : start + RUN]), []).append(start)
    return places
