"""TreeGrower: grows the draft trees of requests with a decoder, a pass for each level.

It chooses tokens with the target's noise, and knows nothing of who keeps the KV of the history.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...core.interface.plan import ScheduledRequest
from ...core.model.decoder import Decoder
from ...core.ops.base import RowPasses
from ...core.ops.batch import DeviceTokens, ForwardOutput, SamplingPlan, Segment, Wanted
from ...core.ops.kv_pool import KVPool
from ...core.ops.row_extras import RowExtras, SegmentState
from ...core.sampling.drafted_row import DraftedRow
from ...core.sampling.sampler import DeviceSampler, PendingTokens
from ...core.sampling.verifier import Best
from ..control.outcome import NUM_BEST
from .gap_model import default_gap_models
from .step_trees import StepTrees
from .tree_growth import (
    ANY_LEVEL,
    ROOT,
    TreeGrowth,
    TreeNodes,
    choose,
    drawn_alone,
    draws_of,
    sample_rows,
)


class TreeGrower:
    """Passes of ``decoder`` over ``pool``, which has the KV of what stands before each draft.

    ``source``: name of the drafter.
    """

    def __init__(self, decoder: Decoder, pool: KVPool, source: str) -> None:
        self._decoder, self._pool, self._source = decoder, pool, source
        self._sampler = sampler = decoder.sampler
        self._gap_models = default_gap_models()  # by whether tokens are sampled
        # Asked once: whether an object keeps a protocol takes as long as a small matrix.
        self._device_sampler = sampler if isinstance(sampler, DeviceSampler) else None
        self._row_passes = decoder.row_passes(pool)
        self._draws = SamplingPlan((), ())  # of the last pass that chose tokens

    def tree(self, scheduled: ScheduledRequest) -> TreeGrowth:
        """The draft of a request, still empty."""
        gap_model = self._gap_models[scheduled.sampling.params.temperature > 0.0]
        return TreeGrowth(
            scheduled,
            gap_model,
            self._source,
            self._pool.page_size,
            most_levels=self._most_levels(scheduled),
        )

    def _most_levels(self, scheduled: ScheduledRequest) -> int:
        """Tokens of a path at most.

        A row behind a page's end folds the page's log into the state: drafts must not be in it.
        """
        page_size = self._pool.page_size
        in_page = (len(scheduled.tokens) - 1) % page_size
        return ANY_LEVEL if self._pool.states is None else page_size - in_page

    def extras(self, scheduled: ScheduledRequest, position: int) -> RowExtras | None:
        """Return the state of a request for a row at a position; None if the decoder has none."""
        state = scheduled.extras.state
        if self._pool.states is None or state is None:
            return None
        return RowExtras(state=SegmentState(state.slot, state.log, position + 1))

    def has_room(self, scheduled: ScheduledRequest) -> bool:
        """Whether the longest draft of a request is within the decoder's context."""
        longest = len(scheduled.tokens) + scheduled.draft_plan.max_draft
        return longest <= self._decoder.config.max_model_len

    def grow(self, trees: Sequence[TreeGrowth], first: Opened) -> None:
        """Expand the trees, level by level, behind their first one."""
        needs_history = any(tree.scheduled.sampling.needs_history for tree, _ in first.nodes)
        if isinstance(first.found, Sequence) or needs_history:
            first.read()
            while any(found := StepTrees(trees).frontiers()):
                self._advance(trees, found).read()
        else:
            self._grow_on_device(first)

    def _advance(self, trees: Sequence[TreeGrowth], found: Sequence[Sequence[int]]) -> Opened:
        """Compute some nodes of each tree, and what may follow them."""
        pairs = zip(trees, found, strict=True)
        nodes = [(tree, node) for tree, opened in pairs for node in tree.open(opened)]
        segments = [self._segment(tree, node) for tree, node in nodes]
        return self.compute(segments, nodes)

    def _segment(self, tree: TreeGrowth, node: int) -> Segment:
        start = len(tree.scheduled.tokens) + tree.nodes[node].level - 1
        return Segment(
            token_ids=array("q", [tree.nodes[node].token_id]),
            start=start,
            page_ids=tree.scheduled.page_ids,
            num_logits=1,
            tail=array("q", tree.slots(node)),
            extras=self.extras(tree.scheduled, start),
        )

    def _grow_on_device(self, first: Opened) -> None:
        """Chains of a given length: launch all passes, each with the tokens of the one before it.

        The host waits once: when it reads the last pass, the others are over.
        """
        passes = [first]
        while trees := [t for t, _ in passes[-1].nodes if len(passes) < t.most_levels]:
            passes.append(self._advance_on_device(trees, passes[-1], len(passes)))
        for level, each in enumerate(passes):
            assert not isinstance(each.found, Sequence)
            for (tree, _), best in zip(each.nodes, drawn_alone(each.found.choices()), strict=True):
                if len(tree.nodes) == level:  # else a token before could not be drawn
                    tree.open(range(level - 1, level) if level else ())
                    tree.expand(level - 1, best)  # ROOT, then each token behind the one before

    def _advance_on_device(
        self, trees: Sequence[TreeGrowth], before: Opened, num_ahead: int
    ) -> Opened:
        """Draw one more token for each chain, of which the device alone knows ``num_ahead``."""
        segments = [self._segment_ahead(tree.scheduled, num_ahead) for tree in trees]
        assert not isinstance(before.found, Sequence)
        rows_before = {id(tree): row for row, (tree, _) in enumerate(before.nodes)}
        sources = np.array([rows_before[id(tree)] for tree in trees], np.int32)
        tokens = DeviceTokens(before.found.words, sources, self._decoder.config.vocab_size)
        roots = [(tree, ROOT) for tree in trees]
        return self.compute(segments, roots, tokens, num_ahead)

    def _segment_ahead(self, scheduled: ScheduledRequest, num_ahead: int) -> Segment:
        start = len(scheduled.tokens) + num_ahead - 1
        extras = self.extras(scheduled, start)
        return Segment([0], start, scheduled.page_ids, 1, extras=extras)

    def compute(
        self,
        segments: Sequence[Segment],
        nodes: TreeNodes,
        device_tokens: DeviceTokens | None = None,
        num_ahead: int = 0,
    ) -> Opened:
        """One pass, a row of logits for each node, and what may follow these."""
        rows = sample_rows(nodes, num_ahead)
        if self._row_passes is not None and len(nodes) == len(segments) == _num_rows(segments):
            return Opened(nodes, self._best_of_rows(self._row_passes, segments, nodes, rows))
        page_size = self._pool.page_size
        batch = self._decoder.batch(segments, page_size=page_size, device_tokens=device_tokens)
        draws = self._draws_of(nodes, rows) if self._device_sampler is not None else None
        output = self._decoder.forward(batch, self._pool, Wanted(draws))
        return self._choose(nodes, rows, output)

    def _draws_of(self, nodes: TreeNodes, rows: Sequence[DraftedRow]) -> SamplingPlan:
        """The tokens that a pass chooses; one that chooses none has the graph of others."""
        if nodes:
            self._draws = draws_of(nodes, rows)
            return self._draws
        return SamplingPlan((), (), self._draws.num_best)

    def _best_of_rows(
        self,
        passes: RowPasses,
        segments: Sequence[Segment],
        nodes: TreeNodes,
        rows: Sequence[DraftedRow],
    ) -> list[Best]:
        if any(tree.wants_best for tree, _ in nodes):
            return passes.best(segments, rows, NUM_BEST)
        return [best._replace(scores=()) for best in passes.best(segments, rows, 1)]

    def _choose(
        self, nodes: TreeNodes, rows: Sequence[DraftedRow], output: ForwardOutput
    ) -> Opened:
        """Choose what may follow each node; it may be on the device still."""
        if output.tokens is not None or not nodes:
            return Opened(nodes, output.tokens or ())
        if output.best is not None:
            return Opened(nodes, output.best.bests())
        wants_best = any(tree.wants_best for tree, _ in nodes)
        if self._device_sampler is not None and not wants_best:
            begun = self._device_sampler.begin(output.logits, rows)
            return Opened(nodes, begun)
        return Opened(nodes, choose(nodes, output.logits, rows, self._sampler))


def _num_rows(segments: Sequence[Segment]) -> int:
    return sum(len(segment.token_ids) for segment in segments)


class Opened(NamedTuple):
    """Nodes that a pass computed, and what may follow each, which may be on the device still."""

    nodes: TreeNodes
    found: PendingTokens | Sequence[Best]  # [len(nodes)]

    def read(self) -> None:
        """Give the tokens to the trees; waits for the device if they are there still."""
        found = (
            self.found if isinstance(self.found, Sequence) else drawn_alone(self.found.choices())
        )
        for (tree, node), best in zip(self.nodes, found, strict=True):
            tree.expand(node, best)
