"""RequestExtras and Transfer: what only some requests have beside text for the model as it is."""

from __future__ import annotations

import msgspec

from ....radix_cache import HeldPages
from .adapter import Adapter
from .images import PromptImage
from .tiers import PageLoad
from .transfers import PageOffer


class RequestExtras(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a request has that changes how its rows are computed, or which KV is kept.

    Requests without any share `PLAIN_REQUEST`.
    """

    adapter: Adapter | None = None  # changes the model for it
    images: tuple[PromptImage, ...] = ()  # their rows have negative ids in its tokens
    kv_budget: int = 0  # tokens of its answer that keep their KV; 0: all. Set when it is queued


PLAIN_REQUEST = RequestExtras()


class Transfer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """KV pages of a request that come from a tier or another engine, or go to another engine.

    With ``hands_over`` the pages of its prompt are held at its end, for another engine, unless
    nobody waits for the answer any more. Requests without any share `NO_TRANSFER`.
    """

    hands_over: bool = False
    handed: HeldPages | None = None  # once they are held
    offer: PageOffer | None = None  # pages of a peer that it may read, until it needs none
    load: PageLoad | None = None  # of pages in a tier: looked up while it waits, else under way


NO_TRANSFER = Transfer()


def request_extras(adapter: Adapter | None, images: tuple[PromptImage, ...]) -> RequestExtras:
    """Return the extras of a request before it is queued."""
    if adapter is None and not images:
        return PLAIN_REQUEST
    return RequestExtras(adapter=adapter, images=images)
