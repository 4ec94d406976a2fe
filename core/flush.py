"""Emptying the prefix cache, and with it what drafts would draw on."""

from __future__ import annotations

from array import array

from .errors import InvalidRequest
from .scheduler import Scheduler


def flush(scheduler: Scheduler, *namespaces: str | None) -> int:
    """Drop what no request uses, of these namespaces or of all; returns how many pages."""
    try:
        scheduler.speculator.flush(*namespaces)
    finally:
        num_pages = scheduler.cache.flush(*namespaces)
    return num_pages


def flush_prefix(scheduler: Scheduler, tokens: array[int], namespace: str | None) -> int:
    """Drop what begins so and no request uses; returns how many pages.

    Raises `InvalidRequest` for tokens that do not fill a page.
    """
    cache = scheduler.cache
    if len(tokens) < cache.page_size:
        message = f"a prefix must fill a page of {cache.page_size} tokens, not {len(tokens)}"
        raise InvalidRequest(message, param="prefix")
    try:
        scheduler.speculator.flush(namespace)
    finally:
        num_pages = cache.flush_prefix(tokens, namespace=namespace)
    return num_pages
