"""GET /cache and /cache/explain, POST /cache/flush: inspect and flush the prefix cache."""

from __future__ import annotations

from array import array
from functools import partial
from typing import cast

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ....core.errors import InvalidRequest
from ...dialects.openai.bodies import Message
from ...dialects.openai.reading import plain_chat
from ...runtime.cache_diagnostics import Explanation
from ...serving.decoding import decoder
from ...serving.dialect import Endpoints, get, post
from ...serving.errors import ApiError, JsonResponse
from ...types.request_context import owner_of
from ..guards.auth import needs_admin_key
from .protocol import CacheBody, Flushed


class FlushRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /cache/flush. Without fields it flushes everything, so unknown fields are rejected.

    ``prefix``: text, token ids or messages, cached under ``cache_salt`` or without a salt.
    """

    cache_salt: str | None = None
    prefix: str | list[int | Message] | None = None


SALTED = ("cache_salt",)
decode_flush = decoder(FlushRequest)


class CacheRoutes(Endpoints):
    """Routes that inspect and flush the prefix cache."""

    @get("/cache", CacheBody, query=SALTED, errors=(403,), is_operators=True)
    async def show(self, request: Request) -> Response:
        """Return the occupancy of the cache, the causes of cache misses, and the pins of a salt."""
        salt = request.query_params.get("cache_salt")
        _check_salt(salt)
        llm = self.service.llm
        return JsonResponse({**await llm.engine.cache_info(salt), "causes": llm.miss_causes.counts})

    @post(
        "/cache/flush",
        Flushed,
        body=FlushRequest,
        is_body_needed=False,
        errors=(403, 408, 413, 503),
    )
    async def flush(self, request: Request) -> Response:
        """Drop all cached prefixes, those with a salt, or those that begin with ``prefix``."""
        data = await self.service.read_bytes(request)
        body = decode_flush(data) if data.strip() else FlushRequest()
        _check_salt(body.cache_salt)
        if body.prefix is None and body.cache_salt is None and not request.state.is_admin:
            raise needs_admin_key("a flush without cache_salt and prefix")
        llm, salt = self.service.llm, body.cache_salt
        if body.prefix is not None:
            async with self.service.wanted(request.receive):
                tokens = array("q", await self._token_ids(body.prefix, salt))
            dropped = 0
            await self._flush_texts(salt)  # they are not indexed by prefix
            for namespace in (salt, *llm.adapters.namespaces(salt)):
                dropped += await llm.engine.flush_prefix(tokens, namespace)
                llm.prompts.flush_prefix(tokens, namespace)
        else:
            salts = () if salt is None else (salt,)
            namespaces = () if salt is None else (salt, *llm.adapters.namespaces(salt))
            await self._flush_texts(*salts)
            dropped = await llm.engine.flush_cache(*namespaces)
            llm.prompts.flush(*namespaces)
        return JsonResponse(Flushed(flushed_pages=dropped))

    async def _flush_texts(self, *salts: str | None) -> None:
        """Forget answers and next turns under these salts; without a salt, all of them."""
        chat = self.service.chat
        chat.next_turns.flush(*salts)
        if chat.history is not None:
            chat.history.flush(*salts)
        await chat.next_turns.settled()

    async def _token_ids(self, prefix: str | list[int | Message], salt: str | None) -> list[int]:
        llm = self.service.llm
        if isinstance(prefix, str):
            return await llm.tokenizer.encode(prefix)
        kinds = {*map(type, prefix)}  # a Python loop over a million ids would block the event loop
        if Message not in kinds:
            token_ids = cast("list[int]", prefix)
            llm.tokenizer.check_ids(token_ids, llm.built.vocab_size, "prefix")
            return token_ids
        if len(kinds) > 1:
            message = "prefix must be a text, token ids or messages, not a mixture"
            raise InvalidRequest(message, param="prefix")
        messages = cast("list[Message]", prefix)
        chat = await self.service.apart(partial(plain_chat, messages, opens=False, cache_salt=salt))
        return [*(await self.service.chat.render(chat)).cached_ids]

    @get("/cache/explain", query=("response_id!", "previous_id", *SALTED), errors=(404,))
    async def explain(self, request: Request) -> Response:
        """Explain a cache miss. Requires the API key and ``cache_salt`` of the request.

        ``previous_id`` names the response to compare with; default: the most similar one.
        """
        asked = request.query_params
        response_id = asked.get("response_id")
        if not response_id:
            raise InvalidRequest("response_id is required", param="response_id")
        return JsonResponse(
            self._explain(response_id, asked.get("previous_id"), asked.get("cache_salt")).body()
        )

    def _explain(self, response_id: str, previous_id: str | None, salt: str | None) -> Explanation:
        llm = self.service.llm
        prompt = llm.prompts.find(response_id)
        # the error does not reveal whether the prompt exists
        if prompt is None or prompt.owner != owner_of(salt):
            raise _unknown(response_id, "response_id")
        found = llm.explain(response_id, previous_id=previous_id)
        if found is None:
            raise _unknown(previous_id or "", "previous_id")
        return found


def _check_salt(salt: str | None) -> None:
    """Raise `InvalidRequest` for a salt that could name an adapter's namespace."""
    if salt is not None and salt.startswith("\0"):
        raise InvalidRequest("cache_salt must not begin with a NUL", param="cache_salt")


def _unknown(response_id: str, param: str) -> ApiError:
    message = f"no prompt is stored for response {response_id}"
    return ApiError(404, message, code="response_not_found", param=param)
