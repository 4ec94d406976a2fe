"""Eviction inside a sequence: packed pages say what masks over the full cache say."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from foretoken.core.execution.eviction import WindowEviction, pack_kv
from foretoken.core.execution.model_runner import LaunchedStep, ModelRunner
from foretoken.core.interface import eviction
from foretoken.core.interface.output import StepOutput
from foretoken.core.interface.plan import ScheduledRequest, StepPlan
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.native import native_library
from foretoken.core.sampling.verifier import Verified
from foretoken.core.scheduling.request_table import SchedulerLimits
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.draft.sources.prediction import PredictionSource
from foretoken.radix_cache import PrefixCache
from support.checkpoints import make_checkpoint
from support.equality_harness import Perfect, make_speculator
from support.fake_model import Driver

EVERY, BUDGET, PAGE_SIZE = 16, 24, 4
PROMPT_LEN, ANSWER_LEN = 21, 100
STOP = PROMPT_LEN + ANSWER_LEN
BACKENDS = ["torch", "native"]


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "EVERY", EVERY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("evict"), "qwen3")


@pytest.fixture(scope="module", params=BACKENDS)
def decoder(request: pytest.FixtureRequest, folder: Path) -> Decoder:
    if request.param == "native" and native_library() is None:
        pytest.skip("no native kernels on this machine")
    return load_decoder(folder, dtype="float32", backend=request.param)


def prompt(seed: int, length: int = PROMPT_LEN) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, 256) for _ in range(length)]


def request(
    name: str, tokens: Sequence[int], *, answer_len: int = ANSWER_LEN, **options: Any
) -> Request:
    params = TokenSamplingParams(temperature=0.0, max_tokens=answer_len)
    sampling = SamplingMetadata(params=params, seed=1, prompt_len=len(tokens))
    return Request(request_id=name, tokens=array("q", tokens), sampling=sampling, **options)


class Watched(ModelRunner):
    """Keeps the logits of each position that decided a token of a request."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logits: dict[str, dict[int, Tensor]] = {}

    def _verify(self, work: LaunchedStep) -> list[Verified]:
        verified = super()._verify(work)
        rows = work.layout.sampled_logits(work.output.logits)
        for (scheduled, draft), outcome in zip(
            work.layout.sampled, [v for v in verified if v.token_ids], strict=True
        ):
            own, rows = rows[: 1 + len(draft.token_ids)], rows[1 + len(draft.token_ids) :]
            kept = self.logits.setdefault(scheduled.request_id, {})
            for index, node in enumerate([-1, *outcome.path]):
                kept[scheduled.stop + index] = own[node + 1].clone()
        return verified


class Twice(Watched):
    """Computes each step twice, as one that failed behind its pass."""

    def step(self, plan: StepPlan) -> StepOutput:
        super().step(plan)
        return super().step(plan)


@dataclass
class Outcome:
    tokens: dict[str, list[int]]
    logits: dict[str, dict[int, Tensor]]
    scheduler: Scheduler
    most_pages: dict[str, int] = field(default_factory=dict)


def serve(
    decoder: Decoder,
    *requests: Request,
    budget: int = BUDGET,
    num_pages: int = 400,
    max_batch_tokens: int = 64,
    drafter: str | None = None,
    proposer: Any = None,
    runner: type[Watched] = Watched,
    preempt_at: Sequence[int] = (),
    later: Sequence[Request] = (),
) -> Outcome:
    """Serve requests, then ``later`` ones from the same cache.

    The first one is preempted when it has said ``preempt_at`` tokens.
    """
    cache = PrefixCache(num_pages, PAGE_SIZE)
    limits = SchedulerLimits(
        max_batch_tokens=max_batch_tokens,
        max_running=8,
        max_queued=20,
        max_model_len=1000,
        vocab_size=decoder.config.vocab_size,
        kv_budget=budget,
    )
    speculator = [] if drafter is None else [make_speculator(drafter)]
    scheduler = Scheduler(cache, limits, *speculator)
    pool = decoder.make_pool(num_pages, page_size=PAGE_SIZE)
    made = runner(decoder, pool, proposer, eviction=WindowEviction())
    driver = Driver(scheduler, made)  # type: ignore[arg-type]
    driver.add(*requests)
    most: dict[str, int] = {}
    left = list(preempt_at)
    while scheduler.num_requests or later:
        if not scheduler.num_requests:
            driver.add(*later)
            later = ()
        if left and requests[0].num_output == left[0] and requests[0].lease is not None:
            del left[0]
            scheduler._preempt(requests[0])
        plan = driver.step()
        for row in plan.requests:
            most[row.request_id] = max(most.get(row.request_id, 0), len(row.page_ids))
    assert set(driver.ended.values()) == {"length"}, driver.ended
    return Outcome(driver.served, made.logits, scheduler, most)


def same(first: Outcome, other: Outcome, name: str = "a") -> None:
    """The same tokens by the same bits."""
    assert first.tokens[name] == other.tokens[name]
    assert first.logits[name].keys() == other.logits[name].keys()
    for position, row in first.logits[name].items():
        assert torch.equal(row, other.logits[name][position]), position


def masked_logits(folder: Path, tokens: Sequence[int], budget: int = BUDGET) -> Tensor:
    """Logits of all positions by transformers, over everything, with a mask of what is left."""
    count = len(tokens)
    seen = torch.ones(count, count, dtype=torch.bool).tril()
    for position in range(count):
        # The rows from the i-th packing on do not see the first i * EVERY tokens of the answer.
        beyond = max(0, (position - PROMPT_LEN - budget) // EVERY) * EVERY
        seen[position, PROMPT_LEN : PROMPT_LEN + beyond] = False
    mask = torch.zeros(count, count).masked_fill_(~seen, float("-inf"))[None, None]
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        found: Tensor = model(torch.tensor([list(tokens)]), attention_mask=mask).logits[0]
    return found


def test_packed_pages_are_masks_over_the_full_cache(decoder: Decoder, folder: Path) -> None:
    outcome = serve(decoder, request("a", prompt(1)))
    said = [*prompt(1), *outcome.tokens["a"]]
    expected = masked_logits(folder, said)
    rows = outcome.logits["a"]
    assert sorted(rows) == list(range(PROMPT_LEN, STOP))
    for stop, row in rows.items():
        torch.testing.assert_close(row, expected[stop - 1], atol=1e-4, rtol=0)
        assert row.argmax() == expected[stop - 1].argmax()
    whole = masked_logits(folder, said, budget=10_000)
    first = PROMPT_LEN + BUDGET + EVERY
    torch.testing.assert_close(rows[first], whole[first - 1], atol=1e-4, rtol=0)
    assert not torch.allclose(rows[first + 1], whole[first], atol=1e-3), "nothing was left out"


def test_pages_stay_within_prompt_budget_and_one_interval(decoder: Decoder) -> None:
    outcome = serve(decoder, request("a", prompt(1)))
    bound = -(-(PROMPT_LEN + BUDGET + EVERY) // PAGE_SIZE)
    assert outcome.most_pages["a"] == bound
    num_evicted = (ANSWER_LEN - 1 - BUDGET) // EVERY * EVERY
    assert outcome.scheduler.num_evicted_tokens == num_evicted > 0
    cache = outcome.scheduler.cache
    assert cache.num_free_pages + PROMPT_LEN // PAGE_SIZE == cache.num_total_pages


def test_steps_of_one_token_and_drafts_give_the_same_bits(decoder: Decoder) -> None:
    plain = serve(decoder, request("a", prompt(1)))
    guess = array("q", plain.tokens["a"])
    for wrong in (0, 7):  # every seventh guess is wrong
        for at in range(wrong - 1, len(guess), wrong) if wrong else ():
            guess[at] = 5
        drafted = serve(decoder, request("a", prompt(1), prediction=guess), drafter="prediction")
        same(plain, drafted)
        assert drafted.scheduler.cache.num_total_pages == 400
    assert PredictionSource.name == "prediction"


def test_a_proposer_stops_where_kv_was_evicted(decoder: Decoder) -> None:
    plain = serve(decoder, request("a", prompt(1)))
    asked = list[int]()

    class Noting(Perfect):
        def propose(self, rows: Sequence[Any]) -> Any:
            asked.extend(len(row.tokens) for row in rows)
            return super().propose(rows)

    whole = {"a": plain.tokens["a"]}
    drafted = serve(decoder, request("a", prompt(1)), drafter="fixed+lm", proposer=Noting(whole))
    same(plain, drafted)
    assert asked
    assert max(asked) <= PROMPT_LEN + BUDGET + EVERY


def test_chunks_and_preemptions_give_the_same_bits(decoder: Decoder) -> None:
    plain = serve(decoder, request("a", prompt(1)))
    for size in (7, 64):  # tokens of a step: of a chunk that must not cross a packing, too
        broken = serve(
            decoder, request("a", prompt(1)), preempt_at=(10, 30, 45, 60, 90), max_batch_tokens=size
        )
        assert broken.scheduler.num_preemptions == 5
        same(plain, broken)
    outcome = serve(
        decoder,
        *(
            request(name, prompt(seed), answer_len=ANSWER_LEN)
            for name, seed in zip("bcda", (2, 3, 4, 1), strict=True)
        ),
        num_pages=40,  # two fit
        max_batch_tokens=7,
    )
    assert outcome.scheduler.num_preemptions > 0
    same(plain, outcome)


def test_neighbours_are_unharmed_and_short_answers_unchanged(decoder: Decoder) -> None:
    """Requests whose answers stay below the budget have the bits that they have without one."""
    short = [request(f"s{seed}", prompt(seed, 30), answer_len=BUDGET + EVERY) for seed in (5, 6)]
    without = serve(decoder, *short, budget=0)
    again = [request(f"s{seed}", prompt(seed, 30), answer_len=BUDGET + EVERY) for seed in (5, 6)]
    beside = serve(decoder, request("a", prompt(1)), *again)
    for name in ("s5", "s6"):
        same(without, beside, name)
    same(serve(decoder, request("a", prompt(1))), beside)


def test_nothing_behind_the_prompt_is_published_once_it_was_packed(decoder: Decoder) -> None:
    outcome = serve(decoder, request("a", prompt(1)))
    cache = outcome.scheduler.cache
    said = array("q", [*prompt(1), *outcome.tokens["a"], 4])
    assert cache.match_len(said) == PROMPT_LEN // PAGE_SIZE * PAGE_SIZE
    short = serve(decoder, request("a", prompt(1), answer_len=BUDGET))
    said = array("q", [*prompt(1), *short.tokens["a"], 4])
    whole = (PROMPT_LEN + BUDGET - 1) // PAGE_SIZE * PAGE_SIZE
    assert short.scheduler.cache.match_len(said) == whole, "an answer that lost nothing is kept"


def test_a_prompt_that_is_shared_stays_as_it_was(decoder: Decoder) -> None:
    shared = prompt(9, 48)
    outcome = serve(decoder, request("a", shared), request("b", [*shared, 7, 8]))
    assert outcome.tokens["a"] == serve(decoder, request("a", shared)).tokens["a"]
    assert outcome.tokens["b"] == serve(decoder, request("b", [*shared, 7, 8])).tokens["b"]
    assert outcome.scheduler.cache.num_hits > 0


def test_pages_that_a_preempted_answer_gave_to_the_cache_are_never_packed(decoder: Decoder) -> None:
    """Before the first packing they are whole and may be shared; it goes on with its own."""
    first = request("a", prompt(1))
    answer = serve(decoder, request("a", prompt(1))).tokens["a"]
    follower = [*prompt(1), *answer[:29]]
    alone = serve(decoder, request("b", follower))
    beside = serve(decoder, first, preempt_at=[30], later=[request("b", follower)])
    assert first.usage.evicted_tokens == beside.scheduler.num_evicted_tokens // 2 > 0
    cached = beside.scheduler.cache.num_hits
    assert cached >= len(follower) // PAGE_SIZE * PAGE_SIZE - PAGE_SIZE
    same(alone, beside, "b")


def test_a_step_that_is_run_again_packs_once(decoder: Decoder) -> None:
    plain = serve(decoder, request("a", prompt(1)))
    again = serve(decoder, request("a", prompt(1)), runner=Twice)
    same(plain, again)


def test_a_packing_that_ended_half_way_fails_its_request_alone() -> None:
    """Its KV is void: to pack what is left would read what is not there."""
    pack = eviction.KvPack(0, 40, 16, is_begun=True)
    row = ScheduledRequest(
        request_id="a",
        tokens=array("q"),
        start=40,
        stop=41,
        page_ids=array("q"),
        sampling=request("a", [1]).sampling,
        num_evicted=16,
        pack=pack,
    )
    with pytest.raises(RuntimeError, match="half way"):
        pack_kv(WindowEviction(), None, row)  # type: ignore[arg-type]
