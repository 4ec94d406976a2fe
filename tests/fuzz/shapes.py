"""Shapes that every refusal must have."""

from __future__ import annotations

from typing import Any

import httpx

NO_FIELD = (
    "the body is",
    "Expected `object`",
    "the header",
    "Content-Length",
    "more than 100",
    "Number out",
)
"""Beginnings of messages that can name no field, as the body as a whole is wrong."""
MAX_MESSAGE_CHARS = 4096


def check_refusal(response: httpx.Response) -> None:
    """Raise AssertionError unless this is an error of the API, in the dialect of its path."""
    body = response.json()
    assert response.headers["content-type"] == "application/json"
    error = body["error"]
    assert response.headers["x-request-id"]
    if response.request.url.path.startswith("/api/"):
        assert set(body) == {"error"}
        assert 0 < len(error) <= MAX_MESSAGE_CHARS
        return
    assert isinstance(error["message"], str)
    assert 0 < len(error["message"]) <= MAX_MESSAGE_CHARS, len(error["message"])
    if response.request.url.path.startswith("/v1beta"):
        assert error["code"] == response.status_code
        assert set(error) - {"details"} == {"code", "message", "status"}
    elif response.request.url.path.startswith("/v1/messages"):
        assert body["type"] == "error"
        assert set(error) - {"details"} == {"type", "message"}
        assert body["request_id"] == response.headers["request-id"]
    else:
        _check_openai(error, response.status_code)


def _check_openai(error: dict[str, Any], status: int) -> None:
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["type"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    if status == 400 and not error["message"].startswith(NO_FIELD):
        assert error["param"] is not None, f"names no field: {error['message']}"
