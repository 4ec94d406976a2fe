"""Positions at which an answer's KV is packed, budgets of requests, options that are refused."""

from __future__ import annotations

import itertools

import pytest

from foretoken.core.config import EngineConfig
from foretoken.core.errors import InvalidRequest
from foretoken.core.interface.extras.packing import EVERY, most_kv, next_packing, num_packed_away
from foretoken.core.interface.extras.request_extras import RequestExtras
from foretoken.core.interface.sampling import TokenSamplingParams
from foretoken.core.scheduling.leases import release_kv
from foretoken.core.scheduling.request_table import kv_budget_of
from foretoken.core.scheduling.shares import draft_limits
from support.fake_model import Driver, FakeRunner, make_request, make_scheduler

PROMPT, BUDGET = 100, 256


def packings() -> list[int]:
    return [PROMPT + BUDGET + turn * EVERY for turn in range(1, 5)]


def test_an_interval_goes_at_each_fixed_position_and_not_before() -> None:
    for turn, position in enumerate(packings(), 1):
        assert num_packed_away(PROMPT, BUDGET, position) == (turn - 1) * EVERY
        assert num_packed_away(PROMPT, BUDGET, position + 1) == turn * EVERY
        assert next_packing(PROMPT, BUDGET, position - 1) == position
        assert next_packing(PROMPT, BUDGET, position) == position + EVERY
    assert num_packed_away(PROMPT, BUDGET, 1) == 0
    assert next_packing(PROMPT, BUDGET, 0) == packings()[0]


def test_steps_of_any_size_go_over_the_same_positions_and_never_across_one() -> None:
    for width in (1, 3, 64, 1000):
        start, seen = 0, []
        while start < packings()[-1]:
            stop = min(start + width, next_packing(PROMPT, BUDGET, start))
            gone = num_packed_away(PROMPT, BUDGET, stop) - num_packed_away(PROMPT, BUDGET, start)
            assert gone in (0, EVERY)
            if gone:
                seen.append(start)
            assert stop - num_packed_away(PROMPT, BUDGET, stop) <= most_kv(PROMPT, BUDGET, stop)
            start = stop
        assert seen == packings()[:-1]
    assert most_kv(PROMPT, BUDGET, 10_000) == PROMPT + BUDGET + EVERY


def budget_of(default: int, **params: object) -> int:
    request = make_request("a", [1, 2])
    request.sampling = type(request.sampling)(
        params=TokenSamplingParams(**params),  # type: ignore[arg-type]
        seed=0,
        prompt_len=2,
    )
    return kv_budget_of(request, default)


def test_a_request_has_its_own_budget_or_the_engines() -> None:
    assert budget_of(0) == 0
    assert budget_of(512) == 512
    assert budget_of(512, kv_budget=300) == 300
    assert budget_of(512, prompt_logprobs=1) == 0, "it keeps everything"


@pytest.mark.parametrize(
    ("default", "params", "told"),
    [
        (0, {"kv_budget": 300}, "needs a server that is started with --kv-evict"),
        (512, {"kv_budget": 300, "prompt_logprobs": 1}, "combined with prompt_logprobs"),
        (512, {"kv_budget": 255}, "256"),
        (512, {"kv_budget": 300.5}, "kv_budget"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused_by_its_name(default, params, told) -> None:
    with pytest.raises(InvalidRequest, match=told) as caught:
        budget_of(default, **params)
    assert caught.value.param == "kv_budget"


def test_the_scheduler_refuses_before_it_queues() -> None:
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequest, match="--kv-evict"):
        scheduler.check(make_request("a", [1, 2], kv_budget=300))
    assert not scheduler.num_requests


def test_the_option_names_a_policy_and_a_budget() -> None:
    assert EngineConfig().packing() is None
    assert EngineConfig(kv_evict="window:2048").packing() == ("window", 2048)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("window", "must be window:N"),
        ("window:", "must be window:N"),
        ("window:-5", "must be window:N"),
        ("window:1e3", "must be window:N"),
        ("window:255", "at least 256 tokens, not 255"),
        ("random:512", "must be window:N"),
        ("", "must be window:N"),
    ],
)
def test_another_option_is_refused(text: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as caught:
        EngineConfig(kv_evict=text)
    assert caught.value.param == "kv_evict"


def test_drafts_end_at_the_next_packing() -> None:
    request = make_request("a", [1] * PROMPT, max_tokens=5000)
    request.extras, request.max_len = RequestExtras(kv_budget=BUDGET), 5000
    for length, most in itertools.product((packings()[0] - 3, packings()[1] - 1), (2, 64)):
        del request.tokens[PROMPT:]
        request.tokens.extend([1] * (length - PROMPT))
        left = next_packing(PROMPT, BUDGET, length - 1) - length
        assert draft_limits([request], most) == [min(left, most)]


@pytest.mark.parametrize("num_more", [0, 1])
def test_pages_that_may_be_packed_are_never_published_as_the_answers(num_more: int) -> None:
    """The step of a packing may fail behind it, so that its tokens are not committed."""
    scheduler = make_scheduler(num_pages=200, max_batch_tokens=1000)
    request = make_request("a", [1] * PROMPT, max_tokens=500)
    scheduler.add(request, 0.0)
    scheduler.schedule(0.0)
    request.extras = RequestExtras(kv_budget=BUDGET)
    request.tokens.extend([2] * (packings()[0] + 1 - PROMPT))
    assert request.lease is not None
    assert scheduler.cache.extend(request.lease, len(request.tokens))
    request.num_computed = packings()[0] - 1 + num_more
    release_kv(scheduler.cache, request)
    cached = scheduler.cache.match_len(request.tokens)
    assert cached == (PROMPT if num_more else packings()[0] - 4)


def test_an_answer_that_could_not_be_read_leaves_none_of_its_pages_cached() -> None:
    request = make_request("a", [1, 2, 3, 4, 5], on_token=lambda _: next(said))
    said = iter([None] * 4)  # and then an error
    driver = Driver(make_scheduler(), FakeRunner(4))
    driver.add(request)
    driver.run()
    assert len(request.tokens) > 8
    assert driver.scheduler.cache.match_len(request.tokens) == 4, "of the prompt alone"
