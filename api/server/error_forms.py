"""error_response: an error in the form of the API that its path belongs to."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Scope

from ..anthropic import errors as anthropic
from ..ollama import errors as ollama
from ..serving.errors import ApiError, JsonResponse
from ..types.request_context import note_error


def error_response(scope: Scope, error: ApiError) -> Response:
    """The error response of a request; OpenAI's form unless it is for another API."""
    note_error(error)
    if ollama.is_ollama(scope["path"]):
        body: object = ollama.error_body(error)
    elif anthropic.is_for_anthropic(scope):
        body = anthropic.error_body(error, scope.get("state", {}).get("request_id"))
    else:
        body = error.body
    return JsonResponse(body, error.status, headers=error.headers)
