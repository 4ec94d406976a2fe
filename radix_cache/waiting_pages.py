"""Unpinned pages of waiting sessions, and the order in which they are evicted."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator

from .namespaces import FlushedNamespaces
from .node import Node
from .session_waits import MAX_SESSIONS, SHORTEST, Ranking, Session, SessionWaits
from .tree import RadixTree

MARK_SECONDS = 1.0  # time between two marks
MAX_MARKS = 4096


class WaitingPages:
    """The last pages of sessions whose pins ended before the sessions.

    Pages without a prediction are evicted least recently used first. A page that was idle for some
    seconds is worth one hit for so many seconds of room. Before it is evicted, the pages of a
    session go whose wait is predicted and that are worth less.
    """

    def __init__(self, tree: RadixTree, waits: SessionWaits) -> None:
        self._tree, self._waits = tree, waits
        self._nodes: OrderedDict[Session, Node] = OrderedDict()  # last node of each session
        self._sessions: dict[Node, Session] = {}  # the latest session of each last node
        self._ranking: Ranking[Session] = Ranking()
        # Values of the tree's clock and their times, ascending: they give the idle time of pages.
        self._ticks: list[int] = []
        self._times: list[float] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def sessions(self, name: str) -> list[Session]:
        """Return the sessions with this name whose pages are cached. O(sessions)."""
        return [
            session
            for session, node in self._nodes.items()
            if session[1] == name and self._tree.owns(node)
        ]

    def mark(self, now: float) -> None:
        """Record that the tree's clock has its present value at time ``now``. O(1).

        Times are recorded at most once in `MARK_SECONDS`.
        """
        if not self._times or now - self._times[-1] >= MARK_SECONDS:
            self._ticks.append(self._tree.clock)
            self._times.append(now)
        if len(self._ticks) > MAX_MARKS:
            del self._ticks[: MAX_MARKS // 2], self._times[: MAX_MARKS // 2]

    def add(self, session: Session, node: Node) -> None:
        """Add a session whose last page, at the end of ``node``, is not pinned. O(1).

        A session that is present already is left as it is.
        """
        if session in self._nodes:
            return
        self._nodes[session], self._sessions[node] = node, session
        if len(self._nodes) > MAX_SESSIONS:
            self.forget(next(iter(self._nodes)))

    def forget(self, session: Session) -> Node | None:
        """Forget a session; return the node with its last page, None if it is unknown. O(1)."""
        node = self._nodes.pop(session, None)
        if node is not None and self._sessions.get(node) == session:
            del self._sessions[node]
        return node

    def retire(self, session: Session) -> None:
        """Let a session's pages be evicted first. O(depth + log n).

        Unknown sessions are ignored.
        """
        node = self.forget(session)
        if node is not None:
            self._tree.retire(node)

    def drop(self, flushed: FlushedNamespaces) -> None:
        """Forget all sessions of the namespaces in ``flushed``. O(sessions)."""
        for session in list(self._nodes):
            if session[0] in flushed:
                self.forget(session)

    def evict(self, num_pages: int, now: float) -> array[int]:
        """Evict pages as `RadixTree.evict` does, but pages of waiting sessions in order of worth.

        O(log n) for each leaf, plus O(sessions) once in `RANK_SECONDS` to find those to sort.
        """
        freed = array("q")
        while len(freed) < num_pages and (leaf := self._tree.first_leaf()) is not None:
            if not leaf.is_retired:
                self._retire_least(leaf, now)
                leaf = self._tree.first_leaf() or leaf
            freed += self._tree.evict(min(num_pages - len(freed), len(leaf.page_ids)))
        return freed

    def check(self) -> None:
        """Assert that sessions and their last nodes refer to each other. O(sessions)."""
        assert len(self._nodes) <= MAX_SESSIONS, "too many sessions wait without a pin"
        for node, session in self._sessions.items():
            assert self._nodes.get(session) is node, "a node has a session that ends elsewhere"
        assert self._ticks == sorted(self._ticks), "the marks of the clock are out of order"
        assert len(self._ticks) == len(self._times) <= MAX_MARKS, "a mark has no time"

    def _retire_least(self, leaf: Node, now: float) -> None:
        """Retire the session whose pages are worth least, if they are worth less than ``leaf``."""
        order = self._ranking.least_first(
            self._predicted, self._nodes, lambda each: self._waits.worth(each, now), now
        )
        session = next(order, None)
        if session is not None and self._waits.worth(session, now) < self._worth(leaf, now):
            self.retire(session)

    def _worth(self, leaf: Node, now: float) -> float:
        """Return the worth of a leaf's pages, in hits per second of keeping them. O(times)."""
        session = self._sessions.get(leaf)
        if session is not None and self._waits.is_predicted(session):
            return self._waits.worth(session, now)
        return 1 / max(self._idle(leaf, now), SHORTEST)

    def _predicted(self) -> Iterator[Session]:
        """Iterate over the sessions whose wait is predicted, the first added first.

        Sessions whose pages were evicted are forgotten. O(sessions).
        """
        for session, node in list(self._nodes.items()):
            if not self._tree.owns(node):
                self.forget(session)
            elif self._waits.is_predicted(session):
                yield session

    def _idle(self, leaf: Node, now: float) -> float:
        """Return for how many seconds a leaf was not used, computed from the marks. O(log n)."""
        at = bisect_right(self._ticks, leaf.last_used)
        return now - self._times[max(0, at - 1)] if self._times else 0.0
