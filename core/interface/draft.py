"""Draft: a tree of draft tokens. DraftPlan: the plan of one request's draft in a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import count, takewhile
from operator import lt

import msgspec


class Draft(msgspec.Struct, frozen=True, gc=False):
    """Tree of draft tokens that may follow a request's tokens, and the source of each node.

    ``parents[i]`` is the parent of node ``i``: an earlier node, or -1 for the request's last token.
    Nodes are in depth-first order, the best child first, so a prefix of the nodes is a tree, too.
    Siblings have different tokens. A draft without ``parents`` is a chain, in which each token
    follows the previous one.
    """

    token_ids: Sequence[int] = ()
    sources: Sequence[str] = ()  # [len(token_ids)]
    parents: Sequence[int] = ()  # [len(token_ids)]; empty for a chain

    # [len(token_ids)] or empty: the probability that a node and all nodes before it on its path are
    # accepted. A proposer estimates it; looked-up nodes that it did not propose itself have 0.
    survival: Sequence[float] = ()
    note: object = None  # data that a proposer passes to the speculator; no other code reads it

    @classmethod
    def of(cls, token_ids: Sequence[int], source: str) -> Draft:
        """Return a chain whose tokens all come from one source."""
        return cls(token_ids, (source,) * len(token_ids))

    def first_nodes(self, count: int) -> Draft:
        """Return the draft of the first ``count`` nodes."""
        if count >= len(self.token_ids):
            return self
        count = max(0, count)
        return msgspec.structs.replace(
            self,
            token_ids=self.token_ids[:count],
            sources=self.sources[:count],
            parents=self.parents[:count],
            survival=self.survival[:count],
        )

    def trunk(self) -> Draft:
        """Return the trunk as a chain."""
        if not self.parents:
            return self
        return msgspec.structs.replace(self.first_nodes(self.trunk_len), parents=())

    def path(self, node: int) -> list[int]:
        """Return the nodes from the first level down to ``node``, inclusive."""
        if not self.parents:
            return list(range(node + 1))
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def depths(self) -> list[int]:
        """Return the depth of each node; the nodes directly after the request's tokens have 1."""
        if not self.parents:
            return list(range(1, len(self.token_ids) + 1))
        return _depths(self.parents)

    @property
    def height(self) -> int:
        """Number of tokens on the longest path."""
        return _height(tuple(self.parents)) if self.parents else len(self.token_ids)

    @property
    def runs(self) -> Sequence[tuple[int, int]]:
        """Ranges ``[first, stop)`` of nodes that form chains; the trunk comes first."""
        if self.parents:
            return _runs(tuple(self.parents))
        return ((0, len(self.token_ids)),) if self.token_ids else ()

    @property
    def trunk_len(self) -> int:
        """Number of nodes on the trunk."""
        return _trunk_len(tuple(self.parents)) if self.parents else len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """Whether the draft has at most one path."""
        return self.trunk_len == len(self.token_ids)

    @property
    def is_valid(self) -> bool:
        """Whether every node's parent is an earlier node or -1."""
        if not self.parents:
            return True
        is_sound = min(self.parents) >= -1 and all(map(lt, self.parents, count()))
        return is_sound and len(self.parents) == len(self.token_ids)


# Results are cached, because several parts of a step need the shape of the same tree.
@lru_cache(maxsize=256)
def _height(parents: tuple[int, ...]) -> int:
    return max(_depths(parents))


@lru_cache(maxsize=256)
def _runs(parents: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    starts = [node for node, parent in enumerate(parents) if node == 0 or parent != node - 1]
    return tuple(zip(starts, [*starts[1:], len(parents)], strict=True))


@lru_cache(maxsize=256)
def _trunk_len(parents: tuple[int, ...]) -> int:
    return sum(takewhile(bool, map(int.__eq__, parents, count(-1))))


def _depths(parents: Sequence[int]) -> list[int]:
    depths = [1] * len(parents)
    for node, parent in enumerate(parents):
        if parent >= 0:
            depths[node] += depths[parent]
    return depths


NO_DRAFT = Draft()


class DraftPlan(msgspec.Struct, frozen=True, gc=False):
    """Plan of one request's draft in a step: a looked-up draft, a limit for the proposer, or both.

    With both, the proposer adds branches to the looked-up draft if ``may_branch``; otherwise the
    better of the two chains is verified. Both drafts may be trees. If too few pages are free, the
    last nodes off the trunk are dropped first.
    """

    draft: Draft = NO_DRAFT
    max_draft: int = 0  # maximum number of nodes, looked-up ones included; 0: no proposer's draft
    may_branch: bool = False  # whether the proposer's draft may be a tree

    # Price of the first 1, 2, ... nodes of all drafts of the step in total, in tokens that they are
    # expected to gain. Beyond the list, each node costs the last difference.
    row_prices: tuple[float, ...] = ()
    # Price of each node in addition, for the keys that it attends to.
    key_price: float = 0.0
    # Price of one more pass of the proposer with 1, 2, ... rows.
    pass_prices: tuple[float, ...] = ()

    @property
    def depth(self) -> int:
        """Maximum depth of the draft, in tokens after the request's own tokens."""
        height, most = self.draft.height, self.max_draft
        return height if height > most else most  # four times as fast as `max`

    @property
    def num_rows(self) -> int:
        """Maximum number of rows that the draft adds to the forward pass."""
        known, most = len(self.draft.token_ids), self.max_draft
        return known if known > most else most

    @property
    def num_beside_trunk(self) -> int:
        """Maximum number of nodes off the trunk, whose KV needs slots of spare pages."""
        if not (self.draft.parents or self.may_branch):
            return 0
        known = len(self.draft.token_ids) - self.draft.trunk_len
        return max(known, self.max_draft - 1 if self.may_branch else 0)


NO_DRAFT_PLAN = DraftPlan()
