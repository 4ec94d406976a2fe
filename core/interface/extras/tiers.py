"""Tiers: stores that keep KV pages outside the pool, as the engine sees them.

Slow calls are made in a thread of their own, the I/O thread. No token depends on a tier: a page
that is missing, late or damaged is computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ....radix_cache.audit import Steps
from .transfers import PageOffer, Refusal

Medium = Literal["host", "disk", "remote", "peer"]
IsValid = Callable[[], bool]


class PageStore(Protocol):
    """Store of pages by key, as bytes of one fixed length. Called in the I/O thread.

    Any method may raise OSError: then the caller does not use the store for a while.
    """

    medium: Medium  # kind of memory, which names the store in metrics
    capacity: int  # largest number of pages

    def __len__(self) -> int:
        """Return the number of pages; any thread may call it."""

    def find(self, keys: Sequence[bytes]) -> int:
        """Return an estimate of how many leading ``keys`` are stored; `get` may still fail."""

    def get(self, key: bytes, into: memoryview) -> bool:
        """Read a page into ``into``; return False if it is missing or damaged.

        In that case the content of ``into`` must not be used.
        """

    def put(self, key: bytes, tag: bytes, page: memoryview, is_valid: IsValid) -> bool:
        """Store a page; return whether it is stored now.

        ``page`` may change while it is read: ``is_valid`` is called after the reading, and only if
        it returns true the page becomes findable. ``tag``: 8 bytes that name the key's namespace.
        """

    def flush(self, tag: bytes | None = None) -> None:
        """Forget the pages of a namespace, by default of all."""

    def stats(self) -> Mapping[str, int]:
        """Return counts of lost pages by cause; any thread may call it."""

    def close(self) -> None:
        """Write pending pages, and close files and connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierState:
    """Present state of a tier; counts since the start, in pages unless stated otherwise."""

    medium: Medium
    pages: int  # pages stored now
    capacity_pages: int
    loaded_pages: int
    load_seconds: float
    saved_pages: int
    queued_pages: int  # pages that wait to be saved
    dropped_pages: Mapping[str, int]  # number of pages dropped, by cause
    times_closed: int  # times that it was closed for a while, because it failed or was late
    is_open: bool


class KVTiers(Protocol):
    """All stores of an engine: methods for the I/O thread, then methods for the event loop.

    No method raises an error of a store.
    """

    # -- in the I/O thread

    def find(self, tokens: array[int], namespace: str | None, first: int) -> list[bytes]:
        """Return the keys of the first pages of ``tokens``, up to the last stored page.

        Pages before page ``first`` are taken as present. Returns an empty list if page ``first`` is
        not stored. For a model with recurrent states, the last returned page has a stored state.
        """

    def load(self, keys: Sequence[bytes], page_ids: array[int]) -> int:
        """Write pages into the pool; return how many of the first ones are complete and valid."""

    def load_state(self, key: bytes, slot: int, position: int) -> bool:
        """Write the state after ``position`` tokens into a slot; return whether it is valid.

        ``key``: key of the page that ends at ``position``.
        """

    def save(self) -> None:
        """Write some of the pages that have joined the tree to the stores."""

    def flush(self, namespaces: Sequence[str | None]) -> None:
        """Forget the pages of some namespaces, by default of all."""

    def meet(self, offer: PageOffer) -> None:
        """Connect to the engine whose pages a request may read, before they are looked up."""

    def renew_offers(self) -> None:
        """Ask the peers of all offers to hold the pages for longer."""

    def end_offer(self, offer: PageOffer) -> None:
        """Let the peer of an offer free the pages, whether they were read or not."""

    def close(self) -> None:
        """Close the stores."""

    # -- on the loop

    least_tokens: int  # least number of tokens that are worth a load

    @property
    def pages_per_call(self) -> int:
        """Number of pages for one call of `load`, so that other loads do not wait for long."""

    @property
    def num_state_pages(self) -> int:
        """Size in pages of a recurrent state, which is loaded with the pages; 0 without states."""

    @property
    def is_open(self) -> bool:
        """Whether at least one store may be used now."""

    @property
    def has_saves(self) -> bool:
        """Whether `save` has something to do."""

    @property
    def refused_offers(self) -> Mapping[Refusal, int] | None:
        """Number of unused offers by cause; None if this engine reads no pages of other engines."""

    def watch_saves(self, on_saves: Callable[[], None]) -> None:
        """Call ``on_saves`` whenever `save` gets something to do."""

    def load_seconds(self, num_pages: int) -> float:
        """Estimate the seconds to load ``num_pages``; 0 if nothing was loaded yet."""

    def note_late(self) -> None:
        """Record that a load took too long: after repeated calls its store is not used for a while.

        Other engines are not counted: each of them is closed separately.
        """

    def checks(self) -> Steps:
        """Assert that keys and pages agree, in steps between which nothing may change."""

    def describe(self) -> Sequence[TierState]:
        """Describe each tier, for reports and metrics."""


def _no_pages() -> array[int]:
    return array("q")


@dataclass(slots=True, eq=False)
class PageLoad:
    """Pages of one request that the pool lacks: first looked up, then loaded.

    The lease of pages that the I/O thread reads or writes is not released before its call has
    ended.
    """

    request_id: str
    tokens: array[int]  # a copy of the request's tokens
    namespace: str | None
    first: int  # index of the first page that the pool lacks
    due: float  # time when the request stops waiting for it

    # keys of the request's pages from the first page on, once the look-up has ended
    keys: list[bytes] = field(default_factory=list)
    is_found: bool = False
    page_ids: array[int] = field(
        default_factory=_no_pages
    )  # [num_pages] pages to load into, once admitted
    num_loaded: int = 0  # number of loaded pages
    state_slot: int | None = None  # slot for the state after the last page, while it is loaded
    lacks_state: bool = False  # the state is still to be loaded, before the pages
    state_position: int = 0  # tokens before the state
    is_in_thread: bool = False  # the I/O thread is in a call for it
    is_over: bool = False  # the request does not wait for it any more
    offer: PageOffer | None = None  # the request's offer at the time of the look-up
