"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from ...core.errors import InvalidRequest, PromptTooLong
from ..openai.schema import decoder, refuse_unsupported, sampling_params
from ..openai.shapes import is_prewarm, prewarm
from ..runtime.chat_types import Ask
from ..runtime.tools import read_cache
from ..serving.errors import ApiError, JsonResponse
from ..serving.serving_context import ANTHROPIC_TEMPERATURE, Service
from ..serving.sse import EventStream, unless_gone
from ..types.sampling_params import SamplingParams
from .breakpoints import Breakpoints, Mark, read_marks
from .conversation import conversation_ask
from .errors import request_id
from .events import PING, MessageWriter, error_event
from .placing import Placer
from .schema import CountRequest, MessagesRequest

decode = decoder(MessagesRequest)
decode_count = decoder(CountRequest)
NAMES = {"stop": "stop_sequences", "json_schema": "output_config.format", "prompt": "messages"}


class MessagesRoute:
    """Conversations in Anthropic's shape."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._placer = Placer(service.turns, normalizes=service.settings.normalize)

    async def create(self, request: Request) -> Response:
        """Answer one conversation, whole or as a stream."""
        body = await self.service.read(request, decode)
        self.service.check_model(body.model)
        self.service.check_range(body, most_temperature=ANTHROPIC_TEMPERATURE)
        with _anthropic_names():
            wanted = partial(self.service.wanted, request, deadline_ms=body.deadline_ms)
            ask, prompt_ids, breakpoints = await wanted(self._rendered(request, body))
            writer = self._writer(body, breakpoints)
            if body.max_tokens == 0:
                is_streamed = bool(body.stream)
                return await self._warm(request, ask, prompt_ids, writer, is_streamed=is_streamed)
            opening = self.service.turns.open(ask, request_id=writer.id, prompt_ids=prompt_ids)
            turn = await wanted(opening)
        if body.stream:
            return self._stream(request, writer.events(turn), turn.close)
        return JsonResponse(await unless_gone(request.receive, writer.whole(turn)))

    async def _rendered(
        self, request: Request, body: MessagesRequest
    ) -> tuple[Ask, list[int], Breakpoints]:
        """The question, its prompt, and where it may be cached up to."""
        marks, ask = await self.service.apart(request, lambda: (read_marks(body), read_ask(body)))
        prompt_ids = await self.service.turns.render(ask)
        ask, breakpoints = await self._placed(marks, ask, prompt_ids)
        return ask, prompt_ids, breakpoints

    def _writer(self, body: MessagesRequest, breakpoints: Breakpoints) -> MessageWriter:
        asked = body.diagnostics
        return MessageWriter(
            service=self.service,
            breakpoints=breakpoints,
            max_tokens=body.max_tokens,
            shows_thoughts=body.thinking is None or body.thinking.display != "omitted",
            previous_id=None if asked is None else asked.previous_message_id,
            explains=bool(body.explain_cache),
        )

    async def _warm(
        self,
        request: Request,
        ask: Ask,
        prompt_ids: Sequence[int],
        writer: MessageWriter,
        *,
        is_streamed: bool,
    ) -> Response:
        """Bring a prompt into the cache and say nothing."""
        work = prewarm(self.service, ask, request_id=writer.id, prompt_ids=prompt_ids)
        usage = await unless_gone(request.receive, work)
        if is_streamed:
            return self._stream(request, writer.warm_events(usage), _nothing)
        return JsonResponse(writer.warm(usage))

    def _stream(
        self, request: Request, events: AsyncGenerator[bytes], close: Callable[[], None]
    ) -> EventStream:
        return EventStream(
            events,
            close=close,
            ping_seconds=self.service.settings.limits.ping_seconds,
            ping=PING,
            on_error=partial(_tell, request_id(request.scope)),
        )

    async def count(self, request: Request) -> Response:
        """How many tokens a conversation has."""
        body = await self.service.read(request, decode_count)
        self.service.check_model(body.model)
        with _anthropic_names():
            num_tokens = await self.service.wanted(request, self._num_tokens(request, body))
        return JsonResponse({"input_tokens": num_tokens})

    async def _num_tokens(self, request: Request, body: CountRequest) -> int:
        ask = await self.service.apart(request, partial(conversation_ask, body))
        return len(await self.service.turns.render(ask))

    async def _placed(
        self, marks: Sequence[Mark], ask: Ask, prompt_ids: Sequence[int]
    ) -> tuple[Ask, Breakpoints]:
        """The question with its breakpoints as pins; who writes nothing has none."""
        if not marks or not ask.cache.write:
            return ask, Breakpoints()
        breakpoints = await self._placer.place(marks, ask, prompt_ids)
        breakpoints = replace(breakpoints, page_size=self.service.llm.page_size)
        pins = (*ask.cache.pins, *breakpoints.pins)
        return replace(ask, cache=replace(ask.cache, pins=pins)), breakpoints


def read_ask(body: MessagesRequest) -> Ask:
    """What the body asks for; raises `InvalidRequest`."""
    refuse_unsupported(body)
    if body.n not in (None, 1):
        raise InvalidRequest("n must be 1", param="n")
    if is_prewarm(body):
        name = "prompt_cache_options.prewarm"
        raise InvalidRequest(f"{name}: here max_tokens 0 prewarms a prompt", param=name)
    if body.mcp_servers:
        raise InvalidRequest("mcp_servers are not served", param="mcp_servers")
    cache = read_cache(body.cache, body.prompt_cache_retention, body.prompt_cache_options)
    ask = conversation_ask(body)
    return replace(ask, params=read_params(body), cache=cache, cache_key=body.prompt_cache_key)


def read_params(body: MessagesRequest) -> SamplingParams:
    """Sampling parameters; 0 tokens are none of the engine's business."""
    params = sampling_params(body, max_tokens=body.max_tokens or 1, logprobs=None)
    if body.stop_sequences is not None:
        params = replace(params, stop=body.stop_sequences)
    if body.format is not None:
        params = replace(params, json_schema=body.format.schema)
    return params


@contextmanager
def _anthropic_names() -> Iterator[None]:
    """Errors name the fields as these bodies do."""
    try:
        yield
    except InvalidRequest as error:
        name = error.param or ""
        if name not in NAMES or isinstance(error, PromptTooLong):
            raise
        message = str(error).replace(name, NAMES[name], 1)
        raise InvalidRequest(message, param=NAMES[name]) from error


def _nothing() -> None:
    """A prompt that is warm has ended."""


def _tell(request_id: str | None, error: ApiError) -> bytes:
    return error_event(error, request_id)
