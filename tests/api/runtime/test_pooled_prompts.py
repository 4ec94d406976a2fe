"""The prompts of one call for vectors: so many at a time, one failure for all, nothing left."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken import (
    AsyncLLM,
    DeadlineExceeded,
    EngineDead,
    ForetokenError,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
)
from foretoken.api.runtime.pooled.embedder import unit_vector
from foretoken.api.runtime.pooled.pooled_prompts import Pooled, PooledPrompts, pool_params
from foretoken.api.runtime.pooled.reranker import Reranker, ranked, score_of
from foretoken.api.serving.errors import JsonResponse
from foretoken.api.serving.pooled import PooledReply
from foretoken.api.types.request_context import CONTEXT, EndedAnswer, RequestContext
from foretoken.core.interface.request import Delta, FinishReason, Request, Usage
from foretoken.core.interface.sampling import Pooling
from foretoken.core.model.pooling import PoolingSpec
from support.fake_engine import FakeEngine

Run = Callable[..., Any]
MANY = [[5, index + 1] for index in range(20)]


def prompts_of(llm: AsyncLLM, count: int = 20, made: list[int] | None = None) -> PooledPrompts:
    async def prompt_of(index: int) -> list[int]:
        if made is not None:
            made.append(index)
        return await llm.check(MANY[index], pool_params(), pooling=Pooling())

    return PooledPrompts(llm, count, prompt_of, pool_params(), lambda _: Pooling())


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


def test_prompts_are_made_when_they_come_to_run(run: Run, engine: FakeEngine) -> None:
    async def body(llm: AsyncLLM) -> None:
        engine.by_hand = True
        made: list[int] = []
        task = asyncio.create_task(prompts_of(llm, made=made).read())
        for num_made in (8, 16, 20):
            await turns()
            assert made == list(range(num_made))
            engine.step()
        assert all(not each.token_ids for each in await task), "of ended ones nothing is kept"

    run(body)


def test_a_drain_lets_an_accepted_call_finish_and_refuses_new_ones(
    run: Run, engine: FakeEngine
) -> None:
    async def body(llm: AsyncLLM) -> None:
        engine.by_hand = True
        task = asyncio.create_task(prompts_of(llm).read())
        await turns()
        closing = asyncio.create_task(llm.close(drain_seconds=20))
        await turns()
        assert llm.draining
        with pytest.raises(EngineDead):
            await prompts_of(llm).read()
        with pytest.raises(EngineDead):
            await llm.generate([5, 6])
        for _ in range(3):
            engine.step()
            await turns()
        assert len(await task) == 20
        await closing

    run(body)


def test_a_drain_ends_a_call_that_takes_longer(run: Run, engine: FakeEngine) -> None:
    async def body(llm: AsyncLLM) -> None:
        engine.by_hand = True
        task = asyncio.create_task(prompts_of(llm).read())
        await turns()
        await llm.close(drain_seconds=0.001)
        with pytest.raises(EngineDead):
            await task

    run(body)


def test_what_is_noted_of_an_ended_one_keeps_no_request(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        context = RequestContext({"headers": [], "method": "POST"})
        CONTEXT.set(context)
        await prompts_of(llm, 3).read()
        assert len(context.answers) == 3
        for each in context.answers:
            assert isinstance(each, EndedAnswer)
            assert (each.usage.prompt_tokens, each.finish_reasons) == (2, ("stop",))

    run(body)


def test_a_queue_that_is_full_in_the_middle_of_a_call_is_waited_for(
    run: Run, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.limits.max_running = 1  # so none of its own is open
    submit, tried = engine.submit, []

    def full(request: Request) -> Any:
        tried.append(request.tokens[1])
        if len(tried) in (4, 5):
            raise QueueFull("full", retry_after=0.001)
        return submit(request)

    monkeypatch.setattr(engine, "submit", full)

    async def body(llm: AsyncLLM) -> None:
        made: list[int] = []
        assert len(await llm._read(prompts_of(llm, made=made))) == 20
        assert made == list(range(20)), "the call does not begin again"
        assert tried[:7] == [1, 2, 3, 4, 4, 4, 5]

    run(body)


def test_a_number_that_is_not_finite_is_an_error(run: Run, engine: FakeEngine) -> None:
    def feed(_: Any) -> Delta:
        numbers = array("f", [float("inf"), 0.0])
        return Delta(pooled=numbers, finish_reason=FinishReason.STOP)

    engine._feed = feed  # type: ignore[method-assign]

    async def body(llm: AsyncLLM) -> None:
        with pytest.raises(ForetokenError, match="not finite"):
            await prompts_of(llm, 1).read()

    run(body)


def test_a_bad_prompt_is_named_by_its_field_in_words_too(run: Run) -> None:
    async def body(llm: AsyncLLM) -> None:
        for bad, words in (([-1], "input[3] must have token ids"), (None, "input[3] must be a")):
            with pytest.raises(InvalidRequest) as caught:
                await llm.check(bad, pool_params(), pooling=Pooling(), param="input[3]")
            assert str(caught.value).startswith(words)
            assert caught.value.param == "input[3]"
        with pytest.raises(PromptTooLong) as long:
            await llm.check("x" * 10**6, pool_params(), pooling=Pooling(), param="input[3]")
        assert (long.value.param, long.value.limit) == ("input[3]", 256)

    run(body)


def test_a_body_is_encoded_in_a_thread_of_its_own_and_sent_as_it_is() -> None:
    threads: list[int] = []

    class Ready:
        async def read(self) -> list[Pooled]:
            return []

    def encode(pooled: Sequence[Pooled]) -> object:
        threads.append(threading.get_ident())
        return {"data": pooled}

    body = asyncio.run(PooledReply(Ready(), encode).whole())  # type: ignore[arg-type]
    assert body == b'{"data":[]}'
    assert JsonResponse(body).body is body
    assert threads != [threading.get_ident()]


class SlowTemplate:
    """A chat and a model whose template fails the first time, and then knows the roles."""

    def __init__(self) -> None:
        self.built = SimpleNamespace(pooling=PoolingSpec(dimensions=2), name="m")
        self.tokenizer = SimpleNamespace(chat_template="'query'", names_special=lambda _: False)
        self.num_tries, self.roles = 0, list[str]()

    async def render_text(self, messages: Any) -> str:
        self.num_tries += 1
        if self.num_tries == 1:
            raise InvalidRequest("it took too long", param="messages")
        return "".join(each["content"] for each in messages)

    async def render(self, chat: Any) -> Any:
        self.roles = [each["role"] for each in chat.messages]
        return SimpleNamespace(token_ids=[5])

    async def check(self, token_ids: list[int], *_: Any, **__: Any) -> list[int]:
        return token_ids


def test_a_template_that_failed_once_is_tried_again_and_its_answer_is_kept() -> None:
    model: Any = SlowTemplate()
    reranker = Reranker(model, model)

    async def body() -> None:
        for roles in (["system", "user"], ["query", "document"], ["query", "document"]):
            await reranker.prompt("q", "d", None, pool_params(), Pooling((0, 1)))
            assert model.roles == roles
        assert model.num_tries == 2

    asyncio.run(body())


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
