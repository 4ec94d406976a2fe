"""KV tiers: the protocol of stores that keep KV pages outside the pool.

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
    """Store of pages by key. Each page is a byte string of the same length.

    Methods are called in the I/O thread. Any method may raise OSError; then the caller does not use
    the store for a while.
    """

    medium: Medium  # kind of memory, by which metrics name the store
    capacity: int  # maximum number of pages

    def __len__(self) -> int:
        """Return the number of stored pages; any thread may call this."""

    def find(self, keys: Sequence[bytes]) -> int:
        """Return an estimate of how many leading ``keys`` are stored; `get` may still fail."""

    def get(self, key: bytes, into: memoryview) -> bool:
        """Read a page into ``into``; return False if the page is missing or damaged.

        After False, the content of ``into`` must not be used.
        """

    def put(self, key: bytes, tag: bytes, page: memoryview, is_valid: IsValid) -> bool:
        """Store a page; return whether it is stored now.

        ``page`` may change while the store reads it. So ``is_valid`` is called after the reading,
        and `find` and `get` find the page only if it returned true. ``tag``: 8 bytes that name the
        namespace of the page.
        """

    def flush(self, tag: bytes | None = None) -> None:
        """Drop the pages of the namespace ``tag``; None: of all namespaces."""

    def stats(self) -> Mapping[str, int]:
        """Return the number of lost pages by cause; any thread may call this."""

    def close(self) -> None:
        """Write pending pages, and close files and connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierState:
    """State of a tier. Counts are in pages unless stated otherwise, and since the start."""

    medium: Medium
    pages: int  # number of pages stored now
    capacity_pages: int
    loaded_pages: int
    load_seconds: float
    saved_pages: int
    queued_pages: int  # number of pages that wait to be saved now
    dropped_pages: Mapping[str, int]  # number of dropped pages by cause
    times_closed: int  # number of times that the store was not used for a while after failures
    is_open: bool


class KVTiers(Protocol):
    """All stores of an engine. No method raises an error of a store.

    The methods up to `close` are called in the I/O thread, the others on the event loop.
    """

    # -- in the I/O thread

    def find(self, tokens: array[int], namespace: str | None, first: int) -> list[bytes]:
        """Return the keys of the leading pages of ``tokens``, up to the last stored page.

        The pages before page ``first`` are in the pool and need not be stored. Returns an empty
        list if page ``first`` is not stored. For a model with recurrent states, the last returned
        page has a stored state.
        """

    def load(self, keys: Sequence[bytes], page_ids: array[int]) -> int:
        """Load pages into the pool; return how many leading pages are complete and valid."""

    def load_state(self, key: bytes, slot: int, position: int) -> bool:
        """Load the recurrent state after ``position`` tokens into a slot; return its validity.

        ``key``: key of the page that ends at ``position``.
        """

    def save(self) -> None:
        """Write some pages that were published to the tree to the stores."""

    def flush(self, namespaces: Sequence[str | None]) -> None:
        """Drop the pages of ``namespaces``; if empty, of all namespaces."""

    def meet(self, offer: PageOffer) -> None:
        """Connect to the peer that made ``offer``, before its pages are looked up."""

    def renew_offers(self) -> None:
        """Ask the peers of all offers to hold the pages for longer."""

    def end_offer(self, offer: PageOffer) -> None:
        """Tell the peer that made ``offer`` that it may free the pages."""

    def close(self) -> None:
        """Close the stores."""

    # -- on the loop

    least_tokens: int  # minimum number of tokens that are worth a load

    @property
    def pages_per_call(self) -> int:
        """Maximum number of pages for one call of `load`, so that other calls do not wait long."""

    @property
    def num_state_pages(self) -> int:
        """Size of a recurrent state in units of a page's size; 0 if the model has no states."""

    @property
    def is_open(self) -> bool:
        """Whether at least one store may be used now."""

    @property
    def has_saves(self) -> bool:
        """Whether `save` has something to do."""

    @property
    def refused_offers(self) -> Mapping[Refusal, int] | None:
        """Number of offers that were not used, by cause; None if this engine takes no offers."""

    def watch_saves(self, on_saves: Callable[[], None]) -> None:
        """Call ``on_saves`` whenever `has_saves` becomes true."""

    def load_seconds(self, num_pages: int) -> float:
        """Return the estimated seconds to load ``num_pages``; 0 if nothing was loaded yet."""

    def note_late(self) -> None:
        """Record that a load took too long; after several such loads a store is suspended.

        Loads from other engines do not count, because each engine is suspended separately.
        """

    def checks(self) -> Steps:
        """Assert that keys and pages agree, one part each iteration.

        Nothing may change until the last iteration.
        """

    def describe(self) -> Sequence[TierState]:
        """Return the state of each tier, for reports and metrics."""


def _no_pages() -> array[int]:
    return array("q")


@dataclass(slots=True, eq=False)
class PageLoad:
    """Look-up, then load, of the pages of one request that are not in the pool.

    The pages that the I/O thread writes to are not released before its call has ended.
    """

    request_id: str
    tokens: array[int]  # a copy of the request's tokens
    namespace: str | None
    first: int  # index of the first page that is not in the pool
    due: float  # time at which the request stops waiting for the look-up or load

    # keys of the request's pages from its first page on; set by the look-up
    keys: list[bytes] = field(default_factory=list)
    is_found: bool = False
    # [num_pages] ids of the pages to load into; empty until the request is admitted
    page_ids: array[int] = field(default_factory=_no_pages)
    num_loaded: int = 0  # number of loaded pages
    state_slot: int | None = None  # slot for the recurrent state after the last page
    lacks_state: bool = False  # whether the state is not loaded yet; it is loaded before the pages
    state_position: int = 0  # number of tokens before the state
    is_in_thread: bool = False  # whether the I/O thread is in a call for this load
    is_over: bool = False  # whether the request no longer waits for this look-up or load
    offer: PageOffer | None = None  # the request's offer at the time of the look-up
