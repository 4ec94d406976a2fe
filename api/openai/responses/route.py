"""POST /v1/responses, and what there is to do with those that were kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from ....core.errors import InvalidRequest
from ...runtime.chat_types import Ask
from ...serving.errors import ApiError, JsonResponse
from ...serving.serving_context import OPENAI_TEMPERATURE, Service
from ...serving.sse import HEADERS, EventStream, unless_gone
from ...types.request_context import Owner, owner_of
from ...types.results import Body
from ..schema import decoder
from ..shapes import is_prewarm, prewarm
from .answer import ResponseWriter
from .ask import make_ask, refuse_unsupported, renaming
from .body import ResponseHead
from .events import ResponseEvents, all_at_once
from .inputs import kept_items, read_items
from .schema import Item, ResponsesRequest
from .store import ResponseStore

MAX_PAGE = 100
PAGE = 20  # items, as OpenAI has it
decode = decoder(ResponsesRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A body and what it says in the light of what was kept."""

    owner: Owner
    items: list[Item]  # the new ones
    ask: Ask


class ResponsesRoute:
    """Answers in OpenAI's Responses shape."""

    def __init__(self, service: Service) -> None:
        self.service = service
        seconds = service.settings.limits.store_seconds
        self.store = ResponseStore(max_seconds=seconds)

    async def create(self, request: Request) -> Response:
        """Answer the input, whole or as a stream."""
        body = await self._read(request)
        with renaming(body):
            question = await self._question(request, body)
            head = ResponseHead(body, question.ask.params, self.service.model)
            writer = ResponseWriter(self.service, head)
            if is_prewarm(body):
                work = prewarm(self.service, question.ask, request_id=head.id)
                usage = await self.service.wanted(request, work, body.deadline_ms)
                response = writer.prewarmed(usage)
                self._keeper(body, question)(response)
                return _prewarmed(body, writer, response)
            opening = self.service.turns.open(question.ask, request_id=head.id)
            turn = await self.service.wanted(request, opening, body.deadline_ms)
        keep = self._keeper(body, question)
        if body.stream:
            events = ResponseEvents(writer, keep).stream(turn)
            seconds = self.service.settings.limits.ping_seconds
            return EventStream(events, close=turn.close, ping_seconds=seconds)
        response = await unless_gone(request.receive, writer.collect(turn))
        keep(response)
        return JsonResponse(response)

    async def count(self, request: Request) -> Response:
        """How many tokens the input comes to."""
        body = await self._read(request)
        with renaming(body):
            question = await self._question(request, body)
            rendering = self.service.turns.render(question.ask)
            token_ids = await self.service.wanted(request, rendering, body.deadline_ms)
        return JsonResponse({"object": "response.input_tokens", "input_tokens": len(token_ids)})

    async def retrieve(self, request: Request) -> Response:
        """A response that was kept."""
        if request.query_params.get("stream") == "true":
            raise InvalidRequest("stream is not supported here", param="stream")
        owner, response_id = _named(request)
        found = self.store.get(owner, response_id)
        if found is None:
            raise _unknown(response_id)
        return JsonResponse(found)

    async def delete(self, request: Request) -> Response:
        """Forget a response."""
        owner, response_id = _named(request)
        if not self.store.delete(owner, response_id):
            raise _unknown(response_id)
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, request: Request) -> Response:
        """What a kept response answers, page by page; the newest first unless asked otherwise."""
        owner, response_id = _named(request)
        items = self.store.inputs(owner, response_id)
        if items is None:
            raise _unknown(response_id)
        if _order(request) == "desc":
            items.reverse()
        return JsonResponse(_page(items, _limit(request), request.query_params.get("after")))

    async def _read(self, request: Request) -> ResponsesRequest:
        body = await self.service.read(request, decode)
        self.service.check_model(body.model)
        self.service.check_range(body, most_temperature=OPENAI_TEMPERATURE)
        refuse_unsupported(body)
        return body

    async def _question(self, request: Request, body: ResponsesRequest) -> Question:
        owner = owner_of(body.cache_salt)
        history: list[Item] = []
        if body.previous_response_id is not None:
            history = self.store.history(owner, body.previous_response_id)
        items = read_items(body.input, lambda item_id: self.store.item(owner, item_id))
        limits = self.service.settings.limits
        limits.check("input", len(history) + len(items), "max_messages")
        reading = self.service.apart(request, partial(make_ask, body, history, items))
        ask = await self.service.wanted(request, reading, body.deadline_ms)
        return Question(owner=owner, items=items, ask=ask)

    def _keeper(self, body: ResponsesRequest, question: Question) -> Callable[[Body], None]:
        """Keeps the response unless ``store`` is false."""

        def keep(response: Body) -> None:
            if body.store is not False:
                self.store.put(question.owner, response, kept_items(question.items))

        return keep


def _prewarmed(body: ResponsesRequest, writer: ResponseWriter, response: Body) -> Response:
    if not body.stream:
        return JsonResponse(response)
    return Response(all_at_once(writer.begun(), response), headers=HEADERS)


def _named(request: Request) -> tuple[Owner, str]:
    owner = owner_of(request.query_params.get("cache_salt"))
    return owner, request.path_params["id"]


def _unknown(response_id: str) -> ApiError:
    return ApiError(404, f"Response with id '{response_id}' not found.", code="response_not_found")


def _order(request: Request) -> Literal["asc", "desc"]:
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    return "asc" if order == "asc" else "desc"


def _limit(request: Request) -> int:
    given = request.query_params.get("limit", str(PAGE))
    is_number = given.isascii() and given.isdigit() and len(given) <= len(str(MAX_PAGE))
    if not is_number or not 1 <= int(given) <= MAX_PAGE:
        raise InvalidRequest(f"limit must be 1 to {MAX_PAGE}", param="limit")
    return int(given)


def _page(items: list[Body], limit: int, after: str | None) -> Body:
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise InvalidRequest(f"there is no item {after}", param="after")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(items),
    }
