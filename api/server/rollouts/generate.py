"""Token ids in, token ids out: vLLM's route for trainers, without text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from typing_extensions import override

from ....core.errors import InvalidRequest
from ....core.interface.output import TokenLogprob
from ...dialects.openai.answers import ChatLogprobs, UsageBody
from ...dialects.openai.bodies import OpenAISampling, StreamOptions
from ...dialects.openai.routes import open_text
from ...dialects.openai.text_writing import prompt_ids
from ...dialects.openai.writing import Head, finite, usage_body
from ...runtime.generation import Answers
from ...serving.answers import AnswerReply, AnswerWriter, refuse_aborted
from ...serving.dialect import Dialect
from ...serving.errors import ApiError
from ...serving.peers import Empty
from ...serving.sampling import Count, NumTop
from ...serving.serving_context import Service
from ...serving.sse import DONE, Reply, event
from ...types.results import Completion, TextDelta
from ...types.sampling_params import SamplingParams
from .pauses import is_pause, reason_of
from .token_numbers import numbered_infos
from .trainer_completions import PromptLogprob, TrainerTextRequest, TrainerTextRoute, ranked
from .versions_body import ChoiceVersions, versions_of


class TokensSampling(OpenAISampling, kw_only=True):
    """``sampling_params`` of /inference/v1/generate."""

    max_tokens: Count | None = None
    logprobs: NumTop | None = None
    prompt_logprobs: NumTop | None = None
    prompt_token_logprobs: bool | None = None


class TokensRequest(Struct, kw_only=True):
    """Body of /inference/v1/generate. Fields of the body precede ``sampling_params``."""

    token_ids: Annotated[list[int], Meta(min_length=1)]
    sampling_params: TokensSampling
    request_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    model: str | None = None
    features: Empty = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    deadline_ms: float | None = None


class TokensChoice(Struct, kw_only=True):
    """Generated tokens of a choice; in an event, only the new ones."""

    index: int
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int]


class TokensBody(Struct, kw_only=True):
    """Answer of /inference/v1/generate. Lists of the prompt have one entry a token."""

    request_id: str
    model: str
    created: int
    choices: list[TokensChoice]
    usage: UsageBody
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    prompt_token_logprobs: list[float | None] | UnsetType = UNSET
    weight_version: str
    weight_versions: list[ChoiceVersions]


class TokensEvent(Struct, kw_only=True):
    """Event of a stream. The one before ``[DONE]`` has the versions of the weights."""

    request_id: str
    choices: list[TokensChoice]
    usage: UsageBody | None = None
    weight_version: str | UnsetType = UNSET
    weight_versions: list[ChoiceVersions] | UnsetType = UNSET


class GenerateWriter(AnswerWriter[Answers]):
    """Encodes the answer to one body."""

    def __init__(self, service: Service, head: Head, body: TokensRequest) -> None:
        self._service, self._head = service, head
        self._request_id = body.request_id or head.id
        self._sampling = body.sampling_params
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)

    def body(self, answer: Answers, completion: Completion) -> TokensBody:
        """Return the whole answer. Raises `ApiError` for an answer without a token."""
        choices = []
        for choice in completion.choices:
            if not is_pause(choice):
                refuse_aborted(self._service, choice.finish_reason, len(choice.token_ids))
            choices.append(
                TokensChoice(
                    index=choice.index,
                    logprobs=self._logprobs(choice.logprobs),
                    finish_reason=reason_of(choice),
                    stop_reason=choice.stop_reason,
                    token_ids=choice.token_ids,
                )
            )
        more: dict[str, Any] = msgspec.structs.asdict(versions_of(answer.ended_choices()))
        entries = completion.prompt_logprobs or []
        if self._sampling.prompt_logprobs is not None:
            more["prompt_logprobs"] = [None if each is None else ranked(each) for each in entries]
        if self._sampling.prompt_token_logprobs:
            more["prompt_token_logprobs"] = [
                None if each is None else finite(each.logprob) for each in entries
            ]
        return TokensBody(
            request_id=self._request_id,
            model=self._head.model,
            created=self._head.created,
            choices=choices,
            usage=usage_body(completion.usage),
            **more,
        )

    @override
    def write(self, delta: TextDelta) -> Iterator[bytes]:
        if not delta.token_ids and delta.finish_reason is None:
            return
        choice = TokensChoice(
            index=delta.index,
            logprobs=self._logprobs(delta.logprobs or None),
            finish_reason=None if delta.finish_reason is None else reason_of(delta),
            token_ids=delta.token_ids,
        )
        if delta.stop_reason is not None:
            choice.stop_reason = delta.stop_reason
        yield event(TokensEvent(request_id=self._request_id, choices=[choice]))

    @override
    def end(self, answer: Answers) -> Iterator[bytes]:
        found = versions_of(answer.ended_choices())
        yield event(
            TokensEvent(
                request_id=self._request_id,
                choices=[],
                usage=usage_body(answer.usage) if self._include_usage else None,
                weight_version=found.weight_version,
                weight_versions=found.weight_versions,
            )
        )
        yield DONE

    def _logprobs(self, entries: list[TokenLogprob] | None) -> ChatLogprobs | None:
        if entries is None:
            return None
        return ChatLogprobs(content=numbered_infos(self._service.llm.tokenizer, entries))


class GenerateReply(AnswerReply[Answers]):
    """The answer to one body, whole or as a stream of token ids."""

    _writer: GenerateWriter

    @override
    async def whole(self) -> object:
        (completion,) = await self._answer.collect()
        return self._writer.body(self._answer, completion)

    @override
    def _refusal(self, delta: TextDelta) -> ApiError | None:
        return None if is_pause(delta) else super()._refusal(delta)


class Generate(Dialect[TokensRequest]):
    """Continue a prompt of token ids, and return token ids, whole or as a stream."""

    path = "/inference/v1/generate"
    body = TokensRequest
    answer: ClassVar[Any] = TokensBody
    event: ClassVar[Any] = TokensEvent

    @override
    def check(self, body: TokensRequest) -> None:
        super().check(body)
        self.service.check_range(body.sampling_params, most_temperature=self.most_temperature)

    @override
    async def open(self, body: TokensRequest) -> Reply:
        """Submit the prompt."""
        self.service.settings.limits.check_body(body.sampling_params)
        asked, params = await self._read(body)
        head = Head(prefix="gen", model=self.service.model)
        (name,) = prompt_ids(head, 1)
        answer = await open_text(self.service, asked, body.token_ids, params, name)
        writer = GenerateWriter(self.service, head, body)
        return GenerateReply(self.service, writer, Answers([answer], self.service.llm.forget))

    async def _read(self, body: TokensRequest) -> tuple[TrainerTextRequest, SamplingParams]:
        """Return the body as one of a text completion, with its sampling parameters."""
        fields = msgspec.structs.asdict(body.sampling_params)
        for name in ("model", "stream", "cache_salt", "priority", "deadline_ms"):
            if (given := getattr(body, name)) is not None:
                fields[name] = given
        asked = TrainerTextRequest(prompt=list(body.token_ids), **fields)
        params, _, _ = await TrainerTextRoute(self.service).read(asked)
        return asked, params

    @override
    def rename(self, error: InvalidRequest, body: TokensRequest) -> None:
        name = error.param
        if name == "prompt":
            error.rename("token_ids")
        elif name in TokensSampling.__struct_fields__ and getattr(body, name, None) is None:
            error.rename(f"sampling_params.{name}")
