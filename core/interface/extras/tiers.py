"""Tiers: stores that keep KV pages beyond the pool, as the engine knows them.

Calls that may take long are made in a thread of their own, the I/O thread. No token depends on a
tier: a page that is missing, late or unsound is computed.
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
    """Keeps pages by key, as bytes of one fixed length. Called in the I/O thread.

    Any method may raise OSError: then the caller leaves the store alone for a while.
    """

    medium: Medium  # the kind of memory, by which metrics name the store
    capacity: int  # number of pages that fit

    def __len__(self) -> int:
        """Return how many pages are kept; any thread may ask."""

    def find(self, keys: Sequence[bytes]) -> int:
        """Return how many of ``keys``, from the first on, are kept. It may be wrong."""

    def get(self, key: bytes, into: memoryview) -> bool:
        """Read a page. False means that it is missing or unsound: then ``into`` is void."""

    def put(self, key: bytes, tag: bytes, page: memoryview, is_valid: IsValid) -> bool:
        """Keep a page; return whether it is kept now.

        ``page`` may change while it is read: ``is_valid`` is called when it was read, and only if
        it returns true the page can be found. ``tag``: 8 bytes that name the key's namespace.
        """

    def flush(self, tag: bytes | None = None) -> None:
        """Forget the pages of a namespace, of all when none is named."""

    def stats(self) -> Mapping[str, int]:
        """Return counts of pages that were given up, by cause; any thread may ask."""

    def close(self) -> None:
        """Write what is not written yet, and let go of files and connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierState:
    """A tier as it is now; counts since the start, in pages unless they say otherwise."""

    medium: Medium
    pages: int  # kept now
    capacity_pages: int
    loaded_pages: int
    load_seconds: float
    saved_pages: int
    queued_pages: int  # that wait to be saved
    dropped_pages: Mapping[str, int]  # by cause, before they were kept or later
    times_closed: int  # how often it was left alone, because it failed or was late
    is_open: bool


class KVTiers(Protocol):
    """All stores of an engine. The first group is called in the I/O thread, all else on the loop.

    None of them raises for what a store does.
    """

    # -- in the I/O thread

    def find(self, tokens: array[int], namespace: str | None, first: int) -> list[bytes]:
        """Keys of the first pages of ``tokens``, as far as those from page ``first`` on are kept.

        Empty if page ``first`` is not. Where states are kept, up to the last page that has one.
        """

    def load(self, keys: Sequence[bytes], page_ids: array[int]) -> int:
        """Write pages into the pool; return how many, from the first on, are whole."""

    def load_state(self, key: bytes, slot: int, position: int) -> bool:
        """Write the recurrent state behind the page of a key, and so many tokens, into a slot.

        Return whether it is whole.
        """

    def save(self) -> None:
        """Write some of the pages that have joined the tree to the stores."""

    def flush(self, namespaces: Sequence[str | None]) -> None:
        """Forget the pages of these namespaces, of all when none is named."""

    def meet(self, offer: PageOffer) -> None:
        """Reach the peer whose pages a request may read, before they are looked up."""

    def renew_offers(self) -> None:
        """Ask the peers of all offers to hold the pages for longer."""

    def end_offer(self, offer: PageOffer) -> None:
        """Let the peer of an offer free the pages, whether they were read or not."""

    def close(self) -> None:
        """Close the stores."""

    # -- on the loop

    least_tokens: int  # the least number of tokens that are worth a load

    @property
    def pages_per_call(self) -> int:
        """Number of pages that one call of `load` should be given: others wait for its end."""

    @property
    def num_state_pages(self) -> int:
        """Pages that are as large as a recurrent state, which is loaded with them; 0: none is."""

    @property
    def is_open(self) -> bool:
        """Whether some store may be asked now."""

    @property
    def has_saves(self) -> bool:
        """Whether `save` has something to do."""

    @property
    def refused_offers(self) -> Mapping[Refusal, int] | None:
        """Count the offers that were of no use, by cause; None where no peers are read."""

    def watch_saves(self, on_saves: Callable[[], None]) -> None:
        """Have ``on_saves`` called whenever `save` gets something to do."""

    def load_seconds(self, num_pages: int) -> float:
        """Estimate how long it takes to load so many pages; 0 if nothing was loaded yet."""

    def note_late(self) -> None:
        """Note that a load took too long: if that repeats, its store is left alone for a while.

        Peers do not count: each is left alone by itself.
        """

    def checks(self) -> Steps:
        """Assert that keys and pages agree, in steps between which nothing may change."""

    def describe(self) -> Sequence[TierState]:
        """Describe each tier, for reports and metrics."""


def _no_pages() -> array[int]:
    return array("q")


@dataclass(slots=True, eq=False)
class PageLoad:
    """The pages of one request that the pool lacks: first looked up, then loaded.

    Pages under I/O belong to a lease that is not released before the call has ended.
    """

    request_id: str
    tokens: array[int]  # a copy
    namespace: str | None
    first: int  # index of the first page that the pool lacks
    due: float  # when the request stops waiting for it
    keys: list[bytes] = field(default_factory=list)  # of its pages from the beginning, once found
    is_found: bool = False
    page_ids: array[int] = field(
        default_factory=_no_pages
    )  # [num_pages] to load into, once admitted
    num_loaded: int = 0  # of these pages
    state_slot: int | None = None  # of the state behind the last page, while it is loaded
    lacks_state: bool = False  # it is to be loaded, before the pages
    state_position: int = 0  # tokens before it
    is_in_thread: bool = False  # the I/O thread is in a call for it
    is_over: bool = False  # the request does not wait for it any more
    offer: PageOffer | None = None  # of the request, when it was to be looked up
