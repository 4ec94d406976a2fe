"""Pagination of lists with the query parameters ``limit`` and ``after``."""

from __future__ import annotations

from starlette.requests import Request

from ...core.errors import InvalidRequest

PAGE, MAX_PAGE = 20, 100  # default and maximum number of entries, as in OpenAI's API


def page_limit(request: Request) -> int:
    """Return the number of entries per page. Raises `InvalidRequest` for a bad ``limit``."""
    given = request.query_params.get("limit", str(PAGE))
    is_number = given.isascii() and given.isdigit() and len(given) <= len(str(MAX_PAGE))
    if not is_number or not 1 <= int(given) <= MAX_PAGE:
        raise InvalidRequest(f"limit must be from 1 to {MAX_PAGE}", param="limit")
    return int(given)
