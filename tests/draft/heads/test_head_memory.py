"""Heads where memory runs out, and where a step failed."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from foretoken.core.engine.step_bisection import StepBisection
from foretoken.core.execution.model_runner import ModelRunner
from foretoken.core.interface.draft import DraftPlan
from foretoken.core.interface.plan import ScheduledRequest, StepPlan
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.scheduling.guarded_speculator import MAX_FAILURES
from foretoken.core.scheduling.request_table import SchedulerLimits
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.draft.heads.common.proposer import Drafting, DraftStart
from foretoken.draft.heads.kinds import KINDS
from foretoken.radix_cache import PrefixCache
from support.fake_model import Driver
from support.fixed_depth import FixedDepth
from support.tiny_heads import join_random
from support.tiny_pair import write_pair

VOCAB_SIZE, PAGE_SIZE, NUM_PAGES = 256, 4, 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_pair(tmp_path_factory.mktemp("pair"), vocab_size=VOCAB_SIZE)[0]


@pytest.fixture(scope="module")
def target(folder: Path) -> Decoder:
    return load_decoder(folder, backend="torch", exact="batch")


def _sampling(prompt_len: int) -> SamplingMetadata:
    params = TokenSamplingParams(temperature=0.5, max_tokens=60)
    return SamplingMetadata(params=params, seed=7, prompt_len=prompt_len)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_whose_memory_ran_out_for_long_drafts_again_when_it_suffices(
    kind: str, target: Decoder
) -> None:
    """Lack of memory depends on the requests: it is no failure of the head."""
    joined = join_random(kind, target)
    proposer = joined.proposer(joined.make_pool(NUM_PAGES, page_size=PAGE_SIZE))
    begin, failures = proposer.begin, list[int]()

    def fails(starts: Sequence[DraftStart], num_drafted: int) -> Drafting:
        failures.append(len(starts))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    proposer.begin = fails  # type: ignore[method-assign]
    runner = ModelRunner(target, target.make_pool(NUM_PAGES, page_size=PAGE_SIZE), proposer)
    limits = SchedulerLimits(
        max_batch_tokens=64, max_running=4, max_queued=9, max_model_len=300, vocab_size=VOCAB_SIZE
    )
    scheduler = Scheduler(PrefixCache(NUM_PAGES, PAGE_SIZE), limits, FixedDepth(3))
    driver = Driver(scheduler, runner)  # type: ignore[arg-type]
    prompt = array("q", random.Random(3).choices(range(4, VOCAB_SIZE), k=20))
    request = Request(request_id="a", tokens=prompt, sampling=_sampling(len(prompt)))
    driver.add(request)
    for _ in range(MAX_FAILURES + 10):
        driver.step()
    assert len(failures) >= MAX_FAILURES + 5
    assert request.usage.proposed_tokens == 0
    proposer.begin = begin  # type: ignore[method-assign]
    driver.run()
    assert request.usage.proposed_tokens > 20
    assert len(driver.served["a"]) == 60


@pytest.mark.parametrize("kind", KINDS)
def test_a_health_check_leaves_nothing_behind(kind: str, target: Decoder) -> None:
    joined = join_random(kind, target)
    proposer = joined.proposer(joined.make_pool(NUM_PAGES, page_size=PAGE_SIZE))
    runner = ModelRunner(target, target.make_pool(NUM_PAGES, page_size=PAGE_SIZE), proposer)
    prompt = ScheduledRequest(
        request_id="0", tokens=array("q", range(4, 20)), start=0, stop=15,
        page_ids=array("q", range(6)), sampling=_sampling(16),
    )  # fmt: skip
    runner.step(StepPlan(requests=[prompt], newly_allocated_pages=array("q"), is_plain=True))
    drafting = replace(prompt, start=15, stop=16, draft_plan=DraftPlan(max_draft=6))
    plan = StepPlan(requests=[drafting], newly_allocated_pages=array("q"))
    bisection = StepBisection(plan, RuntimeError("it failed"))
    part = bisection.next()
    assert part is not None
    bisection.failed(part, RuntimeError("it failed"))
    runner.step(bisection.health_check(PAGE_SIZE))
    assert set(proposer.head_kv.spans) == {"0"}
