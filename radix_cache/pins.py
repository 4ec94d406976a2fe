"""Pins: locks of the tree with a time to live, independent of leases.

Eviction takes pinned pages after all other cached pages, and only if a request could not be served
otherwise. Pins never exceed their quotas.

A request may ask for a pin. A *session* gets a pin for the last turn of each of its conversations
automatically; pins of sessions are removed before those that requests asked for. Their time and
their order depend on what the sessions wait for.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, TypeVar

from sortedcontainers import SortedDict

from .namespaces import FlushedNamespaces
from .node import LockHandle, Match, Node
from .session_waits import Ranking, Session, SessionWaits
from .tree import RadixTree
from .waiting_pages import WaitingPages

Item = TypeVar("Item")
MAX_CONVERSATIONS = 8  # maximum number of pinned conversations of a session and its sub-agents


@dataclass(slots=True, eq=False)
class PinnedPrefix:
    """A pin and the prefix that it keeps in the cache."""

    lock: LockHandle  # owned by `PinnedPrefixes`
    ttl: float  # seconds after the last hit
    until: float  # end of the pin, on the clock of `PinnedPrefixes.expire`
    serial: int  # distinguishes pins that end at the same time
    is_asked: bool = False  # whether a request asked for this pin
    sessions: set[Session] = field(default_factory=set)  # sessions whose last turn this pin keeps

    @property
    def namespace(self) -> str | None:
        """The namespace of the pinned pages."""
        return self.lock.node.namespace


class ByAge(Generic[Item]):
    """Items grouped by namespace, least recently used first; `use` and `remove` are O(1)."""

    def __init__(self) -> None:
        self.all: OrderedDict[Item, None] = OrderedDict()
        # Least recently used first; a namespace without an item is removed.
        self.of: OrderedDict[str | None, OrderedDict[Item, None]] = OrderedDict()

    def use(self, namespace: str | None, item: Item) -> None:
        """Make an item the most recently used; add it if it is missing."""
        own = self.of.setdefault(namespace, OrderedDict())
        self.of.move_to_end(namespace)
        for items in (self.all, own):
            items[item] = None
            items.move_to_end(item)

    def remove(self, namespace: str | None, item: Item) -> None:
        """Remove an item. Raises KeyError if it is missing."""
        del self.all[item], self.of[namespace][item]
        if not self.of[namespace]:
            del self.of[namespace]

    def by_namespace(self) -> set[tuple[str | None, Item]]:
        """Return every item with its namespace. O(items)."""
        return {(name, item) for name, items in self.of.items() for item in items}


class PageCounts:
    """The numbers of pages of namespaces.

    Iteration yields the names of namespaces that have pages, the one with the most pages first.
    """

    def __init__(self) -> None:
        self._sizes: dict[str | None, tuple[int, int]] = {}  # (pages, unique number)
        self._names: SortedDict[tuple[int, int], str | None] = SortedDict()
        self._num_made = 0

    def __getitem__(self, namespace: str | None) -> int:
        return self._sizes.get(namespace, (0, 0))[0]

    def __iter__(self) -> Iterator[str | None]:
        yield from reversed(self._names.values())

    def add(self, namespace: str | None, num_pages: int) -> None:
        """Add ``num_pages``, which may be negative, to a namespace's count. O(log n)."""
        size = self._sizes.pop(namespace, None)
        if size is None:
            self._num_made += 1
            size = (0, -self._num_made)  # the oldest of equal counts comes first
        else:
            del self._names[size]
        now = (size[0] + num_pages, size[1])
        if now[0]:
            self._sizes[namespace] = now
            self._names[now] = namespace


class PinnedPrefixes:
    """The pins of a tree, at most one for each prefix.

    ``quota``: maximum number of pages that one namespace may pin. All namespaces together may pin
    twice as many, but at most ``num_pages``. If a limit is exceeded, the oldest pin is removed: of
    the namespace over its quota, or else of the namespace with the most pinned pages. The age of a
    pin counts from its last hit. Pages under several pins count once.

    The number of sessions is at most the number of pages that may be pinned, because many sessions
    may share one prompt. If there are more, the oldest session of the namespace with the most
    sessions ends.

    ``session_ttl``: seconds for which a session's pin lasts while its wait cannot be predicted, and
    the maximum otherwise.
    """

    def __init__(self, tree: RadixTree, *, quota: int, num_pages: int, session_ttl: float) -> None:
        self.quota = min(quota, num_pages)  # pages
        self.total_quota = min(2 * quota, num_pages)
        self.now = 0.0  # seconds
        self.waits = SessionWaits(session_ttl)
        self.waiting = WaitingPages(tree, self.waits)
        self._ranking: Ranking[PinnedPrefix] = Ranking()  # pins that only sessions have, by worth
        self._tree = tree
        # Pins by their last node, the oldest first.
        self._pins: OrderedDict[Node, PinnedPrefix] = OrderedDict()
        # Pins by their end.
        self._due: SortedDict[tuple[float, int], PinnedPrefix] = SortedDict()
        self._num_pages = PageCounts()  # pinned pages of each namespace
        self._num_made = 0
        # pins that only sessions use, which are removed first
        self._unasked: ByAge[PinnedPrefix] = ByAge()
        self._asked: ByAge[PinnedPrefix] = ByAge()  # pins that requests asked for
        # pins of each session, the oldest first
        self._sessions: dict[Session, list[PinnedPrefix]] = {}
        self._session_ages: ByAge[Session] = ByAge()  # a turn counts as a use
        self.num_session_yields = 0  # pins that only sessions used, removed before their end

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_sessions(self) -> int:
        """Number of sessions that have a pin. O(1)."""
        return len(self._sessions)

    def keep(self, match: Match, ttl: float, session: str | None = None) -> None:
        """Pin a match of at most ``quota`` pages, or prolong its pin.

        A pin for a ``session`` replaces the pins of earlier turns that it continues. No pin that a
        request asked for is removed for it; if the quota has no room beside them, the new pin
        itself is removed.

        O(depth) without removals. A removal takes O(namespaces), or O(log namespaces) if the
        namespace with the most pages has a pin that can be removed. Pins under longer pins are
        passed over, which takes O(1) each.
        """
        pinned = self._pinned(match, ttl)
        if session is None:
            self._ask(pinned)
        else:
            self.waiting.forget((match.namespace, session))
            self._add_to_session((match.namespace, session), pinned)
        self._shrink(pinned)

    def _pinned(self, match: Match, ttl: float) -> PinnedPrefix:
        """Return the pin of a match, with a new time to live; make a pin if it has no pin."""
        before = self._tree.num_pinned_pages
        lock = self._tree.lock(match, is_pin=True)
        known = self._pins.get(lock.node)
        if known is not None:
            self._tree.unlock(lock)
            known.ttl = max(known.ttl, ttl)
            self._renew(known)
            return known
        self._num_pages.add(match.namespace, self._tree.num_pinned_pages - before)
        self._num_made += 1
        pinned = PinnedPrefix(lock, ttl, self.now + ttl, self._num_made)
        self._pins[lock.node] = self._due[pinned.until, pinned.serial] = pinned
        self._ages(pinned).use(pinned.namespace, pinned)
        return pinned

    def _ages(self, pinned: PinnedPrefix) -> ByAge[PinnedPrefix]:
        return self._asked if pinned.is_asked else self._unasked

    def _ask(self, pinned: PinnedPrefix) -> None:
        """Mark a pin as one that a request asked for, and as the most recently used."""
        self._ages(pinned).remove(pinned.namespace, pinned)
        pinned.is_asked = True
        self._ages(pinned).use(pinned.namespace, pinned)

    def _add_to_session(self, session: Session, pinned: PinnedPrefix) -> None:
        """Add a pin to a session, and remove the pins of earlier turns that it continues.

        The oldest pins are removed, too, if the session has more than `MAX_CONVERSATIONS`.
        """
        known = self._sessions.get(session, [])
        others = [each for each in known if each is not pinned and not _continues(pinned, each)]
        kept = [*others[1 - MAX_CONVERSATIONS :], pinned]
        self._sessions[session] = kept
        self._session_ages.use(session[0], session)
        pinned.sessions.add(session)
        for each in known:
            if each not in kept and self._leave(session, each):
                self._drop(each)
        while len(self._sessions) > self.total_quota:
            self._end_a_session()

    def expect(self, session: Session, label: str, *, is_running: bool = False) -> None:
        """Fit the time of a session's newest pin to what the session waits for.

        If no wait of this kind was as short as `session_ttl`, the session leaves the pin. A pin of
        several sessions is never shortened. O(depth + log n), plus the time of
        `SessionWaits.expect`, which explains ``is_running``.
        """
        ttl = self.waits.expect(session, label, is_running=is_running)
        if ttl is None:
            return
        pins = self._sessions.get(session)
        if not pins:
            if not ttl and self.waits.is_own(session):
                self.waiting.retire(session)
            return
        newest, is_shared = pins[-1], len(pins[-1].sessions) > 1
        if newest.is_asked:
            return
        if ttl:
            newest.ttl = max(newest.ttl, ttl) if is_shared else ttl
            self._renew(newest)
        elif is_shared:
            newest.sessions.remove(session)
            pins.remove(newest)
            if not pins:
                self._forget(session)
        else:
            self._end(newest)

    def end_session(self, name: str) -> bool:
        """End a session in all namespaces; return whether any had pages of it.

        Pins that only it uses are removed, and their pages are evicted before all others.
        O(sessions).
        """
        waiting = self.waiting.sessions(name)
        for session in waiting:
            self.waiting.retire(session)
        ended = [session for session in self._sessions if session[1] == name]
        for session in ended:
            for pinned in self._forget(session):
                if self._leave(session, pinned):
                    self._let_go(pinned)
        self.waits.end(name)
        return bool(waiting or ended)

    def _end_a_session(self) -> None:
        """End the oldest session of the namespace with the most sessions. O(namespaces).

        Pins that only this session uses are removed. A caller that makes up many session names
        loses its own sessions, not the sessions of other namespaces.
        """
        most = max(self._session_ages.of.values(), key=len)
        session = next(iter(most))
        for each in self._forget(session):
            if self._leave(session, each):
                self._give_way(each)

    def _forget(self, session: Session) -> list[PinnedPrefix]:
        """Remove a session and return its pins; the pins still contain the session."""
        self._session_ages.remove(session[0], session)
        return self._sessions.pop(session)

    def _leave(self, session: Session, pinned: PinnedPrefix) -> bool:
        """Remove a session from a pin; return whether the pin has no user left."""
        pinned.sessions.discard(session)
        return not pinned.sessions and not pinned.is_asked

    def touch(self, node: Node) -> None:
        """Renew the pins on the path to ``node``, which a request hit. O(depth)."""
        if self._pins:
            for passed in node.path():
                if passed.pins and (pinned := self._pins.get(passed)) is not None:
                    self._renew(pinned)

    def expire(self, now: float) -> None:
        """Remove the expired pins. O(1), and O(depth + log n) for each removed pin."""
        self.now = now
        while self._due and self._due.peekitem(0)[0][0] <= now:
            self._end(self._due.peekitem(0)[1])

    def evict_pin(self) -> None:
        """Remove a pin whose removal makes pages evictable.

        It is the pin of a session that is worth least, or else the oldest pin of a session, or else
        the oldest pin that a request asked for. Raises StopIteration if there is no such pin. Pins
        whose pages are borrowed, or that are under a longer pin, are passed over in O(1) each.
        """
        pins = chain(self._by_worth(), self._unasked.all, self._asked.all)
        self._give_way(next(pin for pin in pins if pin.lock.node.ref_count == 1))

    def _by_worth(self) -> Iterator[PinnedPrefix]:
        """Iterate over pins that only sessions have, the least worth first.

        Without predictions there is no such order, and the iterator is empty.
        """
        if not self.waits.predicts:
            return iter(())
        pins = self._unasked.all
        return self._ranking.least_first(lambda: pins, pins, self._worth, self.now)

    def _worth(self, pinned: PinnedPrefix) -> float:
        return max(self.waits.worth(session, self.now) for session in pinned.sessions)

    def _end(self, pinned: PinnedPrefix) -> None:
        """Remove a pin; its pages go first if its sessions' own times predicted the end."""
        is_own = pinned.sessions and all(map(self.waits.is_own, pinned.sessions))
        (self._let_go if is_own else self._set_aside)(pinned)

    def _let_go(self, pinned: PinnedPrefix) -> None:
        """Remove a pin. If only sessions had it, its pages are evicted first."""
        self._drop(pinned)
        if not pinned.is_asked:
            self._tree.retire(pinned.lock.node)

    def drop(self, *namespaces: str | None) -> None:
        """Remove all pins of some namespaces, by default of all namespaces. O(pins)."""
        flushed = FlushedNamespaces(namespaces)
        for pinned in list(self._pins.values()):
            if pinned.namespace in flushed:
                self._drop(pinned)
        self.waiting.drop(flushed)

    def drop_below(self, node: Node) -> None:
        """Remove the pins whose path contains ``node``. O(pins * depth)."""
        for pinned in list(self._pins.values()):
            if node in pinned.lock.node.path():
                self._drop(pinned)

    def last_pages(self, among: Container[int]) -> set[int]:
        """Return, for each pin, its last page that is in ``among``.

        Pins without such a page are left out. O(pins + pages searched).
        """
        found: set[int] = set()
        passed: set[Node] = set()
        for pinned in self._pins.values():
            node: Node | None = pinned.lock.node
            while node is not None and node not in passed:  # a passed node was searched already
                passed.add(node)
                page_id = next(filter(among.__contains__, reversed(node.page_ids)), None)
                if page_id is not None:
                    found.add(page_id)
                    break
                node = node.parent
        return found

    def of(self, namespace: str | None) -> list[PinnedPrefix]:
        """Return the pins of a namespace, the oldest first. O(pins)."""
        return [pinned for pinned in self._pins.values() if pinned.namespace == namespace]

    def num_pages(self, namespace: str | None) -> int:
        """Return how many pages a namespace pins. O(1)."""
        return self._num_pages[namespace]

    def locks(self) -> Iterator[LockHandle]:
        """Iterate over the locks of all pins."""
        return (pinned.lock for pinned in self._pins.values())

    def check(self) -> None:
        """Assert that pins, times and page counts agree. O(pins * depth)."""
        self.waiting.check()
        found: Counter[str | None] = Counter()
        nodes = {node for pinned in self._pins.values() for node in pinned.lock.node.path()}
        for node in nodes:
            found[node.namespace] += len(node.page_ids)
        for last, pinned in self._pins.items():
            assert pinned.lock.node is last, "a pin is filed under a wrong node"
            assert pinned.lock.is_pin, "a pin's lock is not marked as a pin"
            assert self._due[pinned.until, pinned.serial] is pinned, (
                "a pin is not filed by its expiry"
            )
            assert pinned.is_asked or pinned.sessions, (
                "a pin has neither a request nor a session that wants it"
            )
            ages = self._ages(pinned).of[pinned.namespace]
            assert pinned in ages, "a pin is missing from the age order of its rank and namespace"
        of_sessions = {(name, id(pin)) for name, pins in self._sessions.items() for pin in pins}
        of_pins = {(name, id(pin)) for pin in self._pins.values() for name in pin.sessions}
        assert of_sessions == of_pins, "sessions and pins do not refer to each other"
        assert all(self._sessions.values()), "a session has no pin"
        assert len(self._sessions) <= self.total_quota, (
            "there are more sessions than pages that may be pinned"
        )
        assert self._session_ages.by_namespace() == {(name[0], name) for name in self._sessions}
        for kind in (self._unasked, self._asked, self._session_ages):
            assert len(kind.all) == sum(map(len, kind.of.values())), (
                "the age order of all differs from those of the namespaces"
            )
            assert all(kind.of.values()), "a namespace has an empty age order"
        num_ordered = len(self._unasked.all) + len(self._asked.all)
        assert num_ordered == len(self._pins), "a removed pin is still in an age order"
        assert len(self._due) == len(self._pins), "a removed pin is still filed by its expiry"
        counts = {name: self._num_pages[name] for name in self._num_pages}
        assert found == counts, f"namespaces pin {found} pages, but {counts} are counted"
        assert list(counts.values()) == sorted(counts.values(), reverse=True), (
            "namespaces are not in the order of their pinned pages"
        )
        assert found.total() <= self.total_quota, "more pages are pinned than the quota allows"
        assert max(found.values(), default=0) <= self.quota, (
            "a namespace pins more pages than its quota"
        )

    def _renew(self, pinned: PinnedPrefix) -> None:
        del self._due[pinned.until, pinned.serial]
        pinned.until = self.now + pinned.ttl
        self._due[pinned.until, pinned.serial] = pinned
        self._pins.move_to_end(pinned.lock.node)
        self._ages(pinned).use(pinned.namespace, pinned)

    def _drop(self, pinned: PinnedPrefix) -> None:
        before = self._tree.num_pinned_pages
        self._tree.unlock(pinned.lock)
        self._num_pages.add(pinned.namespace, self._tree.num_pinned_pages - before)
        del self._pins[pinned.lock.node], self._due[pinned.until, pinned.serial]
        self._ages(pinned).remove(pinned.namespace, pinned)
        for session in pinned.sessions:
            self._sessions[session].remove(pinned)
            if not self._sessions[session]:
                self._forget(session)

    def _give_way(self, pinned: PinnedPrefix) -> None:
        self.num_session_yields += not pinned.is_asked
        self._set_aside(pinned)

    def _set_aside(self, pinned: PinnedPrefix) -> None:
        """Remove a pin; its sessions wait without it."""
        for session in pinned.sessions:
            self.waiting.add(session, pinned.lock.node)
        self._drop(pinned)

    def _shrink(self, newest: PinnedPrefix) -> None:
        """Remove pins until the quotas hold: older ones if possible, otherwise the newest."""
        own = newest.namespace
        while self._num_pages[own] > self.quota:
            self._give_way(self._first_to_go([own], newest))
        while self._tree.num_pinned_pages > self.total_quota:
            self._give_way(self._first_to_go(self._num_pages, newest))

    def _first_to_go(self, namespaces: Iterable[str | None], newest: PinnedPrefix) -> PinnedPrefix:
        """Return the next pin to remove, in the order of `evict_pin`.

        A pin that a request asked for is removed only if the newest pin is such a pin, too. If no
        older pin can be removed, the newest pin is returned.
        """
        ranks = [self._unasked] if not newest.is_asked else [self._unasked, self._asked]
        oldest = (
            pin for ages in ranks if ages.of for name in namespaces for pin in ages.of.get(name, ())
        )
        most = next(iter(namespaces))
        others = chain((pin for pin in self._by_worth() if pin.namespace == most), oldest)
        # Removing a pin under a longer one would unpin no page.
        found = (pin for pin in others if pin is not newest and pin.lock.node.pins == 1)
        return next(found, newest)


def _continues(now: PinnedPrefix, before: PinnedPrefix) -> bool:
    """Whether a turn continues an earlier one: it shares at least half of the earlier pages.

    A continuation need not share all pages, because chat templates drop reasoning and agents
    shorten results.
    """
    paths = zip(now.lock.node.path(), before.lock.node.path(), strict=False)
    shared = sum(len(mine.page_ids) for mine, theirs in paths if mine is theirs)
    return 2 * shared >= before.lock.num_pages
