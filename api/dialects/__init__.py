"""The APIs of the server. To add one, add a package and an entry in `APIS`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from starlette.types import Scope

from ..serving.dialect import Api, Dialect
from ..serving.serving_context import Service
from .anthropic.api import ANTHROPIC
from .gemini.api import GEMINI
from .ollama.api import OLLAMA
from .openai.api import OPENAI

APIS = (OPENAI, ANTHROPIC, OLLAMA, GEMINI)
BATCH_PATHS = tuple(each.path for api in APIS for each in api.dialects if each.in_batches)
"""Paths of the routes that batches may use."""


def open_dialects(service: Service, apis: Sequence[Api] = APIS) -> dict[str, Dialect[Any]]:
    """Return the generating routes of the given APIs, by path."""
    return {kind.path: kind(service) for api in apis for kind in api.dialects}


@lru_cache(maxsize=128)
def api_of_path(path: str) -> Api:
    """Return the API that a path belongs to: the longest matching prefix, else OpenAI's."""
    found = [api for api in APIS if api.has(path)]
    return max(found, key=lambda api: len(api.prefix), default=OPENAI)


def api_of(scope: Scope) -> Api:
    """Return the API that serves a request, chosen by its path or else by its headers."""
    found = api_of_path(scope["path"])
    if found is not OPENAI:
        return found
    given = {name for name, value in scope["headers"] if value}
    for api in APIS:
        if api.header in given:
            return api
    return OPENAI


def with_route_prefix(scope: Scope) -> Scope:
    """Return an ASGI scope whose path has the prefix of the routes.

    Clients of some APIs use another prefix, which `Api.moved` names.
    """
    moved, path = api_of(scope).moved, scope["path"]
    if moved is None or not (path == moved[0] or path.startswith(f"{moved[0]}/")):
        return scope
    return {**scope, "path": moved[1] + path[len(moved[0]) :]}
