"""Finding stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    """A prefix of some stop string; ``depth`` is its length in characters."""

    depth: int = 0
    next: dict[str, _Node] = field(default_factory=dict)
    fail: _Node | None = None  # the longest proper suffix that is a prefix too; None at the root
    stop: str | None = None  # the longest stop string that ends here


class StopStrings:
    """All stop strings at once (Aho and Corasick, 1975): O(1) amortised per character.

    The match that completes first wins, of several that complete together the longest: what is
    found does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._root = _Node()
        for stop in stops:
            self._insert(stop)
        self._link()
        self._state = self._root

    def _insert(self, stop: str) -> None:
        node = self._root
        for char in stop:
            node = node.next.setdefault(char, _Node(node.depth + 1))
        node.stop = stop

    def _link(self) -> None:
        queue = deque(self._root.next.values())
        for node in queue:
            node.fail = self._root
        while queue:
            node = queue.popleft()
            for char, child in node.next.items():
                child.fail = self._step(node.fail, char)
                child.stop = child.stop or child.fail.stop
                queue.append(child)

    def _step(self, node: _Node | None, char: str) -> _Node:
        while node is not None:
            if char in node.next:
                return node.next[char]
            node = node.fail
        return self._root

    @property
    def held(self) -> int:
        """Characters at the end of the text so far that may be the beginning of a stop string."""
        return self._state.depth

    def feed(self, text: str, *, count: bool = True) -> tuple[str, int] | None:
        """The first stop string that ``text`` completes and how many of its characters that took.

        With ``count=False`` complete matches are passed over.
        """
        state = self._state
        for consumed, char in enumerate(text, 1):
            state = self._step(state, char)
            if count and state.stop is not None:
                self._state = state
                return state.stop, consumed
        self._state = state
        return None
