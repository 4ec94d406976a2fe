"""DraftedRow: a request's tokens and the draft that follows them, as samplers read it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property

import msgspec

from ..interface.sampling import SamplingMetadata
from .encoded import EncodedSampling


class DraftedRow(msgspec.Struct, frozen=True, dict=True):
    """A request's tokens so far, its prompt included, and a draft of its next tokens.

    To verify the draft, a sampler needs one row of logits after ``tokens`` and one after each node.
    With ``parents`` the draft is a tree, as `core.interface.draft.Draft` describes it. To sample
    one token, a sampler needs one row of logits, after the whole draft, which is then a chain
    (`at`). ``tokens`` is the request's own array, not a copy. ``num_ahead``: number of tokens
    between ``tokens`` and the draft that the host does not know yet.
    """

    tokens: array[int]
    sampling: SamplingMetadata
    draft: Sequence[int] = ()
    parents: Sequence[int] = ()  # [len(draft)]; empty for a chain
    num_ahead: int = 0

    # -- along the draft

    def at(self, node: int) -> DraftedRow:
        """Return the row that samples the token after ``node`` of the draft.

        ``node`` -1 stands for the end of ``tokens``.
        """
        if node == len(self.draft) - 1 and not self.parents:
            return self
        tail = self.tail(node) if node >= 0 else ()
        return DraftedRow(self.tokens, self.sampling, tail, (), self.num_ahead)

    def at_depth(self, depth: int) -> DraftedRow:
        """Return the row of any node at ``depth``, for a sampler that does not read drafted ids."""
        return DraftedRow(self.tokens, self.sampling, self.draft[:depth], (), self.num_ahead)

    def tail(self, node: int) -> Sequence[int]:
        """Return the draft tokens on the path to ``node``, inclusive; empty for -1."""
        if not self.parents:
            return self.draft[: node + 1]
        tail = []
        while node >= 0:
            tail.append(self.draft[node])
            node = self.parents[node]
        return tail[::-1]

    def child(self, node: int, token_id: int) -> int | None:
        """Return the child of ``node`` that has ``token_id``; None if no child has it. O(1).

        ``node`` -1 is the parent of the first level.
        """
        if self.parents:
            return self._children.get((node, token_id))
        follows = node + 1 < len(self.draft) and self.draft[node + 1] == token_id
        return node + 1 if follows else None

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        """Nodes of the tree by (parent, token); of equal siblings, the first one."""
        keys = list(zip(self.parents, self.draft, strict=True))
        return {keys[node]: node for node in reversed(range(len(keys)))}

    def follow(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the nodes, from the first level on, that match the target's ``token_ids``."""
        if not self.parents:
            length = 0
            for token_id, drafted in zip(token_ids, self.draft, strict=False):
                if token_id != drafted:
                    break
                length += 1
            return tuple(range(length))
        path: list[int] = []
        for token_id in token_ids:
            node = self.child(path[-1] if path else -1, token_id)
            if node is None:
                break
            path.append(node)
        return tuple(path)

    # -- behind the whole draft

    @property
    def position(self) -> int:
        """Output position of the token to draw: the number of output tokens before it."""
        return len(self.tokens) + self.num_ahead + len(self.draft) - self.sampling.prompt_len

    def encoded(self, vocab_size: int) -> EncodedSampling:
        """Return the request's encoded parameters for logits of ``vocab_size``."""
        return self.sampling.cached(EncodedSampling, vocab_size)

    def is_edited(self, vocab_size: int) -> bool:
        """Whether `apply_processors` changes or refuses the logits of this row."""
        return self.position < self.encoded(vocab_size).edited_until

    def ending(self, length: int) -> tuple[int, ...]:
        """Return the last ``length`` of the tokens and draft, or all tokens if they are fewer."""
        recent = (*self.tokens[-length:], *self.draft[-length:]) if length else ()
        return recent[max(0, len(recent) - length) :]

    def banned_by_words(self, words: Sequence[tuple[int, ...]]) -> list[int]:
        """Return the last token of each word whose other tokens end ``tokens`` plus the draft."""
        return [word[-1] for word in words if self.ending(len(word) - 1) == word[:-1]]


def positions_of(rows: Sequence[DraftedRow]) -> list[int]:
    """Return `DraftedRow.position` of each row."""
    lens = map(len, [row.tokens for row in rows]), map(len, [row.draft for row in rows])
    return [
        num_tokens + row.num_ahead + num_drafted - row.sampling.prompt_len
        for row, num_tokens, num_drafted in zip(rows, *lens, strict=True)
    ]
