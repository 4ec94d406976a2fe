"""The scheduler against a model of hashes: no torch, every page read is checked."""

from __future__ import annotations

import dataclasses
import random
from array import array
from typing import Any

import pytest
from msgspec.structs import replace

from foretoken.core.errors import InvalidRequest, PromptTooLong, QueueFull
from foretoken.core.interface.extras.images import PromptImage
from foretoken.core.interface.extras.request_extras import RequestExtras
from foretoken.core.interface.output import Refusal, RequestOutput, StepOutput
from foretoken.core.interface.plan import ScheduledRequest, StepPlan
from foretoken.core.interface.request import Request, RequestStatus, by_order
from foretoken.core.scheduling.chunk_budget import num_step_tokens
from foretoken.core.scheduling.request_table import RequestTable
from support.fake_model import (
    VOCAB_SIZE,
    Driver,
    FakeRunner,
    answer,
    make_request,
    make_scheduler,
    no_draft,
    perfect,
    sometimes,
    wrong,
)
from support.fixed_depth import FixedDepth


def drive(drafter=no_draft, **options) -> Driver:
    scheduler = make_scheduler(**options)
    return Driver(scheduler, FakeRunner(scheduler.cache.page_size, drafter))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]


def test_an_answer_is_the_models_own() -> None:
    driver = drive()
    driver.add(make_request("a", prompt_of(5), max_tokens=9))
    driver.run()
    assert driver.served["a"] == answer(prompt_of(5), 9)
    assert driver.ended["a"] == "length"


@pytest.mark.parametrize("drafter", [no_draft, perfect, wrong, sometimes])
def test_drafts_change_the_steps_but_never_the_tokens(drafter) -> None:
    driver = drive(drafter, depth=3, max_batch_tokens=32)
    for index in range(6):
        driver.add(make_request(str(index), prompt_of(3 + index, index), max_tokens=12))
    driver.run()
    for index in range(6):
        assert driver.served[str(index)] == answer(prompt_of(3 + index, index), 12)


def test_a_perfect_drafter_gives_depth_plus_one_tokens_every_step() -> None:
    driver = drive(perfect, depth=3)
    request = make_request("a", prompt_of(4), max_tokens=13)
    driver.add(request)
    driver.run()
    assert request.usage.verify_steps == 1 + 12 // 4  # the prompt's step yields one
    assert request.usage.accepted_tokens == 9
    assert request.usage.accepted_by_source == {"fake": 9}
    assert request.usage.completion_tokens == 13


def test_an_always_wrong_drafter_gives_exactly_one_token_every_step() -> None:
    driver = drive(wrong, depth=3)
    request = make_request("a", prompt_of(4), max_tokens=13)
    driver.add(request)
    driver.run()
    assert request.usage.verify_steps == request.usage.total_time == 13
    assert request.usage.accepted_tokens == 0
    assert request.usage.proposed_tokens > 0


class Noting(FixedDepth):
    """Notes the tokens of each step that it is told of, and the requests that left."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.seen: list[tuple[str, int]] = []
        self.left: list[str] = []

    def observe(
        self, request: Request, scheduled: ScheduledRequest, out: RequestOutput, num_tokens: int
    ) -> None:
        self.seen.append((request.request_id, num_tokens))

    def leave(self, request: Request) -> None:
        self.left.append(request.request_id)


def test_the_speculator_is_told_what_came_of_its_drafts_and_who_left() -> None:
    speculator = Noting(3)
    driver = drive(perfect, speculator=speculator)
    driver.add(make_request("a", prompt_of(4), max_tokens=9))
    driver.add(make_request("aborted", prompt_of(40, 1)))
    for _ in range(3):
        driver.step()
    driver.abort("aborted")
    driver.run()
    assert speculator.seen == [("a", 4), ("a", 4)], "the step of the prompt had none"
    assert sorted(speculator.left) == ["a", "aborted"]


def test_a_long_prompt_never_stalls_a_stream() -> None:
    driver = drive(max_batch_tokens=8, num_pages=100)
    driver.add(make_request("stream", prompt_of(3), max_tokens=40))
    driver.step()
    driver.add(make_request("long", prompt_of(100, 1), max_tokens=2))
    for _ in range(12):
        before = len(driver.served["stream"])
        plan = driver.step()
        assert len(driver.served["stream"]) == before + 1
        assert num_step_tokens(plan.requests) <= 8
    driver.run()
    assert driver.served["long"] == answer(prompt_of(100, 1), 2)


def test_drafts_and_chunks_share_the_token_budget() -> None:
    driver = drive(sometimes, max_batch_tokens=10, depth=4, num_pages=200)
    for index in range(5):
        driver.add(make_request(str(index), prompt_of(30, index), max_tokens=20))
    while driver.scheduler.num_requests:
        plan = driver.step()
        assert (
            num_step_tokens(plan.requests) + sum(row.draft_plan.max_draft for row in plan.requests)
            <= 10
        )


def test_identical_prompts_that_arrive_together_share_one_prefill() -> None:
    driver = drive(max_batch_tokens=64, page_size=4)
    for index in range(5):
        driver.add(make_request(str(index), prompt_of(41), max_tokens=1))
    driver.run()
    own = 41 - 40  # all but the last page is shared
    assert driver.runner.num_computed == 41 + 4 * own
    assert driver.served["4"] == answer(prompt_of(41), 1)


def test_a_common_prefix_is_computed_once_in_chunks() -> None:
    driver = drive(max_batch_tokens=16, page_size=4)
    shared = prompt_of(40)
    for index in range(4):
        driver.add(make_request(str(index), shared + prompt_of(6, 10 + index), max_tokens=3))
    driver.run()
    decoded = 4 * 2
    assert driver.runner.num_computed <= 40 + 4 * 6 + decoded + 4 * 4


def test_prompts_of_other_namespaces_do_not_wait_for_each_other_and_share_nothing() -> None:
    driver = drive(max_batch_tokens=64)
    driver.add(make_request("a", prompt_of(20), namespace="x"))
    driver.add(make_request("b", prompt_of(20), namespace="y"))
    plan = driver.step()
    assert [row.request_id for row in plan.requests] == ["a", "b"]
    driver.run()
    driver.add(late := make_request("c", prompt_of(20), namespace="z"))
    driver.run()
    assert late.usage.cached_tokens == 0


def test_a_second_turn_computes_only_its_new_tokens() -> None:
    driver = drive(page_size=1)
    prompt = prompt_of(20)
    driver.add(first := make_request("a", prompt, max_tokens=5))
    driver.run()
    driver.runner.num_computed = 0
    driver.add(second := make_request("b", [*first.tokens, 3, 4], max_tokens=1))
    driver.run()
    assert second.usage.cached_tokens == 24  # the last served token's KV was never computed
    assert driver.runner.num_computed == 3


def test_lower_priority_values_run_first() -> None:
    driver = drive(max_running=1)
    driver.add(make_request("late", prompt_of(4), priority=5))
    driver.add(make_request("soon", prompt_of(5), priority=-1))
    assert [row.request_id for row in driver.step().requests] == ["soon"]


def test_max_running_holds() -> None:
    driver = drive(max_running=2, max_batch_tokens=100)
    for index in range(6):
        driver.add(make_request(str(index), prompt_of(4, index), max_tokens=6))
    while driver.scheduler.num_requests:
        driver.step()
        assert len(driver.scheduler.running) <= 2


def test_a_prompt_takes_the_one_token_that_decodes_leave_of_a_step() -> None:
    driver = drive(max_batch_tokens=2)
    driver.add(make_request("stream", [1, 2], max_tokens=40))
    driver.step()
    driver.add(late := make_request("late", prompt_of(4), max_tokens=1))
    for _ in range(4):
        driver.step()
    assert late.num_output == 1
    driver.run()


@pytest.mark.parametrize(
    ("page_size", "running", "chunk", "length", "needed"),
    [
        (4, 4, 9, 7, 2 + 2 + 1),  # pages: of the one that runs, of the newcomer, to grow
        (1, 2, 9, 3, 3 + 4 + 1),
        (4, 8, 5, 3, 2 + 1 + 1),  # still in its prompt, with a page for each token of it
    ],
)
@pytest.mark.parametrize("lacking", [0, 1])
def test_a_request_is_admitted_where_its_tokens_fit_and_one_more_of_everybodys(
    page_size: int, running: int, chunk: int, length: int, needed: int, lacking: int
) -> None:
    driver = drive(num_pages=needed - lacking, page_size=page_size, max_batch_tokens=chunk)
    driver.add(make_request("running", prompt_of(running), max_tokens=2))
    driver.step()
    driver.add(make_request("new", prompt_of(length, 1), max_tokens=1))
    assert ("new" in [row.request_id for row in driver.step().requests]) == (not lacking)
    driver.run()


def test_prompts_of_one_token_that_begin_together_preempt_nobody() -> None:
    driver = drive(num_pages=3, page_size=1)
    driver.add(*(make_request(str(token), [token], max_tokens=2) for token in (1, 2)))
    driver.run()
    assert driver.scheduler.num_preemptions == 0


def test_preempted_requests_come_back_with_the_same_answer() -> None:
    driver = drive(sometimes, num_pages=14, page_size=2, max_batch_tokens=12, depth=2)
    requests = [make_request(str(i), prompt_of(4, i), max_tokens=14) for i in range(5)]
    driver.add(*requests)
    driver.run()
    assert driver.scheduler.num_preemptions > 0
    for index, request in enumerate(requests):
        assert driver.served[str(index)] == answer(prompt_of(4, index), 14)
        assert request.usage.completion_tokens == 14


@pytest.mark.parametrize("length", [4, 5], ids=["the last runs short", "the first runs short"])
def test_the_request_that_comes_last_is_preempted_first(length: int) -> None:
    driver = drive(num_pages=8, page_size=2, max_batch_tokens=32)
    driver.add(low := make_request("low", prompt_of(4, 1), max_tokens=9, priority=1))
    driver.step()
    driver.add(high := make_request("high", prompt_of(length, 2), max_tokens=9, priority=0))
    driver.run()
    assert low.num_preemptions > 0
    assert high.num_preemptions == 0
    assert driver.scheduler.num_preemptions == low.num_preemptions


def run_until_preempted(driver: Driver, request: Request) -> None:
    while request.num_preemptions == 0:
        assert driver.step().requests, "it is never preempted"


def test_computed_pages_of_a_preempted_request_are_no_work_that_is_left() -> None:
    driver = drive(num_pages=8, page_size=2, max_batch_tokens=32)
    driver.add(low := make_request("low", prompt_of(6, 1), max_tokens=9, priority=1))
    driver.step()
    driver.add(make_request("high", prompt_of(4, 2), max_tokens=9))
    run_until_preempted(driver, low)
    assert low.num_uncached <= 2
    driver.run()


def test_an_answer_is_cached_when_it_ends_and_not_before() -> None:
    driver = drive(page_size=1)
    driver.add(request := make_request("a", prompt_of(4), max_tokens=5))
    cached = driver.scheduler.cache.match_len
    for _ in range(4):
        driver.step()
        assert cached(request.tokens) == 4
    driver.step()
    assert cached(request.tokens) == 8


def test_an_answer_that_is_computed_again_is_cached_chunk_by_chunk() -> None:
    driver = drive(num_pages=12, page_size=1, max_batch_tokens=2)
    driver.add(request := make_request("a", [1, 2], max_tokens=9, priority=1))
    driver.step()
    driver.add(make_request("b", prompt_of(6, 2), max_tokens=4))
    run_until_preempted(driver, request)
    driver.abort("b")
    driver.scheduler.flush()
    cached = driver.scheduler.cache.match_len
    for num_tokens in (2, 4):
        driver.step()
        assert request.num_computed == cached(request.tokens) == num_tokens
    driver.run()


def test_running_requests_stay_in_order_whenever_they_come_or_come_back() -> None:
    driver = drive(num_pages=14, page_size=2, max_batch_tokens=12)
    for index in range(6):
        driver.add(make_request(str(index), prompt_of(4, index), max_tokens=14, priority=-index))
        driver.step()
        running = list(driver.scheduler.running.values())
        assert running == sorted(running, key=by_order)
    while driver.scheduler.num_requests:
        driver.step()
        driver.scheduler.audit()
    assert driver.scheduler.num_preemptions > 0


def test_a_chunk_never_takes_the_pages_of_a_row_that_is_planned() -> None:
    """An urgent prompt comes in chunks while those behind it decode, and pages run out."""
    driver = drive(num_pages=16, page_size=1, max_batch_tokens=3)
    prompts = {"a": prompt_of(2, 1), "b": prompt_of(2, 2), "urgent": prompt_of(8, 3)}
    for name in "ab":
        driver.add(make_request(name, prompts[name], max_tokens=10, priority=1))
    driver.step()
    driver.step()
    driver.add(urgent := make_request("urgent", prompts["urgent"], max_tokens=6))
    driver.run()
    assert urgent.num_preemptions == 0
    for name, num_tokens in (("a", 10), ("b", 10), ("urgent", 6)):
        assert driver.served[name] == answer(prompts[name], num_tokens)


def test_drafts_never_evict_what_is_cached() -> None:
    driver = drive(perfect, num_pages=8, page_size=1, depth=4, max_batch_tokens=32)
    driver.add(make_request("old", prompt_of(4, 1), max_tokens=1))
    driver.run()
    driver.add(make_request("new", prompt_of(2, 2), max_tokens=9))
    driver.step()
    plan = driver.step()
    assert (
        plan.requests[0].draft_plan.max_draft == 1
    )  # eight pages: four cached, three needed, one free
    assert driver.scheduler.cache.match_len(array("q", [*prompt_of(4, 1), 1])) == 4


def test_a_request_alone_may_use_the_whole_pool() -> None:
    driver = drive(num_pages=5, page_size=4, max_batch_tokens=7)
    driver.add(make_request("old", prompt_of(9, 3), max_tokens=4))
    driver.run()
    driver.add(make_request("a", prompt_of(9), max_tokens=None))
    driver.run()
    assert driver.served["a"] == answer(prompt_of(9), 11)
    assert driver.ended["a"] == "length"


def test_a_prompt_larger_than_the_pool_is_refused() -> None:
    driver = drive(num_pages=5, page_size=4)
    with pytest.raises(PromptTooLong, match="prompt is too long: 20 tokens > 19 maximum"):
        driver.add(make_request("a", prompt_of(20)))


def test_a_prompt_as_long_as_the_context_is_refused() -> None:
    driver = drive(max_model_len=10)
    with pytest.raises(PromptTooLong):
        driver.add(make_request("a", prompt_of(10)))
    driver.add(make_request("b", prompt_of(9), max_tokens=5))
    driver.run()
    assert len(driver.served["b"]) == 1


@pytest.mark.parametrize("bad", [[-1], [VOCAB_SIZE], []])
def test_token_ids_that_the_model_does_not_have_are_refused(bad) -> None:
    with pytest.raises(InvalidRequest) as caught:
        drive().add(make_request("a", bad))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("takes_images", [False, True])
def test_images_are_refused_unless_the_model_has_a_tower(takes_images: bool) -> None:
    scheduler = make_scheduler()
    limits = dataclasses.replace(scheduler.limits, takes_images=takes_images)
    table = RequestTable(limits, scheduler.capacity)
    request = make_request("a", [1, -2, 3])
    request.extras = RequestExtras(images=(PromptImage(bytes(32), ((1, 1),), ()),))
    if takes_images:
        table.check(request)
        return
    with pytest.raises(InvalidRequest, match="the model takes no images") as caught:
        table.check(request)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids"])
def test_parameters_with_foreign_token_ids_are_refused(field) -> None:
    value = {VOCAB_SIZE: 1.0} if field == "logit_bias" else [1, VOCAB_SIZE]
    with pytest.raises(InvalidRequest) as caught:
        drive().add(make_request("a", [1], **{field: value}))
    assert caught.value.param == field


def test_a_full_queue_refuses_and_loses_nothing() -> None:
    driver = drive(max_running=1, max_queued=2)
    driver.add(*(make_request(str(i), prompt_of(4, i)) for i in range(3)))
    with pytest.raises(QueueFull):
        driver.add(make_request("more", prompt_of(4)))
    driver.run()
    assert set(driver.ended) == {"0", "1", "2"}


def test_a_request_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    driver = drive()
    driver.add(make_request("a", [1, 2]))
    with pytest.raises(InvalidRequest):
        driver.add(make_request("a", [1, 2]))
    driver.abort("a")
    driver.ended.clear()
    driver.add(make_request("a", [1, 2]))
    driver.run()
    assert driver.served["a"] == answer([1, 2], 8)


@pytest.mark.parametrize("num_steps", range(7))
def test_abort_in_every_phase_leaves_no_page_behind(num_steps) -> None:
    driver = drive(sometimes, depth=2, max_batch_tokens=8)
    request = make_request("a", prompt_of(20), max_tokens=30)
    driver.add(request, make_request("b", prompt_of(9, 1)))
    for _ in range(num_steps):
        driver.step()
    driver.abort("a")
    assert request.status is RequestStatus.FINISHED
    assert driver.ended["a"] == "abort"
    driver.run()
    assert driver.served["b"] == answer(prompt_of(9, 1), 8)
    cache = driver.scheduler.cache
    assert cache.num_free_pages + cache.num_evictable_pages == cache.num_total_pages


def test_a_deadline_ends_waiting_and_running_requests() -> None:
    driver = drive(max_running=1)
    driver.add(make_request("running", prompt_of(4), max_tokens=100, deadline=3.0))
    driver.add(make_request("waiting", prompt_of(4, 1), max_tokens=100, deadline=2.0))
    driver.run()
    assert driver.ended["running"] == "abort"
    assert "deadline passed" in driver.ended["waiting"]
    assert 0 < len(driver.served["running"]) <= 3


@pytest.mark.parametrize("cut", range(1, 9))
@pytest.mark.parametrize("depth", [0, 1, 3, 7])
def test_a_stop_token_cuts_the_accepted_run(cut, depth) -> None:
    prompt = [2, 5, 3]
    right = answer(prompt, 9)
    stop = right[cut - 1]
    first = right.index(stop) + 1
    driver = drive(perfect, depth=depth)
    driver.add(
        request := make_request("a", prompt, max_tokens=9, stop_ids=[stop], stop_token_ids=[stop])
    )
    driver.run()
    assert driver.served["a"] == right[:first]
    assert driver.ended["a"] == "stop"
    assert request.usage.completion_tokens == first
    assert request.usage.accepted_tokens + request.usage.verify_steps in (first, first + 1)
    assert request.usage.accepted_tokens <= first


@pytest.mark.parametrize("max_tokens", range(1, 9))
@pytest.mark.parametrize("depth", [0, 1, 3, 7])
def test_never_more_than_max_tokens(max_tokens, depth) -> None:
    driver = drive(perfect, depth=depth)
    driver.add(make_request("a", [4, 4], max_tokens=max_tokens))
    driver.run()
    assert driver.served["a"] == answer([4, 4], max_tokens)


def test_stop_wins_over_length_inside_one_run() -> None:
    right = answer([1, 2, 3], 6)
    driver = drive(perfect, depth=7)
    seen: list[int] = []

    def on_token(token_id: int) -> str | None:
        seen.append(token_id)
        return "end" if len(seen) == 6 else None

    driver.add(make_request("a", [1, 2, 3], max_tokens=6, on_token=on_token))
    driver.run()
    assert seen == right
    assert driver.ended["a"] == "stop"


def test_only_served_tokens_enter_the_tree() -> None:
    driver = drive(perfect, depth=7, page_size=1)
    right = answer([1, 2, 3], 12)
    driver.add(
        make_request(
            "a",
            [1, 2, 3],
            max_tokens=12,
            on_token=lambda _: "x" if len(driver.scheduler.running["a"].tokens) == 3 + 5 else None,
        )
    )
    driver.run()
    assert driver.served["a"] == right[:5]
    path = [1, 2, 3, *right]
    cache = driver.scheduler.cache
    assert cache.match_len(array("q", path)) <= 3 + 5


def test_a_callback_that_raises_fails_its_request_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(token_id: int) -> str | None:
        raise RuntimeError("no such character")

    driver = drive()
    driver.add(make_request("bad", prompt_of(3), on_token=broken))
    driver.add(make_request("good", prompt_of(3, 1)))
    driver.run()
    assert "bad failed while its tokens were read" in caplog.text
    assert driver.ended["bad"] == "the answer could not be decoded"
    assert driver.served["good"] == answer(prompt_of(3, 1), 8)


def test_a_failed_row_fails_its_request_alone_and_publishes_nothing() -> None:
    driver = drive(page_size=1)
    driver.add(make_request("bad", prompt_of(6)), make_request("good", prompt_of(6, 1)))
    plan = driver.scheduler.schedule(1.0)
    output = driver.runner.step(plan)
    rows = [
        RequestOutput(request_id="bad", error="NaN") if row.request_id == "bad" else row
        for row in output.requests
    ]
    driver._note(driver.scheduler.commit(plan, StepOutput(requests=rows), 1.0))
    driver.scheduler.audit()
    assert driver.ended["bad"] == "NaN"
    assert driver.scheduler.cache.match_len(array("q", prompt_of(6))) == 0
    driver.run()
    assert driver.served["good"] == answer(prompt_of(6, 1), 8)


@pytest.mark.parametrize(
    ("params", "own", "param"),
    [
        ({"min_tokens": 2, "allowed_token_ids": [1]}, {"constraint_param": "regex"}, "regex"),
        ({"min_tokens": 2, "allowed_token_ids": [1]}, {}, "allowed_token_ids"),
        ({"min_tokens": 2}, {"bad_words_ids": ((1,),)}, "bad_words"),
        ({"min_tokens": 2}, {}, "min_tokens"),
        ({}, {}, None),
    ],
    ids=lambda each: repr(each)[:30],
)
def test_a_row_that_fails_by_the_requests_own_parameters_is_an_invalid_request(
    params: dict[str, Any], own: dict[str, Any], param: str | None
) -> None:
    driver = drive()
    driver.add(request := make_request("bad", prompt_of(6), **params))
    request.sampling = dataclasses.replace(request.sampling, **own)
    plan = driver.scheduler.schedule(1.0)
    rows = [RequestOutput(request_id="bad", error=Refusal("too many states"))]
    ((_, delta),) = driver.scheduler.commit(plan, StepOutput(requests=rows), 1.0)
    assert isinstance(delta.error, InvalidRequest)
    assert (str(delta.error), delta.error.param) == ("too many states", param)


def test_who_left_is_told_with_the_next_plan_even_after_idle_turns() -> None:
    driver = drive()
    driver.add(make_request("a", [1, 2]))
    driver.run()
    for _ in range(3):
        assert not driver.step().requests
    driver.add(make_request("b", [1, 2]))
    assert driver.step().released_request_ids == ["a"]


def test_drafts_leave_half_of_the_budget_to_those_who_wait() -> None:
    driver = drive(wrong, max_batch_tokens=16, num_pages=300, max_running=9)
    streams = [make_request(str(i), [1 + i], max_tokens=90, depth=64) for i in range(3)]
    driver.add(*streams)
    driver.step()
    driver.add(late := make_request("late", prompt_of(20), max_tokens=1))
    while late.num_output == 0:
        plan = driver.step()
        chunk = [row.stop - row.start for row in plan.requests if row.request_id == "late"]
        assert chunk[0] >= min(6, late.num_pending)
    driver.run()


@pytest.mark.parametrize("length", [1, 3])
def test_small_newcomers_do_not_starve_a_large_request(length: int) -> None:
    driver = drive(num_pages=12, page_size=2, max_batch_tokens=30, max_running=9)
    driver.add(make_request("running", prompt_of(6, 1), max_tokens=6))
    driver.step()
    driver.add(make_request("large", prompt_of(18, 2), max_tokens=2))
    for index in range(40):
        driver.add(make_request(f"small-{index}", prompt_of(length, 10 + index), max_tokens=4))
        driver.step()
        if "large" in driver.ended:
            break
    assert index < 10
    driver.run()


def test_no_draft_stands_before_the_first_token() -> None:
    driver = drive(perfect, max_batch_tokens=16, depth=3)
    driver.add(request := make_request("a", prompt_of(17)))
    while request.num_output == 0:
        assert all(row.draft_plan.max_draft == 0 for row in driver.step().requests)
    driver.run()
    assert request.usage.accepted_tokens > 0


def test_pages_of_rejected_drafts_are_given_back() -> None:
    driver = drive(wrong, page_size=1, depth=5, num_pages=40)
    driver.add(request := make_request("a", prompt_of(4), max_tokens=9))
    while driver.scheduler.num_requests:
        driver.step()
        if request.lease is not None:
            assert len(request.lease.page_ids) <= len(request.tokens)


@pytest.mark.parametrize(("page_size", "length", "num_tokens"), [(4, 12, 28), (1, 3, 18)])
def test_a_preempted_request_waits_until_the_others_have_room_to_grow(
    page_size: int, length: int, num_tokens: int
) -> None:
    driver = drive(num_pages=24, page_size=page_size, max_batch_tokens=64)
    requests = [make_request(str(i), prompt_of(length, i), max_tokens=num_tokens) for i in range(4)]
    driver.add(*requests)
    driver.run()
    assert driver.scheduler.num_preemptions > 0
    assert max(request.num_preemptions for request in requests) == 1


def test_per_request_depth_overrides_the_engines() -> None:
    driver = drive(perfect, depth=2)
    driver.add(off := make_request("off", [1, 2], max_tokens=9, depth=0))
    driver.add(deep := make_request("deep", [2, 1], max_tokens=9, depth=7))
    driver.run()
    assert off.usage.proposed_tokens == 0
    assert deep.usage.verify_steps == 2


@pytest.mark.parametrize("seed", range(8))
def test_the_ledger_is_exact_after_thousands_of_random_steps_with_aborts(seed) -> None:
    rng = random.Random(seed)
    driver = drive(
        rng.choice([no_draft, perfect, wrong, sometimes]),
        num_pages=rng.choice([12, 20, 40]),
        page_size=rng.choice([1, 2, 3]),
        max_batch_tokens=rng.choice([4, 9, 16]),
        max_running=rng.choice([2, 5]),
        depth=rng.choice([0, 1, 4]),
    )
    prefixes = [prompt_of(rng.randrange(1, 9), i) for i in range(4)]
    expected: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for step in range(1250):
        if driver.scheduler.num_requests < 8 and rng.random() < 0.5:
            prompt = rng.choice(prefixes) + prompt_of(rng.randrange(1, 4), step)
            if len(prompt) < driver.scheduler.capacity:
                num_tokens = rng.randrange(1, 12)
                request = make_request(
                    str(step),
                    prompt,
                    max_tokens=num_tokens,
                    namespace=rng.choice([None, None, "salt"]),
                    priority=rng.randrange(2),
                )
                driver.add(request)
                expected[str(step)] = answer(prompt, request.max_len - len(prompt))
        if rng.random() < 0.08 and expected:
            victim = rng.choice(list(expected))
            aborted |= {victim} - set(driver.ended)
            driver.abort(victim)
        driver.step()
    driver.run()
    for request_id, tokens in expected.items():
        told = driver.served[request_id]
        assert told == (tokens[: len(told)] if request_id in aborted else tokens)
    cache = driver.scheduler.cache
    cache.flush()
    assert cache.num_free_pages == cache.num_total_pages


def test_a_broken_commit_would_be_noticed() -> None:
    """The fake model's page check bites: a plan that skips a token reads foreign KV."""
    driver = drive()
    driver.add(make_request("a", prompt_of(9)))
    plan = driver.scheduler.schedule(1.0)
    skipped = replace(plan.requests[0], start=3)
    with pytest.raises(KeyError):
        driver.runner.step(replace(plan, requests=[skipped]))


class FailsBehind(FakeRunner):
    """A perfect draft, accepted, and behind it a place where nothing can be drawn."""

    def step(self, plan: StepPlan) -> StepOutput:
        right = super().step(plan)
        rows = [
            replace(out, error="nothing can be drawn") if out.path else out
            for out in right.requests
        ]
        return StepOutput(requests=rows)


@pytest.mark.parametrize(("max_tokens", "ending"), [(4, "length"), (99, "nothing can be drawn")])
def test_what_was_accepted_before_a_failure_is_served(max_tokens: int, ending: str) -> None:
    driver = Driver(make_scheduler(depth=4), FailsBehind(page_size=4, drafter=perfect))
    request = make_request("a", [1, 2, 3], max_tokens=max_tokens, stop_ids=())
    driver.add(request)
    driver.run()
    assert driver.ended["a"] == ending
    served = answer(array("q", [1, 2, 3]), len(driver.served["a"]))
    assert driver.served["a"] == served
    assert len(served) >= 4, "the first token, and what was accepted behind it"
