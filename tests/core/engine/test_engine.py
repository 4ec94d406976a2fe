"""The engine on the model of hashes: streams, aborts, failures, shutdown."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from foretoken.core.engine.engine import Engine
from foretoken.core.engine.inbox import TokenStream
from foretoken.core.errors import (
    DeadlineExceeded,
    EngineDead,
    ForetokenError,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    RankLost,
)
from foretoken.core.interface.output import RequestOutput, StepOutput
from foretoken.core.interface.plan import StepPlan
from foretoken.core.interface.request import CacheOptions, Delta, FinishReason
from support.fake_model import FakeRunner, answer, make_request, make_scheduler, perfect
from support.fixed_depth import FixedDepth


class GatedRunner(FakeRunner):
    """Each step waits until the test lets it go."""

    def __init__(self) -> None:
        super().__init__(page_size=4)
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def step(self, plan: StepPlan) -> StepOutput:
        self.entered.release()
        self.gate.acquire()
        return super().step(plan)


class BrokenRunner(FakeRunner):
    """Fails at the given step."""

    def __init__(self, fails_at: int) -> None:
        super().__init__(page_size=4)
        self.left = fails_at

    def step(self, plan: StepPlan) -> StepOutput:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the forward pass failed")
        return super().step(plan)


class Ranks:
    """`Companions` of which a test says when one is lost."""

    def __init__(self) -> None:
        self.ends: list[bool] = []
        self.lose = lambda failure: None

    def watch(self, on_lost) -> None:
        self.lose = on_lost

    def unwatch(self) -> None:
        self.lose = lambda failure: None

    def end(self, *, at_once: bool = False) -> None:
        self.ends.append(at_once)


def make_engine(runner: FakeRunner | None = None, **options) -> Engine:
    scheduler = make_scheduler(**options)
    return Engine(scheduler, runner or FakeRunner(scheduler.cache.page_size))


async def collect(stream: TokenStream) -> tuple[list[int], Delta]:
    tokens: list[int] = []
    last = Delta()
    async for last in stream:
        tokens += last.token_ids
    return tokens, last


async def entered(runner: GatedRunner) -> None:
    await asyncio.to_thread(runner.entered.acquire)


async def test_many_streams_run_side_by_side_and_each_is_its_solo_answer() -> None:
    engine = make_engine()
    await engine.start()
    prompts = [[1 + i % 6, 2, 1 + i // 6] for i in range(30)]
    streams = [engine.submit(make_request(str(i), p)) for i, p in enumerate(prompts)]
    for prompt, (tokens, last) in zip(
        prompts, await asyncio.gather(*map(collect, streams)), strict=True
    ):
        assert tokens == answer(prompt, 8)
        assert last.finish_reason is FinishReason.LENGTH
    await engine.close()


async def test_a_slow_reader_costs_one_slot_and_misses_nothing() -> None:
    engine = make_engine()
    await engine.start()
    slow = engine.submit(make_request("slow", [1, 2], max_tokens=20))
    await collect(engine.submit(make_request("fast", [2, 1], max_tokens=30)))
    delta = await anext(slow)
    assert delta.token_ids == answer([1, 2], 20)
    assert delta.finish_reason is FinishReason.LENGTH
    with pytest.raises(StopAsyncIteration):
        await anext(slow)
    await engine.close()


async def test_a_slow_reader_of_a_failed_request_is_told_its_tokens_first() -> None:
    engine = make_engine(BrokenRunner(fails_at=4))
    await engine.start()
    streams = [engine.submit(make_request(name, [1, 2], max_tokens=20)) for name in "ab"]
    with pytest.raises(ForetokenError):
        await collect(streams[0])
    delta = await anext(streams[1])
    assert delta.token_ids == answer([1, 2], len(delta.token_ids))
    assert delta.token_ids
    with pytest.raises(ForetokenError) as caught:
        await anext(streams[1])
    assert len(caught.traceback) < 5, "the other reader's frames are not in it"
    await engine.close()


async def test_abort_during_a_step_takes_effect_after_it_and_frees_the_pages() -> None:
    runner = GatedRunner()
    engine = make_engine(runner)
    await engine.start()
    stream = engine.submit(make_request("a", [1, 2, 3]))
    await entered(runner)
    engine.abort("a")
    runner.gate.release()
    tokens, last = await collect(stream)
    assert last.finish_reason is FinishReason.ABORT
    assert tokens == answer([1, 2, 3], len(tokens))
    engine.scheduler.audit()
    assert engine.scheduler.num_requests == 0
    await engine.close()


async def test_abort_before_the_first_step() -> None:
    engine = make_engine()
    await engine.start()
    stream = engine.submit(make_request("a", [1, 2, 3]))
    engine.abort("a")
    assert (await collect(stream))[1].finish_reason is FinishReason.ABORT
    again = engine.submit(make_request("a", [1, 2, 3]))
    assert (await collect(again))[0] == answer([1, 2, 3], 8)
    await engine.close()


async def test_aborting_an_unknown_or_finished_request_is_harmless() -> None:
    engine = make_engine()
    await engine.start()
    engine.abort("nobody")
    await collect(engine.submit(make_request("a", [1])))
    engine.abort("a")
    assert (await collect(engine.submit(make_request("a", [1]))))[0] == answer([1], 8)
    await engine.close()


async def test_three_failed_steps_in_a_row_end_every_stream_and_the_engine() -> None:
    engine = make_engine(BrokenRunner(fails_at=2), max_running=1)
    await engine.start()
    streams = [engine.submit(make_request(str(i), [1, 2, 3])) for i in range(4)]
    for stream in streams[:2]:
        with pytest.raises(ForetokenError) as caught:
            await collect(stream)
        assert not isinstance(caught.value, EngineDead)
    for stream in streams[2:]:
        with pytest.raises(EngineDead):
            await collect(stream)
    assert not engine.alive
    assert isinstance(engine.failure, RuntimeError)
    with pytest.raises(EngineDead):
        engine.submit(make_request("late", [1]))
    await engine.close()


@pytest.mark.parametrize("is_idle", [True, False])
async def test_a_lost_rank_ends_every_stream_and_the_engine_between_two_steps(
    is_idle: bool,
) -> None:
    runner, ranks = GatedRunner(), Ranks()
    engine = Engine(make_scheduler(), runner, companions=ranks)
    await engine.start()
    streams = [] if is_idle else [engine.submit(make_request("a", [1, 2]))]
    if not is_idle:
        await entered(runner)
    ranks.lose(RankLost("rank 1 ended"))
    runner.gate.release()
    for stream in streams:
        with pytest.raises(EngineDead, match="steps failed"):
            await collect(stream)
    assert engine._task is not None
    await asyncio.wait([engine._task])
    assert str(engine.failure) == "rank 1 ended"
    assert ranks.ends == [True], "the others are ended at once"
    with pytest.raises(EngineDead):
        engine.submit(make_request("b", [1, 2]))
    await engine.close()


async def test_ranks_are_ended_with_the_engine_that_closes() -> None:
    ranks = Ranks()
    engine = Engine(make_scheduler(), FakeRunner(4), companions=ranks)
    await engine.start()
    await collect(engine.submit(make_request("a", [1, 2])))
    await engine.close()
    assert ranks.ends == [False]


async def test_a_failed_request_leaves_nothing_behind() -> None:
    async def fail(engine: Engine) -> weakref.ref[TokenStream]:
        stream = engine.submit(make_request("a", [1, 2, 3]))
        with pytest.raises(ForetokenError):
            await collect(stream)
        return weakref.ref(stream)

    class FirstFails(FakeRunner):
        def step(self, plan: StepPlan) -> StepOutput:
            right = super().step(plan)
            wrong = [
                RequestOutput(request_id=row.request_id, error="not finite")
                for row in plan.requests
            ]
            return StepOutput(requests=wrong) if len(self.plans) == 1 else right

    engine = Engine(make_scheduler(), FirstFails(page_size=4))
    await engine.start()
    known = await fail(engine)
    await asyncio.sleep(0)  # the engine's own turn lets go of it as well
    await collect(engine.submit(make_request("b", [1])))
    engine.runner.plans.clear()
    gc.collect()
    assert known() is None
    await engine.close()


def test_an_engine_whose_loop_ends_in_a_step_can_be_collected() -> None:
    began, may_end = threading.Event(), threading.Event()

    class Blocked(FakeRunner):
        def step(self, plan: StepPlan) -> StepOutput:
            began.set()
            may_end.wait(60)
            return super().step(plan)

    async def leave() -> weakref.ref[Engine]:
        engine = Engine(make_scheduler(), Blocked(page_size=4))
        await engine.start()
        engine.submit(make_request("a", [1, 2, 3]))
        await asyncio.to_thread(began.wait, 60)
        return weakref.ref(engine)

    loop = asyncio.new_event_loop()
    known = loop.run_until_complete(leave())
    loop.close()  # the engine was not closed
    may_end.set()
    gone = threading.Event()
    weakref.finalize(known(), gone.set)
    assert any(gone.wait(0.01) for _ in range(500) if gc.collect() >= 0)


async def test_a_request_id_in_use_is_refused_even_from_the_inbox() -> None:
    engine = make_engine()
    await engine.start()
    stream = engine.submit(make_request("a", [1]))
    with pytest.raises(InvalidRequest):
        engine.submit(make_request("a", [2]))
    assert (await collect(stream))[0] == answer([1], 8)
    await engine.close()


async def test_a_full_queue_tells_when_to_come_back() -> None:
    engine = make_engine(max_running=1, max_queued=2)
    await engine.start()
    streams = [engine.submit(make_request(str(i), [1 + i])) for i in range(3)]
    with pytest.raises(QueueFull) as caught:
        engine.submit(make_request("more", [1]))
    assert 1 <= caught.value.retry_after <= 60
    for index, stream in enumerate(streams):
        assert (await collect(stream))[0] == answer([1 + index], 8)
    await engine.close()


async def test_a_session_may_be_ended_before_its_request_is_queued() -> None:
    engine = make_engine()
    await engine.start()
    requests = [make_request(name, [1, 2, 3], max_tokens=2) for name in "ab"]
    for request in requests:
        request.cache = CacheOptions(session=request.request_id)
    streams = [engine.submit(request) for request in requests]
    assert not await engine.end_session("a"), "it has no pages yet"
    for stream in streams:
        await collect(stream)
    assert [request.cache.ends_session for request in requests] == [True, False]
    await engine.close()


async def test_a_wait_may_be_told_while_the_turn_of_the_session_still_runs() -> None:
    runner = GatedRunner()
    engine = make_engine(runner)
    await engine.start()
    waits = engine.scheduler.cache.pins.waits
    waits.turn((None, "s"), 0.0, 0.0)
    engine.expect_turn("s", "first")
    engine.expect_turn("s", "ignored")
    request = make_request("a", [1, 2, 3, 4, 5], max_tokens=1)
    request.cache = CacheOptions(session="s")
    stream = engine.submit(request)
    await entered(runner)
    engine.expect_turn("s", "second")
    runner.gate.release()
    await collect(stream)
    assert waits._sessions[None, "s"].label == "second"
    await engine.close()


async def test_a_request_is_checked_without_being_queued() -> None:
    engine = make_engine(max_running=1, max_queued=1)
    await engine.start()
    streams = [engine.submit(make_request(str(i), [1 + i])) for i in range(2)]
    engine.check(make_request("a", [1]))  # though the queue is full
    with pytest.raises(InvalidRequest, match="from 0 to 6, not 7"):
        engine.check(make_request("a", [7]))
    with pytest.raises(PromptTooLong):
        engine.check(make_request("a", [1] * engine.scheduler.capacity))
    for index, stream in enumerate(streams):
        assert (await collect(stream))[0] == answer([1 + index], 8)
    assert engine.scheduler.request_table.get("a") is None
    await engine.close()


async def test_close_lets_running_requests_finish_and_refuses_new_ones() -> None:
    runner = GatedRunner()
    engine = make_engine(runner)
    await engine.start()
    stream = engine.submit(make_request("a", [1, 2], max_tokens=5))
    await entered(runner)
    closing = asyncio.create_task(engine.close(drain_seconds=20))
    await asyncio.sleep(0)
    with pytest.raises(EngineDead):
        engine.submit(make_request("late", [1]))
    runner.gate.release(10)
    assert (await collect(stream))[0] == answer([1, 2], 5)
    await closing
    assert not engine.alive


async def test_an_engine_takes_nothing_from_the_moment_it_is_told_to_close() -> None:
    engine = make_engine()
    await engine.start()
    closing = asyncio.create_task(engine.close(drain_seconds=20))
    await asyncio.sleep(0)
    assert engine.alive
    with pytest.raises(EngineDead):
        engine.submit(make_request("late", [1]))
    await closing


async def test_close_without_grace_ends_every_stream_with_one_terminal() -> None:
    runner = GatedRunner()
    engine = make_engine(runner, max_running=1)
    await engine.start()
    running = engine.submit(make_request("running", [1, 2]))
    await entered(runner)
    waiting = engine.submit(make_request("waiting", [2, 2]))
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    runner.gate.release(10)
    await closing
    assert (await collect(running))[1].finish_reason is FinishReason.ABORT
    with pytest.raises(EngineDead):
        await collect(waiting)
    engine.scheduler.audit()


async def test_a_scheduler_that_fails_while_letting_go_leaves_no_reader_waiting() -> None:
    engine = make_engine(BrokenRunner(fails_at=1))
    await engine.start()
    streams = [engine.submit(make_request(str(i), [1, 2, 3])) for i in range(2)]

    def fail(*args: object) -> list[object]:
        raise ValueError("cannot let go")

    engine.scheduler.abort_all = fail  # type: ignore[assignment, method-assign]
    engine.scheduler.fail = fail  # type: ignore[assignment, method-assign]
    for stream in streams:
        with pytest.raises(EngineDead):
            await collect(stream)
    await engine.close()


async def test_an_engine_that_is_cancelled_from_outside_ends_its_streams() -> None:
    engine = make_engine()
    await engine.start()
    stream = engine.submit(make_request("a", [1, 2, 3], max_tokens=500))
    await anext(stream)
    (task,) = [t for t in asyncio.all_tasks() if t.get_name() == "foretoken-engine"]
    task.cancel()
    with pytest.raises(EngineDead):
        engine.submit(make_request("b", [1]))
    with pytest.raises(EngineDead):
        await collect(stream)
    await engine.close()


async def test_closing_before_the_first_turn_ends_what_was_submitted() -> None:
    engine = make_engine()
    await engine.start()
    stream = engine.submit(make_request("a", [1, 2, 3]))
    await engine.close()
    assert stream.ended


async def test_closing_twice_waits_for_the_first_time() -> None:
    runner = GatedRunner()
    engine = make_engine(runner)
    await engine.start()
    stream = engine.submit(make_request("a", [1, 2, 3]))
    await entered(runner)
    closings = [asyncio.create_task(engine.close()) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(closing.done() for closing in closings)
    runner.gate.release(9)
    await asyncio.gather(*closings)
    assert (await collect(stream))[1].finish_reason is FinishReason.ABORT
    with pytest.raises(EngineDead):
        await engine.start()


async def test_metrics_follow_the_cut_of_an_accepted_run() -> None:
    scheduler = make_scheduler(depth=7)
    engine = Engine(scheduler, FakeRunner(scheduler.cache.page_size, perfect))
    await engine.start()
    seen: list[int] = []

    def on_token(token_id: int) -> str | None:
        seen.append(token_id)
        return "stop" if len(seen) == 3 else None

    await collect(engine.submit(make_request("a", [1, 2], max_tokens=20, on_token=on_token)))
    text = engine.metrics.render()[0].decode()
    assert "foretoken:spec_decode_num_accepted_tokens_total 2.0" in text
    assert "foretoken:generation_tokens_total 3.0" in text
    await engine.close()


async def test_metrics_count_what_was_served() -> None:
    scheduler = make_scheduler(depth=3)
    engine = Engine(scheduler, FakeRunner(scheduler.cache.page_size, perfect))
    await engine.start()
    await collect(engine.submit(make_request("a", [1] * 9, max_tokens=8)))
    await collect(engine.submit(make_request("b", [1] * 9, max_tokens=8)))
    body, content_type = engine.metrics.render()
    text = body.decode()
    assert content_type.startswith("text/plain")
    assert "foretoken:generation_tokens_total 16.0" in text
    assert "foretoken:prompt_tokens_total 18.0" in text
    assert "foretoken:prefix_cache_queries_total 18.0" in text
    assert "foretoken:prefix_cache_hits_total 8.0" in text
    assert 'foretoken:request_success_total{finished_reason="length"} 2.0' in text
    assert "foretoken:spec_decode_num_accepted_tokens_total" in text
    assert 'num_accepted_tokens_per_pos_total{position="0"}' in text
    assert "foretoken:time_to_first_token_seconds_count 2.0" in text
    assert "foretoken:inter_token_latency_seconds_count 14.0" in text
    await engine.close()


class Timing(FixedDepth):
    """Remembers how long it was told that each step took."""

    def __init__(self) -> None:
        super().__init__(0)
        self.seconds: list[float] = []

    def observe_step(self, plan: StepPlan, output: StepOutput, seconds: float) -> None:
        self.seconds.append(seconds)


async def test_the_first_step_takes_no_longer_than_the_engine_lives() -> None:
    now = 50_000.0  # a machine that has been up for long

    def clock() -> float:
        nonlocal now
        now += 0.25
        return now

    scheduler = make_scheduler(speculator=(timing := Timing()))
    engine = Engine(scheduler, FakeRunner(scheduler.cache.page_size), clock=clock)
    await engine.start()
    await collect(engine.submit(make_request("a", [1, 2], max_tokens=4)))
    await engine.close()
    assert len(timing.seconds) == 4
    assert max(timing.seconds) < 10.0


async def test_a_flush_reaches_the_cache_even_if_the_speculator_fails() -> None:
    class Stubborn(FixedDepth):
        def flush(self, *namespaces: str | None) -> None:
            raise RuntimeError("flush")

    scheduler = make_scheduler(speculator=Stubborn(0))
    engine = Engine(scheduler, FakeRunner(scheduler.cache.page_size))
    await engine.start()
    await collect(engine.submit(make_request("a", [1] * 9, max_tokens=4)))
    assert scheduler.cache.num_evictable_pages > 0
    with pytest.raises(RuntimeError, match="flush"):
        await engine.flush_cache()
    assert scheduler.cache.num_evictable_pages == 0
    await engine.close()


async def test_a_flush_of_one_namespace_leaves_the_others_what_is_cached() -> None:
    scheduler = make_scheduler()
    engine = Engine(scheduler, FakeRunner(scheduler.cache.page_size))
    await engine.start()
    for namespace in (None, "mine", "theirs"):
        request = make_request(str(namespace), [1] * 9, max_tokens=4, namespace=namespace)
        await collect(engine.submit(request))
    per_namespace = scheduler.cache.num_evictable_pages // 3
    assert per_namespace > 0
    assert await engine.flush_cache("mine") == per_namespace
    assert await engine.flush_cache("mine") == 0
    assert await engine.flush_cache(None) == per_namespace
    assert await engine.flush_cache() == per_namespace
    await engine.close()


async def test_the_engine_is_warm_before_it_serves() -> None:
    seen: list[str] = []
    scheduler = make_scheduler()
    engine = Engine(
        scheduler,
        FakeRunner(scheduler.cache.page_size),
        warm_up=lambda: seen.append(threading.current_thread().name),
    )
    await engine.start()
    assert len(seen) == 1
    assert seen[0].startswith("foretoken-model")
    await engine.close()


async def test_an_audit_runs_between_two_steps_and_says_whose_every_page_is() -> None:
    runner = GatedRunner()
    engine = make_engine(runner)
    await engine.start()
    stream = engine.submit(make_request("a", [1, 2, 3, 4, 5], max_tokens=3))
    await entered(runner)
    audit = asyncio.create_task(engine.audit())
    given_up = asyncio.create_task(engine.audit())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not audit.done(), "the model thread computes"
    given_up.cancel()
    checks, num_checks = engine.scheduler.checks, 0

    def counted() -> Iterator[None]:
        nonlocal num_checks
        num_checks += 1
        return checks()

    engine.scheduler.checks = counted  # type: ignore[method-assign]
    others = [asyncio.create_task(engine.audit()) for _ in range(5)]
    await asyncio.sleep(0)
    runner.gate.release(10)
    assert (await others[4])["ok"]
    assert num_checks == 1, "one audit answers all who asked"
    assert await audit == {
        "ok": True,
        "pages": {
            "total": 64,
            "free": 62,
            "tree": 1,
            "private": 1,
            "evictable": 0,
            "pinned": 0,
        },
        "requests": {"running": 1, "waiting": 0},
    }
    await collect(stream)
    assert (await engine.audit())["ok"], "an idle engine answers, too"
    assert engine.num_audit_failures == 0
    await engine.close()
    with pytest.raises(EngineDead):
        await engine.audit()


async def test_an_audit_that_fails_is_told_and_counted_and_ends_nothing(caplog) -> None:
    engine = make_engine()
    await engine.start()
    lost = engine.scheduler.cache._free.pop()
    result = await engine.audit()
    assert result == {"ok": False, "violation": "63 pages have an owner, but the pool has 64"}
    assert engine.num_audit_failures >= 1
    assert "63 pages have an owner" in caplog.text
    assert (await collect(engine.submit(make_request("a", [1, 2]))))[0] == answer([1, 2], 8)
    engine.scheduler.cache._free.append(lost)
    assert (await engine.audit())["ok"]
    await engine.close()


async def test_an_idle_engine_audits_itself_once_a_minute_at_most(monkeypatch) -> None:
    now, audits = 0.0, []
    engine = Engine(make_scheduler(), FakeRunner(4), clock=lambda: now)

    def checks() -> Iterator[None]:
        audits.append(now)
        yield

    monkeypatch.setattr(engine.scheduler, "checks", checks)
    await engine.start()
    for now in (1.0, 30.0, 59.0, 61.0, 62.0, 130.0):  # noqa: B007
        await collect(engine.submit(make_request("a", [1, 2])))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert audits == [1.0, 61.0, 130.0]
    await engine.close()


async def test_audits_that_nobody_can_answer_any_more_fail() -> None:
    runner = GatedRunner()
    engine = make_engine(runner)
    await engine.start()
    engine.submit(make_request("a", [1, 2]))
    await entered(runner)
    audit = asyncio.create_task(engine.audit())
    await asyncio.sleep(0)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    runner.gate.release(9)
    with pytest.raises(EngineDead):
        await audit
    await closing


async def test_a_deadline_that_passes_in_the_queue_is_an_error_that_says_when_to_come() -> None:
    now = 0.0
    runner = GatedRunner()
    engine = Engine(make_scheduler(max_running=1), runner, clock=lambda: now)
    await engine.start()
    engine._inbox.retry_after = lambda: 7.0  # type: ignore[method-assign]
    running = engine.submit(make_request("running", [1, 2], deadline=5.0))
    await entered(runner)
    waiting = engine.submit(make_request("waiting", [2, 2], deadline=4.0))
    runner.gate.release()
    await entered(runner)
    now = 7.0
    runner.gate.release(9)
    with pytest.raises(DeadlineExceeded) as caught:
        await collect(waiting)
    assert caught.value.retry_after == 7.0
    tokens, last = await collect(running)
    assert tokens == answer([1, 2], 2)
    assert (last.finish_reason, last.stop_reason) == (FinishReason.ABORT, "deadline")
    assert (await engine.audit())["requests"] == {"running": 0, "waiting": 0}
    await engine.close()


async def test_an_engine_that_closes_or_is_dead_is_not_ready() -> None:
    engine = make_engine()
    assert engine.readiness is not None
    await engine.start()
    assert engine.readiness is None
    await engine.close()
    assert engine.readiness == "the engine is shutting down"
    broken = make_engine(BrokenRunner(fails_at=0), max_running=1)
    await broken.start()
    streams = [broken.submit(make_request(str(i), [1])) for i in range(3)]
    for stream in streams:
        with pytest.raises(ForetokenError):
            await collect(stream)
    assert broken.readiness == "steps failed; the engine stopped"
    await broken.close()
