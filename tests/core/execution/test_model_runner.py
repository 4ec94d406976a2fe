"""One step in the model thread: what a bad row or a bad draft may cost, and what never."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
import torch
from msgspec.structs import replace

from foretoken.core.execution.model_runner import ModelRunner
from foretoken.core.interface.draft import Draft
from foretoken.core.interface.plan import ScheduledRequest
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.scheduling.request_table import SchedulerLimits
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.radix_cache import PrefixCache
from support.fake_model import Driver
from support.fixed_depth import FixedDepth
from support.proposers import BareProposer
from support.tiny_pair import write_pair

VOCAB_SIZE, PAGE_SIZE, NUM_PAGES = 64, 2, 40
POISON = 63  # a token whose embedding is not a number


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Decoder:
    torch.set_num_threads(1)
    folder, _ = write_pair(tmp_path_factory.mktemp("pair"), vocab_size=VOCAB_SIZE)
    decoder = load_decoder(folder)
    decoder.weights.embedding[POISON] = float("nan")
    return decoder


class Fixed(BareProposer):
    """Proposes the same thing whatever it is asked."""

    def __init__(self, drafts: object) -> None:
        self._drafts = drafts

    def propose(self, rows: Sequence[ScheduledRequest]) -> list[Draft]:
        return self._drafts if isinstance(self._drafts, list) else [self._drafts] * len(rows)  # type: ignore[list-item]


def drive(decoder: Decoder, proposer: Fixed | None = None) -> Driver:
    limits = SchedulerLimits(
        max_batch_tokens=8, max_running=4, max_queued=9, max_model_len=70,
        vocab_size=VOCAB_SIZE,
    )  # fmt: skip
    pool = decoder.make_pool(NUM_PAGES, page_size=PAGE_SIZE)
    scheduler = Scheduler(PrefixCache(NUM_PAGES, PAGE_SIZE), limits, FixedDepth(3))
    return Driver(scheduler, ModelRunner(decoder, pool, proposer))  # type: ignore[arg-type]


def add(driver: Driver, request_id: str, prompt: list[int], **params: object) -> Request:
    params = {"temperature": 0, "max_tokens": 10, "logit_bias": {POISON: -100}, **params}
    sampling = SamplingMetadata(
        params=TokenSamplingParams(**params), seed=4, prompt_len=len(prompt)
    )  # type: ignore[arg-type]
    request = Request(request_id=request_id, tokens=array("q", prompt), sampling=sampling)
    driver.add(request)
    return request


def solo(decoder: Decoder, prompt: list[int]) -> list[int]:
    driver = drive(decoder)
    add(driver, "solo", prompt)
    driver.run()
    return driver.served["solo"]


@pytest.mark.parametrize("where", [0, 9, 19])
def test_a_row_that_is_not_finite_fails_its_request_alone(decoder: Decoder, where: int) -> None:
    driver = drive(decoder)
    bad, good = [1 + i for i in range(20)], [40 - i for i in range(11)]
    bad[where] = POISON
    add(driver, "bad", bad)
    add(driver, "good", good)
    driver.run()
    assert driver.ended["bad"] == "the model's logits are not finite"
    assert driver.served["bad"] == []
    assert driver.served["good"] == solo(decoder, good)


def test_kv_that_is_not_finite_reaches_nobody(decoder: Decoder) -> None:
    driver = drive(decoder)
    prompt = [*range(1, 9), POISON, *range(10, 30)]
    add(driver, "bad", prompt)
    driver.run()
    cached = driver.scheduler.cache.match_len(array("q", prompt))
    assert cached <= 8, "the pages before the bad token are sound, those behind it are not"
    for index in range(3):  # its pages go to others
        tokens = [2 + index, *range(20, 50)]
        add(driver, str(index), tokens)
        driver.run()
        assert driver.served[str(index)] == solo(decoder, tokens)


@pytest.mark.parametrize(
    "drafts",
    [
        Draft.of([VOCAB_SIZE, 1, 2], "x"),
        Draft.of([-1], "x"),
        Draft.of([1] * 50, "x"),
        Draft.of([1.5, 2.0], "x"),  # type: ignore[list-item]
        Draft.of(["a"], "x"),  # type: ignore[list-item]
        Draft([1, 2], ()),
        replace(Draft.of([1, 2, 3], "x"), parents=(-1, 0, -1)),
        replace(Draft.of([1, 2, 3], "x"), parents=(9,)),
        None,
        [],
    ],
)
def test_a_draft_that_makes_no_sense_costs_nothing_but_itself(decoder: Decoder, drafts) -> None:
    driver = drive(decoder, Fixed(drafts))
    prompt = [3, 1, 4, 1, 5]
    request = add(driver, "a", prompt)
    driver.run()
    assert driver.served["a"] == solo(decoder, prompt)
    assert request.usage.proposed_tokens <= 3 * request.usage.verify_steps


def test_prompt_logprobs_are_those_of_one_whole_pass_however_it_is_cut(decoder: Decoder) -> None:
    prompt = [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]
    told = []
    driver = drive(decoder)
    for request_id in ("cold", "cached"):
        request = add(driver, request_id, prompt, prompt_logprobs=2, max_tokens=1)
        collected = []
        while driver.scheduler.num_requests:
            plan = driver.scheduler.schedule(0.0)
            output = driver.runner.step(plan)
            for _, delta in driver.scheduler.commit(plan, output, 0.0):
                collected += delta.prompt_logprobs
        told.append(collected)
        assert request.usage.cached_tokens == 0
    assert [entry.token_id for entry in told[0]] == prompt[1:]
    assert told[0] == told[1]
    assert all(entry.logprob <= 0 and len(entry.top) == 2 for entry in told[0])
