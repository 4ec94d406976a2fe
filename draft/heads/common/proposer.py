"""HeadProposer: what proposers with a trained head share.

It follows the target's steps (`HeadKV`) and grows the trees of requests level by level. A kind of
head derives from it and says how head KV is written and what a pass computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from ....core.execution.proposer import PageRows, Proposer, VerifiedRequest
from ....core.interface.draft import NO_DRAFT, Draft, DraftPlan
from ....core.interface.plan import ScheduledRequest
from ....core.interface.protocols import ProposerTraits
from ....core.interface.sampling import SamplingMetadata, TokenSamplingParams
from ....core.model.decoder import OwnDecoder
from ....core.ops.batch import ForwardOutput, RaggedBatch, SamplingPlan, Taps, Wanted
from ....core.ops.kv_pool import KVPool
from ....core.sampling.sampler import DeviceSampler, DraftVocab, PendingBest, PendingTokens
from ...proposers.gap_model import GapModel, GapNumbers, default_gap_models
from ...proposers.step_trees import StepTrees
from ...proposers.tree_growth import (
    ROOT,
    TreeGrowth,
    choose,
    drawn_alone,
    draws_of,
    judge_trees,
    read_best,
    sample_rows,
)
from .head_kv import HeadKV, Written
from .layers import Head

TRIED_PRICE = 1e-9  # of a row where passes are timed: tokens are raced for, none is too dear


class DraftStart(NamedTuple):
    """The start of a draft: behind the last of the request's tokens."""

    scheduled: ScheduledRequest
    first: int  # the first position whose head KV it may see, and that of all behind
    feature: Tensor | None  # [hidden] of the position before the last token; or None


def features_of(starts: Sequence[DraftStart]) -> Tensor:
    """Stack the features of all starts, ``[b, hidden]``."""
    known = [start.feature for start in starts if start.feature is not None]
    assert len(known) == len(starts)
    return torch.stack(known)


class Query(NamedTuple):
    """A token behind which a head predicts: the last one of a request, or a draft token."""

    request: int
    level: int  # draft tokens up to it, itself included
    parent: int  # its place in the call before, one level up; -1 for the last token of a request
    token_id: int
    slots: Sequence[int] = ()  # of the KV of the draft tokens up to it, if the head keeps that


class Scored(NamedTuple):
    """Logits of what follows some queries, and the tokens, where the pass chose them itself."""

    logits: Tensor  # [num_queries, draft_vocab]
    tokens: PendingTokens | None = None
    best: PendingBest | None = None

    @classmethod
    def of(cls, output: ForwardOutput) -> Scored:
        """Take them from a decoder's pass with a row for each query."""
        return cls(output.logits, output.tokens, output.best)


class Drafting(ABC):
    """The drafts of some requests, level by level."""

    @abstractmethod
    def score(self, queries: Sequence[Query], draws: SamplingPlan | None) -> Scored:
        """Compute logits of what follows each query.

        ``draws``: the tokens that they will decide, which the pass may choose itself. All are of
        one level, one deeper than those of the call before; in the order of requests, of which
        there are never more than before.
        """


class HeadProposer(Proposer, ABC):
    """Follows the target's KV and grows trees, or chains.

    ``head``: what is left of the module when its layers are packed.
    """

    head: Head
    keeps_node_kv = False  # whether KV of draft tokens lies in the pool until a step is verified

    def __init__(self, head: Head, pool: KVPool, target: OwnDecoder) -> None:
        self.head, self.config, self.pool = head, head.config, pool
        config, draft_ids = head.config, head.draft_ids
        self.dtype, self.device = pool.dtype, pool.data.device
        self.head_kv = HeadKV(config, pool, self.write_head_kv)
        self._sampler = target.sampler
        self._draws_on_device = isinstance(target.sampler, DeviceSampler)
        self._draft_vocab = None if draft_ids is None else DraftVocab(draft_ids, config.vocab_size)
        self._trees: dict[str, TreeGrowth] = {}  # of the step under way, by request
        self._gap_models = default_gap_models()  # by whether tokens are sampled
        self._taps: Taps = tuple(dict.fromkeys(config.taps))
        self._order = [self._taps.index(boundary) for boundary in config.taps]

    def begin_with(self, numbers: Mapping[bool, GapNumbers]) -> None:
        """Begin with gap models that were fitted before, by whether tokens are sampled."""
        self._gap_models |= {is_sampled: GapModel(*each) for is_sampled, each in numbers.items()}

    @property
    @override
    def source(self) -> str:
        return self.config.kind

    @property
    @override
    def taps(self) -> Taps:
        return self._taps

    @property
    def traits(self) -> ProposerTraits:
        """Traits for prices."""
        return ProposerTraits(
            tokens_per_pass=self.config.tokens_per_pass,
            catches_up=False,  # its KV is written from the target's own passes
            weighs=True,
        )

    def warm_up(self, max_len: int, num_best: int) -> None:
        """Be ready for passes over texts of up to ``max_len`` tokens; some kinds always are.

        ``num_best``: tokens that will be chosen of each place.
        """
        del max_len, num_best

    def wanted(self, num_best: int) -> Wanted:
        """Describe passes of vectors that choose tokens, to be ready for them."""
        vectors = self.pool.data.new_empty((0, self.config.hidden_size))
        draws = SamplingPlan((), (), num_best, self._draft_vocab)
        return Wanted(draws if self._draws_on_device else None, inputs=vectors)

    # -- what kinds of heads do -----------------------------------------------------------------

    @abstractmethod
    def write_head_kv(self, written: Written) -> Tensor | None:
        """Compute and write the head KV of positions; returns their features, if it has such.

        KV whose feature before is unknown is void.
        """

    @abstractmethod
    def begin(self, starts: Sequence[DraftStart], num_drafted: int) -> Drafting:
        """Draft up to ``num_drafted`` tokens behind the last token of each request."""

    # -- the target's steps ---------------------------------------------------------------------

    @property
    def stored(self) -> Sequence[PageRows]:
        """The head KV of a page, its feature and whether it is ready."""
        return self.head_kv.stored

    @override
    def adopt(self, page_ids: array[int]) -> None:
        self.head_kv.adopt(page_ids)

    @override
    def forget(self, request_ids: Sequence[str], newly_allocated_pages: array[int]) -> None:
        self.head_kv.forget(request_ids, newly_allocated_pages)

    @torch.inference_mode()
    def observe(
        self, batch: RaggedBatch, output: ForwardOutput, verified: Sequence[VerifiedRequest]
    ) -> None:
        """Judge the trees; write the head KV of what was committed."""
        del batch
        judge_trees(self._trees, verified)
        assert output.taps is not None
        live = [each for each in verified if self.head_kv.is_live(each)]
        if not live:
            return
        rows = torch.tensor([row for each in live for row in each.batch_rows])
        taps = self._ordered(output.taps.index_select(0, rows.to(output.taps.device)))
        self.head_kv.add(live, torch.split(taps, [len(each.batch_rows) for each in live]))

    def _ordered(self, taps: Tensor) -> Tensor:
        """Taps in the order of the head's, which may name one twice."""
        if self._order == list(range(len(self._taps))):
            return taps
        parts = taps.chunk(len(self._taps), dim=-1)
        return torch.cat([parts[index] for index in self._order], dim=-1)

    # -- drafts ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, requests: Sequence[ScheduledRequest]) -> list[Draft]:
        """Grow a tree for each request that has head KV, with the verifier's noise."""
        self._trees = {}  # those of a step that failed are void
        self.head_kv.write_waiting([each for each in requests if self.head_kv.waits(each)])
        starts = [start for start in map(self._start, requests) if start is not None]
        if starts:
            self._trees = {tree.scheduled.request_id: tree for tree in self._grow(starts)}
        drafts = StepTrees([*self._trees.values()]).drafts()
        found = dict(zip(self._trees, drafts, strict=True))
        return [found.get(scheduled.request_id, NO_DRAFT) for scheduled in requests]

    def try_draft(self, num_requests: int, num_tokens: int) -> None:
        """Compute what the first tokens of so many drafts cost, over void head KV; to be timed."""
        count = max(1, min(num_tokens // self.pool.page_size, self.pool.num_pages))
        pages = array("q", range(count))
        tokens = array("q", [0] * (count * self.pool.page_size))
        sampling = SamplingMetadata(
            params=TokenSamplingParams(temperature=1.0), seed=0, prompt_len=1
        )
        scheduled = ScheduledRequest(
            request_id="", tokens=tokens, start=0, stop=0, page_ids=pages, sampling=sampling,
            draft_plan=DraftPlan(
                max_draft=self.config.tokens_per_pass, row_prices=(TRIED_PRICE,)
            ),
        )  # fmt: skip
        feature = torch.zeros(self.config.hidden_size, dtype=self.dtype, device=self.device)
        start = DraftStart(scheduled, self.config.first_position, feature)
        self._grow([start] * num_requests)

    def _start(self, scheduled: ScheduledRequest) -> DraftStart | None:
        """Find where the request's draft begins; None where the head lacks what it reads."""
        span = self.head_kv.spans.get(scheduled.request_id)
        if span is None or span.stop < len(scheduled.tokens) - 1:
            return None
        return DraftStart(scheduled, self.head_kv.first_seen(scheduled, span), span.feature)

    @torch.inference_mode()
    def _grow(self, starts: Sequence[DraftStart]) -> list[TreeGrowth]:
        """Grow trees together: whether another pass pays is decided for all of them at once."""
        trees = [self._tree(start.scheduled) for start in starts]
        num_drafted = min(
            self.config.longest, max(start.scheduled.draft_plan.max_draft for start in starts)
        )
        drafting = self.begin(starts, num_drafted)
        nodes, before = [[ROOT] for _ in trees], dict[tuple[int, int], int]()
        for level in count():
            opened = [(index, node) for index, each in enumerate(nodes) for node in each]
            if not opened:
                break
            queries = [self._query(trees[index], index, node, before) for index, node in opened]
            self._expand([(trees[i], n) for i, n in opened], queries, drafting)
            before = {each: at for at, each in enumerate(opened)}
            nodes = self._next_level(trees, level + 1)
        return trees

    def _tree(self, scheduled: ScheduledRequest) -> TreeGrowth:
        gap_model = self._gap_models[scheduled.sampling.params.temperature > 0.0]
        page_size = self.pool.page_size if self.keeps_node_kv else 0
        return TreeGrowth(
            scheduled, gap_model, self.source, page_size, most_levels=self.config.longest
        )

    def _query(
        self, tree: TreeGrowth, request: int, node: int, before: dict[tuple[int, int], int]
    ) -> Query:
        if node == ROOT:
            return Query(request, 0, -1, tree.scheduled.tokens[-1])
        found = tree.nodes[node]
        parent = before[request, found.parent]
        return Query(request, found.level, parent, found.token_id, tree.path_slots(node))

    def _expand(
        self,
        nodes: Sequence[tuple[TreeGrowth, int]],
        queries: Sequence[Query],
        drafting: Drafting,
    ) -> None:
        rows = sample_rows(nodes)
        draws = draws_of(nodes, rows, self._draft_vocab) if self._draws_on_device else None
        scored = drafting.score(queries, draws)
        if scored.best is not None:
            has_scores = draws is not None and draws.num_best > 1
            found = read_best(scored.best, has_scores=has_scores)
        elif scored.tokens is not None:
            found = drawn_alone(scored.tokens.choices())
        else:
            found = choose(nodes, scored.logits, rows, self._sampler, draft_vocab=self._draft_vocab)
        for (tree, node), best in zip(nodes, found, strict=True):
            tree.expand(node, best)

    def _next_level(self, trees: Sequence[TreeGrowth], level: int) -> list[list[int]]:
        """The nodes of each tree that are worth expanding, a pass if they take one."""
        takes_pass = level % self.config.tokens_per_pass == 0
        found = StepTrees(trees).frontiers(level, takes_pass=takes_pass)
        return [tree.open(nodes) for tree, nodes in zip(trees, found, strict=True)]
