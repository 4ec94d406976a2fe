"""Prompts share the tokens of a step: none waits for the end of a longer one, none starves."""

from __future__ import annotations

import random

import pytest

from foretoken.core.interface.request import Request
from foretoken.core.scheduling.chunk_budget import short_prompt_share
from foretoken.core.scheduling.request_table import MAX_PASSED, SchedulerLimits
from foretoken.radix_cache import PrefixCache
from support.fake_model import VOCAB_SIZE, Driver, FakeRunner, make_request, no_draft

from .checked import CheckedScheduler

BUDGET = 100  # tokens a step
LONG = 2000


def make_driver(*, num_pages: int = 1000, max_running: int = 1000) -> Driver:
    limits = SchedulerLimits(
        max_batch_tokens=BUDGET,
        max_running=max_running,
        max_queued=1000,
        max_model_len=10_000,
        vocab_size=VOCAB_SIZE,
    )
    page_size = 64
    scheduler = CheckedScheduler(PrefixCache(num_pages, page_size), limits)
    return Driver(scheduler, FakeRunner(page_size, no_draft))


def come(driver: Driver, name: str, length: int, **options: object) -> Request:
    rng = random.Random(name)
    prompt = [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]
    driver.add(request := make_request(name, prompt, max_tokens=1, **options))
    return request


def steps_to_first_token(driver: Driver, request: Request) -> int:
    num_steps = 0
    while request.num_output == 0:
        driver.step()
        num_steps += 1
    return num_steps


@pytest.mark.parametrize("num_long", [1, 4, 16])
def test_a_short_prompt_does_not_wait_for_long_ones(num_long: int) -> None:
    """The next step computes the short one, or the one after it where the share is full."""
    driver = make_driver()
    long = [come(driver, f"long-{index}", LONG) for index in range(num_long)]
    for _ in range(10):
        driver.step()
    assert steps_to_first_token(driver, come(driver, "short", 20)) == 1
    assert steps_to_first_token(driver, come(driver, "longer", 60)) == 3, "a fifth of each step"
    assert all(each.num_output == 0 for each in long)
    driver.run()


@pytest.mark.parametrize("length", [40, 80, 99, 100, 101, 150, 300])
def test_a_short_prompt_does_not_wait_for_a_queue_of_longer_ones(length: int) -> None:
    """Neither of such as fit into a step, nor of such as do not quite."""
    driver = make_driver()
    longer = [come(driver, f"longer-{index}", length) for index in range(40)]
    driver.step()
    assert steps_to_first_token(driver, come(driver, "short", 20)) <= 2
    assert any(each.num_output == 0 for each in longer[5:])
    driver.run()


def test_short_prompts_one_after_another_cost_a_long_one_a_quarter_of_its_time() -> None:
    alone, beside = make_driver(), make_driver()
    num_alone = steps_to_first_token(alone, come(alone, "long", LONG))
    long, num_beside = come(beside, "long", LONG), 0
    while long.num_output == 0:
        come(beside, f"short-{num_beside}", 30)  # more than its share
        beside.step()
        num_beside += 1
    assert 1.1 * num_alone < num_beside <= 1.25 * num_alone + 1
    beside.run()


def test_prompts_of_falling_lengths_do_not_all_begin() -> None:
    """One of half the length may go before: the rest would hold pages and places in vain."""
    driver = make_driver(max_running=16)
    for index in range(16):
        come(driver, f"falling-{index}", LONG - 110 * index)
        driver.step()
    assert len(driver.scheduler.running) <= 5
    assert steps_to_first_token(driver, come(driver, "short", 20)) == 1
    driver.run()


@pytest.mark.parametrize(("length", "begins"), [(450, True), (451, False)])
def test_a_prompt_begins_early_if_at_most_half_of_the_shortest_one_is_as_long(
    length: int, begins: bool
) -> None:
    driver = make_driver()
    come(driver, "long", BUDGET + 900)
    driver.step()
    come(driver, "half", length)
    driver.step()
    assert ("half" in driver.scheduler.running) == begins
    driver.run()


@pytest.mark.parametrize(("length", "num_begun"), [(19, 2), (20, 1)])
def test_short_prompts_begin_until_they_fill_their_share(length: int, num_begun: int) -> None:
    driver = make_driver()
    come(driver, "long", LONG)
    driver.step()
    for index in range(3):
        come(driver, f"short-{index}", length)
    driver.step()
    assert len(driver.scheduler.waiting) == 3 - num_begun
    driver.run()


@pytest.mark.parametrize(("length", "num_begun"), [(99, 2), (100, 1)])
def test_prompts_begin_in_turn_until_they_fill_a_step(length: int, num_begun: int) -> None:
    driver = make_driver()
    for index in range(3):
        come(driver, f"prompt-{index}", length)
    driver.step()
    assert len(driver.scheduler.waiting) == 3 - num_begun
    driver.run()


def test_a_prompt_that_began_early_is_in_turn_once_those_before_it_leave_room() -> None:
    driver = make_driver()
    long = come(driver, "long", BUDGET + 400)
    driver.step()
    early = come(driver, "early", 200)
    driver.step()
    assert early.is_early
    while long.num_output == 0:
        driver.step()
    driver.step()
    assert not early.is_early
    driver.run()


def test_no_short_prompt_begins_where_as_many_run_as_may() -> None:
    driver = make_driver(max_running=1)
    come(driver, "long", LONG)
    driver.step()
    come(driver, "short", 20)
    driver.step()
    assert list(driver.scheduler.running) == ["long"]
    driver.run()


@pytest.mark.parametrize("num_passed", [MAX_PASSED - 1, MAX_PASSED])
def test_a_step_looks_for_short_prompts_at_so_many_tenants_and_no_more(num_passed: int) -> None:
    """The prompts of most of them share one that is being computed, and wait for it."""
    driver = make_driver()
    long = come(driver, "long", LONG, tenant="long")
    driver.step()
    for index in range(num_passed):
        name = f"sharer-{index}"
        driver.add(make_request(name, long.tokens[:200], max_tokens=1, tenant=name))
    come(driver, "last", 300, tenant="last")
    driver.step()
    assert ("last" in driver.scheduler.running) == (num_passed < MAX_PASSED)
    driver.run()


def test_a_heavy_tenants_queue_does_not_go_before_another_tenants_prompt() -> None:
    """Short ones that begin early change no turns: the tenant that was served least is next."""
    driver, rng = make_driver(), random.Random(1)
    for index in range(40):
        come(driver, f"heavy-{index}", rng.randrange(200, 2000), tenant="heavy")
    for _ in range(30):
        driver.step()
    light = come(driver, "light", 1500, tenant="light")
    before = driver.runner.num_computed
    while light.num_output == 0:
        driver.step()
    longest_ahead = 2000 + 1000  # the heavy one whose turn it was, and one that began early
    assert driver.runner.num_computed - before <= 1.25 * (1500 + longest_ahead) + 3 * BUDGET
    driver.run()


def test_a_tenant_whose_requests_are_passed_by_keeps_its_credit() -> None:
    driver = make_driver()
    for index in range(6):
        come(driver, f"heavy-{index}", LONG, tenant="heavy")
    for index in range(20):
        come(driver, f"light-{index}", 30, tenant="light")
        driver.step()
    counters = driver.scheduler.waiting.counters
    assert counters["light"] <= 20 * 30 + 30
    driver.run()


@pytest.mark.parametrize("seed", range(4))
def test_no_prompt_starves(seed: int) -> None:
    """Until a prompt is computed, at most 1.25 times the tokens before it and its own are."""
    rng, driver = random.Random(seed), make_driver()
    requests: list[Request] = []
    allowed: dict[str, float] = {}  # tokens computed in all by the time of the first token
    for _ in range(60):
        for _ in range(rng.choice([0, 1, 1, 3])):
            length = int(10 ** rng.uniform(0.5, 3.3))
            request = come(driver, f"{seed}-{len(requests)}", length)
            before = sum(each.num_pending for each in requests if not each.num_output)
            allowed[request.request_id] = (
                driver.runner.num_computed + 1.25 * (before + length) + 3 * BUDGET
            )
            requests.append(request)
        driver.step()
        _check(driver, requests, allowed)
    while driver.scheduler.num_requests:
        driver.step()
        _check(driver, requests, allowed)
    assert driver.scheduler.num_preemptions == 0


def _check(driver: Driver, requests: list[Request], allowed: dict[str, float]) -> None:
    late = [
        request.request_id
        for request in requests
        if not request.num_output and driver.runner.num_computed > allowed[request.request_id]
    ]
    assert not late


def test_a_conversation_that_is_mostly_cached_is_short() -> None:
    driver = make_driver()
    first = come(driver, "first", 1500)
    driver.run()
    come(driver, "long", 1000)
    driver.step()
    driver.add(second := make_request("second", [*first.tokens, *range(1, 6)], max_tokens=1))
    assert steps_to_first_token(driver, second) <= 2
    driver.run()


def test_sharers_of_a_long_prefix_still_compute_it_once() -> None:
    driver = make_driver()
    prefix = [random.Random(1).randrange(1, VOCAB_SIZE) for _ in range(1000)]
    come(driver, "long", LONG)
    driver.step()
    for index in range(4):
        driver.add(make_request(f"sharer-{index}", [*prefix, 1 + index], max_tokens=1))
    driver.run()
    assert driver.runner.num_computed <= LONG + len(prefix) + 4 * (1 + 64)


def test_a_less_urgent_short_prompt_takes_nothing_from_a_long_one() -> None:
    driver = make_driver()
    long = come(driver, "long", 1000)
    driver.step()
    background = come(driver, "background", 20, priority=1)
    while long.num_output == 0:
        assert background.num_output == 0
        driver.step()
    driver.run()


def test_an_urgent_prompt_takes_a_share_however_long_it_is() -> None:
    driver = make_driver()
    long = come(driver, "long", 1000)
    driver.step()
    urgent = come(driver, "urgent", 1000, priority=-1000)
    while urgent.num_output == 0:
        driver.step()
    assert long.num_output == 0
    driver.run()


def test_a_tenant_with_many_short_prompts_does_not_keep_anothers_waiting() -> None:
    driver = make_driver()
    come(driver, "long", LONG, tenant="long")
    driver.step()
    for index in range(200):
        come(driver, f"flood-{index}", 20, tenant="flood")
        if index % 20 == 19:
            driver.step()
    other = come(driver, "other", 20, tenant="other")
    assert steps_to_first_token(driver, other) <= 2
    driver.run()


def test_no_shorter_prompt_is_admitted_into_pages_that_a_longer_one_will_need() -> None:
    """A long prompt takes pages chunk by chunk: those that it lacks still are not free."""
    driver = make_driver(num_pages=25)
    long = come(driver, "long", 1400)
    driver.step()
    short = [come(driver, f"short-{length}", length) for length in (500, 450, 400)]
    driver.run()
    assert driver.scheduler.num_preemptions == 0
    assert all(each.num_output for each in (long, *short))


def test_the_share_of_newcomers_leaves_the_greater_part_to_the_first() -> None:
    assert [short_prompt_share(budget) for budget in (0, 1, 2, 20, 64, 100, 1000)] == [
        0, 0, 1, 10, 16, 20, 200,
    ]  # fmt: skip
