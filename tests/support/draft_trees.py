"""Draft trees made of paths, and drafters that guess several ways at once."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from foretoken.core.execution.step_layout import request_segments
from foretoken.core.interface.draft import Draft, DraftPlan
from foretoken.core.interface.kv_codec import KvDtype
from foretoken.core.interface.plan import ScheduledRequest
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.model.decoder import Decoder
from foretoken.core.ops.batch import Segment
from support.checkpoints import void_item
from support.fixed_depth import FixedDepth
from support.proposers import BareProposer


def tree_of(paths: Sequence[Sequence[int]], names: Sequence[str] | None = None) -> Draft:
    """The tree of these paths, the first one its trunk; a node bears its first path's name."""
    names = names or [f"path {index}" for index in range(len(paths))]
    children: dict[tuple[int, ...], list[tuple[int, str]]] = {}
    for path, name in zip(paths, names, strict=True):
        for level, token_id in enumerate(path):
            known = children.setdefault(tuple(path[:level]), [])
            if all(token_id != other for other, _ in known):
                known.append((token_id, name))
    token_ids, sources, parents = array("q"), list[str](), list[int]()

    def lay_out(path: tuple[int, ...], parent: int) -> None:
        for token_id, name in children.get(path, ()):
            token_ids.append(token_id)
            sources.append(name)
            parents.append(parent)
            lay_out((*path, token_id), len(token_ids) - 1)

    lay_out((), -1)
    return Draft(token_ids, tuple(sources), parents=tuple(parents))


def random_paths(
    rng: random.Random, right: Sequence[int], num_paths: int, vocab_size: int
) -> list[list[int]]:
    """Ways that leave ``right`` at random points, with its own tokens behind wrong ones."""
    paths = []
    for _ in range(num_paths):
        at = rng.randrange(len(right) + 1)
        wrong = [rng.randrange(vocab_size) for _ in right[at : at + 1]]
        rest = right[at + 1 :] if rng.random() < 0.5 else [rng.randrange(vocab_size) for _ in right]
        paths.append([*right[:at], *wrong, *rest][: rng.randint(1, max(1, len(right)))])
    return paths


class RandomTrees(FixedDepth):
    """Plans random trees about the right answers, some of their tokens foreign to the model."""

    def __init__(
        self,
        answers: dict[str, list[int]],
        *,
        depth: int = 6,
        vocab_size: int = 257,
    ) -> None:
        super().__init__(depth)
        self._answers, self._rng = answers, random.Random(3)
        self._vocab_size = vocab_size

    def plan(
        self, requests: Sequence[Request], limits: Sequence[int], *, budget: int, num_prefill: int
    ) -> Sequence[DraftPlan]:
        share = budget // max(1, len(requests))
        return [self._plan(*pair, share) for pair in zip(requests, limits, strict=True)]

    def _plan(self, request: Request, limit: int, share: int) -> DraftPlan:
        right = self._answers[request.request_id][request.num_output :][: min(limit, self.depth)]
        if not right:
            return DraftPlan()
        paths = random_paths(self._rng, right, 4, self._vocab_size)
        return DraftPlan(tree_of(paths).first_nodes(share))


class TreeDepth(FixedDepth):
    """Lets the proposer guess a tree of ``depth`` nodes for every request."""

    def plan(
        self, requests: Sequence[Request], limits: Sequence[int], *, budget: int, num_prefill: int
    ) -> Sequence[DraftPlan]:
        plans = super().plan(requests, limits, budget=budget, num_prefill=num_prefill)
        return [DraftPlan(max_draft=plan.max_draft, may_branch=True) for plan in plans]


class TreeProposer(BareProposer):
    """Proposes random trees about the right answers, larger than it may, too."""

    def __init__(self, answers: dict[str, list[int]]) -> None:
        self._answers, self._rng = answers, random.Random(4)

    def propose(self, rows: Sequence[ScheduledRequest]) -> list[Draft]:
        return [self._tree(row) for row in rows]

    def _tree(self, row: ScheduledRequest) -> Draft:
        at = len(row.tokens) - row.sampling.prompt_len
        right = self._answers[row.request_id][at : at + row.draft_plan.max_draft]
        return tree_of(random_paths(self._rng, right, 4, 257)) if right else Draft()


class TreeRows:
    """A prompt in shuffled pages of a pool that holds NaN wherever nothing was written."""

    def __init__(
        self, decoder: Decoder, page_size: int, length: int, *, kv_dtype: KvDtype = "auto"
    ) -> None:
        self.decoder, self.page_size = decoder, page_size
        rng = random.Random(length)
        num_pages = 2 * (length + 200) // page_size
        self.pool = decoder.make_pool(num_pages, page_size=page_size, kv_dtype=kv_dtype)
        self.pool.data.fill_(void_item(self.pool))
        self.pages = array("q", rng.sample(range(num_pages), num_pages))
        self.tokens = array("q", [rng.randrange(decoder.config.vocab_size) for _ in range(length)])
        self._decoded: tuple[int, ...] = ()  # by `plain`, from the pending token on
        self.forward(Segment(self.tokens[:-1], 0, self.pages, 0))

    def forward(self, *segments: Segment) -> Tensor:
        batch = self.decoder.batch(segments, page_size=self.page_size)
        return self.decoder.forward(batch, self.pool).logits.clone()

    def row(self, draft: Draft) -> ScheduledRequest:
        length, num_spare = len(self.tokens), -(-len(draft.token_ids) // self.page_size)
        return ScheduledRequest(
            request_id="a",
            tokens=self.tokens,
            start=length - 1,
            stop=length,
            page_ids=self.pages[:-num_spare],
            sampling=SamplingMetadata(params=TokenSamplingParams(), seed=0, prompt_len=length),
            draft_plan=DraftPlan(draft),
            spare_page_ids=self.pages[-num_spare:],
        )

    def tree(self, draft: Draft) -> Tensor:
        """Logits of the pending token and of every node, in one pass."""
        self._decoded = ()
        row = self.row(draft)
        segments = request_segments(
            row, self.tokens[-1:], draft, self.page_size, samples=row.samples
        )
        return self.forward(*segments)

    def plain(self, token_ids: Sequence[int]) -> Tensor:
        """Logits of the last of some tokens behind the pending one, one pass each.

        What the call before has in common with this one was decoded by it.
        """
        tokens = (self.tokens[-1], *token_ids)
        pairs = zip(tokens[:-1], self._decoded, strict=False)
        known = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        for position, token_id in enumerate(tokens[known:], len(self.tokens) - 1 + known):
            logits = self.forward(Segment(array("q", [token_id]), position, self.pages, 1))
        self._decoded = tokens
        return logits[0]

    def check(self, draft: Draft) -> None:
        """Every row has the bits of plain decoding along its path."""
        together = self.tree(draft)
        assert len(together) == len(draft.token_ids) + 1
        assert torch.isfinite(together).all()
        assert torch.equal(together[0], self.plain(()))
        for node in range(len(draft.token_ids)):
            path = [draft.token_ids[each] for each in draft.path(node)]
            assert torch.equal(together[node + 1], self.plain(path)), (draft.parents, node)
