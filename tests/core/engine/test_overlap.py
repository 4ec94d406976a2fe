"""An engine that begins a step before the one ahead of it is looked at: nobody can tell."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from foretoken.core.interface.request import FinishReason, Request
from support.fake_model import VOCAB_SIZE, answer, sometimes
from support.fixed_depth import FixedDepth
from support.overlap_fixture import (
    PROMPTS,
    Reader,
    come_to_rest,
    make_engine,
    read_all,
    run,
    stop_at,
)
from support.virtual_thread import Ahead, Launching

# -- the same answers -----------------------------------------------------------------------------


def served(overlap: bool, runner: Ahead, **options: Any) -> list[tuple[Any, ...]]:
    """Return the tokens, reason and counts of each of many readers, with or without overlap."""

    async def scenario() -> list[tuple[Any, ...]]:
        engine, readers = make_engine(runner, overlap=overlap, **options), []
        await engine.start()
        for index, prompt in enumerate(PROMPTS):
            params = [
                {"max_tokens": 30 - index},
                {"max_tokens": 30, "stop_ids": [1 + index % (VOCAB_SIZE - 1)]},
                {"max_tokens": 30, "on_token": stop_at(3 + index)},
            ][index % 3]
            readers.append(Reader(engine, str(index), prompt, **params))
            await asyncio.sleep(2.5 * (index % 3))
        await read_all(*readers)
        await come_to_rest(engine)
        return [(r.tokens, *r.reason, *_counted(r.request)) for r in readers]

    found: list[tuple[Any, ...]] = run(scenario)
    return found


def _counted(request: Request) -> tuple[Any, ...]:
    usage = request.usage
    return usage.completion_tokens, usage.verify_steps, usage.steps_by_accepted


@pytest.mark.parametrize("max_running", [1, 3, 8])
def test_answers_ends_and_counts_are_those_of_one_step_after_the_other(
    max_running,
) -> None:
    expected = served(False, Ahead(), max_running=max_running)
    runner = Launching()
    assert served(True, runner, max_running=max_running) == expected
    assert runner.num_ahead > 20
    assert len({told[1] for told in expected}) > 1


def test_preemption_for_want_of_pages_changes_no_token() -> None:
    few = {"num_pages": 16, "max_running": 4}
    runner = Launching()
    assert served(True, runner, **few) == served(False, Ahead(), **few)
    assert runner.num_ahead > 20


class EveryNinth(FixedDepth):
    """Drafts for all where the tokens of one are a multiple of nine, and is silent elsewhere."""

    def drafts_nothing(self, requests: Sequence[Request], *, num_new_tokens: int = 0) -> bool:
        return all((len(each.tokens) + num_new_tokens) % 9 for each in requests)


@pytest.mark.parametrize("max_running", [1, 3])
def test_between_drafts_steps_overlap_while_all_are_silent(max_running) -> None:
    runner = Launching(drafter=sometimes)
    told = served(True, runner, max_running=max_running, speculator=EveryNinth(3))
    plain = served(False, Ahead(), max_running=max_running)
    assert [each[:3] for each in told] == [each[:3] for each in plain]
    ahead = runner.ahead
    drafted = [
        plan for plan in runner.plans if any(row.draft_plan.max_draft for row in plan.requests)
    ]
    assert ahead
    assert drafted
    assert all(row.stop % 9 for plan in ahead for row in plan.requests)
    assert all(any(row.stop % 9 == 0 for row in plan.requests) for plan in drafted)


def test_steps_follow_each_other_at_once_where_the_host_takes_its_time() -> None:
    async def scenario(overlap: bool) -> list[float]:
        engine = make_engine(overlap=overlap)
        deliver = engine._inbox.deliver
        gaps: list[float] = []

        def slow(now: float) -> None:
            deliver(now)
            gaps.append(float(engine._step_executor.planned_ahead is not None))

        engine._inbox.deliver = slow  # type: ignore[method-assign]
        await engine.start()
        await read_all(Reader(engine, "a", PROMPTS[0], max_tokens=10))
        await come_to_rest(engine)
        return gaps

    assert sum(run(lambda: scenario(True))) == 8, "all but the prompt's and the last"
    assert sum(run(lambda: scenario(False))) == 0


# -- who ends -------------------------------------------------------------------------------------


def test_a_token_behind_a_stop_reaches_nobody_and_its_page_comes_back() -> None:
    async def scenario() -> None:
        engine = make_engine(runner := Launching())
        await engine.start()
        seen: list[int] = []
        reader = Reader(engine, "a", PROMPTS[0], max_tokens=40, on_token=stop_at(6, seen))
        await read_all(reader)
        assert reader.tokens == seen == answer(PROMPTS[0], 6)
        assert reader.reason == (FinishReason.STOP, "enough")
        assert list(reader.request.tokens) == [*PROMPTS[0], *seen]
        await come_to_rest(engine)
        assert runner.num_computed == 3 + 5 + 1, "a row in vain, whose KV took a page of its own"
        assert engine.scheduler.cache.tree.num_pages == 2

    run(scenario)


def test_what_was_computed_in_vain_is_found_by_nobody() -> None:
    async def scenario() -> None:
        engine = make_engine(Launching(), page_size=4)
        await engine.start()
        await read_all(Reader(engine, "a", PROMPTS[0], max_tokens=40, on_token=stop_at(5)))
        full = [*PROMPTS[0], *answer(PROMPTS[0], 6)]
        again = Reader(engine, "b", full)  # the runner checks what every page holds
        await read_all(again)
        assert again.request.usage.cached_tokens == 4
        assert again.tokens == answer(full, 8)
        await come_to_rest(engine)

    run(scenario)


@pytest.mark.parametrize("after", [3.0, 3.5, 4.0, 7.5])
def test_an_abort_takes_effect_behind_the_step_under_way(after) -> None:
    async def scenario() -> None:
        engine = make_engine(Launching())
        await engine.start()
        readers = [Reader(engine, name, PROMPTS[i], max_tokens=20) for i, name in enumerate("ab")]
        await asyncio.sleep(after)
        engine.abort("a")
        await read_all(*readers)
        assert readers[0].reason[0] is FinishReason.ABORT
        assert readers[0].tokens == answer(PROMPTS[0], len(readers[0].tokens))
        assert len(readers[0].tokens) <= after + 1
        assert readers[1].tokens == answer(PROMPTS[1], 20)
        await come_to_rest(engine)

    run(scenario)


def test_a_deadline_ends_a_request_in_the_middle() -> None:
    async def scenario() -> None:
        engine = make_engine(Launching())
        await engine.start()
        late = Reader(engine, "late", PROMPTS[0], max_tokens=20, deadline=5.5)
        other = Reader(engine, "other", PROMPTS[1], max_tokens=20)
        await read_all(late, other)
        assert late.reason == (FinishReason.ABORT, "deadline")
        assert late.tokens == answer(PROMPTS[0], 6)
        assert other.tokens == answer(PROMPTS[1], 20)
        await come_to_rest(engine)

    run(scenario)


def test_an_id_is_free_at_once_when_its_request_has_ended() -> None:
    async def scenario() -> None:
        engine = make_engine(runner := Launching())
        await engine.start()
        other = Reader(engine, "other", PROMPTS[5], max_tokens=60)
        for index, prompt in enumerate(PROMPTS):
            again = Reader(engine, "a", prompt, max_tokens=9, on_token=stop_at(2 + index % 4))
            await read_all(again)
            assert again.tokens == answer(prompt, 2 + index % 4)
            assert again.request.usage.completion_tokens == 2 + index % 4
        await read_all(other)
        assert other.tokens == answer(PROMPTS[5], 60)
        assert runner.num_ahead > 20
        await come_to_rest(engine)

    run(scenario)


# -- who comes ------------------------------------------------------------------------------------


def test_a_newcomer_waits_for_a_step_that_was_launched() -> None:
    async def scenario() -> None:
        engine = make_engine(Launching())
        await engine.start()
        first = Reader(engine, "first", PROMPTS[0], max_tokens=20)
        await asyncio.sleep(5.5)
        second = Reader(engine, "second", PROMPTS[1], max_tokens=20)
        assert engine._step_executor.planned_ahead is not None
        await read_all(first, second)
        assert second.times[0] == 9.0, "two steps under way, and one of its own"
        assert (first.tokens, second.tokens) == tuple(answer(p, 20) for p in PROMPTS[:2])
        await come_to_rest(engine)

    run(scenario)


def test_whoever_comes_and_goes_charges_their_tenant_as_without() -> None:
    def charged(overlap: bool, runner: Ahead) -> float:
        async def scenario() -> float:
            engine = make_engine(runner, overlap=overlap)
            await engine.start()
            readers = []
            for index, prompt in enumerate(PROMPTS):
                readers.append(Reader(engine, str(index), prompt, max_tokens=12, tenant="t"))
                await asyncio.sleep(1.5)
            await read_all(*readers)
            counters = engine.scheduler.waiting.counters
            await come_to_rest(engine)
            return counters["t"]

        found: float = run(scenario)
        return found

    assert charged(True, Launching()) == charged(False, Ahead())


def test_an_audit_finds_everything_in_order_at_any_time() -> None:
    async def scenario() -> None:
        engine = make_engine(runner := Launching(), num_pages=16)
        await engine.start()
        readers = []
        for index, prompt in enumerate(PROMPTS):
            readers.append(
                Reader(engine, str(index), prompt, max_tokens=30, on_token=stop_at(5 + 2 * index))
            )
            for _ in range(4):
                await asyncio.sleep(0.7)
                engine.scheduler.audit()
                assert (await engine.audit())["ok"]
        await read_all(*readers)
        assert runner.num_ahead > 10
        await come_to_rest(engine)

    run(scenario)
