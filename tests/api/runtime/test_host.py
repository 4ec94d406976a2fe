"""One event loop per LLM, ids that can be aborted from the start, and lists that fail as one."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import foretoken
from foretoken import (
    AsyncLLM,
    DeadlineExceeded,
    EngineDead,
    ForetokenError,
    InvalidRequest,
    QueueFull,
    SamplingParams,
)
from foretoken.api.types.request_context import CONTEXT, RequestContext
from foretoken.core.interface.request import Delta

FOUR = SamplingParams(max_tokens=4, seed=0)
TALK = [{"role": "user", "content": "hi"}]


async def until(holds):
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0)


def test_a_second_event_loop_is_refused(run, built):
    async def body(llm):
        def elsewhere():
            return asyncio.run(asyncio.wait_for(llm.generate([5], FOUR), 10))

        with pytest.raises(EngineDead, match="another event loop"):
            await asyncio.to_thread(elsewhere)
        assert (await llm.generate([5], FOUR)).token_ids == [5] * 4

        async def submit():
            await llm.open([5], FOUR)

        with pytest.raises(EngineDead, match="another event loop"):
            await asyncio.to_thread(asyncio.run, submit())

    run(body)


@pytest.mark.parametrize("name", ["self", "messages", "conversations", "conversation", "tokenize"])
def test_template_options_cannot_take_the_names_of_our_own(run, name):
    async def body(llm):
        with pytest.raises(InvalidRequest, match=f"must not contain {name}") as info:
            await llm.render(TALK, {name: []})
        assert info.value.param == "chat_template_kwargs"
        assert await llm.render(TALK, {"mood": "good"}) == await llm.render(TALK)

    run(body)


@pytest.mark.parametrize("messages", [3, None, "hi", [3], ["hi"], [TALK[0], 3], [None]], ids=str)
def test_a_conversation_that_is_no_list_of_objects_is_an_invalid_request(llm, messages):
    with pytest.raises(InvalidRequest) as info:
        llm.chat(messages, FOUR)
    assert info.value.param == "messages"


def test_a_deadline_counts_from_when_the_request_arrived(run, engine):
    async def body(llm):
        CONTEXT.set(RequestContext({"headers": []}, arrived=time.monotonic() - 5))
        llm.forget(await llm.open([5], SamplingParams(deadline=100)))
        llm.max_request_seconds = 50
        llm.forget(await llm.open([5], SamplingParams(deadline=100)))
        for own, ours in ((4, None), (None, 4), (100, 4)):
            llm.max_request_seconds = ours
            with pytest.raises(DeadlineExceeded):
                await llm.open([5], SamplingParams(deadline=own))
        first, second = engine.requests
        assert 90 < first.deadline <= 95
        assert 40 < second.deadline <= 45
        assert not llm._answers

    run(body)


def test_a_client_is_idle_while_only_ended_answers_are_unread(run, engine):
    async def body(llm):
        assert llm.is_idle
        engine.by_hand = True
        answer = await llm.open([5], FOUR)
        assert not llm.is_idle
        engine.by_hand = False
        engine._work.set()
        await until(lambda: answer.ended)
        assert llm._answers, "its tokens are unread"
        assert llm.is_idle
        llm.forget(answer)
        assert llm.is_idle

    run(body)


def test_an_abort_while_the_prompt_is_tokenised_is_not_lost(run, engine):
    working, go_on = threading.Event(), threading.Event()

    async def body(llm):
        def slow(text, **options):
            working.set()
            go_on.wait(10)
            return [5, 6]

        llm.tokenizer.max_model_len = 10**9
        llm.tokenizer._encode = slow
        task = asyncio.create_task(llm.generate("x" * 20_000, SamplingParams(n=2), request_id="me"))
        await asyncio.to_thread(working.wait, 10)
        with pytest.raises(InvalidRequest, match="in use"):
            await llm.generate([5], FOUR, request_id="me")
        llm.abort("me")
        go_on.set()
        out = await task
        assert [choice.finish_reason for choice in out.choices] == ["abort", "abort"]
        assert (out.text, out.token_ids, out.usage.prompt_tokens) == ("", [], 2)
        assert (await llm.generate([5], FOUR, request_id="me")).token_ids == [5] * 4

    run(body)
    assert len(engine.requests) == 1


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_choice_that_fails_ends_those_before_it(run, engine, is_chat):
    async def body(llm):
        engine.by_hand, params = True, SamplingParams(n=2)
        asked = llm.chat(TALK, params) if is_chat else llm.generate([5], params)
        task = asyncio.create_task(asked)
        await until(lambda: len(engine.requests) == 2)
        first, second = engine.requests
        engine._live.pop(second.request_id).stream.push(Delta(error=ForetokenError("broken")))
        async with asyncio.timeout(10):
            with pytest.raises(ForetokenError, match="broken"):
                await task
        await until(lambda: engine.aborted == [first.request_id])

    run(body)


def test_an_abort_of_a_prompt_that_waits_for_room_is_not_lost(run, engine):
    refused = asyncio.Event()
    submit = engine.submit

    def picky(request):
        if len(engine._live) >= 1:
            refused.set()
            raise QueueFull("full", retry_after=60)
        return submit(request)

    async def body(llm):
        engine.by_hand, engine.submit = True, picky
        task = asyncio.create_task(llm.generate([[5]] * 3, FOUR, request_id=["a", "b", "c"]))
        await refused.wait()
        llm.abort("c")
        llm.abort("b")
        await until(lambda: not llm._answers.keys() & {"b", "c"})
        engine.by_hand = False
        engine._work.set()
        outs = await task
        assert [out.finish_reason for out in outs] == ["length", "abort", "abort"]

    run(body)
    assert [request.request_id for request in engine.requests] == ["a"]


def test_an_id_twice_in_a_list_is_refused_before_anything_is_submitted(llm, engine):
    with pytest.raises(InvalidRequest, match="in use"):
        llm.generate([[5], [6]], FOUR, request_id=["a", "a"])
    assert not engine.requests


def test_one_failure_ends_a_long_list_before_the_rest_is_submitted(run, engine):
    submit = engine.submit

    def picky(request):
        if len(engine._live) >= 2:
            engine.row_error = "NaN"  # from now on every request fails
            raise QueueFull("full", retry_after=60)
        return submit(request)

    async def body(llm):
        engine.submit = picky
        with pytest.raises(foretoken.ForetokenError, match="NaN"):
            await llm.generate([[5]] * 200, FOUR)
        assert not llm._answers

    run(body)
    assert len(engine.requests) < 10


def test_bad_words_are_tokenised_once_for_all_prompts_and_choices_and_in_the_thread(run, engine):
    seen = []
    params = SamplingParams(n=2, max_tokens=1, bad_words=[f"word{i}" for i in range(1024)])

    async def body(llm):
        encode = llm.tokenizer._encode_words

        def watch(words):
            seen.append(threading.current_thread().name)
            return encode(words)

        llm.tokenizer._encode_words = watch
        await llm.generate([[5], [6], [7]], params)

    run(body)
    assert len(engine.requests) == 6
    assert len(seen) == 1
    assert seen[0].startswith("foretoken-tokenizer")


@pytest.mark.parametrize("kind", ["waiting", "cancelled", "after"])
def test_closing_while_a_long_prompt_is_tokenised_is_engine_dead(built, kind):
    working, go_on = threading.Event(), threading.Event()

    async def body():
        llm = AsyncLLM.from_built(built)
        await llm.start()

        def slow(text, **options):
            working.set()
            go_on.wait(10)
            return [5]

        llm.tokenizer.max_model_len = 10**9
        llm.tokenizer._encode = slow
        if kind == "after":
            await llm.close()
            with pytest.raises(EngineDead, match="this LLM is closed"):
                await llm.tokenizer.encode("x" * 20_000)
            return
        tasks = [asyncio.create_task(llm.generate("x" * 20_000)) for _ in range(2)]
        await asyncio.to_thread(working.wait, 10)
        await until(lambda: llm.tokenizer._long.num_waiting == 1)
        if kind == "cancelled":
            tasks[1].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks.pop()
        await llm.close()
        go_on.set()
        for task in tasks:
            with pytest.raises(EngineDead, match="this LLM is closed"):
                await task

    asyncio.run(asyncio.wait_for(body(), 20))
