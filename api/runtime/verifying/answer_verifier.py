"""AnswerVerifier: computes a recorded answer again, with the recorded answer as the draft.

The verifier of speculative decoding accepts exactly the tokens that the model chooses with the
request's seed and parameters, so the check needs no rule of its own: it ends at the first token
that is not the recorded one. A step compares up to 65 tokens; up to 25 if a drafter with weights is
loaded, because the controller then decides how deep drafts are. The prefix cache is read but not
written.
"""

from __future__ import annotations

import asyncio
import dataclasses
from array import array
from collections.abc import Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING

from ....core.errors import DeadlineExceeded, EngineDead
from ....core.interface.request import DEFAULT_CACHE, CacheOptions
from ....core.interface.sampling import Pooling, SamplingMetadata
from ...text.detokenizer import AnswerText
from ...types.results import TextDelta
from ...types.sampling_params import SamplingParams
from ...types.verdict import ComparedToken, Difference, Verdict
from ..chat import ChatClient, ChoiceReader
from ..conversation.chat_input import ChatInput
from ..engine_client import EngineClient
from ..generation import Answer
from ..preprocess import Prompt, PromptTokens
from .recorded import Comparison, RecordedAnswer

if TYPE_CHECKING:
    from ....core.sampling.explanation import Explanation

MOST_TEXT = 256  # characters that are tokenized to find a recorded text's next token


class AnswerVerifier:
    """Verifies recorded answers with the model of ``llm``."""

    def __init__(self, llm: EngineClient, chat: ChatClient) -> None:
        self._llm, self._chat = llm, chat

    async def verify_text(
        self,
        prompt: Prompt,
        params: SamplingParams,
        recorded: RecordedAnswer,
        *,
        cache: CacheOptions = DEFAULT_CACHE,
        request_id: str | None = None,
    ) -> Verdict:
        """Return whether the model continues a prompt with the recorded answer.

        Raises `InvalidRequest`, `QueueFull`, `DeadlineExceeded` and `EngineDead`.
        """
        recorded.check(self._llm)
        own = recorded.replayed(self._llm, params)
        with self._llm.call():
            answer = await self._llm.open(
                prompt, own, request_id=request_id, cache=read_only(cache)
            )
            try:
                return await self._compared(answer, recorded, VisibleText(self._llm, answer))
            finally:
                self._llm.forget(answer)

    async def verify_chat(
        self, chat: ChatInput, recorded: RecordedAnswer, *, request_id: str | None = None
    ) -> Verdict:
        """Return whether the model's next message of a conversation is the recorded answer.

        Raises the errors of `verify_text`.
        """
        recorded.check(self._llm)
        params = recorded.replayed(self._llm, chat.params)
        own = dataclasses.replace(chat, params=params, cache=read_only(chat.cache), cache_key=None)
        with self._llm.call():
            running = await self._chat.open(own, request_id=request_id)
            try:
                text = VisibleText(self._llm, running.answer, running.reader())
                return await self._compared(running.answer, recorded, text)
            finally:
                running.close()

    async def _compared(
        self, answer: Answer, recorded: RecordedAnswer, text: VisibleText
    ) -> Verdict:
        prompt_len, context = len(answer.prompt_token_ids), self._llm.built.max_model_len
        recorded.check_room(prompt_len, context)
        comparison = await self._replay(answer, recorded, text)
        answer.close()  # the tokens after the comparison are not needed
        difference = await self._difference(answer, recorded, comparison, text.finish_reason)
        return Verdict(
            verified=difference is None,
            exact=self._llm.built.exact,
            checked_tokens=comparison.num_checked,
            different_tokens=int(difference is not None),
            finish_reason=text.finish_reason,
            first_difference=difference,
            token_ids=comparison.own[: comparison.num_checked],
            usage=dataclasses.replace(answer.usage, completion_tokens=0),
        )

    async def _replay(
        self, answer: Answer, recorded: RecordedAnswer, text: VisibleText
    ) -> Comparison:
        """Compare the model's answer with the recorded one, up to the first difference."""
        comparison = Comparison(recorded)
        async with aclosing(answer.generations[0].deltas()) as deltas:
            async for delta in deltas:
                _refuse_aborted(delta)
                last = len(delta.token_ids) - 1
                for at, token_id in enumerate(delta.token_ids):
                    end = delta if delta.finish_reason is not None and at == last else None
                    piece = text.add(token_id, end)
                    if not comparison.take(token_id, piece, is_stop=_is_stop(end)):
                        return comparison
                    if text.finish_reason is not None and recorded.token_ids is None:
                        return comparison
        return comparison

    async def _difference(
        self,
        answer: Answer,
        recorded: RecordedAnswer,
        comparison: Comparison,
        finish_reason: str | None,
    ) -> Difference | None:
        position, own = len(comparison.same), None
        given: int | None = None
        if comparison.is_different or (finish_reason is None and not recorded.may_continue):
            own = comparison.own[-1]
        if comparison.is_different or comparison.is_shorter:
            given = await self._recorded_token(recorded, comparison)
        elif recorded.may_continue or finish_reason == recorded.finish_reason:
            return None
        if own is None and given is None:
            return Difference(position=position, given=None, own=None)
        return await self._explained(answer, comparison.same, given, own)

    async def _recorded_token(self, recorded: RecordedAnswer, comparison: Comparison) -> int | None:
        """Return the recorded token at the first difference.

        If only a text was recorded, the text after the equal characters is tokenized, and its
        first token is returned.
        """
        if recorded.token_ids is not None:
            return recorded.token_ids[len(comparison.same)]
        known = recorded.text or ""
        rest = known[comparison.num_same_chars :][:MOST_TEXT]
        ids = await self._llm.tokenizer.encode_prediction(rest)
        return ids[0] if ids else None

    async def _explained(
        self, answer: Answer, same: list[int], given: int | None, own: int | None
    ) -> Difference:
        tokens = array("q", [*answer.prompt.cached_ids, *same])
        logits, sampling = await self._logits(answer, same), _forked(answer.request.sampling)
        found = await asyncio.to_thread(_explain, logits, tokens, sampling, given, own)
        # The logits were computed again and may differ, for example without packed KV. They explain
        # the choice only if they lead to it.
        is_sure = own is None or found.chosen == own
        return Difference(
            position=len(same),
            given=self._token(given, found.logprobs),
            own=self._token(own, found.logprobs),
            margin=found.margin if is_sure else None,
            excluded_by=found.excluded_by if is_sure else None,
        )

    async def _logits(self, answer: Answer, same: list[int]) -> array[float]:
        """Return the raw logits [vocab] after the prompt, followed by the tokens ``same``."""
        prompt, params = answer.prompt, answer.params
        pooled = await self._llm.open(
            PromptTokens([*prompt.token_ids, *same], images=prompt.images),
            SamplingParams(
                cache_salt=params.cache_salt,
                lora=params.lora,
                deadline=params.deadline,
                priority=params.priority,
            ),
            cache=read_only(answer.request.cache),
            pooling=Pooling(tuple(range(self._llm.built.vocab_size))),
        )
        try:
            return await pooled.generations[0].pooled()
        finally:
            self._llm.forget(pooled)

    def _token(self, token_id: int | None, logprobs: Mapping[int, float]) -> ComparedToken | None:
        if token_id is None:
            return None
        text = self._llm.tokenizer.decode([token_id], skip_special_tokens=False)
        return ComparedToken(id=token_id, text=text, logprob=logprobs[token_id])


class VisibleText:
    """The visible text of an answer, token by token.

    It is the content of the message if a ``reader`` parses the answer, otherwise the whole text.
    """

    def __init__(
        self, llm: EngineClient, answer: Answer, reader: ChoiceReader | None = None
    ) -> None:
        request, params = answer.request, answer.params
        self.finish_reason: str | None = None  # set at the end of the answer
        self._reader = reader
        self._text = AnswerText(
            llm.tokenizer.detokenizer(answer.prompt_token_ids, request.shown_ids),
            stops=tuple(params.stop),
            min_tokens=params.min_tokens,
        )

    def add(self, token_id: int, end: TextDelta | None) -> str:
        """Add a token and return the text that becomes visible with it.

        ``end``: the last delta of the answer, if the token is the last one.
        """
        if not _is_stop(end):
            self._text.add_token(token_id)
        piece = self._text.take(final=end is not None)
        reason = None if end is None else end.finish_reason
        if self._reader is None:
            self.finish_reason = reason
            return piece
        stop_reason = None if end is None else end.stop_reason
        delta = TextDelta(
            text=piece, token_ids=[token_id], finish_reason=reason, stop_reason=stop_reason
        )
        parts = self._reader.read(delta)
        self.finish_reason = self._reader.choice.finish_reason or None
        return "".join(part.text for part in parts)


def read_only(cache: CacheOptions) -> CacheOptions:
    """Return options that read from the cache if ``cache`` does, and write nothing to it."""
    return CacheOptions(read=cache.read, write=False)


def _explain(
    logits: array[float],
    tokens: array[int],
    sampling: SamplingMetadata,
    given: int | None,
    own: int | None,
) -> Explanation:
    from ....core.sampling.explanation import explain  # loads torch

    return explain(logits, tokens, sampling, given, own)


def _forked(sampling: SamplingMetadata) -> SamplingMetadata:
    """Return a copy with a constraint of its own, because the model thread uses the request's."""
    constraint = sampling.constraint
    fork = None if constraint is None else constraint.fork()
    return dataclasses.replace(sampling, constraint=fork)


def _is_stop(end: TextDelta | None) -> bool:
    """Whether the last token of an answer is a stop token, which has no text."""
    return end is not None and end.finish_reason == "stop" and not isinstance(end.stop_reason, str)


def _refuse_aborted(delta: TextDelta) -> None:
    if delta.finish_reason != "abort":
        return
    if delta.stop_reason == "deadline":
        raise DeadlineExceeded("the deadline passed before the answer was verified")
    raise EngineDead("the request was aborted before the answer was verified")
