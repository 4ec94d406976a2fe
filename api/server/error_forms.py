"""error_response: an error in the form of the API that its path belongs to."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Scope

from ..anthropic import errors as anthropic
from ..ollama import errors as ollama
from ..serving.errors import ApiError, JsonResponse
from ..types.request_context import note_error


def error_response(scope: Scope, error: ApiError) -> Response:
    """The error response of a path; OpenAI's form unless another API has the path."""
    note_error(error)
    path: str = scope["path"]
    if anthropic.is_messages(path):
        body: object = anthropic.error_body(error, scope.get("state", {}).get("request_id"))
    elif ollama.is_ollama(path):
        body = ollama.error_body(error)
    else:
        body = error.body
    return JsonResponse(body, error.status, headers=error.headers)
