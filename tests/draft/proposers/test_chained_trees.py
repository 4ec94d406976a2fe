"""Passes launched in a chain grow the same draft trees as passes launched one by one."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")

from msgspec.structs import replace

from foretoken.bench.lab.simulated_device import (
    VOCAB_SIZE,
    FormulaOps,
    SimulatedDevice,
    formula_decoder,
    simulated,
)
from foretoken.core.execution.proposer import VerifiedRequest
from foretoken.core.interface.draft import Draft, DraftPlan
from foretoken.core.interface.output import RequestOutput
from foretoken.core.interface.plan import ScheduledRequest
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.model.decoder import Decoder
from foretoken.core.ops.triton.graph.chained import TritonChainedPasses
from foretoken.draft.proposers.lm_proposer import LmProposer
from foretoken.draft.proposers.tree_grower import DecoderGrower
from support.graph_fixture import VOCAB, Graphs, make_decoder
from support.quick_interpreter import quicken

PAGE_SIZE, NUM_PAGES, MAX_LEN = 16, 6000, 2000
PARAMS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.5, "top_k": 3},
    {"temperature": 0.0, "min_tokens": 30},
    {"temperature": 0.0, "presence_penalty": 0.5},
)


@dataclass
class Running:
    """A request, and the pages that only it uses."""

    request_id: str
    tokens: array[int]
    page_ids: array[int]
    spare_page_ids: array[int]
    sampling: SamplingMetadata


def started(rng: random.Random, number: int, num_kinds: int) -> Running:
    params = TokenSamplingParams(**PARAMS[rng.randrange(num_kinds)])  # type: ignore[arg-type]
    tokens = array("q", [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(2, 90))])
    pages = array("q", range(20 * number, 20 * number + 20))
    return Running(
        str(number), tokens, pages[:16], pages[16:],
        SamplingMetadata(params=params, seed=number, prompt_len=len(tokens) // 2),
    )  # fmt: skip


def known(rng: random.Random) -> Draft:
    """A looked-up chain or tree."""
    token_ids = [rng.randrange(VOCAB_SIZE) for _ in range(4)]
    parents = rng.choice([(), (-1, 0, 0, -1), (-1, 0, 1, 0)])
    trust, chances = rng.random(), [0.6, 0.3, 0.2, 0.1] if parents else [0.9, 0.8, 0.5, 0.1]
    return Draft(token_ids, ("suffix",) * 4, parents, [trust * each for each in chances])


def scheduled(rng: random.Random, running: Running) -> ScheduledRequest:
    """Schedule a request; some have no price, no branches or no draft."""
    plan = DraftPlan(max_draft=rng.choice([1, 3, 8, 16]))
    if rng.random() < 0.8:
        plan = DraftPlan(
            draft=known(rng) if rng.random() < 0.3 else plan.draft,
            max_draft=plan.max_draft,
            may_branch=rng.random() < 0.8,
            row_prices=rng.choice([(0.0001,), (0.02, 0.02, 0.1)]),
            pass_prices=rng.choice([(0.01, 0.012), (0.2, 0.2)]),
        )
    return ScheduledRequest(
        request_id=running.request_id,
        tokens=running.tokens[:],
        start=len(running.tokens) - 1,
        stop=len(running.tokens),
        page_ids=running.page_ids,
        sampling=running.sampling,
        draft_plan=plan,
        spare_page_ids=running.spare_page_ids if plan.may_branch else array("q"),
    )


def outcome(rng: random.Random, each: ScheduledRequest, draft: Draft) -> VerifiedRequest:
    """Accept a random path of a draft, and one token more."""
    path, node = list[int](), -1
    parents = draft.parents or range(-1, len(draft.token_ids) - 1)
    while children := [at for at, parent in enumerate(parents) if parent == node]:
        if rng.random() < 0.3:
            break
        path.append(node := rng.choice(children))
    tokens = [*(draft.token_ids[at] for at in path), rng.randrange(VOCAB_SIZE)]
    output = RequestOutput(request_id=each.request_id, token_ids=tokens, draft=draft, path=path)
    return VerifiedRequest(each, range(1 + len(path)), output)


class Pair:
    """Two proposers with the same model; only the second one launches chains of passes."""

    def __init__(self, make: Callable[[], Decoder], num_pages: int = NUM_PAGES) -> None:
        self.proposers = list[LmProposer]()
        for _ in range(2):
            decoder = make()
            self.proposers.append(
                LmProposer(decoder, decoder.make_pool(num_pages, page_size=PAGE_SIZE))
            )
        self.proposers[0]._grower._chained_passes = None

    def propose(self, requests: list[ScheduledRequest]) -> list[Draft]:
        one_by_one, chained = [each.propose(requests) for each in self.proposers]
        assert chained == one_by_one
        return chained

    def observe(self, verified: list[VerifiedRequest]) -> None:
        for each in self.proposers:
            each.observe(None, None, verified)  # type: ignore[arg-type]

    def forget(self, request_ids: list[str], pages: array[int]) -> None:
        for each in self.proposers:
            each.forget(request_ids, pages)


def by_formula() -> Decoder:
    ops = FormulaOps(SimulatedDevice(sleeps=False), {1: 1e-3, 64: 2e-3}, accuracy=0.7)
    return formula_decoder(ops, MAX_LEN)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the passes of templates that are launched in chains, and those that are not."""
    counts: Counter[str] = Counter()
    launch, launched = TritonChainedPasses.launch, DecoderGrower._launch

    def counted(self, rows, words):  # type: ignore[no-untyped-def]
        found = launch(self, rows, words)
        counts["chained"] += len(found)
        return found

    def tried(self, planned, before):  # type: ignore[no-untyped-def]
        found = launched(self, planned, before)
        if self._chained_passes is not None:
            counts["one by one"] += len(planned) - len(found)
        return found

    monkeypatch.setattr(TritonChainedPasses, "launch", counted)
    monkeypatch.setattr(DecoderGrower, "_launch", tried)
    return counts


@pytest.mark.parametrize(
    ("most", "num_steps", "num_kinds"),
    [(1, 60, 6), (5, 60, 5), pytest.param(20, 20, 4, marks=pytest.mark.slow), (200, 4, 4)],
)
def test_drafts_are_equal_over_random_steps(
    most: int, num_steps: int, num_kinds: int, launches: Counter[str]
) -> None:
    """Requests join, are aborted, and have drafts of different depth."""
    rng, numbers = random.Random(most), iter(range(10**6))
    with simulated(SimulatedDevice(sleeps=False)):
        pair, running, branched = Pair(by_formula), list[Running](), 0
        for _ in range(num_steps):
            while len(running) < most and rng.random() < 0.9:
                running.append(started(rng, next(numbers) % 300, num_kinds))
            requests = [scheduled(rng, each) for each in running]
            drafts = pair.propose(requests)
            branched += sum(bool(draft.parents) for draft in drafts)
            verified = [outcome(rng, *each) for each in zip(requests, drafts, strict=True)]
            gone = [each for each in running if rng.random() < 0.1 or len(each.tokens) > 150]
            pair.observe(verified)
            for each, found in zip(running, verified, strict=True):
                each.tokens.extend(found.output.token_ids)
            pages = array("q", [page for each in gone for page in each.page_ids])
            pair.forget([each.request_id for each in gone], pages)
            running = [each for each in running if each not in gone]
    assert branched > 0
    # The first pass of 200 requests has more rows than a graph chooses tokens for.
    assert bool(launches["chained"]) == (most < 100)
    assert not launches["one by one"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_kernels_compute_equal_drafts_with_the_keys_of_each_path(launches: Counter[str]) -> None:
    """A wrong slot, tail or page would change the scores of a node."""
    quicken()
    torch.set_num_threads(1)
    rng, running = random.Random(4), list[Running]()
    pair = Pair(lambda: make_decoder(Graphs()), 60)
    for number in range(2):
        one = started(rng, number, 4)
        one.tokens = array("q", [token % VOCAB for token in one.tokens[:9]])
        running.append(one)
    plan = DraftPlan(max_draft=12, may_branch=True, row_prices=(0.0001,), pass_prices=(0.01, 0.012))
    requests = [
        replace(
            scheduled(rng, each),
            draft_plan=plan,
            spare_page_ids=each.spare_page_ids,
            sampling=SamplingMetadata(params=each.sampling.params, seed=5, prompt_len=1),
        )
        for each in running
    ]
    pair.propose(requests)
    assert launches["chained"] > 0
