"""AnswerVerifier: checks whether the model gives a recorded answer with the request's seed.

Token ids are compared in a prefill: the recorded answer follows the prompt, and each row of its
chunks yields the model's own token (`Pooling.compare_from`). So the comparison takes as many steps
as a prompt of that length, it continues after a difference, and other requests run beside it.

Several token sequences may have the same text, and an answer may have tokens that are not in its
text, such as its reasoning. If the usual token ids of the text are not the model's answer, the
model generates, with the text as a draft, and its visible text is compared. The prefix cache is
read but not written.
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Sequence
from contextlib import aclosing, suppress
from functools import partial

from ....core.errors import DeadlineExceeded, EngineDead, InvalidRequest
from ....core.interface.extras.token_comparison import TokenComparison, comparisons_of
from ....core.interface.request import DEFAULT_CACHE, CacheOptions, Usage
from ....core.options.checks import require
from ...types.results import TextDelta, batch_usage
from ...types.sampling_params import SamplingParams
from ...types.verdict import ComparedToken, Difference, Verdict
from ..chat import ChatClient
from ..conversation.chat_input import ChatInput
from ..engine_client import EngineClient
from ..preprocess import Prompt
from .agreement import agreement_of
from .asked import Asked, AskedChat, AskedText, Opened
from .compared_tokens import ComparedTokens
from .recorded import RecordedAnswer, TextComparison
from .visible_text import is_stop

FOLLOW_BYTES = 2**10  # bytes that are read in the time in which a compared token is read
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
        return await self._verify(AskedText(self._llm, prompt, cache, request_id), params, recorded)

    async def verify_chat(
        self, chat: ChatInput, recorded: RecordedAnswer, *, request_id: str | None = None
    ) -> Verdict:
        """Return whether the model's next message of a conversation is the recorded answer.

        Raises the errors of `verify_text`.
        """
        asked = AskedChat(self._llm, self._chat, chat, request_id)
        return await self._verify(asked, chat.params, recorded)

    async def _verify(
        self, asked: Asked, params: SamplingParams, recorded: RecordedAnswer
    ) -> Verdict:
        recorded.check(self._llm)
        params = recorded.replayed(self._llm, params)
        with self._llm.call():
            if (token_ids := recorded.token_ids) is not None:
                return await self._compare(asked, params, recorded, token_ids)
            if ids := await self._usual_ids(recorded):
                with suppress(InvalidRequest):  # these ids may not fit; generating checks the rest
                    found = await self._compare(asked, params, recorded, ids)
                    if found.verified:
                        return found
            return await self._generate(asked, params, recorded)

    # -- token ids ------------------------------------------------------------------------------

    async def _compare(
        self,
        asked: Asked,
        params: SamplingParams,
        recorded: RecordedAnswer,
        token_ids: Sequence[int],
    ) -> Verdict:
        """Compare all recorded token ids with the model's own tokens."""
        context = self._llm.built.max_model_len
        if recorded.token_ids is not None:
            recorded.check_room(len((await asked.prompt()).token_ids), context)
        opened = await asked.compare(params, token_ids, recorded.checked_from)
        try:
            numbers = await opened.answer.generations[0].pooled()
        finally:
            opened.close()
        read = partial(_read, opened, recorded, token_ids, numbers, context)
        compared = await self._llm.tokenizer.apart(FOLLOW_BYTES * len(token_ids), read)
        difference = await self._first_difference(asked, params, opened, compared)
        text = recorded.text
        is_same = difference is None and (text is None or compared.text == text)
        return Verdict(
            verified=is_same,
            exact=self._llm.built.exact,
            checked_tokens=len(compared.own),
            checked_from=recorded.checked_from,
            different_tokens=max(len(compared.differences), int(difference is not None)),
            finish_reason=opened.text.finish_reason,
            first_difference=difference,
            agreement=agreement_of(
                [each.margin for each in compared.differences], len(compared.own)
            ),
            token_ids=compared.own,
            usage=_usage(asked.opened),
        )

    async def _first_difference(
        self, asked: Asked, params: SamplingParams, opened: Opened, compared: ComparedTokens
    ) -> Difference | None:
        if compared.differences:
            first = compared.differences[0]
            given = compared.token_ids[first.position]
            return self._explained(opened, first, given=given, own=first.own)
        position = compared.num_same
        if compared.given_after_end is not None:
            return await self._looked_up(
                asked, params, compared.token_ids[:position], given=compared.given_after_end
            )
        if compared.own_after_end is not None:
            return self._explained(
                opened, compared.own_after_end, given=None, own=compared.own_after_end.own
            )
        if compared.ends_otherwise:
            return Difference(position=position, given=None, own=None)
        return None

    async def _looked_up(
        self,
        asked: Asked,
        params: SamplingParams,
        same: Sequence[int],
        *,
        given: int | None = None,
        own: int | None = None,
    ) -> Difference:
        """Return the difference after the tokens ``same``, from logits that are computed now."""
        ids = [*same, *(() if given is None else (given,))]
        num_tokens, context = len((await asked.prompt()).token_ids), self._llm.built.max_model_len
        fits = num_tokens + len(ids) <= context
        require(
            fits, "answer.text", f"does not fit: it goes on after the context of {context} tokens"
        )
        opened = await asked.compare(params, ids, len(same))
        try:
            numbers = await opened.answer.generations[0].pooled()
        finally:
            opened.close()
        first = next(comparisons_of(numbers))
        # The logits were computed again and may differ, for example without packed KV. They explain
        # the choice only if they lead to it.
        is_sure = own is None or first.own == own
        return self._explained(opened, first, given=given, own=own, is_sure=is_sure)

    def _explained(
        self,
        opened: Opened,
        found: TokenComparison,
        *,
        given: int | None,
        own: int | None,
        is_sure: bool = True,
    ) -> Difference:
        excluder = found.excluder if is_sure else None
        if excluder == "constraint":
            excluder = opened.answer.request.sampling.constraint_param
        has_margin = is_sure and given is not None and own is not None
        return Difference(
            position=found.position,
            given=self._token(given, found.given_logprob),
            own=self._token(own, found.own_logprob),
            margin=found.margin if has_margin and math.isfinite(found.margin) else None,
            excluded_by=excluder,
        )

    def _token(self, token_id: int | None, logprob: float) -> ComparedToken | None:
        if token_id is None:
            return None
        text = self._llm.tokenizer.decode([token_id], skip_special_tokens=False)
        return ComparedToken(id=token_id, text=text, logprob=logprob)

    # -- texts ----------------------------------------------------------------------------------

    async def _usual_ids(self, recorded: RecordedAnswer) -> Sequence[int]:
        """Return the tokenizer's token ids of the recorded text, without a stop token."""
        return await self._llm.tokenizer.encode_prediction(recorded.text or "")

    async def _generate(
        self, asked: Asked, params: SamplingParams, recorded: RecordedAnswer
    ) -> Verdict:
        """Generate an answer and compare its visible text, up to the first difference."""
        params = recorded.as_draft(self._llm, params)
        opened = await asked.generate(params)
        try:
            comparison = await self._replay(opened, recorded)
        finally:
            opened.close()  # the tokens after the comparison are not needed
        finish_reason = None if comparison.is_longer else opened.text.finish_reason
        difference = await self._text_difference(asked, params, recorded, comparison, finish_reason)
        margins = [math.inf]
        if difference is not None and difference.margin is not None:
            margins = [difference.margin]
        return Verdict(
            verified=difference is None,
            exact=self._llm.built.exact,
            checked_tokens=comparison.num_checked,
            different_tokens=int(difference is not None),
            finish_reason=finish_reason,
            first_difference=difference,
            agreement=agreement_of(
                margins if comparison.is_different else [], comparison.num_checked
            ),
            token_ids=comparison.own[: comparison.num_checked],
            usage=_usage(asked.opened),
        )

    async def _replay(self, opened: Opened, recorded: RecordedAnswer) -> TextComparison:
        """Compare the model's visible text with the recorded one, up to the first difference."""
        comparison, text = TextComparison(recorded.text or ""), opened.text
        async with aclosing(opened.answer.generations[0].deltas()) as deltas:
            async for delta in deltas:
                _refuse_aborted(delta)
                last = len(delta.token_ids) - 1
                for at, token_id in enumerate(delta.token_ids):
                    end = delta if delta.finish_reason is not None and at == last else None
                    piece = text.add(token_id, end)
                    goes_on = comparison.take(token_id, piece, is_stop=is_stop(end))
                    if not goes_on or text.finish_reason is not None:
                        return comparison
        return comparison

    async def _text_difference(
        self,
        asked: Asked,
        params: SamplingParams,
        recorded: RecordedAnswer,
        comparison: TextComparison,
        finish_reason: str | None,
    ) -> Difference | None:
        own: int | None = None
        given: int | None = None
        if comparison.is_different or (finish_reason is None and not recorded.may_continue):
            own = comparison.own[-1]
        if comparison.is_different or comparison.is_shorter:
            given = await self._recorded_token(recorded, comparison)
        elif recorded.may_continue or finish_reason == recorded.finish_reason:
            return None
        if own is None and given is None:
            return Difference(position=len(comparison.same), given=None, own=None)
        return await self._looked_up(asked, params, comparison.same, given=given, own=own)

    async def _recorded_token(
        self, recorded: RecordedAnswer, comparison: TextComparison
    ) -> int | None:
        """Return the first token of the recorded text after the equal characters."""
        rest = (recorded.text or "")[comparison.num_same_chars :][:MOST_TEXT]
        ids = await self._llm.tokenizer.encode_prediction(rest)
        return ids[0] if ids else None


def _read(
    opened: Opened,
    recorded: RecordedAnswer,
    token_ids: Sequence[int],
    numbers: array[float],
    context: int,
) -> ComparedTokens:
    comparisons = [*comparisons_of(numbers)]
    return ComparedTokens(opened, recorded, token_ids, comparisons, context)


def _usage(opened: Sequence[Opened]) -> Usage:
    """Return the usage of requests that ran one after the other.

    Tokens that were generated to be compared count as prompt tokens, since they were given.
    """
    usages = [each.answer.usage for each in opened]
    total = batch_usage(usages)
    return dataclasses.replace(
        total,
        prompt_tokens=total.prompt_tokens + total.completion_tokens,
        completion_tokens=0,
        normalized=usages[0].normalized,
        cache_loss=usages[0].cache_loss,
        queue_time=sum(each.queue_time for each in usages),
        time_to_first_token=usages[0].time_to_first_token,
        total_time=sum(each.total_time for each in usages),
    )


def _refuse_aborted(delta: TextDelta) -> None:
    if delta.finish_reason != "abort":
        return
    if delta.stop_reason == "deadline":
        raise DeadlineExceeded("the deadline passed before the answer was verified")
    raise EngineDead("the request was aborted before the answer was verified")
