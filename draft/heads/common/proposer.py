"""HeadProposer: the base class of proposers with a trained head.

After each step of the target, it adds the committed positions to its `HeadKV`. Its `HeadGrower`
grows the draft trees of requests level by level. Each kind of head has a subclass, which defines
how head KV is written and what a pass computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from ....core.execution.proposer import PageRows, Proposer, VerifiedRequest
from ....core.interface.draft import NO_DRAFT, Draft, DraftPlan
from ....core.interface.plan import ScheduledRequest
from ....core.interface.protocols import ProposerTraits
from ....core.model.decoder import OwnDecoder
from ....core.ops.batch import (
    DeviceTokens,
    ForwardOutput,
    RaggedBatch,
    SamplingPlan,
    Taps,
    Wanted,
)
from ....core.ops.kv_pool import KVPool
from ....core.sampling.sampler import DraftVocab, PendingBest, Sampler
from ...control.profiler import TRIED_PRICE, TRIED_SAMPLING
from ...proposers.gap_model import GapModel, GapNumbers
from ...proposers.step_trees import StepTrees
from ...proposers.tree_grower import (
    Opened,
    Scored,
    TreeGrower,
    drawn_ahead,
    read_passes,
    root_rows,
    sample_rows,
)
from ...proposers.tree_growth import ROOT, TreeGrowth, TreeNodes
from ...proposers.tree_template import TemplateRow
from .head_kv import HeadKV, Written
from .layers import Head, TapConfig


class DraftStart(NamedTuple):
    """The state of a request from which a head starts a draft."""

    scheduled: ScheduledRequest
    first: int  # first position of the head KV that the draft may read
    feature: Tensor | None  # [hidden] feature of the position before the last token, if known


def features_of(starts: Sequence[DraftStart]) -> Tensor:
    """Return the features with which drafts start, [b, hidden]."""
    known = [start.feature for start in starts if start.feature is not None]
    assert len(known) == len(starts)
    return torch.stack(known)


class Query(NamedTuple):
    """A token whose successor a head predicts: the last token of a request, or a draft token."""

    request: int  # index of the request among the starts
    level: int  # number of draft tokens on the path to this token, itself included
    parent: int  # index of the parent token in the previous call; -1 without a parent
    token_id: int
    slots: Sequence[int] = ()  # KV slots of the path's draft tokens; empty if they have no KV


class Drafting(ABC):
    """The computation of some requests' drafts, one level of the trees per call."""

    # Whether `score` supports ``device_tokens``. It does if all that depends on token ids is in the
    # graph of the pass, or behind it. Only EAGLE-3's layer is: the embeddings of an MTP layer and
    # of an assistant are joined to features before the graph, and a pass of a block or a Medusa
    # head yields several levels, so that few of its tokens are waited for.
    takes_device_tokens = False

    @abstractmethod
    def score(
        self,
        queries: Sequence[Query],
        draws: SamplingPlan | None,
        device_tokens: DeviceTokens | None = None,
    ) -> Scored:
        """Compute the logits of the token after each token in ``queries``.

        ``device_tokens``: tokens that are still on the device; their queries have the token id 0.
        ``draws``: sampling plan with which the pass may choose these tokens itself. All queries are
        at one level, which is one deeper than in the previous call. They are in the order of the
        requests. A request that is missing in one call is missing in all later ones.
        """


class HeadGrower(TreeGrower):
    """Grows trees with a head, one level per call.

    ``page_size``: page size of the pool that holds the KV of draft tokens; 0 if they have no KV.
    """

    def __init__(
        self, config: TapConfig, sampler: Sampler, *, page_size: int, draft_vocab: DraftVocab | None
    ) -> None:
        super().__init__(
            config.kind,
            sampler,
            page_size=page_size,
            tokens_per_pass=config.tokens_per_pass,
            draft_vocab=draft_vocab,
        )
        self._longest, self._vocab_size = config.longest, config.vocab_size
        self._drafting: Drafting | None = None  # drafts of the growing trees
        self._requests: dict[TreeGrowth, int] = {}  # indices of the growing trees
        self._before: dict[tuple[TreeGrowth, int], int] = {}  # indices of the previous call's nodes

    @override
    def most_levels(self, scheduled: ScheduledRequest) -> int:
        return self._longest

    def grow_with(self, trees: Sequence[TreeGrowth], drafting: Drafting) -> None:
        """Grow trees, one for each request of ``drafting``, in its order."""
        self._drafting, self._before = drafting, {}
        self._requests = {tree: at for at, tree in enumerate(trees)}
        self.grow(trees, self.compute([(tree, ROOT) for tree in trees]))
        self._drafting, self._before, self._requests = None, {}, {}  # Free the drafts' tensors.

    @override
    def grow(self, trees: Sequence[TreeGrowth], first: Opened) -> None:
        assert self._drafting is not None
        if self._drafting.takes_device_tokens and self.may_launch_ahead(first):
            self._grow_ahead(trees, first)
        else:
            super().grow(trees, first)

    def _grow_ahead(self, trees: Sequence[TreeGrowth], first: Opened) -> None:
        """Launch the passes of a template before reading any of them; then grow pass by pass.

        A head cannot return to an earlier level, so there is one template for a step.
        """
        rows = root_rows(first)
        planned = StepTrees(trees).template({row.tree: row for row in rows}, by_level=True)
        passes, slots = [(rows, first)], dict[TemplateRow, tuple[int, ...]]()
        for rows in planned:
            before = passes[-1][1].found
            if isinstance(before, Sequence):
                break  # The next pass cannot take its tokens from the device.
            passes.append((rows, self._compute_rows(rows, before, slots)))
        read_passes(passes)
        self._before = {
            (row.tree, row.node): row.index for row in passes[-1][0] if row.node is not None
        }
        self._grow_on(trees, len(passes))

    def _compute_rows(
        self,
        rows: Sequence[TemplateRow],
        before: PendingBest,
        slots: dict[TemplateRow, tuple[int, ...]],
    ) -> Opened:
        """Compute a pass of a template. ``before``: the results of the pass before it.

        ``slots``: KV slots of the paths of earlier rows, to which the paths of ``rows`` are added.
        """
        assert self._drafting is not None
        vocab, queries = self._draft_vocab, list[Query]()
        for row in rows:
            tree, parent = row.tree, row.parent
            assert parent is not None
            own = () if row.slot is None else (row.slot,)
            slots[row] = path = (*slots.get(parent, ()), *own)
            token_id = 0 if row.node is None else tree.nodes[row.node].token_id
            queries.append(Query(self._requests[tree], row.level, parent.index, token_id, path))
        sources = np.array([row.source(self._num_best) for row in rows], np.int32)
        names = None if vocab is None else vocab.token_ids
        tokens = DeviceTokens(before.words, sources, self._vocab_size, names)
        nodes, drawn = [(row.tree, ROOT) for row in rows], drawn_ahead(rows)
        return self.choose(
            nodes, drawn, self._drafting.score(queries, self.draws_of(nodes, drawn), tokens)
        )

    @override
    def compute(self, nodes: TreeNodes) -> Opened:
        assert self._drafting is not None
        queries = [self._query(*each) for each in nodes]
        self._before = {each: at for at, each in enumerate(nodes)}
        rows = sample_rows(nodes)
        return self.choose(nodes, rows, self._drafting.score(queries, self.draws_of(nodes, rows)))

    def _query(self, tree: TreeGrowth, node: int) -> Query:
        found = tree.at(node)
        parent = -1 if node == ROOT else self._before[tree, found.parent]
        slots = tree.path_slots(node)
        return Query(self._requests[tree], found.level, parent, found.token_id, slots)


class HeadProposer(Proposer, ABC):
    """Base of proposers that grow draft trees or chains with a head, and keep the KV of the head.

    ``head``: the module without its packed layers.
    """

    head: Head
    keeps_node_kv = False  # whether the pool holds KV of draft tokens until a step is verified

    def __init__(self, head: Head, pool: KVPool, target: OwnDecoder) -> None:
        self.head, self.config, self.pool = head, head.config, pool
        config, draft_ids = head.config, head.draft_ids
        self.dtype, self.device = pool.dtype, pool.data.device
        self.head_kv = HeadKV(config, pool, self.write_head_kv)
        self._grower = HeadGrower(
            config,
            target.sampler,
            page_size=pool.page_size if self.keeps_node_kv else 0,
            draft_vocab=None if draft_ids is None else DraftVocab(draft_ids, config.vocab_size),
        )
        self._taps: Taps = tuple(dict.fromkeys(config.taps))
        self._order = [self._taps.index(boundary) for boundary in config.taps]

    def begin_with(self, numbers: Mapping[bool, GapNumbers]) -> None:
        """Replace the gap models for greedy (False) or sampled (True) requests by fitted ones."""
        models = {is_sampled: GapModel(*each) for is_sampled, each in numbers.items()}
        self._grower.gap_models |= models

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
        """Traits that determine the price of drafts."""
        return ProposerTraits(
            tokens_per_pass=self.config.tokens_per_pass,
            catches_up=False,  # Head KV is written from the target's own passes.
            weighs=True,
        )

    def wanted(self, num_best: int) -> Wanted:
        """Return what a warm-up pass reads and computes: it reads features and chooses tokens."""
        vectors = self.pool.data.new_empty((0, self.config.hidden_size))
        return Wanted(self._grower.draws((), num_best), inputs=vectors)

    # -- methods of kinds of heads --------------------------------------------------------------

    @abstractmethod
    def write_head_kv(self, written: Written) -> Tensor | None:
        """Compute and write the head KV of positions; return their features, if there are any.

        If the feature of the preceding position is needed but unknown, the KV is invalid and never
        read.
        """

    @abstractmethod
    def begin(self, starts: Sequence[DraftStart], num_drafted: int) -> Drafting:
        """Begin drafts of up to ``num_drafted`` tokens after the last token of each request."""

    # -- the target's steps ---------------------------------------------------------------------

    @property
    def stored(self) -> Sequence[PageRows]:
        """The data per page that KV tiers store: head KV, last position's feature, ready mark."""
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
        """Learn from verified trees; add the committed positions to the head KV."""
        del batch
        self._grower.judge(verified)
        assert output.taps is not None
        live = [each for each in verified if self.head_kv.is_live(each)]
        if not live:
            return
        rows = torch.tensor([row for each in live for row in each.batch_rows])
        taps = self._ordered(output.taps.index_select(0, rows.to(output.taps.device)))
        self.head_kv.add(live, torch.split(taps, [len(each.batch_rows) for each in live]))

    def _ordered(self, taps: Tensor) -> Tensor:
        """Return the taps in the order of the head's config, which may list the same tap twice."""
        if self._order == list(range(len(self._taps))):
            return taps
        parts = taps.chunk(len(self._taps), dim=-1)
        return torch.cat([parts[index] for index in self._order], dim=-1)

    # -- drafts ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, requests: Sequence[ScheduledRequest]) -> list[Draft]:
        """Grow a tree for each request that has head KV, with the noise of the verifier."""
        self._grower.begin()
        self.head_kv.write_waiting([each for each in requests if self.head_kv.waits(each)])
        starts = [start for start in map(self._start, requests) if start is not None]
        trees = self._grow(starts) if starts else []
        names = [tree.scheduled.request_id for tree in trees]
        drafts = dict(zip(names, self._grower.drafts(trees), strict=True))
        return [drafts.get(scheduled.request_id, NO_DRAFT) for scheduled in requests]

    @override
    def try_draft(self, num_requests: int, num_tokens: int) -> None:
        count = max(1, min(num_tokens // self.pool.page_size, self.pool.num_pages))
        pages = array("q", range(count))
        tokens = array("q", [0] * (count * self.pool.page_size))
        scheduled = ScheduledRequest(
            request_id="", tokens=tokens, start=0, stop=0, page_ids=pages, sampling=TRIED_SAMPLING,
            draft_plan=DraftPlan(
                max_draft=self.config.tokens_per_pass, row_prices=(TRIED_PRICE,)
            ),
        )  # fmt: skip
        feature = torch.zeros(self.config.hidden_size, dtype=self.dtype, device=self.device)
        start = DraftStart(scheduled, self.config.first_position, feature)
        self._grow([start] * num_requests)

    def _start(self, scheduled: ScheduledRequest) -> DraftStart | None:
        """Return the state for starting a draft; None if the last positions have no head KV."""
        span = self.head_kv.spans.get(scheduled.request_id)
        if span is None or span.stop < len(scheduled.tokens) - 1:
            return None
        return DraftStart(scheduled, self.head_kv.first_seen(scheduled, span), span.feature)

    @torch.inference_mode()
    def _grow(self, starts: Sequence[DraftStart]) -> list[TreeGrowth]:
        """Grow all trees together, and decide for all of them whether another pass runs."""
        trees = [self._grower.tree(start.scheduled) for start in starts]
        num_drafted = min(
            self.config.longest, max(start.scheduled.draft_plan.max_draft for start in starts)
        )
        self._grower.grow_with(trees, self.begin(starts, num_drafted))
        return trees
