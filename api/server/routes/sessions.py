"""DELETE /v1/sessions/{session_id}: end a session of the prefix cache."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ...serving.dialect import Endpoints, delete
from ...serving.errors import JsonResponse
from ...types.request_context import caller_key


class EndedSession(Struct, kw_only=True):
    """Answer of DELETE /v1/sessions/{session_id}."""

    id: str
    object: Literal["session.deleted"] = "session.deleted"
    deleted: bool  # whether the cache had pages that it kept for the session


class SessionRoutes(Endpoints):
    """The route that ends sessions."""

    @delete("/v1/sessions/{session_id:path}", EndedSession, errors=(503,))
    async def end(self, request: Request) -> Response:
        """End a session of the caller's API key: unpin its pages and evict them first.

        Unknown sessions are not an error, because the cache may have forgotten them.
        """
        name, llm = request.path_params["session_id"], self.service.llm
        deleted = await llm.session_ends.end(llm.engine, caller_key(name))
        return JsonResponse(EndedSession(id=name, deleted=deleted))
