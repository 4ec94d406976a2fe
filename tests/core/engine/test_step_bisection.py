"""A step that raises: who is to blame is found, and nobody else knows."""

from __future__ import annotations

import asyncio
import gc
import math
import weakref
from array import array

import pytest

from foretoken.core.engine.engine import Engine
from foretoken.core.engine.inbox import TokenStream
from foretoken.core.engine.step_bisection import StepBisection, forget_frames
from foretoken.core.errors import EngineDead, ForetokenError, RankLost, is_out_of_memory
from foretoken.core.interface.extras.images import PromptImage
from foretoken.core.interface.extras.packing import KvPack
from foretoken.core.interface.output import StepOutput
from foretoken.core.interface.plan import ScheduledExtras, ScheduledRequest, StepPlan
from foretoken.core.interface.protocols import NO_SPECULATION
from foretoken.core.interface.request import Delta, FinishReason
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.scheduling.chunk_budget import LEAST_CHUNK, REGROWTH, num_step_tokens
from support.fake_model import (
    Driver,
    FakeRunner,
    answer,
    make_request,
    make_scheduler,
    perfect,
    sometimes,
)
from support.fixed_depth import FixedDepth
from support.toy_states import ToyStates

PROMPTS = [[1 + i % 6, 2, 1 + i // 6] for i in range(16)]
GPU_LOST = [
    "CUDA error: an illegal memory access was encountered",
    "Triton Error [CUDA]: an illegal memory access was encountered",
]


class Faulty(FakeRunner):
    """Computes all of a step, and then raises what ``fault`` says of its plan."""

    def __init__(self, fault, page_size: int = 4, drafter=sometimes, **options) -> None:
        super().__init__(page_size, drafter, **options)
        self.fault = fault
        self.num_raised = 0

    def step(self, plan: StepPlan) -> StepOutput:
        output = super().step(plan)
        failure = self.fault(plan)
        if failure is not None:
            self.num_raised += 1
            raise failure
        return output


def holds(*names: str):
    """Raises whenever one of these is in the step."""

    def fault(plan: StepPlan) -> Exception | None:
        found = {row.request_id for row in plan.requests} & set(names)
        return RuntimeError("the forward pass failed") if found else None

    return fault


async def read(stream: TokenStream) -> list[int] | ForetokenError:
    tokens: list[int] = []
    last = Delta()
    try:
        async for last in stream:
            tokens += last.token_ids
    except ForetokenError as error:
        return error
    assert last.finish_reason is FinishReason.LENGTH
    return tokens


def serve(runner: FakeRunner, prompts=PROMPTS, *, max_tokens: int = 8, **options):
    """Serve the prompts; return what each reader was told, the engine, and whether it lived."""

    async def scenario():
        options.setdefault("depth", 3)
        options.setdefault("max_batch_tokens", 128)
        options.setdefault("max_running", 16)
        engine = Engine(make_scheduler(**options), runner)
        await engine.start()
        streams = [
            engine.submit(make_request(str(i), prompt, max_tokens=max_tokens))
            for i, prompt in enumerate(prompts)
        ]
        async with asyncio.timeout(30):
            told = await asyncio.gather(*map(read, streams))
        was_alive = engine.alive
        if was_alive:
            result = await engine.audit()
            assert result["ok"], result
        await engine.close()
        engine.scheduler.audit()
        return told, engine, was_alive

    return asyncio.run(scenario())


def check_neighbours(told, failing_requests=()) -> None:
    for index, (prompt, one) in enumerate(zip(PROMPTS, told, strict=False)):
        if str(index) in failing_requests:
            assert type(one) is ForetokenError
        else:
            assert one == answer(prompt, 8)


@pytest.mark.parametrize("culprit", range(16))
def test_one_culprit_is_found_in_few_runs_and_its_neighbours_never_know(culprit: int) -> None:
    runner = Faulty(holds(str(culprit)))
    told, engine, was_alive = serve(runner)
    check_neighbours(told, {str(culprit)})
    assert was_alive
    assert engine.num_bisections == 1
    assert runner.num_raised == engine.num_failed_steps == 1 + math.log2(16)
    assert len(runner.plans) <= 8 + 1 + 2 * math.log2(16)


@pytest.mark.parametrize("failing_requests", [{"0", "15"}, {"6", "7"}, {"3", "12"}])
def test_two_culprits_are_found_together(failing_requests) -> None:
    told, _, was_alive = serve(Faulty(holds(*failing_requests)))
    check_neighbours(told, failing_requests)
    assert was_alive


def test_a_culprit_among_those_that_decode_is_found_in_the_middle_of_its_answer() -> None:
    def fault(plan: StepPlan) -> Exception | None:
        grown = [row for row in plan.requests if row.request_id == "5" and len(row.tokens) > 6]
        return RuntimeError("the forward pass failed") if grown else None

    told, _, was_alive = serve(Faulty(fault))
    check_neighbours(told, {"5"})
    assert was_alive


def test_a_failure_that_does_not_come_again_costs_nobody_anything() -> None:
    failures = [RuntimeError("once")]
    told, engine, _ = serve(Faulty(lambda plan: failures.pop() if failures else None))
    check_neighbours(told)
    assert engine.num_failed_steps == 1


def test_a_failure_that_follows_from_drafts_costs_the_drafts_alone() -> None:
    def fault(plan: StepPlan) -> Exception | None:
        drafted = any(row.draft_plan.max_draft for row in plan.requests)
        return RuntimeError("the draft broke the step") if drafted else None

    told, engine, _ = serve(Faulty(fault, drafter=perfect), PROMPTS[:1])
    check_neighbours(told)
    assert engine.num_failed_steps > 1


def test_when_too_much_fails_the_rest_of_the_step_fails_together() -> None:
    plans: list[StepPlan] = []

    def fault(plan: StepPlan) -> Exception | None:
        plans.append(plan)
        return RuntimeError("the forward pass failed") if len(plans) < 40 else None

    told, _, was_alive = serve(Faulty(fault), PROMPTS, max_running=16)
    assert all(type(one) is ForetokenError for one in told)
    assert len(plans) == 3 + 2 * math.log2(16)
    assert was_alive, "one step of which nothing came through"


def test_an_engine_whose_steps_always_raise_ends_soon_and_everybody_is_told() -> None:
    runner = Faulty(lambda plan: RuntimeError("the forward pass failed"))
    told, engine, was_alive = serve(runner, PROMPTS, max_running=4)
    assert [type(one) for one in told] == [ForetokenError] * 8 + [EngineDead] * 8
    assert not was_alive
    assert isinstance(engine.failure, RuntimeError)
    assert len(runner.plans) == 3 * (3 + 2 * math.log2(4)) + 1, "and one of nobody's, no run more"


@pytest.mark.parametrize("failure", [*map(RuntimeError, GPU_LOST), RankLost("rank 1 is gone")])
def test_a_model_that_is_lost_ends_the_engine_at_once_and_blames_nobody(failure) -> None:
    message = str(failure)
    runner = Faulty(lambda plan: type(failure)(message) if len(runner.plans) > 1 else None)
    told, engine, was_alive = serve(runner, PROMPTS, max_running=4)
    assert {type(one) for one in told} == {EngineDead}
    assert not was_alive
    assert message in str(engine.failure)
    assert len(runner.plans) == 1 + (3 + 2 * math.log2(4)) + 1, "one step in parts, and the probe"


def test_one_call_that_a_gpu_refuses_costs_the_request_of_that_step_alone() -> None:
    def fault(plan: StepPlan) -> Exception | None:
        is_his = any(row.request_id == "3" for row in plan.requests)
        return RuntimeError("CUDA error: invalid configuration argument") if is_his else None

    told, _, was_alive = serve(Faulty(fault), max_running=1)
    check_neighbours(told, {"3"})
    assert was_alive


def test_an_engine_that_can_choose_no_token_ends_although_its_model_computes() -> None:
    def fault(plan: StepPlan) -> Exception | None:
        return RuntimeError("no sampler") if any(row.samples for row in plan.requests) else None

    told, _, was_alive = serve(Faulty(fault), PROMPTS, max_running=4)
    assert {type(one) for one in told} == {ForetokenError, EngineDead}
    assert not was_alive


def test_five_culprits_among_sixty_four_take_no_innocent_with_them() -> None:
    driver = Driver(make_scheduler(num_pages=256, max_batch_tokens=256, max_running=64),
                    FakeRunner(4))  # fmt: skip
    driver.add(*(make_request(str(i), [1 + i % 6, 2, 3]) for i in range(64)))
    plan = driver.scheduler.schedule(0.0)
    bad = {"3", "4", "20", "41", "63"}
    bisection = StepBisection(plan, RuntimeError("x"))
    while (part := bisection.next()) is not None:
        if bad & {row.request_id for row in part.requests}:
            bisection.failed(part, RuntimeError("x"))
        else:
            bisection.passed()
    assert {row.request_id for row in bisection.failing_requests} == bad
    driver.scheduler.abort_all(0.0)


def test_drafts_that_make_every_step_fail_are_given_up() -> None:
    def fault(plan: StepPlan) -> Exception | None:
        drafts = any(row.draft_plan.max_draft for row in plan.requests)
        return RuntimeError("no kernel for so many rows") if drafts else None

    told, engine, _ = serve(Faulty(fault), PROMPTS[:1], max_tokens=100)
    assert told == [answer(PROMPTS[0], 100)]
    assert engine.num_failed_steps < 30
    assert engine.scheduler.speculator.inner is NO_SPECULATION


def test_causes_that_go_round_in_a_circle_hold_nobody_up() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    forget_frames(first)


def test_what_a_failed_step_took_is_no_price_of_the_next() -> None:
    told: list[float] = []
    now = [0.0]

    class Watching(FixedDepth):
        def observe_step(self, plan: StepPlan, output: StepOutput, seconds: float) -> None:
            told.append(seconds)

    class Slow(FakeRunner):
        def step(self, plan: StepPlan) -> StepOutput:
            now[0] += 1.0
            if len(self.plans) == 3:
                self.plans.append(plan)
                now[0] += 50.0
                raise RuntimeError("slow, and then nothing")
            return super().step(plan)

    async def scenario() -> None:
        scheduler = make_scheduler(speculator=Watching(0))
        engine = Engine(scheduler, Slow(4), clock=lambda: now[0])
        await engine.start()
        assert await read(engine.submit(make_request("a", [1, 2], max_tokens=8))) is not None
        await engine.close()

    asyncio.run(scenario())
    assert set(told[1:]) == {1.0}


def test_requests_that_fail_one_after_the_other_do_not_end_an_engine_that_computes() -> None:
    runner = Faulty(holds(*map(str, range(7))))
    told, engine, was_alive = serve(runner, PROMPTS[:8], max_running=1)
    check_neighbours(told, set(map(str, range(7))))
    assert was_alive
    assert engine.scheduler.cache.num_free_pages + engine.scheduler.cache.num_evictable_pages == 64


@pytest.mark.parametrize("max_running", [1, 4])
def test_failures_between_which_something_comes_through_never_end_the_engine(max_running) -> None:
    odd = holds(*map(str, range(1, 16, 2)))
    told, _, was_alive = serve(Faulty(odd), max_running=max_running)
    check_neighbours(told, set(map(str, range(1, 16, 2))))
    assert was_alive


def test_a_retrial_tells_again_of_pages_and_of_those_who_left() -> None:
    driver = Driver(make_scheduler(), FakeRunner(4))
    driver.add(*(make_request(str(i), [1, 2, 3]) for i in range(2)))
    plan = driver.scheduler.schedule(0.0)
    bisection = StepBisection(plan, RuntimeError("x"))
    part = bisection.next()
    assert part is not None
    assert part.newly_allocated_pages == plan.newly_allocated_pages
    assert part.released_request_ids == plan.released_request_ids
    bisection.passed()
    driver.scheduler.abort_all(0.0)


# -- memory -------------------------------------------------------------------------------------


class Small(Faulty):
    """A machine on which steps beyond so many tokens do not fit into memory."""

    def __init__(self, most: int, failure: Exception) -> None:
        def fault(plan: StepPlan) -> Exception | None:
            return failure if num_step_tokens(plan.requests) > most else None

        super().__init__(fault, page_size=16, drafter=sometimes)

    @property
    def sizes(self) -> list[int]:
        return [num_step_tokens(plan.requests) for plan in self.plans]


OUT_OF_MEMORY = [
    MemoryError(),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 7 bytes"),
    type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


def test_what_a_failed_run_held_is_let_go_before_the_next() -> None:
    class Holding(FakeRunner):
        """Runner that fails once; a set in the failed frame stands for its tensors."""

        held: weakref.ref | None = None

        def step(self, plan: StepPlan) -> StepOutput:
            assert self.held is None or self.held() is None, "still held by the failure"
            if self.held is None:
                tensors = {1, 2, 3}
                self.held = weakref.ref(tensors)
                raise MemoryError
            return super().step(plan)

    gc.disable()
    try:
        told, _, _ = serve(Holding(4), PROMPTS[:2])
    finally:
        gc.enable()
    check_neighbours(told)


@pytest.mark.parametrize("failure", OUT_OF_MEMORY, ids=lambda each: str(each)[:12])
def test_a_prompt_that_does_not_fit_into_memory_is_computed_in_smaller_chunks(failure) -> None:
    assert is_out_of_memory(failure)
    prompts = [[1 + (i + j) % 6 for j in range(200)] for i in range(3)]
    runner = Small(40, failure)
    told, engine, _ = serve(
        runner, prompts, page_size=16, num_pages=64, max_batch_tokens=128, max_running=3
    )
    assert told == [answer(prompt, 8) for prompt in prompts]
    assert engine.num_bisections < 6, "later steps ask for less at once"
    first = runner.sizes.index(128)
    assert runner.sizes[first : first + 3] == [128, 64, 32]


def test_those_who_decode_go_on_where_a_prompt_does_not_fit() -> None:
    runner = Small(40, MemoryError())
    prompts = [[1, 2, 3], [1 + j % 6 for j in range(300)]]
    told, _, _ = serve(runner, prompts, page_size=16, num_pages=64, max_tokens=20)
    assert told == [answer(prompt, 20) for prompt in prompts]


def test_a_prompt_fails_when_its_least_chunk_does_not_fit_either() -> None:
    def fault(plan: StepPlan) -> Exception | None:
        return MemoryError() if any(r.request_id == "0" for r in plan.requests) else None

    runner = Faulty(fault, page_size=16)
    prompts = [[1 + j % 6 for j in range(100)], [2, 3]]
    told, _, was_alive = serve(runner, prompts, page_size=16, max_running=1)
    assert type(told[0]) is ForetokenError
    assert told[1] == answer([2, 3], 8)
    assert was_alive
    assert (
        min(
            num_step_tokens(plan.requests)
            for plan in runner.plans
            if num_step_tokens(plan.requests) > 2
        )
        == LEAST_CHUNK
    )


def test_a_step_may_have_more_of_prompts_again_when_memory_is_back() -> None:
    driver = Driver(make_scheduler(max_batch_tokens=128, num_pages=2000), FakeRunner(4))
    driver.add(make_request("a", [1 + j % 6 for j in range(900)]))
    plan = driver.scheduler.schedule(0.0)
    assert num_step_tokens(plan.requests) == 128
    driver.scheduler.shrink_chunks(plan)
    sizes = []
    while driver.scheduler.running["a"].num_pending > 1:
        sizes.append(num_step_tokens(driver.step().requests))
    assert sizes[0] == 64
    assert sizes[5] == int(64 * (1 + REGROWTH) ** 5)
    assert sizes[:-1] == sorted(sizes[:-1])


def test_a_tenant_pays_once_for_what_a_step_without_memory_did_not_get_to() -> None:
    prompts = [[1 + (i + j) % 6 for j in range(200)] for i in range(3)]
    paid = []
    for runner in (Small(40, MemoryError()), Small(999, MemoryError())):
        told, engine, _ = serve(runner, prompts, page_size=16, num_pages=64, max_running=3, depth=0)
        assert told == [answer(prompt, 8) for prompt in prompts]
        paid.append(engine.scheduler.waiting.counters[None])
    assert paid[0] == paid[1] == 3 * (200 + 7), "all of a prompt, and of the answer but its end"


# -- packed KV ----------------------------------------------------------------------------------


def packed_rows(name: str, num_rows: int) -> ScheduledRequest:
    """Rows of a request that has 484 tokens, whose first 128 of the answer go before them."""
    return ScheduledRequest(
        request_id=name,
        tokens=array("q", [1] * 600),
        start=484,
        stop=484 + num_rows,
        page_ids=array("q", range((484 - 128 + num_rows + 15) // 16)),
        sampling=SamplingMetadata(params=TokenSamplingParams(), seed=0, prompt_len=100),
        extras=ScheduledExtras(num_packed_away=128, pack=KvPack(100, 484, 128)),
    )


def test_a_packed_request_computes_a_token_at_least_however_little_memory_there_is() -> None:
    """Else the request would be planned with another order, and be packed twice."""
    rows = [packed_rows(name, 40) for name in "abc"]
    plan = StepPlan(requests=rows, newly_allocated_pages=array("q"))
    bisection = StepBisection(plan, MemoryError())
    computed: dict[str, ScheduledRequest] = {}
    while (part := bisection.next()) is not None:
        if num_step_tokens(part.requests) > LEAST_CHUNK + 2:
            bisection.failed(part, MemoryError())
        else:
            bisection.passed()
            computed |= {row.request_id: row for row in part.requests}
    assert computed.keys() == {"a", "b", "c"}
    assert not bisection.failing_requests
    assert all(computed[row.request_id].extras is row.extras for row in rows), "the same order"


def rows_with_image(name: str, run: tuple[int, int], num_rows: int) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=name,
        tokens=array("q", range(num_rows + 1)),
        start=0,
        stop=num_rows,
        page_ids=array("q", range(num_rows // 16 + 1)),
        sampling=SamplingMetadata(params=TokenSamplingParams(), seed=0, prompt_len=num_rows + 1),
        extras=ScheduledExtras(images=(PromptImage(bytes(32), (run,), (), is_mutual=True),)),
    )


def test_an_image_is_not_cut_however_little_memory_there_is() -> None:
    """Half of the tokens would end in it; when it is all that is left, its request fails."""
    row = rows_with_image("a", (10, 80), 100)
    bisection = StepBisection(
        StepPlan(requests=[row], newly_allocated_pages=array("q")), MemoryError()
    )
    part = bisection.next()
    assert part is not None
    assert [each.stop for each in part.requests] == [10]
    row = rows_with_image("b", (0, 80), 80)
    bisection = StepBisection(
        StepPlan(requests=[row], newly_allocated_pages=array("q")), MemoryError()
    )
    part = bisection.next()
    assert part is not None
    assert [each.stop for each in part.requests] == [80]
    bisection.failed(part, MemoryError())
    assert bisection.next() is None
    assert [each.request_id for each in bisection.failing_requests] == ["b"]


def test_a_dummy_step_writes_into_the_last_page_of_a_packed_request() -> None:
    row = packed_rows("a", 1)
    plan = StepPlan(requests=[row], newly_allocated_pages=array("q"))
    bisection = StepBisection(plan, RuntimeError("x"))
    part = bisection.next()
    assert part is not None
    bisection.failed(part, RuntimeError("x"))
    assert bisection.health_check(16).requests[0].page_ids[0] == row.page_ids[-1]


# -- recurrent states -----------------------------------------------------------------------------

LONG = [[*range(1, 7), *[1 + index] * 5, *[1, 2, 3] * 9] for index in range(4)]


def serve_states(fault, prompts=LONG, *, num_slots: int = 8, max_running: int = 4, **options):
    """`serve` by a model with recurrent states; the runner's steps are in its ``plans``."""

    def violation(text: str) -> None:
        raise AssertionError(text)

    states = ToyStates(num_slots, max_running, page_size=4, violation=violation)
    runner = Faulty(fault, states=states)
    return *serve(runner, prompts, num_slots=num_slots, max_running=max_running, **options), runner


def check_long(told, failing=()) -> None:
    for index, (prompt, one) in enumerate(zip(LONG, told, strict=True)):
        if index in failing:
            assert type(one) is ForetokenError
        else:
            assert one == answer(prompt, 8)


@pytest.mark.parametrize("max_batch_tokens", [16, 64, 200])
@pytest.mark.parametrize("culprit", range(4))
def test_a_prompt_that_moves_its_state_and_fails_takes_no_neighbour_with_it(
    culprit: int, max_batch_tokens: int
) -> None:
    told, engine, was_alive, _ = serve_states(
        holds(str(culprit)), max_batch_tokens=max_batch_tokens
    )
    check_long(told, {culprit})
    assert was_alive
    assert engine.scheduler.cache.states.num_private == 0


@pytest.mark.parametrize("num_passed", range(7))
def test_a_failure_that_is_not_repeated_ends_no_request(num_passed: int) -> None:
    failures = iter([None] * num_passed + [RuntimeError("once")])
    told, engine, _, runner = serve_states(lambda plan: next(failures, None), max_batch_tokens=32)
    check_long(told)
    assert runner.num_raised == 1
    assert engine.num_bisections == 1


def test_a_chunk_is_never_run_again_as_it_was() -> None:
    failures = iter([None, RuntimeError("once")])
    _, _, _, runner = serve_states(lambda plan: next(failures, None), max_batch_tokens=64)
    failed, after = runner.plans[1], runner.plans[2]
    chunks = {row.request_id for row in failed.requests if row.stop - row.start > 1}
    assert chunks
    again = {row.request_id: row for row in after.requests}
    assert all(again[name].start == 0 for name in chunks & again.keys())


def test_a_prompt_that_fails_at_one_place_ends_though_what_is_before_it_passes() -> None:
    def fault(plan: StepPlan) -> Exception | None:
        rows = [row for row in plan.requests if row.request_id == "2"]
        return RuntimeError("x") if any(row.start <= 30 < row.stop for row in rows) else None

    told, _, was_alive, _ = serve_states(fault, max_batch_tokens=24)
    check_long(told, {2})
    assert was_alive


def test_memory_that_runs_out_over_chunks_makes_them_smaller_and_ends_no_request() -> None:
    def fault(plan: StepPlan) -> Exception | None:
        return MemoryError() if num_step_tokens(plan.requests) > 40 else None

    told, _, was_alive, runner = serve_states(fault, max_batch_tokens=200)
    check_long(told)
    assert was_alive
    assert runner.num_raised > 0


def test_a_model_with_states_that_computes_nothing_ends_the_engine() -> None:
    told, _, was_alive, _ = serve_states(lambda plan: RuntimeError("lost"))
    assert not was_alive
    assert {type(one) for one in told} <= {ForetokenError, EngineDead}


def test_a_dummy_step_of_a_model_with_states_shows_that_it_computes() -> None:
    def fault(plan: StepPlan) -> Exception | None:
        names = {row.request_id for row in plan.requests}
        return RuntimeError("x") if names - {""} else None

    told, engine, was_alive, _ = serve_states(fault, max_running=1)
    check_long(told, range(4))
    assert was_alive
    assert engine.scheduler.cache.states.num_free == 8


def test_drafts_that_break_steps_end_no_prompt_beside_them() -> None:
    """Chunks of models with states are not run again: the drafts are tried without them."""

    def fault(plan: StepPlan) -> Exception | None:
        drafted = any(row.draft_plan.max_draft for row in plan.requests)
        return RuntimeError("the draft broke the step") if drafted else None

    told, engine, was_alive, runner = serve_states(fault, max_batch_tokens=24, max_running=2)
    check_long(told)
    assert was_alive
    assert runner.num_raised > 1
    assert engine.scheduler.cache.states.num_private == 0
