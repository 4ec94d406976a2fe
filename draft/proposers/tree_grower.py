"""TreeGrower: grows the draft trees of requests together, pass by pass.

It chooses tokens with the target's noise. Subclasses run the passes: `DecoderGrower` for drafters
that are decoders, and `HeadGrower` (draft/heads/common/proposer.py) for trained heads.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
from torch import Tensor
from typing_extensions import override

from ...core.execution.proposer import Proposer, VerifiedRequest
from ...core.interface.draft import Draft, DraftPlan
from ...core.interface.plan import ScheduledExtras, ScheduledRequest, StateUse
from ...core.model.decoder import Decoder
from ...core.ops.batch import DeviceTokens, ForwardOutput, SamplingPlan, Segment, Wanted
from ...core.ops.chained_rows import ChainedRows
from ...core.ops.kv_pool import KVPool
from ...core.ops.row_extras import RowExtras, SegmentState
from ...core.sampling.drafted_row import DraftedRow
from ...core.sampling.sampler import (
    DeviceSampler,
    DraftVocab,
    PendingBest,
    PendingTokens,
    Sampler,
)
from ...core.sampling.verifier import Best
from ..control.outcome import NUM_BEST
from ..control.profiler import TRIED_PRICE, TRIED_SAMPLING
from .gap_model import default_gap_models
from .step_trees import StepTrees
from .tree_growth import ANY_LEVEL, ROOT, TreeGrowth, TreeNodes
from .tree_template import TemplateRow, note_rows


class Scored(NamedTuple):
    """Logits of the tokens after some nodes, and the tokens themselves if the pass chose them."""

    logits: Tensor  # [num_nodes, draft_vocab]
    tokens: PendingTokens | None = None
    best: PendingBest | None = None

    @classmethod
    def of(cls, output: ForwardOutput) -> Scored:
        """Take logits and tokens from the output of a decoder's pass that has one row per node."""
        return cls(output.logits, output.tokens, output.best)


class Opened(NamedTuple):
    """Nodes that a pass computed, and candidates for the token after each node.

    The candidates may still be on the device.
    """

    nodes: TreeNodes
    found: PendingBest | Sequence[Best]  # [len(nodes)]

    def read(self) -> None:
        """Add the candidates to the trees; wait for the device if they are still there."""
        for (tree, node), best in zip(self.nodes, self.bests(), strict=True):
            tree.expand(node, best)

    def bests(self) -> Sequence[Best]:
        """Return the candidates for each node; wait for the device if they are still there."""
        return self.found if isinstance(self.found, Sequence) else self.found.bests()


class _DrawnAlone(PendingBest):
    """Candidates of a pass that draws one token per node, without scores."""

    def __init__(self, tokens: PendingTokens) -> None:
        self._tokens = tokens

    @property
    @override
    def words(self) -> Tensor:
        return self._tokens.words

    @override
    def bests(self) -> list[Best]:
        return _drawn_alone(self._tokens.choices().token_ids)


class _Unscored(PendingBest):
    """Candidates without their scores."""

    def __init__(self, found: PendingBest) -> None:
        self._found = found

    @property
    @override
    def words(self) -> Tensor:
        return self._found.words

    @override
    def bests(self) -> list[Best]:
        return _without_scores(self._found.bests())


class TreeGrower(ABC):
    """Grows trees, and keeps the trees of the current step until they are verified.

    ``source``: the drafter's name. ``page_size``: page size of the pool that holds the nodes' KV,
    in tokens; 0 if nodes have no KV. ``tokens_per_pass``: levels that one pass yields, for a
    drafter that grows level by level; 0 if a pass may compute nodes of any level.
    ``draft_vocab``: the tokens that the logits cover, unless they cover the whole vocabulary.
    """

    def __init__(
        self,
        source: str,
        sampler: Sampler,
        *,
        page_size: int,
        tokens_per_pass: int = 0,
        draft_vocab: DraftVocab | None = None,
    ) -> None:
        self._source, self._page_size, self._sampler = source, page_size, sampler
        self._tokens_per_pass, self._draft_vocab = tokens_per_pass, draft_vocab
        # The check runs once, because `isinstance` with a protocol takes as long as a small matrix
        # product.
        self._device_sampler = sampler if isinstance(sampler, DeviceSampler) else None
        self.gap_models = default_gap_models()  # gap models by whether tokens are sampled
        self._num_best = 1  # candidates per node in the last pass with nodes
        self._trees: dict[str, TreeGrowth] = {}  # trees of the current step, by request id

    # -- methods of drafters --------------------------------------------------------------------

    def most_levels(self, scheduled: ScheduledRequest) -> int:  # noqa: ARG002
        """Return the maximum number of tokens on a path of a request's draft."""
        return ANY_LEVEL

    @abstractmethod
    def compute(self, nodes: TreeNodes) -> Opened:
        """Compute the candidates that may follow ``nodes``, which come in the order of their trees.

        The parent of each node was computed before. With ``tokens_per_pass`` all nodes are at one
        level, which is one deeper than in the previous call.
        """

    # -- trees ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step: drop trees that a failed step left."""
        self._trees = {}

    def tree(self, scheduled: ScheduledRequest) -> TreeGrowth:
        """Return a new tree for a request, which contains its looked-up tokens."""
        gap_model = self.gap_models[scheduled.sampling.params.temperature > 0.0]
        most = self.most_levels(scheduled)
        return TreeGrowth(scheduled, gap_model, self._source, self._page_size, most_levels=most)

    def grow(self, trees: Sequence[TreeGrowth], first: Opened) -> None:
        """Grow trees after their ``first`` pass, until another pass costs more than it brings.

        Costs and gains are compared for all trees together.
        """
        first.read()
        self._grow_on(trees, 1)

    def _grow_on(self, trees: Sequence[TreeGrowth], number: int) -> None:
        """Grow trees pass by pass; ``number``: number of the next pass after the first one."""
        together = StepTrees(trees)
        for level in count(number):
            nodes = self._open_next(together, level)
            if not nodes:
                return
            self.compute(nodes).read()

    def may_launch_ahead(self, first: Opened) -> bool:
        """Whether passes can be launched before the result of the ``first`` pass is read.

        The device must have chosen its tokens, and no later choice may depend on token ids.
        """
        if isinstance(first.found, Sequence):
            return False
        return not any([tree.scheduled.sampling.needs_history for tree, _ in first.nodes])  # noqa: C419

    def _open_next(self, trees: StepTrees, level: int) -> TreeNodes:
        if not self._tokens_per_pass:
            return trees.open()
        return trees.open(level, takes_pass=level % self._tokens_per_pass == 0)

    def drafts(self, trees: Sequence[TreeGrowth], owed: Sequence[int] | None = None) -> list[Draft]:
        """Return the draft of each grown tree, and keep the trees for `judge`.

        ``owed``: number of tokens of each request whose KV the drafter lacks.
        """
        self._trees = {tree.scheduled.request_id: tree for tree in trees if tree.rankings}
        return StepTrees(trees).drafts(owed)

    def judge(self, verified: Sequence[VerifiedRequest]) -> list[tuple[str, list[tuple[int, int]]]]:
        """Learn from the outcome of a step.

        Returns the id of each request whose tree was verified, with a (KV slot, slot of the
        position) pair for each accepted node that has KV.
        """
        judged = []
        for each in verified:
            request_id, takes_part = each.scheduled.request_id, each.scheduled.draft_plan.max_draft
            tree = self._trees.pop(request_id, None) if takes_part else None
            if tree is not None and each.output.error is None:
                judged.append((request_id, tree.judge(each.output.token_ids)))
        return judged

    def forget(self, request_ids: Sequence[str]) -> None:
        """Forget the trees of ended requests."""
        for request_id in request_ids:
            self._trees.pop(request_id, None)

    # -- candidates -----------------------------------------------------------------------------

    def draws(self, rows: Sequence[DraftedRow], num_best: int) -> SamplingPlan | None:
        """Return a sampling plan for a pass; None if the device cannot sample."""
        if self._device_sampler is None:
            return None
        return SamplingPlan(rows, [1] * len(rows), num_best, self._draft_vocab)

    def draws_of(self, nodes: TreeNodes, rows: Sequence[DraftedRow]) -> SamplingPlan | None:
        """Return a sampling plan for a pass with one row per node, if the device can sample.

        Without nodes, the plan asks for as many candidates per row as the previous plan, so that
        both passes can use the same graph.
        """
        if nodes:
            self._num_best = NUM_BEST if _wants_best(nodes) else 1
        return self.draws(rows, self._num_best)

    def choose(self, nodes: TreeNodes, rows: Sequence[DraftedRow], scored: Scored) -> Opened:
        """Choose candidates for the token after each node, unless the pass itself has chosen them.

        A node with invalid logits gets no candidates. The result may still be on the device.
        """
        if scored.tokens is not None or not nodes:
            return Opened(nodes, () if scored.tokens is None else _DrawnAlone(scored.tokens))
        has_scores, logits = _wants_best(nodes), scored.logits
        if scored.best is not None:
            if has_scores:
                return Opened(nodes, scored.best)
            found = scored.best.bests()
        elif has_scores or self._draft_vocab is not None:
            num_best = NUM_BEST if has_scores else 1
            found = self._sampler.best(logits, rows, num_best, draft_vocab=self._draft_vocab)
        elif self._device_sampler is not None:
            return Opened(nodes, _DrawnAlone(self._device_sampler.begin(logits.float(), rows)))
        else:
            drawn = self._sampler.sample(logits.float(), rows)
            found = _drawn_alone([each.token_id for each in drawn])
        return Opened(nodes, found if has_scores else _without_scores(found))


def root_rows(first: Opened) -> list[TemplateRow]:
    """Return the rows of a first pass, which computes the roots of trees."""
    return [TemplateRow(tree, 0, node=ROOT, index=at) for at, (tree, _) in enumerate(first.nodes)]


def read_passes(passes: Sequence[tuple[Sequence[TemplateRow], Opened]]) -> None:
    """Add the results of passes to the trees, in the order of the passes."""
    for rows, opened in passes:
        note_rows(rows)
        for row, best in zip(rows, opened.bests(), strict=True):
            row.read(best)


def drawn_ahead(rows: Sequence[TemplateRow]) -> list[DraftedRow]:
    """Return the rows with which tokens are drawn after nodes whose paths are not known yet."""
    return [
        DraftedRow(row.tree.scheduled.tokens, row.tree.scheduled.sampling, (), (), row.level)
        for row in rows
    ]


def sample_rows(nodes: TreeNodes) -> list[DraftedRow]:
    """Return the rows with which the token after each node is sampled."""
    return [
        DraftedRow(tree.scheduled.tokens, tree.scheduled.sampling, tree.tail(node))
        for tree, node in nodes
    ]


def _wants_best(nodes: TreeNodes) -> bool:
    return any(tree.wants_best for tree, _ in nodes)


def _without_scores(found: Sequence[Best]) -> list[Best]:
    return [best._replace(scores=()) for best in found]


def _drawn_alone(token_ids: Sequence[int]) -> list[Best]:
    """Convert each drawn token to one candidate without a score, and -1, an error, to none."""
    return [Best((token_id,) if token_id >= 0 else (), ()) for token_id in token_ids]


class DecoderGrower(TreeGrower):
    """Grows trees by passes of ``decoder`` over ``pool``, which holds the KV of the context."""

    def __init__(self, decoder: Decoder, pool: KVPool, source: str) -> None:
        super().__init__(source, decoder.sampler, page_size=pool.page_size)
        self._decoder, self._pool = decoder, pool
        self._row_passes = decoder.row_passes(pool)
        self._chained_passes = decoder.chained_passes(pool)
        self._tried: tuple[tuple[int, int], list[Segment], TreeNodes] | None = None

    @override
    def most_levels(self, scheduled: ScheduledRequest) -> int:
        # A row after the end of a page folds the page's log into the state, which must not contain
        # draft tokens. So drafts end with the page.
        in_page = (len(scheduled.tokens) - 1) % self._page_size
        return ANY_LEVEL if self._pool.states is None else self._page_size - in_page

    def _extras(self, scheduled: ScheduledRequest, position: int) -> RowExtras | None:
        """Return the recurrent state of a request for a row at ``position``, or None."""
        state = scheduled.extras.state
        if self._pool.states is None or state is None:
            return None
        return RowExtras(state=SegmentState(state.slot, state.log, position + 1))

    def has_room(self, scheduled: ScheduledRequest) -> bool:
        """Whether the longest draft of a request fits into the decoder's context."""
        longest = len(scheduled.tokens) + scheduled.draft_plan.max_draft
        return longest <= self._decoder.config.max_model_len

    @override
    def compute(self, nodes: TreeNodes) -> Opened:
        return self.run([self._segment(tree, node) for tree, node in nodes], nodes)

    def _segment(self, tree: TreeGrowth, node: int) -> Segment:
        found = tree.at(node)
        start = len(tree.scheduled.tokens) + found.level - 1
        return Segment(
            token_ids=array("q", [found.token_id]),
            start=start,
            page_ids=tree.scheduled.page_ids,
            num_logits=1,
            tail=array("q", tree.slots(node)),
            extras=self._extras(tree.scheduled, start),
        )

    @override
    def grow(self, trees: Sequence[TreeGrowth], first: Opened) -> None:
        if self.may_launch_ahead(first):
            self._grow_ahead(trees, first)
        else:
            super().grow(trees, first)

    def _grow_ahead(self, trees: Sequence[TreeGrowth], first: Opened) -> None:
        """Grow trees by templates: launch all passes of a template before reading any of them."""
        together = StepTrees(trees)
        roots = root_rows(first)
        passes = [(roots, first)]
        planned = together.template({row.tree: row for row in roots})
        while passes or planned:
            before = passes[-1][1].found if passes else ()
            launched = self._launch(planned, before) if planned else []
            for rows, opened in zip(planned, launched, strict=False):
                passes.append((rows, opened))
                before = opened.found
            for rows in planned[len(launched) :]:
                opened = self._compute_rows(rows, before)
                passes.append((rows, opened))
                before = opened.found
                if isinstance(before, Sequence):
                    break  # The next pass cannot take its tokens from the device.
            read_passes(passes)
            passes, planned = [], together.template({})

    def _launch(
        self, planned: Sequence[Sequence[TemplateRow]], before: PendingBest | Sequence[Best]
    ) -> list[Opened]:
        """Launch passes of a template together; return the results of those that were launched.

        ``before``: the results of the pass before them.
        """
        words = None if isinstance(before, Sequence) else before.words
        if self._chained_passes is None or (words is None and before):
            return []
        num_best = self._num_best
        trees = list(dict.fromkeys([row.tree for rows in planned for row in rows]))
        chained, known = ChainedRows(), dict[TreeGrowth, tuple[int, int, int]]()
        for index, tree in enumerate(trees):
            scheduled, sampling = tree.scheduled, tree.scheduled.sampling
            chained.add_request(scheduled.page_ids, sampling)
            num_tokens = len(scheduled.tokens)
            known[tree] = index, num_tokens - 1, num_tokens - sampling.prompt_len
        for rows in planned:
            has_scores = False
            for row in rows:
                has_scores |= row.tree.wants_best
                request, last, num_output = known[row.tree]
                token_id = 0 if row.node is None else row.tree.nodes[row.node].token_id
                position, level = last + row.level, row.level
                chained.records += (
                    request, token_id, row.source(num_best), position, position, row.slot or 0,
                    len(row.tail), num_output + level,
                )  # fmt: skip
                chained.tails.extend(row.tail)
            num_best = NUM_BEST if has_scores else 1
            chained.end_pass(len(rows), num_best)
        launched = self._chained_passes.launch(chained, words)
        opened = list[Opened]()
        for found, num_best in zip(launched, chained.num_best, strict=False):
            self._num_best = num_best
            opened.append(Opened((), found if num_best > 1 else _Unscored(found)))
        return opened

    def _compute_rows(
        self, rows: Sequence[TemplateRow], before: PendingBest | Sequence[Best]
    ) -> Opened:
        """Compute a pass of a template. ``before``: the results of the pass before it."""
        tokens = None
        if not isinstance(before, Sequence):
            sources = np.array([row.source(self._num_best) for row in rows], np.int32)
            tokens = DeviceTokens(before.words, sources, self._decoder.config.vocab_size)
        nodes = [(row.tree, ROOT) for row in rows]
        segments = [self._template_segment(row) for row in rows]
        return self.run(segments, nodes, drawn_ahead(rows), tokens)

    def _template_segment(self, row: TemplateRow) -> Segment:
        scheduled = row.tree.scheduled
        token_id = 0 if row.node is None else row.tree.nodes[row.node].token_id
        start = len(scheduled.tokens) + row.level - 1
        extras = self._extras(scheduled, start)
        return Segment([token_id], start, scheduled.page_ids, 1, row.tail, extras)

    def run(
        self,
        segments: Sequence[Segment],
        nodes: TreeNodes,
        rows: Sequence[DraftedRow] | None = None,
        device_tokens: DeviceTokens | None = None,
    ) -> Opened:
        """Run a pass with a row of logits for each node; return the candidates for each node.

        ``rows``: rows with which the tokens after the nodes are drawn, if their paths are not known
        yet.
        """
        rows = sample_rows(nodes) if rows is None else rows
        if self._row_passes is not None and len(nodes) == len(segments) == _num_rows(segments):
            has_scores = _wants_best(nodes)
            found = self._row_passes.best(segments, rows, NUM_BEST if has_scores else 1)
            return Opened(nodes, found if has_scores else _without_scores(found))
        batch = self._decoder.batch(
            segments, page_size=self._page_size, device_tokens=device_tokens
        )
        output = self._decoder.forward(batch, self._pool, Wanted(self.draws_of(nodes, rows)))
        return self.choose(nodes, rows, Scored.of(output))

    def try_draft(self, num_requests: int, num_tokens: int) -> None:
        """Run the first pass of ``num_requests`` drafts, to time it.

        Each has a context of ``num_tokens`` tokens with arbitrary KV.
        """
        if self._tried is None or self._tried[0] != (num_requests, num_tokens):
            roots = [(self.tree(each), ROOT) for each in self._tries(num_requests, num_tokens)]
            segments = [self._segment(*root) for root in roots]
            self._tried = (num_requests, num_tokens), segments, roots
        _, segments, nodes = self._tried
        if (states := self._pool.states) is not None:
            for index, each in enumerate(segments):
                states.set_position(index, index, each.start)
        self.run(segments, nodes).bests()

    def _tries(self, num_requests: int, num_tokens: int) -> Iterator[ScheduledRequest]:
        """Yield requests for `try_draft`, with a shorter context if the pool is small.

        Each request has its own pages if the pool has enough, because pages that are read twice
        would be in a processor cache. The last tokens of the requests differ, because equal tokens
        would use the same experts.
        """
        pool, config, rng = self._pool, self._decoder.config, random.Random(0)
        most = min(pool.num_pages * pool.page_size, config.max_model_len)
        num_tokens = min(num_tokens + 1, most)
        count = -(-num_tokens // pool.page_size)
        for index in range(num_requests):
            pages = (page % pool.num_pages for page in range(index * count, (index + 1) * count))
            yield ScheduledRequest(
                request_id="",
                tokens=array("q", [rng.randrange(config.vocab_size)]) * num_tokens,
                start=num_tokens - 1,
                stop=num_tokens,
                page_ids=array("q", pages),
                sampling=TRIED_SAMPLING,
                draft_plan=DraftPlan(max_draft=1, row_prices=(TRIED_PRICE,)),
                extras=ScheduledExtras(state=StateUse(index, index)),
            )


def _num_rows(segments: Sequence[Segment]) -> int:
    return sum(len(segment.token_ids) for segment in segments)


class DecoderProposer(Proposer):
    """Base of proposers that draft by passes of ``decoder`` over ``pool``."""

    def __init__(self, decoder: Decoder, pool: KVPool) -> None:
        self._grower = DecoderGrower(decoder, pool, self.source)
        self.models, self.device = ((decoder, pool),), decoder.device

    @override
    def try_draft(self, num_requests: int, num_tokens: int) -> None:
        self._grower.try_draft(num_requests, num_tokens)
