"""Passes of an EAGLE-3 head that take their tokens from the device yield the same drafts."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from foretoken.bench.lab.simulated_device import (
    VOCAB_SIZE,
    FormulaOps,
    SimulatedDevice,
    formula_decoder,
    simulated,
)
from foretoken.core.interface.draft import Draft, DraftPlan
from foretoken.core.interface.plan import ScheduledRequest
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.ops.triton.graph.plan import take_tokens
from foretoken.core.ops.triton.sampling.sampler import TritonPendingBest
from foretoken.core.sampling.sampler import PendingBest
from foretoken.draft.heads.common.proposer import DraftStart, HeadGrower, HeadProposer, Query
from foretoken.draft.heads.eagle_network import EagleHead
from foretoken.draft.heads.joined import join, lend
from foretoken.draft.proposers.tree_grower import Opened, drawn_ahead
from foretoken.draft.proposers.tree_growth import ROOT
from foretoken.draft.proposers.tree_template import KNOWN, TemplateRow
from support.quick_interpreter import quicken
from support.tiny_heads import eagle_config

PAGE_SIZE, NUM_PAGES, MAX_LEN = 16, 3000, 2000


class FeatureOps(FormulaOps):
    """The next feature depends on the feature before it and on the token, and the tokens on it."""

    def add_norm(self, x: Tensor, residual: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        mixed = (3 * residual + x[:, :1] + 1) % VOCAB_SIZE
        return mixed, mixed


def make_proposer() -> HeadProposer:
    ops = FeatureOps(SimulatedDevice(sleeps=False), {1: 1e-3, 64: 2e-3}, accuracy=0.7)
    target = formula_decoder(ops, MAX_LEN)
    head = EagleHead(
        eagle_config(target.config, num_heads=32, num_kv_heads=8, head_dim=128, taps=(1,))
    )
    lend(head, target, lambda: target.weights.embedding)
    joined = join(head, target)
    return joined.proposer(joined.make_pool(NUM_PAGES, page_size=PAGE_SIZE))


def known(rng: random.Random) -> Draft:
    token_ids, trust = [rng.randrange(VOCAB_SIZE) for _ in range(4)], rng.random()
    parents = rng.choice([(), (-1, 0, 0, -1)])
    chances = [0.6, 0.3, 0.2, 0.1] if parents else [0.95, 0.9, 0.8, 0.3]
    return Draft(token_ids, ("suffix",) * 4, parents, [trust * each for each in chances])


def start(rng: random.Random, number: int) -> DraftStart:
    tokens = array("q", [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(2, 90))])
    pages = array("q", range(20 * number, 20 * number + 20))
    params = TokenSamplingParams(temperature=rng.choice([0.0, 0.0, 1.0]))
    is_tree = rng.random() < 0.8
    scheduled = ScheduledRequest(
        request_id=str(number),
        tokens=tokens,
        start=len(tokens) - 1,
        stop=len(tokens),
        page_ids=pages[:16],
        sampling=SamplingMetadata(params=params, seed=number, prompt_len=1),
        draft_plan=DraftPlan(
            draft=known(rng) if rng.random() < 0.4 else Draft(()),
            max_draft=rng.choice([1, 3, 8, 16]),
            may_branch=is_tree,
            row_prices=(0.0001,),
            pass_prices=(0.01, 0.012),
        ),
        spare_page_ids=pages[16:] if is_tree else array("q"),
    )
    return DraftStart(scheduled, 1, torch.tensor([float(rng.randrange(VOCAB_SIZE))]))


def with_known_tokens(
    self: HeadGrower,
    rows: Sequence[TemplateRow],
    before: PendingBest,
    slots: dict[TemplateRow, tuple[int, ...]],
) -> Opened:
    """Compute a pass whose tokens the host reads from the pass before it."""
    assert self._drafting is not None
    bests, queries = before.bests(), list[Query]()
    for row in rows:
        assert row.parent is not None
        assert row.slot is not None
        slots[row] = (*slots.get(row.parent, ()), row.slot)
        if row.rank == KNOWN:
            token_id = row.tree.at(row.node or 0).token_id
        else:
            token_id = bests[row.parent.index].token_ids[row.rank]
        request = self._requests[row.tree]
        queries.append(Query(request, row.level, row.parent.index, token_id, slots[row]))
    nodes, drawn = [(row.tree, ROOT) for row in rows], drawn_ahead(rows)
    return self.choose(nodes, drawn, self._drafting.score(queries, self.draws_of(nodes, drawn)))


@pytest.mark.parametrize("num_requests", [1, 4, 20, 90])
def test_drafts_are_those_of_passes_whose_tokens_the_host_knows(
    num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, events = random.Random(num_requests), list[str]()
    bests, compute_rows = TritonPendingBest.bests, HeadGrower._compute_rows

    def read(self: TritonPendingBest) -> Any:
        events.append("read")
        return bests(self)

    def computed(self: HeadGrower, *arguments: Any) -> Opened:
        events.append("launch")
        return compute_rows(self, *arguments)

    monkeypatch.setattr(TritonPendingBest, "bests", read)
    with simulated(SimulatedDevice(sleeps=False)), torch.inference_mode():
        proposer = make_proposer()
        num_ahead = num_branched = 0
        for step in range(6):
            starts = [start(rng, number) for number in range(num_requests)]
            drafts = []
            for compute in (computed, with_known_tokens):
                events.clear()
                monkeypatch.setattr(HeadGrower, "_compute_rows", compute)
                trees = proposer._grow(starts)
                drafts.append(proposer._grower.drafts(trees))
                if compute is computed and "launch" in events:
                    num_ahead += events.count("launch")
                    assert "read" not in events[: events.count("launch")], "none is waited for"
            assert drafts[0] == drafts[1], step
            num_branched += sum(bool(draft.parents) for draft in drafts[0])
    assert num_branched or num_requests == 1
    assert bool(num_ahead) == (num_requests <= 64), "a graph chooses tokens for 64 rows"


def test_a_token_of_a_reduced_vocabulary_is_taken_by_its_name() -> None:
    quicken()
    last = 2**31 - 1
    words = torch.tensor([last - 2, last - 0, last - 900, last - 1])
    fields = {
        "sources": torch.tensor([3, -1, 0, 2], dtype=torch.int32),
        "token_ids": torch.tensor([5, 6, 7, 8], dtype=torch.int32),
    }
    named = {key: each.clone() for key, each in fields.items()}
    take_tokens(words, 500, 4, named, torch.tensor([40, 41, 42]))
    assert named["token_ids"].tolist() == [41, 6, 42, 42]
    take_tokens(words, 500, 4, fields)
    assert fields["token_ids"].tolist() == [1, 6, 2, 499]
