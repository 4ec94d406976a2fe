"""Routes that check whether the model gives a recorded answer again with the request's seed."""

from __future__ import annotations

from functools import partial
from typing import Generic, TypeVar

from msgspec import UNSET

from ....core.errors import InvalidRequest
from ....core.options.checks import check_integer
from ...runtime.verifying.answer_verifier import AnswerVerifier
from ...runtime.verifying.recorded import RecordedAnswer
from ...serving.dialect import Dialect
from ...serving.sampling import cache_options
from ...serving.serving_context import Service
from ...serving.sse import ReadyReply, Reply
from ...types.request_context import random_id
from ...types.verdict import Verdict
from ..openai.reading import completion_params, read_chat, read_prompts, refuse
from ..openai.routes import text_ids
from .bodies import (
    ChatVerifyRequest,
    CompletionVerifyRequest,
    VerdictBody,
    VerifyPromptDetails,
    VerifyUsage,
)

B = TypeVar("B", ChatVerifyRequest, CompletionVerifyRequest)


class _Verify(Dialect[B], Generic[B]):
    """A route whose body is a request with its recorded answer."""

    answer = VerdictBody
    in_batches = True

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._verifier = AnswerVerifier(service.llm, service.chat)

    async def open(self, body: B) -> Reply:
        """Compare the answer with the model's. ``stream`` of the body is ignored."""
        request_id = f"verify-{random_id()}"
        verdict = await self._verdict(body, request_id)
        return ReadyReply(self._body(request_id, verdict, returns_ids=bool(body.return_token_ids)))

    async def _verdict(self, body: B, request_id: str) -> Verdict:
        raise NotImplementedError

    def rename(self, error: InvalidRequest, body: B) -> None:
        """Rename json_schema in an error to response_format if the body has this field."""
        if error.param == "json_schema" and body.response_format is not None:
            error.param = "response_format"

    def _body(self, request_id: str, verdict: Verdict, *, returns_ids: bool) -> VerdictBody:
        usage = verdict.usage
        return VerdictBody(
            id=request_id,
            model=self.service.model,
            verified=verdict.verified,
            exact=verdict.exact,
            checked_tokens=verdict.checked_tokens,
            checked_from=verdict.checked_from,
            different_tokens=verdict.different_tokens,
            finish_reason=verdict.finish_reason,
            first_difference=verdict.first_difference,
            agreement=verdict.agreement,
            token_ids=verdict.token_ids if returns_ids else UNSET,
            usage=VerifyUsage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=0,
                total_tokens=usage.prompt_tokens,
                prompt_tokens_details=VerifyPromptDetails(cached_tokens=usage.cached_tokens),
                verify_steps=usage.verify_steps,
                cost=self.service.cost(usage, 0),
            ),
        )


class ChatVerify(_Verify[ChatVerifyRequest]):
    """Verify a recorded answer to a conversation."""

    path = "/v1/chat/completions/verify"
    body = ChatVerifyRequest

    async def _verdict(self, body: ChatVerifyRequest, request_id: str) -> Verdict:
        chat = await self.service.apart(partial(read_chat, body))
        return await self._verifier.verify_chat(chat, _recorded(body), request_id=request_id)


class CompletionsVerify(_Verify[CompletionVerifyRequest]):
    """Verify a recorded answer to a prompt, or to one prompt of a list."""

    path = "/v1/completions/verify"
    body = CompletionVerifyRequest

    async def _verdict(self, body: CompletionVerifyRequest, request_id: str) -> Verdict:
        refuse(body)
        params, prompts = completion_params(body), read_prompts(body.prompt)
        check_integer("index", body.index, 0, len(prompts) * params.n - 1)
        at, index = divmod(body.index, params.n)
        return await self._verifier.verify_text(
            await text_ids(self.service, body, prompts[at]),
            params,
            _recorded(body, index),
            cache=cache_options(body),
            request_id=request_id,
        )


def _recorded(
    body: ChatVerifyRequest | CompletionVerifyRequest, index: int | None = None
) -> RecordedAnswer:
    given = body.answer
    return RecordedAnswer(
        token_ids=given.token_ids,
        text=given.text,
        finish_reason=given.finish_reason,
        index=body.index if index is None else index,
        checked_from=body.checked_from,
    )
