"""The draft model's KV: it follows the target's pages, and never stands before the first token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from foretoken.core.execution.model_runner import ModelRunner
from foretoken.core.execution.proposer import VerifiedRequest
from foretoken.core.interface.draft import Draft, DraftPlan
from foretoken.core.interface.output import RequestOutput
from foretoken.core.interface.plan import ScheduledRequest
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.batch import ForwardOutput, RaggedBatch, Wanted
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.scheduling.request_table import SchedulerLimits
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.draft.proposers.lm_proposer import LmProposer
from foretoken.radix_cache import PrefixCache
from support.drafts import with_drafts
from support.fake_model import Driver
from support.fixed_depth import FixedDepth
from support.tiny_pair import write_pair

VOCAB_SIZE, PAGE_SIZE, NUM_PAGES, WINDOW = 256, 4, 120, 24


class Counting:
    """A decoder that says how many tokens it computed."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.config, self.device = decoder.config, decoder.device
        self.batch, self.sampler = decoder.batch, decoder.sampler
        self.calls: list[int] = []

    @property
    def num_tokens(self) -> int:
        return sum(self.calls)

    def row_passes(self, pool: KVPool) -> None:
        return None

    def chained_passes(self, pool: KVPool) -> None:
        return None

    def forward(self, batch: RaggedBatch, pool: KVPool, wanted: Wanted) -> ForwardOutput:
        self.calls.append(int(batch.lens.sum()))
        return self._decoder.forward(batch, pool, wanted)


class Bench:
    """An engine without its loop, and a draft model that is watched."""

    def __init__(self, target: Decoder, draft: Decoder, *, num_pages: int = NUM_PAGES) -> None:
        limits = SchedulerLimits(
            max_batch_tokens=64, max_running=4, max_queued=9, max_model_len=300,
            vocab_size=VOCAB_SIZE,
        )  # fmt: skip
        self.draft = Counting(draft)
        pool = draft.make_pool(num_pages, page_size=PAGE_SIZE)
        self.proposer = LmProposer(self.draft, pool, window=WINDOW)  # type: ignore[arg-type]
        runner = ModelRunner(
            target, target.make_pool(num_pages, page_size=PAGE_SIZE), self.proposer
        )
        self.driver = Driver(
            Scheduler(PrefixCache(num_pages, PAGE_SIZE), limits, FixedDepth(3)), runner
        )  # type: ignore[arg-type]

    def add(
        self, request_id: str, prompt: list[int], max_tokens: int = 12, temperature: float = 0.0
    ) -> Request:
        params = TokenSamplingParams(temperature=temperature, max_tokens=max_tokens)
        sampling = SamplingMetadata(params=params, seed=1, prompt_len=len(prompt))
        request = Request(request_id=request_id, tokens=array("q", prompt), sampling=sampling)
        self.driver.add(request)
        return request

    def run(self, request_id: str, prompt: list[int], max_tokens: int = 12) -> Request:
        request = self.add(request_id, prompt, max_tokens)
        self.driver.run()
        return request


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Decoder, Decoder]:
    torch.set_num_threads(1)
    folders = write_pair(tmp_path_factory.mktemp("pair"), vocab_size=VOCAB_SIZE)
    target, draft = (load_decoder(folder) for folder in folders)
    return target, draft


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist()
    return ids


def test_the_first_token_never_waits_for_the_draft(pair) -> None:
    bench = Bench(*pair)
    request = bench.add("a", prompt_of(50))
    while request.num_output == 0:
        assert bench.draft.num_tokens == 0
        bench.driver.step()
    assert bench.draft.num_tokens == 0


def test_missing_draft_kv_is_caught_up_a_window_at_a_time(pair) -> None:
    bench = Bench(*pair)
    request = bench.add("a", prompt_of(60))
    bench.driver.step()
    before = 0
    while request.usage.proposed_tokens == 0:
        bench.driver.step()
        assert bench.draft.num_tokens - before <= WINDOW + 1 + 2  # and two single draft steps
        before = bench.draft.num_tokens
    assert request.usage.verify_steps == 1 + -(-60 // WINDOW)


def test_a_prefix_hit_brings_the_drafts_kv_along(pair) -> None:
    bench = Bench(*pair)
    first = bench.run("a", prompt_of(60))
    cold = bench.draft.num_tokens
    bench.draft.calls.clear()
    second = bench.run("b", prompt_of(60))
    assert second.tokens[second.prompt_len :] == first.tokens[first.prompt_len :]
    assert second.usage.proposed_tokens > first.usage.proposed_tokens
    assert bench.draft.num_tokens < cold - 50


def test_the_same_draft_is_proposed_cold_and_over_a_hit(pair) -> None:
    """Wrong draft KV would change no token, only acceptance: so acceptance is what is compared."""
    bench = Bench(*pair)
    bench.run("a", prompt_of(21), max_tokens=40)
    warm = bench.run("b", prompt_of(21), max_tokens=40)
    cold = Bench(*pair).run("c", prompt_of(21), max_tokens=40)
    assert warm.usage.accepted_tokens == cold.usage.accepted_tokens
    assert warm.usage.accepted_tokens > 0


def test_a_model_that_drafts_for_itself_is_always_right(pair) -> None:
    """Any stale or foreign draft KV would break the run of accepted tokens."""
    target, _ = pair
    bench = Bench(target, target, num_pages=28)
    shared = prompt_of(21)
    for index in range(4):
        bench.add(str(index), [*shared, *prompt_of(3 + index, index)], max_tokens=30)
    requests = list(bench.driver.scheduler.waiting)
    bench.driver.run()
    again = [bench.run(f"again-{i}", [*shared, *prompt_of(3 + i, i)], 30) for i in range(4)]
    for request in [*requests, *again]:
        assert request.usage.accepted_tokens == request.usage.proposed_tokens > 0
    assert bench.driver.scheduler.num_preemptions > 0, "the pool is small enough to matter"


def test_pages_that_change_hands_lose_the_drafts_kv(pair) -> None:
    target, _ = pair
    bench = Bench(target, target, num_pages=20)
    for index in range(6):  # each fills most of the pool and evicts the one before
        request = bench.run(str(index), prompt_of(30, index), max_tokens=30)
        assert request.usage.accepted_tokens == request.usage.proposed_tokens > 0


class Doubting:
    """Compares every draft with one that a newcomer makes from nothing; silent every other time."""

    def __init__(self, proposer: LmProposer, draft: Decoder) -> None:
        self._proposer, self._draft = proposer, draft
        self.forget, self.observe = proposer.forget, proposer.observe
        self.traits, self.taps = proposer.traits, proposer.taps
        self.num_compared = self.num_calls = 0

    def propose(self, rows: Sequence[ScheduledRequest]) -> list[Draft]:
        self.num_calls += 1
        if self.num_calls % 2 == 0:
            return [Draft()] * len(rows)
        drafts = self._proposer.propose(rows)
        pool = self._draft.make_pool(NUM_PAGES, page_size=PAGE_SIZE)
        newcomer = LmProposer(self._draft, pool, window=10_000)
        for draft, right in zip(drafts, newcomer.propose(rows), strict=True):
            assert draft == right or not draft.token_ids, "not caught up is the only excuse"
            self.num_compared += len(draft.token_ids)
        return drafts


@pytest.mark.parametrize("num_pages", [120, 40])
def test_drafts_are_those_of_a_newcomer_whatever_was_rejected_shared_or_preempted(
    pair, num_pages
) -> None:
    target, draft = pair
    bench = Bench(target, draft, num_pages=num_pages)
    doubting = Doubting(bench.proposer, draft)
    bench.driver.runner.proposer = doubting  # type: ignore[attr-defined]
    shared = prompt_of(21)
    for turn in range(2):  # the same ids again, for other prompts
        prompts = [[*shared, *prompt_of(3 + i, 10 * turn + i)] for i in range(4)]
        requests = [bench.add(str(i), prompt, 60, 1.0) for i, prompt in enumerate(prompts)]
        bench.driver.run()
        bench.driver.ended.clear()
        assert any(r.usage.accepted_tokens < r.usage.proposed_tokens for r in requests)
    assert doubting.num_compared > 100
    assert (bench.driver.scheduler.num_preemptions > 0) == (num_pages == 40)


def row_of(tokens: list[int], max_draft: int = 4) -> ScheduledRequest:
    params = TokenSamplingParams(temperature=0)
    return ScheduledRequest(
        request_id="a",
        tokens=array("q", tokens),
        start=len(tokens) - 1,
        stop=len(tokens),
        page_ids=array("q", range(NUM_PAGES)),
        sampling=SamplingMetadata(params=params, seed=0, prompt_len=1),
        draft_plan=DraftPlan(max_draft=max_draft),
    )


@pytest.mark.parametrize("num_accepted", range(5))
@pytest.mark.parametrize("num_unasked", [0, 2, 6])
def test_kv_of_rejected_drafts_is_computed_anew(pair, num_accepted, num_unasked) -> None:
    """Other proposers may have served the steps between two questions."""
    _, draft = pair
    pools = [draft.make_pool(NUM_PAGES, page_size=PAGE_SIZE) for _ in range(2)]
    prompt = prompt_of(21)
    old = LmProposer(draft, pools[0])
    drafted = list(old.propose([row_of(prompt)])[0].token_ids)
    other = [(token + 1) % VOCAB_SIZE for token in drafted] + [7, 8, 9]
    grown = prompt + drafted[:num_accepted] + other[num_accepted:][: 1 + num_unasked]
    old.propose([row_of(grown)])
    LmProposer(draft, pools[1]).propose([row_of(grown)])
    ours, newcomers = (_positions(pool, len(grown)) for pool in pools)
    assert torch.equal(ours, newcomers)


@pytest.mark.parametrize("max_draft", [1, 4])
def test_kv_of_an_accepted_token_that_no_pass_has_read_is_computed(pair, max_draft) -> None:
    _, draft = pair
    pools = [draft.make_pool(NUM_PAGES, page_size=PAGE_SIZE) for _ in range(2)]
    prompt = prompt_of(21)
    old = LmProposer(draft, pools[0])
    row = with_drafts(row_of(prompt, max_draft), row_prices=(1e-9,))
    drafted = old.propose([row])[0].token_ids
    assert len(drafted) == max_draft
    output = RequestOutput(request_id="a", token_ids=[*drafted, 7])
    old.observe(None, None, [VerifiedRequest(row, [], output)])  # type: ignore[arg-type]
    grown = [*prompt, *drafted, 7]
    old.propose([row_of(grown)])
    LmProposer(draft, pools[1]).propose([row_of(grown)])
    ours, newcomers = (_positions(pool, len(grown)) for pool in pools)
    assert torch.equal(ours, newcomers)


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_draft_whose_pages_went_to_others_behind_a_failed_step_is_not_believed(
    pair, comes_back
) -> None:
    """Steps without drafts follow: they commit what was guessed, and get pages of their own."""
    _, draft = pair
    pools = [draft.make_pool(NUM_PAGES, page_size=PAGE_SIZE) for _ in range(2)]
    prompt = prompt_of(21)
    old = LmProposer(draft, pools[0])
    drafted = list(old.propose([row_of(prompt, max_draft=6)])[0].token_ids)
    row = row_of([*prompt, *drafted])  # 24 and on are on the seventh page
    pools[0].data[6] = 7.0  # another's
    if not comes_back:
        row.page_ids[6] = NUM_PAGES - 1
    old.forget([], row.page_ids[6:7])
    ours = old.propose([row])
    assert ours == LmProposer(draft, pools[1]).propose([row])
    pages = row.page_ids[:6].tolist()
    assert torch.equal(pools[0].data[pages], pools[1].data[pages])
    assert (
        pools[0].data[row.page_ids[6], ..., :2, :].equal(pools[1].data[row.page_ids[6], ..., :2, :])
    )


def _positions(pool: KVPool, count: int) -> torch.Tensor:
    """The pool's content by position: [num_layers, 2, heads, positions, head_dim]."""
    return torch.cat(list(pool.data), dim=-2)[..., :count, :]


def test_nothing_is_remembered_of_requests_that_left(pair) -> None:
    bench = Bench(*pair)
    for index in range(5):
        bench.run(str(index), prompt_of(9, index))
    assert len(bench.proposer._draft_kvs) <= 1  # the last one's end is told with the next plan


def test_a_draft_model_with_a_shorter_context_stops_drafting_there(pair) -> None:
    target, draft = pair
    bench = Bench(target, draft)
    object.__setattr__(bench.draft, "config", _shortened(draft, 30))
    request = bench.run("a", prompt_of(20), max_tokens=40)
    assert request.usage.completion_tokens == 40
    assert 0 < request.usage.proposed_tokens < 30


def _shortened(decoder: Decoder, max_model_len: int) -> object:
    return replace(decoder.config, max_model_len=max_model_len)
