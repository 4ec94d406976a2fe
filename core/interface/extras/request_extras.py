"""RequestExtras and Transfer: attributes that only some requests have."""

from __future__ import annotations

import msgspec

from ....radix_cache import HeldPages
from .adapter import Adapter
from .branches import Branches
from .images import PromptImage
from .tiers import PageLoad
from .transfers import PageOffer


class RequestExtras(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Attributes of a request that change how its rows are computed, or which KV is kept.

    Requests without such attributes use `PLAIN_REQUEST`.
    """

    adapter: Adapter | None = None  # the LoRA adapter of this request
    images: tuple[PromptImage, ...] = ()  # images, whose rows have negative ids among the tokens

    branches: Branches | None = None  # tokens of several paths, at the end of the prompt

    # Number of answer tokens that keep their KV; 0: all. It is set when the request is queued.
    kv_budget: int = 0

    # Whether the prompt is computed before a request asks for it, so that no statistics count it.
    is_idle_prefill: bool = False


PLAIN_REQUEST = RequestExtras()


class Transfer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """KV pages of a request that come from a tier or another engine, or go to another engine.

    ``hands_over``: when the request ends, the pages of its prompt are held for another engine,
    unless the request was aborted. Requests without transfers use `NO_TRANSFER`.
    """

    hands_over: bool = False
    handed: HeldPages | None = None  # pages held for another engine; None until they are held
    offer: PageOffer | None = None  # pages of a peer that the request may still read

    # Load of pages from a tier, which begins with a look-up while the request waits.
    load: PageLoad | None = None


NO_TRANSFER = Transfer()


def request_extras(
    adapter: Adapter | None, images: tuple[PromptImage, ...], branches: Branches | None = None
) -> RequestExtras:
    """Return the extras of a new request; `PLAIN_REQUEST` if it has no extras."""
    if adapter is None and not images and branches is None:
        return PLAIN_REQUEST
    return RequestExtras(adapter=adapter, images=images, branches=branches)
