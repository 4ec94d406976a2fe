"""Replicas in virtual time. Their prefix caches are real, and so is what they report of them."""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Sequence

from foretoken.api.cluster.front.routing import Choice, Router
from foretoken.api.cluster.wire.messages import PageNews, page_keys, page_news
from foretoken.core.tiers.keys import PageKeys, StoredPages
from foretoken.radix_cache import PrefixCache
from foretoken.radix_cache.node import Cause

FINGERPRINT = b"virtual"
TOKEN_SECONDS = 1e-3  # to compute one


class VirtualReplica:
    """A prefix cache with keys, and the messages about its pages that were not sent yet."""

    def __init__(
        self, name: bytes, num_pages: int, page_size: int, fingerprint: bytes = FINGERPRINT
    ) -> None:
        self.name, self.fingerprint = name, fingerprint
        self.cache = PrefixCache(num_pages, page_size)
        keys = PageKeys(fingerprint, num_pages, page_size)
        self.cache.tree.add_observer(keys)
        keys.add_observer(self)
        self.news: list[PageNews] = []
        self.queue: deque[tuple[str, array[int]]] = deque()
        self.is_busy = False

    def stored(self, pages: StoredPages) -> None:
        self.news.append(page_news(is_stored=True, keys=pages.keys))

    def dropped(self, namespace: str | None, keys: list[bytes], cause: Cause) -> None:
        del namespace, cause
        self.news.append(page_news(is_stored=False, keys=keys))

    def report(self, router: Router[bytes]) -> None:
        """Pass the messages on."""
        for each in self.news:
            note = router.stored if each.is_stored else router.dropped
            note(self.name, page_keys(each))
        self.news.clear()

    def serve(self, tokens: array[int], namespace: str | None = None) -> int:
        """Compute a prompt and keep its pages; return how many of its tokens were cached."""
        lease = self.cache.acquire(tokens, namespace=namespace)
        assert self.cache.extend(lease, len(tokens))
        self.cache.release(lease, tokens, len(tokens))
        return lease.num_cached_tokens


class VirtualCluster:
    """Replicas behind a router. Each computes one prompt after the other, in order of arrival."""

    def __init__(self, router: Router[bytes], replicas: Sequence[VirtualReplica]) -> None:
        self.router = router
        self.replicas = {each.name: each for each in replicas}
        for each in replicas:
            page_size = each.cache.page_size
            router.join(each.name, page_size=page_size, fingerprint=each.fingerprint)
        self.choices: list[Choice[bytes]] = []
        self._events: list[tuple[float, int, VirtualReplica | None, array[int]]] = []

    def run(self, prompts: Sequence[tuple[float, array[int]]]) -> float:
        """Serve prompts that arrive at these seconds; return the share of tokens found cached."""
        self._events = [(at, n, None, tokens) for n, (at, tokens) in enumerate(prompts)]
        heapq.heapify(self._events)
        while self._events:
            now, number, replica, tokens = heapq.heappop(self._events)
            if replica is None:
                self._arrive(now, str(number), tokens)
            else:
                self._finish(now, replica)
        caches = [each.cache for each in self.replicas.values()]
        return sum(each.num_hits for each in caches) / sum(each.num_queries for each in caches)

    def _arrive(self, now: float, request_id: str, tokens: array[int]) -> None:
        choice = self.router.choose(tokens, None, session=None, now=now)
        assert choice is not None
        self.choices.append(choice)
        self.router.begin(request_id, choice)
        replica = self.replicas[choice.replica]
        replica.queue.append((request_id, tokens))
        self._start(now, replica)

    def _start(self, now: float, replica: VirtualReplica) -> None:
        if replica.is_busy or not replica.queue:
            return
        replica.is_busy = True
        _, tokens = replica.queue[0]
        seconds = (len(tokens) - replica.cache.match_len(tokens)) * TOKEN_SECONDS
        heapq.heappush(self._events, (now + seconds, -len(self._events), replica, tokens))

    def _finish(self, now: float, replica: VirtualReplica) -> None:
        replica.is_busy = False
        request_id, tokens = replica.queue.popleft()
        replica.serve(tokens)
        replica.report(self.router)
        self.router.end(request_id)
        self._start(now, replica)
