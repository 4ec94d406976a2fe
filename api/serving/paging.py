"""Pages of lists: as many entries as ``limit`` says, behind the one that ``after`` names."""

from __future__ import annotations

from starlette.requests import Request

from ...core.errors import InvalidRequest

PAGE, MAX_PAGE = 20, 100  # entries, as OpenAI has it


def page_limit(request: Request) -> int:
    """Return the entries of a page. Raises `InvalidRequest`."""
    given = request.query_params.get("limit", str(PAGE))
    is_number = given.isascii() and given.isdigit() and len(given) <= len(str(MAX_PAGE))
    if not is_number or not 1 <= int(given) <= MAX_PAGE:
        raise InvalidRequest(f"limit must be from 1 to {MAX_PAGE}", param="limit")
    return int(given)
