"""Branches: tokens after a prompt, of which several may follow the same token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from ..draft import Draft
from .images import PromptImage, mutual_runs


class Branches(msgspec.Struct, frozen=True, gc=False):
    """Tokens at the end of a request's tokens that form a tree, whose root is the token before.

    A row of a branch attends to the prompt and to the tokens on its own path, at the positions that
    these have in a text. So each path has the bits of a prompt that ends with it. The rows of the
    root and of all branches are computed in the same step. The KV of branches is not cached, since
    the tokens before them are not all on their path.
    """

    first: int  # index of the first branch token among the request's tokens
    parents: tuple[int, ...]  # parent of each branch token as in `Draft`; -1 for the root

    def tree(self, tokens: array[int]) -> Draft:
        """Return the branches of a request with these ``tokens`` as a tree."""
        return Draft(token_ids=tokens[self.first :], parents=self.parents)


def undivided_runs(
    images: Sequence[PromptImage], branches: Branches | None
) -> list[tuple[int, int]]:
    """Return the (position, number of rows) of rows that one step must compute together."""
    runs = mutual_runs(images)
    return runs if branches is None else [*runs, (branches.first - 1, 1 + len(branches.parents))]


def chunk_stop(
    images: Sequence[PromptImage], branches: Branches | None, start: int, stop: int
) -> int:
    """Return ``stop``, moved so that a chunk from ``start`` cuts no `undivided_runs`.

    A chunk that would end inside such a run ends before it, or after it if the chunk begins at or
    inside the run.
    """
    for first, count in undivided_runs(images, branches):
        if first < stop < first + count:
            return first if start < first else first + count
    return stop
