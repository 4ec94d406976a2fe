"""Router: chooses a request's replica by the replicas' cached pages and owed tokens.

Replicas report the pages that join and leave their prefix caches by keys of `KEY_BYTES`. The router
makes the keys of a prompt's pages from the same fingerprint (core/tiers/keys.py), so it compares no
token ids. It has no sockets and no clock: callers pass messages, in order, and the time.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count, islice
from typing import Generic, NamedTuple, TypeVar

from ....core.interface.request import DEFAULT_CACHE, CacheOptions
from ....core.tiers.keys import chain_keys, root_key
from ..wire.messages import KEY_BYTES

SENT_SECONDS = 2.0  # time for which a sent prompt's pages count as stored
ANSWER_TOKENS = 64  # least tokens that a live request owes, since it takes part in steps
MAX_OVER_MEAN = 1.25  # a replica that owes more, relative to the mean, gets no new request
R = TypeVar("R", bound=Hashable)


class Route(StrEnum):
    """Ways to choose the replica of a request."""

    KV = "kv"  # fewest tokens to compute until the prompt is computed, with cache hits
    SESSION = "session"  # one replica for a session, unless it owes far more than the others
    EVEN = "even"  # fewest tokens owed


@dataclass(frozen=True, slots=True)
class Choice(Generic[R]):
    """A replica for a request. Counts are tokens."""

    replica: R
    hit_tokens: int  # prompt tokens that are probably cached there
    owed: int  # tokens that the request adds to the replica's owed ones, at least `ANSWER_TOKENS`
    num_tokens: int  # prompt tokens


class _Seed(NamedTuple):
    """The seed of page keys. Replicas with equal seeds have equal keys for equal tokens."""

    fingerprint: bytes | None  # None: the replica has no keys
    page_size: int


@dataclass(slots=True, eq=False)
class _Replica(Generic[R]):
    """A replica that has joined. No key is both in ``pages`` and in ``sent``."""

    name: R
    seed: _Seed
    pages: set[bytes] = field(default_factory=set)  # keys of the pages that it reports as stored
    # The time until which each sent page counts as stored, by key, earliest first.
    sent: OrderedDict[bytes, float] = field(default_factory=OrderedDict)
    owed: int = 0  # tokens left to compute for its requests
    num_requests: int = 0
    last_turn: int = 0  # number of the last choice of this replica; 0: never chosen
    is_leaving: bool = False

    def mark_sent(self, keys: Iterable[bytes], end: float) -> None:
        """Treat pages that a sent request will store as stored until ``end``. O(pages)."""
        for key in keys:
            if key not in self.pages:
                self.sent[key] = end
                self.sent.move_to_end(key)

    def forget_sent(self, now: float) -> None:
        """Drop the pages of `mark_sent` whose end has passed. O(1) for each page."""
        while self.sent and next(iter(self.sent.values())) <= now:
            self.sent.popitem(last=False)


@dataclass(slots=True, eq=False)
class _Request(Generic[R]):
    """A live request: its replica, its tokens and its owed tokens."""

    replica: _Replica[R]
    num_tokens: int
    owed: int


class _Keys:
    """Keys of a prompt's whole pages. Each is computed once, at its first use."""

    def __init__(self, seed: _Seed, tokens: array[int], namespace: str | None) -> None:
        self._made: list[bytes] = []
        self._rest: Iterator[bytes] = iter(())
        if seed.fingerprint is not None:
            self._rest = chain_keys(root_key(seed.fingerprint, namespace), tokens, seed.page_size)

    def __iter__(self) -> Iterator[bytes]:
        yield from self._made
        for key in self._rest:
            self._made.append(key[:KEY_BYTES])
            yield self._made[-1]


@dataclass(slots=True, eq=False)
class _Offer(Generic[R]):
    """A replica, and the part of a prompt that its cache has. Counts are tokens."""

    replica: _Replica[R]
    num_tokens: int  # prompt tokens
    hit: int = 0
    hit_under_way: int = 0  # part of the hit that was just sent and is not reported as stored yet

    def has(self, key: bytes) -> bool:
        """Whether the replica has a page of the prompt, or is about to store it.

        A page that is about to be stored is added to ``hit_under_way``.
        """
        if key in self.replica.pages:
            return True
        is_under_way = key in self.replica.sent
        self.hit_under_way += is_under_way * self.replica.seed.page_size
        return is_under_way

    @property
    def owed(self) -> int:
        """Tokens that the request would add to the replica's owed tokens."""
        return max(self.num_tokens - self.hit, ANSWER_TOKENS)

    @property
    def rank_by_wait(self) -> tuple[int, ...]:
        """Sort key: tokens to compute until the prompt is computed, fewest first.

        A prefix of the prompt that the replica is computing for another request is subtracted from
        its owed tokens: any other replica would have to compute it, too. Requests that share a
        prefix therefore stay on one replica until its other work exceeds the tokens that the prefix
        saves.
        """
        others = self.replica.owed - min(self.hit_under_way, self.replica.owed)
        return others + self.num_tokens - self.hit, *self._rank_by_turn

    @property
    def rank_by_owed(self) -> tuple[int, ...]:
        """Sort key: owed tokens, fewest first."""
        return self.replica.owed, *self._rank_by_turn

    @property
    def _rank_by_turn(self) -> tuple[int, int]:
        # Idle replicas take turns, since otherwise only the first one's cache would fill.
        return self.replica.num_requests, self.replica.last_turn


class Router(Generic[R]):
    """Chooses replicas for requests, and counts each replica's owed tokens.

    A request owes the tokens of its prompt that are not computed yet, and at least `ANSWER_TOKENS`
    until it ends. Messages about unknown requests, and about replicas that have not joined or have
    left, are ignored: they may have been sent before the replica left.
    """

    def __init__(self, route: Route, *, fingerprint: bytes | None) -> None:
        """Create a router; ``fingerprint`` is the default for replicas that join without one."""
        self._route = route
        self._fingerprint = fingerprint
        self._replicas: dict[R, _Replica[R]] = {}  # sorted by time of joining
        self._requests: dict[str, _Request[R]] = {}
        self._turns = count(1)

    # -- replicas

    def join(self, replica: R, *, page_size: int, fingerprint: bytes | None) -> None:
        """Send requests to a replica from now on. Raises ValueError if it has joined already.

        ``fingerprint`` and ``page_size`` (tokens) come from the replica's `PageKeys`. Without any
        fingerprint, none of its tokens count as cached.
        """
        if replica in self._replicas:
            raise ValueError(f"the replica {replica!r} has already joined")
        seed = _Seed(fingerprint or self._fingerprint, page_size)
        self._replicas[replica] = _Replica(replica, seed)

    def leave(self, replica: R) -> None:
        """Remove a replica that is gone.

        The owed tokens of its requests count at no replica until `begin` assigns the requests
        again.
        """
        self._replicas.pop(replica, None)

    def retire(self, replica: R) -> None:
        """Send no new request to a replica; its present requests still count."""
        if (found := self._replicas.get(replica)) is not None:
            found.is_leaving = True
            found.pages.clear()

    def owed(self, replica: R) -> int:
        """Return the number of tokens that a replica owes; 0 for an unknown one."""
        found = self._replicas.get(replica)
        return 0 if found is None else found.owed

    def num_pages(self, replica: R) -> int:
        """Return the number of pages that a replica reports as stored; 0 for an unknown one."""
        found = self._replicas.get(replica)
        return 0 if found is None else len(found.pages)

    # -- pages

    def stored(self, replica: R, keys: Sequence[bytes]) -> None:
        """Record pages that joined a replica's prefix cache. O(pages)."""
        found = self._replicas.get(replica)
        if found is None or found.is_leaving:
            return
        found.pages.update(keys)
        for key in keys:
            found.sent.pop(key, None)

    def dropped(self, replica: R, keys: Sequence[bytes]) -> None:
        """Record pages that left a replica's prefix cache; unknown ones are ignored. O(pages)."""
        if (found := self._replicas.get(replica)) is not None:
            found.pages.difference_update(keys)

    # -- requests

    def choose(
        self,
        tokens: array[int],
        namespace: str | None,
        *,
        session: str | None,
        now: float,
        excluded: Collection[R] = (),
        cache: CacheOptions = DEFAULT_CACHE,
        is_sent: bool = True,
        is_idle_prefill: bool = False,
    ) -> Choice[R] | None:
        """Return the replica for a request that is sent now, or None if all are excluded.

        If ``is_sent`` is false, the request is not sent now, and no state changes.
        ``is_idle_prefill``: the request computes the next pages of a prompt in advance. Unless its
        session decides, it belongs where the pages before are, whatever the route.

        ``tokens``: all tokens of the request, including its output so far. ``now``: seconds on a
        monotonic clock. ``excluded``: replicas that cannot take the request. The request's pages
        count as stored at the chosen replica for `SENT_SECONDS`. O(pages of the prompt) for each
        replica that has them.
        """
        offers = [
            _Offer(each, len(tokens))
            for each in self._replicas.values()
            if not (each.is_leaving or each.name in excluded)
        ]
        if not offers:
            return None
        keys = {seed: _Keys(seed, tokens, namespace) for seed in {o.replica.seed for o in offers}}
        for each in offers:
            each.replica.forget_sent(now)
        for seed in keys if cache.read else ():
            _find_pages([each for each in offers if each.replica.seed == seed], keys[seed])
        session = namespace if session is None else session
        best = self._best(offers, session, is_idle_prefill=is_idle_prefill)
        if is_sent:
            best.replica.last_turn = next(self._turns)
        if is_sent and cache.write:
            best.replica.mark_sent(keys[best.replica.seed], now + SENT_SECONDS)
        return Choice(best.replica.name, best.hit, best.owed, best.num_tokens)

    def begin(self, request_id: str, choice: Choice[R]) -> None:
        """Count a request at the chosen replica, and no longer at an earlier replica.

        Raises ValueError if the chosen replica has left.
        """
        if (found := self._replicas.get(choice.replica)) is None:
            raise ValueError(f"unknown replica {choice.replica!r}")
        self.end(request_id)
        self._requests[request_id] = _Request(found, choice.num_tokens, choice.owed)
        found.owed += choice.owed
        found.num_requests += 1

    def progress(self, request_id: str, num_computed: int) -> None:
        """Record that the first ``num_computed`` tokens of a request are computed.

        When the first output token arrives, all tokens that were sent are computed. O(1).
        """
        if (request := self._requests.get(request_id)) is not None:
            left = max(request.num_tokens - num_computed, ANSWER_TOKENS)
            request.replica.owed += min(left - request.owed, 0)
            request.owed = min(left, request.owed)

    def end(self, request_id: str) -> None:
        """Stop counting a request that has ended or is about to be sent to another replica."""
        if (request := self._requests.pop(request_id, None)) is not None:
            request.replica.owed -= request.owed
            request.replica.num_requests -= 1

    def _best(
        self, offers: list[_Offer[R]], session: str | None, *, is_idle_prefill: bool
    ) -> _Offer[R]:
        if self._route is Route.SESSION and session is not None:
            return _of_session(offers, session)
        if self._route is Route.KV or is_idle_prefill:
            return min(offers, key=lambda each: each.rank_by_wait)
        return min(offers, key=lambda each: each.rank_by_owed)


def _find_pages(offers: list[_Offer[R]], keys: Iterable[bytes]) -> None:
    """Count the leading tokens of a prompt that each replica has in its cache.

    All replicas in ``offers`` use ``keys``. The last token of the prompt never counts, because its
    logits must be computed.
    """
    page_size, num_tokens = offers[0].replica.seed.page_size, offers[0].num_tokens
    for key in islice(keys, max(num_tokens - 1, 0) // page_size):
        offers = [each for each in offers if each.has(key)]
        if not offers:
            return
        for each in offers:
            each.hit += page_size


def _of_session(offers: list[_Offer[R]], session: str) -> _Offer[R]:
    """Return the first replica in the session's order that does not owe too much.

    The order is by rendezvous hashing: when a replica joins or leaves, only the sessions that it
    gains or loses move. A replica owes too much if it owes more than `MAX_OVER_MEAN` times the mean
    plus this request's tokens.
    """

    def weight(offer: _Offer[R]) -> bytes:
        name = repr(offer.replica.name).encode()
        return hashlib.blake2b(session.encode(), key=hashlib.blake2b(name).digest()).digest()

    mean = sum(each.replica.owed for each in offers) / len(offers)
    return next(
        each
        for each in sorted(offers, key=weight)
        if each.replica.owed <= MAX_OVER_MEAN * mean + each.owed
    )
