"""Adapter: what changes a model's weights for some requests of a batch."""

from __future__ import annotations


class Adapter:
    """Weights beside a model's own, opaque to all but the decoder that they were made for.

    Requests, plans and batches refer to the object itself: its memory is free as soon as none of
    them needs it any more.
    """

    __slots__ = ("__weakref__",)
