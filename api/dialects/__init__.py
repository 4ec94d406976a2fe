"""The APIs of the server. Another one is a package and a line in `APIS`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.types import Scope

from ..serving.dialect import Api, Dialect
from ..serving.serving_context import Service
from ..types.request_context import header
from .anthropic.api import ANTHROPIC
from .gemini.api import GEMINI
from .ollama.api import OLLAMA
from .openai.api import OPENAI

APIS = (OPENAI, ANTHROPIC, OLLAMA, GEMINI)
BATCH_PATHS = tuple(each.path for api in APIS for each in api.dialects if each.in_batches)
"""Routes whose requests a batch may have."""


def open_dialects(service: Service, apis: Sequence[Api] = APIS) -> dict[str, Dialect[Any]]:
    """Return the dialects of these APIs for a server, by path."""
    return {kind.path: kind(service) for api in apis for kind in api.dialects}


def api_of_path(path: str) -> Api:
    """Return the API that a path belongs to; OpenAI's has all that belong to no other."""
    found = [api for api in APIS if api.has(path)]
    return max(found, key=lambda api: len(api.prefix), default=OPENAI)


def api_of(scope: Scope) -> Api:
    """Return the API of a request: by its path, or by the header of an API's clients."""
    found = api_of_path(scope["path"])
    if found is not OPENAI:
        return found
    named = (api for api in APIS if api.header is not None and header(scope, api.header))
    return next(named, OPENAI)


def at_home(scope: Scope) -> Scope:
    """Return the scope of a request with the path under which its API has the route."""
    moved, path = api_of(scope).moved, scope["path"]
    if moved is None or not (path == moved[0] or path.startswith(f"{moved[0]}/")):
        return scope
    return {**scope, "path": moved[1] + path[len(moved[0]) :]}
