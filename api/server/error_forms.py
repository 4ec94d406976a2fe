"""Encode an error in the format of the API that the path belongs to."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Scope

from ..dialects import api_of
from ..serving.errors import ApiError, JsonResponse
from ..types.request_context import note_error


def error_response(scope: Scope, error: ApiError) -> Response:
    """Return the response for an error, in the format of the request's API; by default OpenAI's."""
    note_error(error)
    request_id = scope.get("state", {}).get("request_id")
    body = api_of(scope).error_form.body(error, request_id)
    return JsonResponse(body, error.status, headers=error.headers)
