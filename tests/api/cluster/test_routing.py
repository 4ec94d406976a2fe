"""The choice of a replica for a request, by what each has cached and what it owes."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain

import pytest

from foretoken.api.cluster.front.routing import (
    ANSWER_TOKENS,
    MAX_OVER_MEAN,
    SENT_SECONDS,
    Choice,
    Route,
    Router,
)
from foretoken.api.cluster.wire.messages import KEY_BYTES
from foretoken.core.interface.request import CacheOptions
from foretoken.core.tiers.keys import chain_keys, root_key
from support.virtual_replicas import FINGERPRINT, VirtualCluster, VirtualReplica

A, B, C = b"a", b"b", b"c"
PAGE = 16
UNSEEN = CacheOptions(write=False)  # leaves no mark


def prompt(*parts: tuple[int, int]) -> array[int]:
    """Tokens by pairs of a number and a length: equal pairs are equal tokens."""
    tokens = array("q")
    for number, length in parts:
        tokens.extend(range(number * 10_000, number * 10_000 + length))
    return tokens


def keys_of(
    tokens: array[int], namespace: str | None = None, fingerprint: bytes = FINGERPRINT
) -> list[bytes]:
    before = root_key(fingerprint, namespace)
    return [key[:KEY_BYTES] for key in chain_keys(before, tokens, PAGE)]


def router_of(
    *names: bytes, route: Route = Route.KV, fingerprint: bytes | None = FINGERPRINT
) -> Router[bytes]:
    router: Router[bytes] = Router(route, fingerprint=None)
    for each in names:
        router.join(each, page_size=PAGE, fingerprint=fingerprint)
    return router


def choose(
    router: Router[bytes],
    tokens: array[int],
    namespace: str | None = None,
    *,
    session: str | None = None,
    now: float = 0.0,
    excluded: Collection[bytes] = (),
    cache: CacheOptions = UNSEEN,
) -> Choice[bytes]:
    choice = router.choose(
        tokens, namespace, session=session, now=now, excluded=excluded, cache=cache
    )
    assert choice is not None
    return choice


def load(router: Router[bytes], replica: bytes, num_tokens: int, request_id: str = "") -> None:
    """Make a replica owe so many more tokens."""
    router.begin(request_id or f"load {replica!r}", Choice(replica, 0, num_tokens, num_tokens))


class Sender:
    """Sends requests at one time, and counts them by replica."""

    def __init__(self, router: Router[bytes], now: float = 0.0) -> None:
        self.router, self.now = router, now
        self.sent: Counter[bytes] = Counter()

    def send(self, tokens: array[int], session: str | None = None) -> Choice[bytes]:
        choice = self.router.choose(tokens, None, session=session, now=self.now)
        assert choice is not None
        self.router.begin(f"request {self.sent.total()}", choice)
        self.sent[choice.replica] += 1
        return choice


# -- pages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_hit_is_what_the_replicas_cache_would_find(page_size: int) -> None:
    rng = random.Random(page_size)
    replicas = [VirtualReplica(name, 12, page_size) for name in (A, B)]
    router: Router[bytes] = Router(Route.KV, fingerprint=None)
    for each in replicas:
        router.join(each.name, page_size=page_size, fingerprint=each.fingerprint)
    num_hits = 0
    for _ in range(1_000):
        pages = rng.choices(([0] * page_size, [1] * page_size), k=8)
        tokens = array("q", chain.from_iterable(pages))[: rng.randrange(1, 8 * page_size)]
        namespace = rng.choice([None, "", "salt"])
        for each in replicas:
            others = {A, B} - {each.name}
            choice = choose(router, tokens, namespace, excluded=others)
            assert choice.replica == each.name
            assert choice.hit_tokens == each.cache.match_len(tokens, namespace=namespace)
            num_hits += choice.hit_tokens > 0
        chosen = rng.choice(replicas)
        chosen.serve(tokens, namespace)
        if rng.random() < 0.05:
            chosen.cache.flush()
        chosen.report(router)
        assert router.num_pages(chosen.name) == chosen.cache.tree.num_pages
    assert num_hits > 500


def eight_beginnings(seed: int, per_second: float) -> list[tuple[float, array[int]]]:
    """Prompts of 560 tokens, of which 512 are one of 8 beginnings, and their arrivals."""
    rng = random.Random(seed)
    now, found = 0.0, []
    for number in range(240):
        now += rng.expovariate(per_second)
        found.append((now, prompt((rng.randrange(8), 512), (100 + number, 48))))
    return found


@pytest.mark.parametrize("per_second", [1.0, 4.0, 7.0], ids=["idle", "busy", "full"])
def test_routing_by_keys_finds_more_than_even_routing(per_second: float) -> None:
    """Two pools of 3,072 tokens: five of the beginnings fit into one, and all into both."""
    rates = {}
    for route in (Route.KV, Route.EVEN):
        replicas = [VirtualReplica(name, 3072 // PAGE, PAGE) for name in (A, B)]
        cluster = VirtualCluster(Router(route, fingerprint=None), replicas)
        rates[route] = cluster.run(eight_beginnings(1, per_second))
        share = Counter(each.replica for each in cluster.choices)
        assert min(share.values()) > 240 / 4
        assert router_owes_nothing(cluster.router)
    assert rates[Route.KV] > 0.75
    assert rates[Route.KV] - rates[Route.EVEN] > 0.2


def router_owes_nothing(router: Router[bytes]) -> bool:
    return router.owed(A) == router.owed(B) == 0


def test_the_replica_with_the_least_to_compute_is_chosen() -> None:
    router = router_of(A, B)
    tokens = prompt((1, 320), (2, 80))
    router.stored(B, keys_of(tokens[:320]))
    assert choose(router, tokens) == Choice(B, 320, 80, 400)
    load(router, B, 319)
    assert choose(router, tokens).replica == B
    load(router, B, 2, "one more")
    assert choose(router, tokens) == Choice(A, 0, 400, 400)


def test_of_equal_replicas_the_one_with_fewest_requests_is_chosen_then_each_in_turn() -> None:
    router = router_of(A, B, C)
    assert [choose(router, prompt((n, 40))).replica for n in range(6)] == [A, B, C, A, B, C]
    for n, owed in enumerate((100, 100, 200)):
        load(router, A if n < 2 else B, owed, str(n))
    load(router, C, 200)
    load(router, C, 0, "a third one there")
    assert choose(router, prompt((7, 40))).replica == B


def test_pages_behind_a_gap_are_not_found() -> None:
    router = router_of(A)
    tokens = prompt((1, 100))
    keys = keys_of(tokens)
    router.stored(A, [*keys[:2], *keys[3:]])
    assert choose(router, tokens).hit_tokens == 2 * PAGE
    router.dropped(A, keys[:1])
    assert choose(router, tokens).hit_tokens == 0


def test_the_last_token_is_never_found() -> None:
    router = router_of(A)
    tokens = prompt((1, 4 * PAGE))
    router.stored(A, keys_of(tokens))
    assert choose(router, tokens).hit_tokens == 3 * PAGE
    assert choose(router, array("q")) == Choice(A, 0, ANSWER_TOKENS, 0)


def test_pages_that_are_stored_twice_or_were_never_stored_are_no_error() -> None:
    router = router_of(A)
    tokens = prompt((1, 100))
    keys = keys_of(tokens)
    router.dropped(A, keys)
    router.stored(A, keys)
    router.stored(A, keys)
    assert choose(router, tokens).hit_tokens == 96
    router.dropped(A, keys[4:])
    assert choose(router, tokens).hit_tokens == 64
    assert router.num_pages(A) == 4


def test_replicas_with_other_kernels_are_found_by_their_own_keys() -> None:
    router: Router[bytes] = Router(Route.KV, fingerprint=b"of those without one")
    for name, fingerprint in ((A, b"one"), (B, b"other"), (C, None)):
        router.join(name, page_size=PAGE, fingerprint=fingerprint)
    tokens = prompt((1, 160))
    for name in (A, B, C):
        router.stored(name, keys_of(tokens[:32], fingerprint=b"one"))
    router.stored(B, keys_of(tokens[:96], fingerprint=b"other"))
    router.stored(C, keys_of(tokens[:64], fingerprint=b"of those without one"))

    def hits(name: bytes) -> int:
        return choose(router, tokens, excluded={A, B, C} - {name}).hit_tokens

    assert [hits(name) for name in (A, B, C)] == [32, 96, 64]
    assert choose(router, tokens).replica == B


def test_without_any_fingerprint_nothing_counts_as_cached() -> None:
    router = router_of(A, B, fingerprint=None)
    sender = Sender(router)
    assert [sender.send(prompt((1, 320))).hit_tokens for _ in range(4)] == [0] * 4
    assert sender.sent == {A: 2, B: 2}


def test_a_request_that_reads_no_cache_goes_where_the_least_waits() -> None:
    router = router_of(A, B)
    tokens = prompt((1, 320))
    router.stored(B, keys_of(tokens))
    load(router, B, 100)
    private = CacheOptions(read=False, write=False)
    assert choose(router, tokens, cache=private) == Choice(A, 0, 320, 320)
    assert choose(router, tokens).replica == B


# -- what was just sent ---------------------------------------------------------------------------


def test_sharers_that_arrive_together_stay_together() -> None:
    router = router_of(A, B)
    sender = Sender(router)
    found = [sender.send(prompt((1, 512), (2 + n, 48))) for n in range(4)]
    assert sender.sent == {A: 4}
    assert [each.hit_tokens for each in found] == [0, 512, 512, 512]
    assert sender.send(prompt((9, 512))).replica == B


def test_what_was_sent_counts_for_a_while_unless_it_is_reported() -> None:
    router = router_of(A)
    tokens = prompt((1, 64), (2, 36))
    choose(router, tokens, cache=CacheOptions())
    assert choose(router, tokens, now=SENT_SECONDS - 0.1).hit_tokens == 96
    assert choose(router, tokens, now=SENT_SECONDS).hit_tokens == 0
    choose(router, tokens, now=10.0, cache=CacheOptions())
    choose(router, tokens[:64], now=11.0, cache=CacheOptions())
    assert choose(router, tokens, now=10.5 + SENT_SECONDS).hit_tokens == 64
    router.stored(A, keys_of(tokens[:32]))
    assert choose(router, tokens, now=20.0).hit_tokens == 32


def test_a_page_that_leaves_soon_after_it_was_stored_does_not_count_as_just_sent() -> None:
    router = router_of(A)
    tokens = prompt((1, 100))
    choose(router, tokens, cache=CacheOptions())
    router.stored(A, keys_of(tokens))
    router.dropped(A, keys_of(tokens)[3:])
    assert choose(router, tokens).hit_tokens == 48


def test_a_request_that_writes_no_cache_leaves_no_mark() -> None:
    router = router_of(A)
    choose(router, prompt((1, 100)), cache=UNSEEN)
    assert choose(router, prompt((1, 100))).hit_tokens == 0


def test_what_was_sent_weighs_no_more_than_what_is_stored_once_its_request_has_ended() -> None:
    router = router_of(A, B)
    tokens = prompt((1, 320))
    choose(router, tokens[:160], cache=CacheOptions(), excluded=[B])
    router.stored(B, keys_of(tokens[:192]))
    assert choose(router, tokens) == Choice(B, 192, 128, 320)


def test_a_group_does_not_pin_all_load_on_one_replica() -> None:
    router = router_of(A, B)
    sender = Sender(router)
    for n in range(200):
        sender.send(prompt((1, 512), (2 + n, 48)))
    assert abs(sender.sent[A] - sender.sent[B]) < 20
    assert abs(router.owed(A) - router.owed(B)) <= 512 + 2 * ANSWER_TOKENS


def test_answers_under_way_weigh_too() -> None:
    """Prompts of a group that are all cached would else go to one replica for ever."""
    router = router_of(A, B)
    shared = prompt((1, 512))
    router.stored(A, keys_of(shared))
    sender = Sender(router)
    for n in range(100):
        sender.send(prompt((1, 512), (2 + n, 8)))
        router.progress(f"request {n}", 520)
    assert min(sender.sent.values()) > 30


# -- session and even -----------------------------------------------------------------------------


def place(router: Router[bytes], session: str) -> bytes:
    return choose(router, prompt((1, 140)), session=session).replica


def test_a_session_stays_where_it_is_and_sessions_spread() -> None:
    router = router_of(A, B, C, route=Route.SESSION)
    places = {str(n): place(router, str(n)) for n in range(300)}
    assert all(place(router, session) == at for session, at in places.items())
    assert min(Counter(places.values()).values()) > 70


def test_a_replica_that_leaves_moves_its_own_sessions_alone() -> None:
    router = router_of(A, B, C, route=Route.SESSION)
    before = {str(n): place(router, str(n)) for n in range(100)}
    router.leave(B)
    after = {session: place(router, session) for session in before}
    assert all(at == after[session] for session, at in before.items() if at != B)
    router.join(B, page_size=PAGE, fingerprint=None)
    assert {session: place(router, session) for session in before} == before


def test_a_sessions_replica_is_passed_over_when_it_owes_too_much() -> None:
    router = router_of(A, B, C, route=Route.SESSION)
    session = next(str(n) for n in range(99) if place(router, str(n)) == B)
    load(router, B, 240)
    assert MAX_OVER_MEAN * 240 / 3 + 140 == 240
    assert place(router, session) == B
    load(router, B, 1, "one more")
    second = place(router, session)
    assert second != B
    load(router, A, 240)
    load(router, C, 240)
    assert place(router, session) == B


def test_one_session_alone_uses_all_replicas_when_it_must() -> None:
    sender = Sender(router_of(A, B, route=Route.SESSION))
    for n in range(40):
        sender.send(prompt((n, 100)), session="only")
    assert min(sender.sent.values()) > 5
    assert abs(sender.sent[A] - sender.sent[B]) > 5


def test_without_a_session_the_salt_decides_and_without_both_what_is_owed() -> None:
    router = router_of(A, B, route=Route.SESSION)

    def salted(salt: str, session: str | None = None) -> bytes:
        return choose(router, prompt((1, 100)), salt, session=session).replica

    salts = [str(n) for n in range(20)]
    assert {salted(salt) for salt in salts} == {A, B}
    assert all(salted(salt) == salted(salt) == place(router, salt) for salt in salts)
    assert len({salted(salt, "session") for salt in salts}) == 1
    load(router, A, 1)
    assert [choose(router, prompt((1, 100))).replica for _ in range(3)] == [B] * 3


@pytest.mark.parametrize("route", Route)
def test_a_prompt_that_is_computed_in_advance_goes_where_its_pages_are(route: Route) -> None:
    router, tokens = router_of(A, B, route=route), prompt((1, 320))
    router.stored(B, keys_of(tokens))
    for _ in range(2):
        found = router.choose(tokens, None, session=None, now=0.0, is_idle_prefill=True)
        assert found is not None
        assert found.replica == B
    if route is Route.SESSION:  # the next turn will be routed by its session
        session = next(str(n) for n in range(99) if place(router, str(n)) == A)
        found = router.choose(tokens, None, session=session, now=0.0, is_idle_prefill=True)
        assert found is not None
        assert found.replica == A


def test_even_routing_goes_by_what_is_owed_whatever_is_cached() -> None:
    router = router_of(A, B, route=Route.EVEN)
    tokens = prompt((1, 320))
    router.stored(A, keys_of(tokens))
    load(router, A, 1)
    assert choose(router, tokens) == Choice(B, 0, 320, 320)
    load(router, B, 2)
    assert choose(router, tokens) == Choice(A, 304, ANSWER_TOKENS, 320)


# -- joining and leaving --------------------------------------------------------------------------


def test_without_a_replica_that_can_take_it_there_is_no_choice() -> None:
    router = router_of()
    tokens = prompt((1, 40))
    assert router.choose(tokens, None, session=None, now=0.0) is None
    router.join(A, page_size=PAGE, fingerprint=None)
    assert router.choose(tokens, None, session="s", now=0.0, excluded=[A]) is None
    router.join(B, page_size=PAGE, fingerprint=None)
    assert choose(router, tokens, excluded=[A]).replica == B
    router.retire(B)
    assert router.choose(tokens, None, session=None, now=0.0, excluded=[A]) is None
    assert choose(router, tokens).replica == A
    router.leave(A)
    assert router.choose(tokens, None, session=None, now=0.0) is None


def test_a_replica_that_comes_back_has_nothing() -> None:
    router = router_of(A)
    tokens = prompt((1, 100))
    choose(router, tokens, cache=CacheOptions())
    router.stored(A, keys_of(tokens[:64]))
    load(router, A, 500)
    router.leave(A)
    router.stored(A, keys_of(tokens))
    assert (router.owed(A), router.num_pages(A)) == (0, 0)
    router.join(A, page_size=PAGE, fingerprint=FINGERPRINT)
    assert (router.owed(A), router.num_pages(A)) == (0, 0)
    assert choose(router, tokens).hit_tokens == 0
    router.end(f"load {A!r}")
    assert router.owed(A) == 0


def test_a_leaving_replica_owes_what_is_there_and_its_pages_count_for_nothing() -> None:
    router = router_of(A, B)
    tokens = prompt((1, 320))
    router.stored(A, keys_of(tokens))
    load(router, A, 100)
    router.retire(A)
    router.stored(A, keys_of(tokens))
    assert choose(router, tokens) == Choice(B, 0, 320, 320)
    assert (router.owed(A), router.num_pages(A)) == (100, 0)
    router.end(f"load {A!r}")
    assert router.owed(A) == 0


def test_a_new_replica_gets_requests_at_once() -> None:
    router = router_of(A)
    sender = Sender(router)
    for n in range(3):
        sender.send(prompt((n, 100)))
    router.join(B, page_size=PAGE, fingerprint=FINGERPRINT)
    assert sender.send(prompt((9, 100))).replica == B


def test_joining_twice_and_a_request_for_a_replica_that_left_are_errors() -> None:
    router = router_of(A)
    with pytest.raises(ValueError, match="b'a' has already joined"):
        router.join(A, page_size=PAGE, fingerprint=None)
    choice = choose(router, prompt((1, 40)))
    router.leave(A)
    with pytest.raises(ValueError, match="unknown replica b'a'"):
        router.begin("late", choice)


# -- what is owed ---------------------------------------------------------------------------------


def test_a_request_owes_what_is_not_computed_and_a_little_until_its_end() -> None:
    router = router_of(A)
    router.stored(A, keys_of(prompt((1, 320))))
    router.begin("one", choose(router, prompt((1, 320), (2, 480))))
    assert router.owed(A) == 480
    for num_computed, owed in ((100, 480), (400, 400), (300, 400), (800, ANSWER_TOKENS)):
        router.progress("one", num_computed)
        assert router.owed(A) == owed
    router.begin("two", choose(router, prompt((1, 320))))
    assert router.owed(A) == 2 * ANSWER_TOKENS
    router.end("one")
    router.end("one")
    router.progress("one", 1)
    assert router.owed(A) == ANSWER_TOKENS
    router.end("two")
    assert router.owed(A) == 0


def test_a_request_that_is_sent_elsewhere_is_owed_there() -> None:
    router = router_of(A, B)
    load(router, A, 300, "one")
    load(router, B, 200, "one")
    assert (router.owed(A), router.owed(B)) == (0, 200)
    router.leave(A)
    assert router.owed(B) == 200


# -- against a model ------------------------------------------------------------------------------


@dataclass
class Model:
    """The same by the plainest means: one flat list of everything there is."""

    joined: list[bytes] = field(default_factory=list)
    leaving: set[bytes] = field(default_factory=set)
    pages: set[tuple[bytes, bytes]] = field(default_factory=set)
    sent: dict[tuple[bytes, bytes], float] = field(default_factory=dict)
    requests: dict[str, tuple[bytes, int, int]] = field(default_factory=dict)
    turns: list[bytes] = field(default_factory=list)

    def forget(self, replica: bytes) -> None:
        self.pages = {each for each in self.pages if each[0] != replica}
        self.sent = {each: end for each, end in self.sent.items() if each[0] != replica}

    def leave(self, replica: bytes) -> None:
        self.forget(replica)
        self.joined = [each for each in self.joined if each != replica]
        self.leaving.discard(replica)
        self.requests = {key: at for key, at in self.requests.items() if at[0] != replica}
        self.turns = [each for each in self.turns if each != replica]

    def owed(self, replica: bytes) -> int:
        return sum(owed for at, _, owed in self.requests.values() if at == replica)

    def hit(self, replica: bytes, tokens: array[int], now: float) -> tuple[int, int]:
        found = under_way = 0
        for key in keys_of(tokens[:-1]):
            is_sent = self.sent.get((replica, key), now) > now
            if (replica, key) not in self.pages and not is_sent:
                break
            found += PAGE
            under_way += PAGE * ((replica, key) not in self.pages)
        return found, under_way

    def choose(self, tokens: array[int], now: float, excluded: Collection[bytes]) -> bytes | None:
        def rank(replica: bytes) -> tuple[int, ...]:
            hit, under_way = self.hit(replica, tokens, now)
            others = max(self.owed(replica) - under_way, 0)
            last = max((n for n, at in enumerate(self.turns) if at == replica), default=-1)
            num_requests = sum(at == replica for at, _, _ in self.requests.values())
            return others + len(tokens) - hit, num_requests, last

        free = [each for each in self.joined if each not in {*self.leaving, *excluded}]
        return min(free, key=rank, default=None)

    def send(self, replica: bytes, tokens: array[int], now: float) -> None:
        self.turns.append(replica)
        for key in keys_of(tokens):
            if (replica, key) not in self.pages:
                self.sent[replica, key] = now + SENT_SECONDS


@dataclass
class Fuzz:
    """One router and its model, and random events for both."""

    rng: random.Random
    router: Router[bytes] = field(default_factory=lambda: Router(Route.KV, fingerprint=None))
    model: Model = field(default_factory=Model)
    now: float = 0.0
    num_hits: int = 0

    def tokens(self) -> array[int]:
        rng = self.rng
        parts = [(rng.randrange(3), rng.randrange(5 * PAGE)) for _ in range(rng.randrange(1, 4))]
        return prompt(*parts) or prompt((1, 1))

    def replica(self) -> bytes:
        return self.rng.choice((A, B, C))

    def keys(self) -> Sequence[bytes]:
        keys = keys_of(self.tokens())
        return keys[self.rng.randrange(2) : self.rng.randrange(8)]

    def request_id(self) -> str:
        return str(self.rng.randrange(12))

    def join(self) -> None:
        if (replica := self.replica()) not in self.model.joined:
            self.model.joined.append(replica)
            self.router.join(replica, page_size=PAGE, fingerprint=FINGERPRINT)

    def leave(self) -> None:
        replica = self.replica()
        self.model.leave(replica)
        self.router.leave(replica)

    def retire(self) -> None:
        replica = self.replica()
        if replica in self.model.joined:
            self.model.leaving.add(replica)
            self.model.forget(replica)
        self.router.retire(replica)

    def stored(self) -> None:
        replica, keys = self.replica(), self.keys()
        if replica in self.model.joined and replica not in self.model.leaving:
            self.model.pages.update((replica, key) for key in keys)
            for key in keys:
                self.model.sent.pop((replica, key), None)
        self.router.stored(replica, keys)

    def dropped(self) -> None:
        replica, keys = self.replica(), self.keys()
        self.model.pages.difference_update((replica, key) for key in keys)
        self.router.dropped(replica, keys)

    def send(self) -> None:
        tokens, excluded = self.tokens(), self.rng.choice([(), (), (self.replica(),)])
        expected = self.model.choose(tokens, self.now, excluded)
        choice = self.router.choose(tokens, None, session=None, now=self.now, excluded=excluded)
        if choice is None:
            assert expected is None
            return
        hit, _ = self.model.hit(choice.replica, tokens, self.now)
        assert (choice.replica, choice.hit_tokens) == (expected, hit)
        assert choice.owed == max(len(tokens) - hit, ANSWER_TOKENS)
        self.num_hits += hit > 0
        self.model.send(choice.replica, tokens, self.now)
        request_id = self.request_id()
        self.model.requests[request_id] = choice.replica, len(tokens), choice.owed
        self.router.begin(request_id, choice)

    def progress(self) -> None:
        request_id, num_computed = self.request_id(), self.rng.randrange(200)
        if request_id in self.model.requests:
            replica, num_tokens, owed = self.model.requests[request_id]
            left = max(num_tokens - num_computed, ANSWER_TOKENS)
            self.model.requests[request_id] = replica, num_tokens, min(owed, left)
        self.router.progress(request_id, num_computed)

    def end(self) -> None:
        request_id = self.request_id()
        self.model.requests.pop(request_id, None)
        self.router.end(request_id)

    def step(self) -> None:
        events: dict[Callable[[], None], int] = {
            self.join: 4, self.leave: 1, self.retire: 1, self.stored: 12, self.dropped: 6,
            self.send: 12, self.progress: 4, self.end: 4,
        }  # fmt: skip
        [event] = self.rng.choices(list(events), weights=list(events.values()))
        self.now += self.rng.choice([0.0, 0.0, 0.1, 0.4])
        event()
        for replica in (A, B, C):
            assert self.router.owed(replica) == self.model.owed(replica)
            num_pages = sum(at == replica for at, _ in self.model.pages)
            assert self.router.num_pages(replica) == num_pages


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_the_router_knows_what_its_model_knows(seed: int) -> None:
    fuzz = Fuzz(random.Random(seed))
    for _ in range(1_500):
        fuzz.step()
    assert fuzz.num_hits > 50
