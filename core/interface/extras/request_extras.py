"""RequestExtras: what only some requests have beside text for the model as it is."""

from __future__ import annotations

import msgspec

from .adapter import Adapter
from .images import PromptImage


class RequestExtras(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a request has that changes how its rows are computed, or which KV is kept.

    Requests without any share `PLAIN_REQUEST`.
    """

    adapter: Adapter | None = None  # changes the model for it
    images: tuple[PromptImage, ...] = ()  # their rows have negative ids in its tokens
    kv_budget: int = 0  # tokens of its answer that keep their KV; 0: all. Set when it is queued


PLAIN_REQUEST = RequestExtras()


def request_extras(adapter: Adapter | None, images: tuple[PromptImage, ...]) -> RequestExtras:
    """Return the extras of a request before it is queued."""
    if adapter is None and not images:
        return PLAIN_REQUEST
    return RequestExtras(adapter=adapter, images=images)
