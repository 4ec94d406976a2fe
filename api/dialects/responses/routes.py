"""The routes of /v1/responses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import time
from typing import Literal, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from ....core.errors import InvalidRequest, PromptTooLong
from ...runtime.chat import ChatAnswer
from ...runtime.conversation.chat_input import ChatInput
from ...serving.answers import prewarm
from ...serving.dialect import READS, Dialect, Endpoints, delete, get
from ...serving.errors import ApiError, JsonResponse
from ...serving.paging import page_limit
from ...serving.render import Rendered, render_chat
from ...serving.sampling import is_prewarm
from ...serving.serving_context import Service
from ...serving.sse import EventStream, ReadyReply, Reply
from ...types.request_context import at_close, owner_of
from ...types.shares import Owner
from ..openai.bodies import Message
from ..openai.breakpoints import with_breakpoints
from .answers import CompactedResponse, Deleted, InputTokens, ItemList, ResponseBody, StreamEvent
from .bodies import Item, ResponsesRequest
from .compaction.compactor import Compaction, Compactor
from .compaction.reply import CompactingReply, CompactingWriter
from .compaction.sealed import TRIGGER, user_messages
from .items import Thread, kept_items, read_items, thread_of
from .reading import check_n, make_chat_input, rename
from .store import ResponseStore
from .tools import ServedTool
from .writing import ResponseReply, ResponseWriter, new_id, response_usage

STORED = ("cache_salt",)  # query parameters that identify the owner of a response


def response_store(service: Service) -> ResponseStore:
    """Return the store of responses that all routes of a server share."""
    store = ResponseStore(max_seconds=service.settings.limits.store_seconds)
    found: ResponseStore = service.shared.setdefault(ResponseStore, store)
    return found


class ReadResponse(NamedTuple):
    """A request as the server reads it."""

    chat: ChatInput
    served: list[ServedTool]
    messages: list[Message]  # the whole conversation
    items: list[Item]  # new items of the request
    thread: Thread  # the conversation that the request continues, with its new items


class ResponsesDialect(Dialect[ResponsesRequest]):
    """The base of the generating routes: decoding, checks and field names."""

    body = ResponsesRequest

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.store = response_store(service)
        self.compactor = Compactor(service)

    def check(self, body: ResponsesRequest) -> None:
        """Check the model and the number of answers."""
        super().check(body)
        check_n(body)

    def rename(self, error: InvalidRequest, body: ResponsesRequest) -> None:
        """Replace the parameter name in an error by the name of the field in the body."""
        rename(error, body)

    async def read_chat(self, body: ResponsesRequest) -> ReadResponse:
        """Read a request and the stored history that it continues."""
        owner = owner_of(body.cache_salt)
        history: list[Item] = []
        if body.previous_response_id is not None:
            history = self.store.history(owner, body.previous_response_id)
        items = read_items(body.input, lambda item_id: self.store.item(owner, item_id))
        limits = self.service.settings.limits
        limits.check("input", len(history) + len(items), "max_messages")
        thread = self.compactor.read(body, thread_of(history, items))
        read = await self.service.apart(partial(make_chat_input, body, thread))
        return ReadResponse(*read, items, thread)


class ResponsesCount(ResponsesDialect):
    """Count the tokens of an input."""

    path = "/v1/responses/input_tokens"
    answer = InputTokens
    statuses = READS

    async def open(self, body: ResponsesRequest) -> Reply:
        """Count the tokens of an input."""
        chat, *_ = await self.read_chat(body)
        prompt = await self.service.chat.render(chat)
        return ReadyReply(InputTokens(input_tokens=len(prompt.token_ids)))


class ResponsesRender(ResponsesDialect):
    """Render an input: check it and return its prompt's token ids."""

    path = "/v1/responses/render"
    answer = Rendered
    statuses = READS

    async def open(self, body: ResponsesRequest) -> Reply:
        """Render and check the input. Nothing is submitted or stored."""
        chat, *_ = await self.read_chat(body)
        return ReadyReply(
            await render_chat(
                self.service, chat, body, request_id=new_id(), is_prewarm=is_prewarm(body)
            )
        )


class ResponsesRoute(ResponsesDialect):
    """Answer the input, whole or as a stream."""

    path = "/v1/responses"
    answer = ResponseBody
    event = StreamEvent
    in_batches = True

    async def open(self, body: ResponsesRequest) -> Reply:
        """Render the input and submit it."""
        chat, served, messages, items, thread = await self.read_chat(body)
        params = self.service.llm.built.sampling_defaults.fill(chat.params)
        owner = owner_of(body.cache_salt)
        is_stored = body.store is not False

        def keep(response: ResponseBody, answer_ids: Sequence[int]) -> None:
            # A later response on the same connection may continue one that is not stored.
            if is_stored or at_close(partial(self._forget, owner, response.id)):
                kept = kept_items(items)
                self.store.put(owner, response, kept, answer_ids, is_shown=is_stored)

        is_asked = bool(items) and items[-1].type == TRIGGER
        is_due = not is_prewarm(body) and await self.compactor.is_due(body, thread, chat)
        if is_asked or is_due:
            compacting = CompactingWriter(self.service, body, params, served, keep)
            compact = partial(self.compactor.compact, body, thread, chat, keeps_last=not is_asked)

            async def proceed(done: Compaction) -> ChatAnswer:
                options = body.prompt_cache_options
                pinned = await with_breakpoints(self.service, done.messages, options, done.chat)
                compacting.pinned(pinned.breakpoints)
                return await self.service.chat.open(
                    pinned.chat,
                    request_id=compacting.id,
                    prompt=pinned.prompt,
                    hands_out=is_stored,
                )

            return CompactingReply(self.service, compacting, compact, None if is_asked else proceed)
        try:
            options = body.prompt_cache_options
            pinned = await with_breakpoints(self.service, messages, options, chat)
            writer = ResponseWriter(self.service, body, params, served, keep, pinned.breakpoints)
            if is_prewarm(body):
                usage = await prewarm(
                    self.service, pinned.chat, request_id=writer.id, prompt=pinned.prompt
                )
                return writer.prewarmed(usage)
            answer = await self.service.chat.open(
                pinned.chat, request_id=writer.id, prompt=pinned.prompt, hands_out=is_stored
            )
        except PromptTooLong as error:
            await self.compactor.explain(error, body, thread)
            raise
        return ResponseReply(self.service, writer, answer)

    def _forget(self, owner: Owner, response_id: str) -> None:
        self.store.delete(owner, response_id)


class CompactRoute(ResponsesDialect):
    """Compact a conversation: the model summarizes it, and a compaction item replaces it."""

    path = "/v1/responses/compact"
    answer = CompactedResponse

    async def open(self, body: ResponsesRequest) -> Reply:
        """Return the user's messages, and a compaction item that replaces all other items."""
        read = await self.read_chat(body)
        chat, thread = read.chat, read.thread
        done = await self.compactor.compact(body, thread, chat, keeps_last=False)
        users = kept_items(user_messages(thread).items)
        item = Item(
            type="compaction", id=done.item.id, encrypted_content=done.item.encrypted_content
        )
        usage = response_usage(done.spent, 0, cost=self.service.cost(done.spent))
        usage.compaction = done.usage
        return ReadyReply(
            CompactedResponse(
                id=new_id(), created_at=int(time()), output=[*users, item], usage=usage
            )
        )


class KeptResponses(Endpoints):
    """Read and delete stored responses."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.store = response_store(service)

    @get(
        "/v1/responses/{id}",
        ResponseBody,
        query=("stream", "starting_after", *STORED),
        errors=(404,),
        events=StreamEvent,
        events_media="text/event-stream",
    )
    async def retrieve(self, request: Request) -> Response:
        """Return a stored response; with ``stream`` the events of a stream that can be resumed."""
        after = _starting_after(request)
        if _wants_stream(request):
            return self._resumed(request, after)
        owner, response_id = _named(request)
        found = self.store.get(owner, response_id)
        if found is None:
            raise _unknown(response_id)
        return JsonResponse(found)

    def _resumed(self, request: Request, after: int) -> Response:
        """Return the events after number ``after``. Raises `InvalidRequest` and `ApiError` 404."""
        streams = self.service.streams
        if streams is None:
            raise InvalidRequest(
                "resuming a stream needs a server with --resume-seconds", param="stream"
            )
        salt = request.query_params.get("cache_salt")
        reader = streams.attach(request.path_params["id"], after + 1, salt)
        seconds = self.service.settings.limits.ping_seconds
        return EventStream(reader.events(), close=reader.close, ping_seconds=seconds)

    @delete("/v1/responses/{id}", Deleted, query=STORED, errors=(404,))
    async def delete(self, request: Request) -> Response:
        """Delete a stored response."""
        owner, response_id = _named(request)
        if not self.store.delete(owner, response_id):
            raise _unknown(response_id)
        return JsonResponse(Deleted(id=response_id))

    @get(
        "/v1/responses/{id}/input_items",
        ItemList,
        query=("limit", "after", "order", *STORED),
        errors=(404,),
    )
    async def input_items(self, request: Request) -> Response:
        """Return one page of a stored response's input items, newest first by default."""
        owner, response_id = _named(request)
        items = self.store.inputs(owner, response_id)
        if items is None:
            raise _unknown(response_id)
        if _order(request) == "desc":
            items.reverse()
        return JsonResponse(_page(items, page_limit(request), request.query_params.get("after")))


def _named(request: Request) -> tuple[Owner, str]:
    owner = owner_of(request.query_params.get("cache_salt"))
    return owner, request.path_params["id"]


def _wants_stream(request: Request) -> bool:
    given = request.query_params.get("stream", "false")
    if given not in ("true", "false"):
        raise InvalidRequest("stream must be true or false", param="stream")
    return given == "true"


def _starting_after(request: Request) -> int:
    """Return the number of the last event that the client has; -1 if it has none."""
    given = request.query_params.get("starting_after", "-1")
    if given != "-1" and not (given.isascii() and given.isdecimal() and len(given) < 16):
        message = "starting_after must be -1, or a whole number of at most 15 digits"
        raise InvalidRequest(message, param="starting_after")
    return int(given)


def _unknown(response_id: str) -> ApiError:
    return ApiError(404, f"Response with id '{response_id}' not found.", code="response_not_found")


def _order(request: Request) -> Literal["asc", "desc"]:
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    return "asc" if order == "asc" else "desc"


def _page(items: list[Item], limit: int, after: str | None) -> ItemList:
    ids = [item.id for item in items]
    if after is not None and after not in ids:
        raise InvalidRequest(f"after: unknown item id {after}", param="after")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    return ItemList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=start + limit < len(items),
    )
