"""The prompts of one call for vectors: so many at a time, one failure for all, nothing left."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from foretoken import AsyncLLM, DeadlineExceeded, EngineDead, InvalidRequest, QueueFull
from foretoken.api.runtime.embedder import unit_vector
from foretoken.api.runtime.pooled_prompts import Pooled, PooledPrompts, pool_params
from foretoken.api.runtime.reranker import ranked, score_of
from foretoken.api.types.request_context import CONTEXT, RequestContext
from foretoken.core.interface.request import Delta, FinishReason, Request, Usage
from foretoken.core.interface.sampling import Pooling
from support.fake_engine import FakeEngine

Run = Callable[..., Any]
MANY = [[5, index + 1] for index in range(20)]


def prompts_of(llm: AsyncLLM, count: int = 20) -> PooledPrompts:
    return PooledPrompts(llm, MANY[:count], pool_params(), Pooling())


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_no_more_run_at_a_time_than_the_engine_runs_and_all_come_in_order(
    run: Run, engine: FakeEngine
) -> None:
    async def body(llm: AsyncLLM) -> None:
        engine.by_hand = True
        task = asyncio.create_task(prompts_of(llm).read())
        for num_begun in (8, 16, 20):
            await turns()
            assert len(engine.requests) == num_begun
            engine.step()
        pooled = await task
        assert [list(each.numbers) for each in pooled] == MANY
        assert not llm._answers

    run(body)


def test_a_full_queue_refuses_the_first_one(run: Run, engine: FakeEngine) -> None:
    async def body(llm: AsyncLLM) -> None:
        engine.refusal = QueueFull("full")
        with pytest.raises(QueueFull):
            await prompts_of(llm).read()
        assert not llm._answers

    run(body)


def test_later_ones_wait_for_those_before_them_while_the_queue_is_full(
    run: Run, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = engine.submit

    def full(request: Request) -> Any:
        if len(engine._live) >= 2:
            raise QueueFull("full")
        return submit(request)

    monkeypatch.setattr(engine, "submit", full)

    async def body(llm: AsyncLLM) -> None:
        assert len(await prompts_of(llm).read()) == 20

    run(body)


def test_one_that_fails_ends_the_others(
    run: Run, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = engine.submit

    def refuse(request: Request) -> Any:
        if request.tokens[1] == 4:
            raise InvalidRequest("no", param="prompt")
        return submit(request)

    monkeypatch.setattr(engine, "submit", refuse)

    async def body(llm: AsyncLLM) -> None:
        engine.by_hand = True
        with pytest.raises(InvalidRequest):
            await prompts_of(llm).read()
        await turns()
        assert len(engine.aborted) == len(engine.requests)
        assert not llm._answers

    run(body)


def test_a_caller_that_leaves_aborts_all(run: Run, engine: FakeEngine) -> None:
    async def body(llm: AsyncLLM) -> None:
        engine.by_hand = True
        task = asyncio.create_task(prompts_of(llm).read())
        await turns()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await turns()
        assert len(engine.aborted) == 8
        assert not llm._answers

    run(body)


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (Delta(finish_reason=FinishReason.ABORT, stop_reason="deadline"), DeadlineExceeded),
        (Delta(finish_reason=FinishReason.ABORT), EngineDead),
        (Delta(error=EngineDead("dead")), EngineDead),
    ],
)
def test_an_end_without_numbers_is_an_error(
    run: Run, engine: FakeEngine, last: Delta, error: type[Exception]
) -> None:
    async def body(llm: AsyncLLM) -> None:
        engine.by_hand = True
        task = asyncio.create_task(prompts_of(llm, 1).read())
        await turns()
        next(iter(engine._live.values())).stream.push(last)
        engine._live.clear()
        with pytest.raises(error):
            await task

    run(body)


def test_it_is_no_turn_of_a_session_and_its_prompt_is_not_remembered(
    run: Run, engine: FakeEngine
) -> None:
    async def body(llm: AsyncLLM) -> None:
        CONTEXT.set(RequestContext({"headers": [(b"x-session-id", b"mine")], "method": "POST"}))
        await prompts_of(llm, 1).read()
        (request,) = engine.requests
        assert request.cache.session is None
        assert (request.depth, request.sampling.pooling) == (0, Pooling())
        assert llm.prompts.find(request.request_id) is None

    run(body)


def test_vectors_of_length_1_and_zeros_that_stay_zeros() -> None:
    assert unit_vector(array("f", [3.0, 4.0])).tolist() == pytest.approx([0.6, 0.8])
    assert unit_vector(array("f", [3.0, 4.0]), 1).tolist() == [1.0]
    assert unit_vector(array("f", [0.0, 0.0])).tolist() == [0.0, 0.0]
    assert unit_vector(array("f", [3e38, 4e38 / 2])).tolist()[0] == pytest.approx(0.83205, abs=1e-4)


def test_scores_of_logits_far_apart_and_ties_in_their_order() -> None:
    assert score_of(array("f", [0.0, 0.0])) == 0.5
    assert score_of(array("f", [9e9, 0.0])) == pytest.approx(0.0, abs=1e-300)
    assert score_of(array("f", [-9e9, 0.0])) == 1.0
    pairs = ([0.0, 1.0], [0.0, 2.0], [0.0, 1.0])
    pooled = [Pooled(token_ids=[], numbers=array("f", each), usage=Usage()) for each in pairs]
    assert [index for index, _ in ranked(pooled)] == [1, 0, 2]
    assert [index for index, _ in ranked(pooled, 1)] == [1]
