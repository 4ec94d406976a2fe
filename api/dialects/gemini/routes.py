"""The routes of Gemini's API: generateContent, streamGenerateContent, countTokens, models."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ....core.errors import InvalidRequest
from ...serving.dialect import READS, Dialect, Endpoints, get
from ...serving.errors import JsonResponse
from ...serving.limits import Limits
from ...serving.sse import ReadyReply, Reply
from ...types.request_context import random_id
from ...types.sampling_params import num_stop_bytes
from .answers import ERRORS, GeminiModel, GeminiModels, GenerateAnswer, TokensCounted
from .bodies import CountTokensBody, GenerateBody, GenerationConfig, gemini_decoder
from .reading import read_chat
from .writing import CandidateWriter, GeminiReply

B = TypeVar("B", GenerateBody, CountTokensBody)
MODELS = "/v1beta/models"
_CONFIG = "generationConfig"
NAMES = {
    "max_tokens": f"{_CONFIG}.maxOutputTokens",
    "n": f"{_CONFIG}.candidateCount",
    "stop": f"{_CONFIG}.stopSequences",
    "logprobs": f"{_CONFIG}.logprobs",
    "json_schema": f"{_CONFIG}.responseSchema",
    "choice": f"{_CONFIG}.responseSchema",
    "tool_choice": "toolConfig.functionCallingConfig",
    "messages": "contents",
}


class GeminiDialect(Dialect[B]):
    """The base of the generating routes: decoding, field names and error format."""

    names = NAMES
    error_form = ERRORS

    @cached_property
    def _decode(self) -> Any:  # noqa: ANN401 - same as in the base class
        return gemini_decoder(self.body)

    def read_request(self, request: Request, data: bytes) -> B:
        """Return a body, with its model taken from the path. Raises `ApiError` 400."""
        body = self.decode(data)
        body.model = request.path_params["model"]
        return body


def check_limits(limits: Limits, body: GenerateBody) -> None:
    """Raise `InvalidRequest` for a body that exceeds a limit of the server."""
    limits.check("contents", len(body.contents), "max_messages")
    functions = [each for group in body.tools or () for each in group.function_declarations or ()]
    limits.check("tools", len(functions), "max_tools")
    config = body.generation_config or GenerationConfig()
    limits.check(f"{_CONFIG}.candidateCount", config.candidate_count or 1, "max_n")
    limits.check(f"{_CONFIG}.logprobs", config.logprobs or 0, "max_top_logprobs")
    num_bytes = num_stop_bytes(config.stop_sequences or ())
    limits.check(f"{_CONFIG}.stopSequences", num_bytes, "max_stop_bytes")


class GenerateContent(GeminiDialect[GenerateBody]):
    """Answer one conversation."""

    path = MODELS + "/{model:path}:generateContent"
    body = GenerateBody
    answer = GenerateAnswer

    def check(self, body: GenerateBody) -> None:
        """Check the model, the temperature and the limits."""
        super().check(body)
        config = body.generation_config
        self.service.check_range(config, most_temperature=self.most_temperature)
        check_limits(self.service.settings.limits, body)

    async def open(self, body: GenerateBody) -> Reply:
        """Render the conversation and submit it."""
        chat = await self.service.apart(partial(read_chat, body))
        self.service.check_room(1, chat.params.n)
        name = f"gemini-{random_id()}"
        answer = await self.service.chat.open(chat, request_id=name)
        thinking = body.generation_config and body.generation_config.thinking_config
        shows = bool(thinking and thinking.include_thoughts)
        writer = CandidateWriter(self.service, name, shows_thoughts=shows)
        return GeminiReply(self.service, writer, answer)


class StreamGenerateContent(GenerateContent):
    """Answer one conversation as server-sent events."""

    path = MODELS + "/{model:path}:streamGenerateContent"
    event = GenerateAnswer
    query = ("alt!",)

    def read_request(self, request: Request, data: bytes) -> GenerateBody:
        """Return a body with streaming enabled. Raises `InvalidRequest` unless ``alt`` is sse."""
        if request.query_params.get("alt") != "sse":
            raise InvalidRequest(
                "alt must be sse: streams are only available as server-sent events", param="alt"
            )
        body = super().read_request(request, data)
        body.stream = True
        return body


class CountTokens(GeminiDialect[CountTokensBody]):
    """Count the tokens of a conversation."""

    path = MODELS + "/{model:path}:countTokens"
    body = CountTokensBody
    answer = TokensCounted
    statuses = READS

    def check(self, body: CountTokensBody) -> None:
        """Check the model only, since sampling parameters do not affect the count."""
        self.service.check_model(body.model)

    async def open(self, body: CountTokensBody) -> Reply:
        """Count the tokens of a conversation."""
        request = body.generate_content_request
        if request is None and not body.contents:
            raise InvalidRequest("contents must not be empty", param="contents")
        counted = request or GenerateBody(contents=body.contents or [])
        check_limits(self.service.settings.limits, counted)
        chat = await self.service.apart(partial(read_chat, counted))
        prompt = await self.service.chat.render(chat)
        return ReadyReply(TokensCounted(total_tokens=len(prompt.token_ids)))


class GeminiModelRoutes(Endpoints):
    """Lists and describes the served model and its adapters."""

    @get(MODELS, GeminiModels)
    async def index(self, _request: Request) -> Response:
        """Return the model under each of its names, and its adapters."""
        adapters = [each.name for each in self.service.llm.adapters.served]
        names = dict.fromkeys([*self.service.names, *adapters])
        return JsonResponse(GeminiModels(models=[self._model(name) for name in names]))

    @get(MODELS + "/{name:path}", GeminiModel, errors=(404,))
    async def retrieve(self, request: Request) -> Response:
        """Return the model or an adapter by any of its names. Raises `ApiError` 404."""
        name = request.path_params["name"]
        self.service.check_model(name)
        return JsonResponse(self._model(name))

    def _model(self, name: str) -> GeminiModel:
        most = self.service.llm.built.max_model_len
        return GeminiModel(
            name=f"models/{name}",
            display_name=name,
            input_token_limit=most,
            output_token_limit=most,
        )
