"""A front over replicas that a test plays: requests, routing, calls, readiness, its end."""

from __future__ import annotations

import asyncio
import logging
from array import array
from typing import Any

import msgspec
import pytest

from foretoken.api.cluster.front import replicas as replicas_of_front
from foretoken.api.cluster.front.replicas import Replicas
from foretoken.api.cluster.front.routing import ANSWER_TOKENS, Route
from foretoken.api.cluster.wire.messages import (
    VERSION,
    Abort,
    Answer,
    Audit,
    Beat,
    CacheInfo,
    Call,
    EndSession,
    ExpectTurn,
    FlushCache,
    FlushPrefix,
    Leaving,
    Load,
    Overview,
    Step,
    body_form,
    page_news,
)
from foretoken.api.types.request_context import CONTEXT, RequestContext
from foretoken.core.errors import (
    EngineDead,
    ForetokenError,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    Unavailable,
)
from foretoken.core.interface.request import CacheOptions, Delta, FinishReason, Request, Usage
from foretoken.core.interface.sampling import Pooling
from foretoken.core.model.pooling import PoolingSpec
from foretoken.core.telemetry.observers import EngineObserver
from foretoken.core.tiers.keys import chain_keys, root_key
from support.scripted_replica import (
    SECONDS,
    ScriptedReplica,
    front_of,
    in_idle_time,
    read,
    replicas_of,
    request,
    run,
    step,
    until,
)

# -- requests -------------------------------------------------------------------------------------


async def test_a_request_is_computed_by_the_replica_and_read_here() -> None:
    async with front_of() as front, replicas_of(front) as (replica,):
        wanted = request()
        stream = front.submit(wanted)
        assert (await replica.submitted()).request_id == "r"
        replica.say("r", 10, usage=Usage(cached_tokens=2, queue_time=0.25))
        replica.finish("r", 11, 12, usage=Usage(cached_tokens=2, verify_steps=2))
        answer = await read(stream)
        assert (answer.token_ids, answer.finish_reason) == ([10, 11, 12], FinishReason.LENGTH)
        assert list(wanted.tokens) == [5, 6, 7, 10, 11, 12]
        usage = wanted.usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (3, 2, 3)
        assert (usage.verify_steps, usage.moves) == (2, 0)
        assert 0 < usage.time_to_first_token <= usage.total_time


async def test_drafts_are_counted_by_deltas_until_the_replica_sends_its_counts() -> None:
    async with front_of() as front, replicas_of(front) as (replica,):
        wanted = request()
        stream = front.submit(wanted)
        await replica.submitted()
        replica.say(
            "r", 10, 11, num_proposed=3, proposed_sources=["lm"] * 3, accepted_sources=["lm"]
        )
        await anext(stream)
        usage = wanted.usage
        assert (usage.proposed_tokens, usage.accepted_tokens, usage.verify_steps) == (3, 1, 1)
        assert (usage.proposed_by_source, usage.steps_by_accepted) == ({"lm": 3}, {1: 1})


async def test_a_stop_string_ends_where_the_replica_says_and_the_text_follows() -> None:
    async with front_of() as front, replicas_of(front) as (replica,):
        heard: list[int] = []

        def watch(token_id: int) -> str | None:
            heard.append(token_id)
            return "x" if len(heard) == 3 else None

        wanted = request()
        wanted.on_token = watch
        stream = front.submit(wanted)
        await replica.submitted()
        replica.say("r", 10, 11)
        replica.finish("r", 12, finish_reason=FinishReason.STOP, stop_reason="x")
        assert (await read(stream)).stop_reason == "x"
        assert heard == [10, 11, 12]


async def test_an_end_token_has_no_text() -> None:
    async with front_of() as front, replicas_of(front) as (replica,):
        heard: list[int] = []
        wanted = request()
        wanted.on_token = heard.append
        stream = front.submit(wanted)
        await replica.submitted()
        replica.finish("r", 10, 1, finish_reason=FinishReason.STOP)
        await read(stream)
        assert heard == [10]


def test_a_text_that_cannot_be_read_ends_its_request_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        async with front_of() as front, replicas_of(front) as (replica,):

            def broken(token_id: int) -> str | None:
                raise ValueError("no such token")

            wanted = request()
            wanted.on_token = broken
            stream = front.submit(wanted)
            await replica.submitted()
            replica.say("r", 10)
            with pytest.raises(Exception, match="could not be decoded"):
                await read(stream)
            assert (await replica.next(Abort)).request_id == "r"
            replica.finish("r", 11)  # it crosses with the abort
            other = front.submit(request("s"))
            await replica.submitted()
            replica.finish("s", 12)
            assert (await read(other)).token_ids == [12]

    run(body())
    assert "no such token" in caplog.text


async def test_refusals_of_a_replica_reach_the_caller() -> None:
    async with front_of() as front, replicas_of(front) as (replica,):
        stream = front.submit(request())
        await replica.submitted()
        replica.say("r", error=QueueFull("for this tenant", retry_after=7.5))
        with pytest.raises(QueueFull, match="for this tenant") as caught:
            await read(stream)
        assert caught.value.retry_after == 7.5


async def test_what_no_replica_could_serve_is_refused_at_once() -> None:
    async with front_of() as front, replicas_of(front):
        with pytest.raises(PromptTooLong):
            front.submit(request(prompt=[5] * 256))
        with pytest.raises(InvalidRequest, match="from 0 to 99"):
            front.check(request(prompt=[100]))
        front.submit(request())
        with pytest.raises(InvalidRequest, match="in use") as caught:
            front.submit(request())
        assert caught.value.param == "request_id"


async def test_a_priority_above_that_of_the_replicas_is_refused() -> None:
    settings = body_form({"max_priority": 2})
    async with front_of() as front, replicas_of(front, settings=settings):
        front.submit(request(priority=2))
        with pytest.raises(InvalidRequest, match="2") as caught:
            front.submit(request("s", priority=3))
        assert caught.value.param == "priority"


async def test_the_queue_is_full_when_every_replica_has_all_it_takes() -> None:
    async with (
        front_of(2, route=Route.KV) as front,
        replicas_of(front, 2, max_running=1, max_queued=1) as replicas,
    ):
        assert (front.limits.max_running, front.limits.max_queued) == (2, 2)
        for name in "abcd":
            front.submit(request(name))
        with pytest.raises(QueueFull) as caught:
            front.submit(request("e"))
        assert caught.value.retry_after >= 1
        for each in replicas:
            assert {(await each.submitted()).request_id for _ in range(2)} < set("abcd")


async def test_an_abort_reaches_the_replica_and_ends_the_stream_when_that_has_ended_it() -> None:
    async with front_of() as front, replicas_of(front) as (replica,):
        stream = front.submit(request())
        await replica.submitted()
        front.abort("unknown")
        front.abort("r")
        assert (await replica.next(Abort)).request_id == "r"
        assert not stream.ended
        replica.finish("r", finish_reason=FinishReason.ABORT)
        assert (await read(stream)).finish_reason is FinishReason.ABORT


async def test_observers_follow_requests_as_they_follow_an_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Seen(EngineObserver):
        def __init__(self) -> None:
            self.began: list[str] = []
            self.tokens: list[int] = []
            self.steps: list[int] = []

        def begin(self, request: Request, now: float) -> None:
            self.began.append(request.request_id)

        def observe_delta(self, request: Request, delta: Delta, now: float) -> None:
            self.tokens += delta.token_ids
            if delta.terminal:
                raise ValueError("its own")

        def observe_replica_step(self, replica: int) -> None:
            self.steps.append(replica)

    async with front_of() as front, replicas_of(front) as (replica,):
        seen = Seen()
        front.metrics.observers.append(seen)
        stream = front.submit(request())
        await replica.submitted()
        replica.say("r", 10)
        replica.send(Step(load=Load(running=1, waiting=0, kv_usage=0.5)))  # news alone
        replica.finish("r", 11)
        assert (await read(stream)).token_ids == [10, 11]
        assert (seen.began, seen.tokens, seen.steps) == (["r"], [10, 11], [1, 1])
        assert b"front_observer_failures_total 1.0" in front.metrics.render()[0]


async def test_idle_time_is_neither_observed_nor_counted_as_requests() -> None:
    class Seen(EngineObserver):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def begin(self, request: Request, now: float) -> None:
            self.calls.append(request.request_id)

        def observe_delta(self, request: Request, delta: Delta, now: float) -> None:
            self.calls.append(request.request_id)

    async with front_of(route=Route.KV) as front, replicas_of(front) as (replica,):
        seen = Seen()
        front.metrics.observers.append(seen)
        for wanted in (request(prompt=[5] * 48), in_idle_time([5] * 48)):
            stream = front.submit(wanted)
            name = (await replica.submitted()).request_id
            replica.finish(name)
            await read(stream)
        assert seen.calls == ["r", "r"]
        assert front.describe()[0]["served"] == 1
        assert b"route_hit_tokens_total 0.0" in front.metrics.render()[0]


# -- which replica --------------------------------------------------------------------------------


async def test_a_request_goes_where_its_pages_are() -> None:
    async with front_of(2, route=Route.KV) as front, replicas_of(front, 2) as replicas:
        prompt = array("q", range(5, 5 + 64))
        keys = [*chain_keys(root_key(b"f" * 32, None), prompt, 16)]
        load = Load(running=0, waiting=0, kv_usage=0.0)
        replicas[1].send(Step(load=load, pages=[page_news(is_stored=True, keys=keys)]))
        flushing = asyncio.create_task(front.flush_cache())
        for each in replicas:
            await each.answer(0)
        await flushing  # so the news are there, too
        front.submit(request(prompt=prompt))
        assert (await replicas[1].submitted()).request_id == "r"
        assert b"route_hit_tokens_total 48.0" in front.metrics.render()[0]


def test_a_session_stays_where_it_is() -> None:
    async def body() -> None:
        async with front_of(2, route=Route.SESSION) as front, replicas_of(front, 2) as replicas:
            places = []
            for name in ("a", "b", "c", "d"):
                stream = front.submit(request(name))
                place = next(n for n, row in enumerate(front.describe()) if row["requests"])
                places.append(place)
                await replicas[place].submitted()
                replicas[place].finish(name, 10)
                await read(stream)
            assert len({*places}) == 1

    token = CONTEXT.set(RequestContext({"type": "http", "headers": [(b"x-session-id", b"mine")]}))
    try:
        run(body())
    finally:
        CONTEXT.reset(token)


async def test_one_that_cannot_take_requests_now_is_passed_over() -> None:
    async with front_of(2) as front, replicas_of(front, 2) as replicas:
        replicas[0].send(Beat(unready="a step takes long"))
        await until(lambda: front.describe()[0]["state"] != "ready")
        for name in "abc":
            front.submit(request(name))
            assert (await replicas[1].submitted()).request_id == name
        assert front.readiness is None
        replicas[1].send(Beat(unready="likewise"))
        await until(lambda: front.readiness is not None)
        assert front.readiness == "a step takes long"
        front.submit(request("d"))  # it may wait there


async def test_a_replica_owes_the_tokens_of_its_requests_until_they_are_computed() -> None:
    def row(front: Replicas) -> tuple[int, int]:
        (found,) = front.describe()
        return found["owed_tokens"], found["served"]

    async with front_of() as front, replicas_of(front) as (replica,):
        stream = front.submit(request(prompt=range(5, 95)))
        assert row(front) == (90, 0)
        replica.say("r", 10)
        await anext(stream)
        assert row(front) == (ANSWER_TOKENS, 0)
        replica.finish("r", 11)
        await read(stream)
        assert row(front) == (0, 1)


async def test_the_load_that_comes_with_a_step_is_shown() -> None:
    async with front_of() as front, replicas_of(front) as (replica,):
        stream = front.submit(request())
        load = Load(running=3, waiting=2, kv_usage=0.25)
        replica.send(step("r", [10], load=load))
        await anext(stream)
        (row,) = front.describe()
        assert (row["running"], row["waiting"], row["kv_usage"]) == (3, 2, 0.25)


# -- who is there ---------------------------------------------------------------------------------


async def test_requests_wait_for_all_replicas_that_are_wanted() -> None:
    async with front_of(2) as front, replicas_of(front, 1):
        assert front.alive
        assert front.readiness == "waiting for replicas: 1 of 2 are connected"
        with pytest.raises(Unavailable, match="1 of 2"):
            front.submit(request())
        async with replicas_of(front, 1):
            assert front.readiness is None
            front.submit(request())
        await until(lambda: not (len(front.describe()) > 1))
        assert front.readiness is None  # it serves on with those that are left


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "other"}, "the replica's name is other"),
        ({"vocab_size": 101}, "the replica's vocab_size is 101"),
        ({"page_size": 32}, "the replica's page_size is 32"),
        ({"max_model_len": 99}, "the replica's max_model_len is 99"),
        ({"tokenizer": "ff"}, "the replica's tokenizer is ff"),
        (
            {"pooling": PoolingSpec(dimensions=8)},
            "the replica's pooling is PoolingSpec(dimensions=8",
        ),
        ({"version": VERSION + 1}, f"version {VERSION + 1}"),
    ],
    ids=str,
)
def test_a_replica_of_another_model_is_refused_and_the_front_serves_on(
    changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with front_of() as front, replicas_of(front) as (replica,):
            other = ScriptedReplica(front)
            other.hello = msgspec.structs.replace(other.hello, **changes)
            other.send(other.hello)
            assert reason in await other.refusal()
            other.die()
            assert len(front.describe()) == 1
            stream = front.submit(request())
            await replica.submitted()
            replica.finish("r", 10)
            await read(stream)

    with caplog.at_level(logging.WARNING):
        run(body())
    assert sum("refused" in each.getMessage() for each in caplog.records) == 1


async def test_the_first_replica_must_have_the_tokenizer_of_the_front() -> None:
    async with front_of(tokenizer="other") as front:
        replica = ScriptedReplica(front)
        replica.send(replica.hello)
        with pytest.raises(InvalidRequest, match=r"different tokenizers.*tiny/model"):
            await front.first()
        assert "different tokenizers" in await replica.refusal()
        replica.die()


def test_other_kernels_are_taken_with_a_single_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        other = {"kernels": "native-avx512"}
        async with front_of() as front, replicas_of(front), replicas_of(front, 2, **other):
            assert len(front.describe()) == 3

    run(body())
    assert caplog.text.count("tokens may differ") == 1


# -- the end --------------------------------------------------------------------------------------


async def test_a_drain_lets_requests_end_and_refuses_new_ones() -> None:
    async with front_of() as front, replicas_of(front) as (replica,):
        stream = front.submit(request())
        await replica.submitted()
        closing = asyncio.create_task(front.close(drain_seconds=SECONDS))
        await asyncio.sleep(0)
        with pytest.raises(EngineDead, match="shutting down"):
            front.submit(request("s"))
        assert front.readiness == "the engine is shutting down"
        replica.finish("r", 10)
        assert (await read(stream)).token_ids == [10]
        await closing
        while (last := await replica.socket.receive()) is not None:
            assert not isinstance(last, Leaving)  # it waits for the next front
        assert not front.alive


async def test_what_a_drain_leaves_is_aborted() -> None:
    async with front_of() as front, replicas_of(front) as (replica,):
        stream = front.submit(request())
        await replica.submitted()
        await front.close()
        assert (await read(stream)).finish_reason is FinishReason.ABORT


# -- calls ----------------------------------------------------------------------------------------

CACHE = {
    "page_size": 16, "total_pages": 10, "free_pages": 4, "evictable_pages": 3, "pinned_pages": 1,
    "num_pins": 1, "num_sessions": 1, "pins": [{"tokens": 16}], "usage": 0.2,
    "queried_tokens": 100, "hit_tokens": 40, "tiers": [],
}  # fmt: skip
VIEW = {
    "running": 1, "max_running": 8, "waiting": 2, "tokens": 10, "steps": 5, "drafts": 4, "trees": 0,
    "num_proposed": 8, "acceptance_length": 2.0, "proposed": {"lm": 8}, "accepted": {"lm": 4},
    "prefix_queries": 20, "prefix_hits": 10, "pages": {"held": 1, "free": 2},
    "parts": {"forward": 0.5}, "row": None, "tree": [[0, 0, 2, 16, 0, 1], [0, 1, 2, 16, 0, 0]],
    "requests": [{"id": "r", "prompt_tokens": 3, "cached_tokens": 0, "boxes": [0, 1]}],
}  # fmt: skip


async def asked(
    replicas: list[ScriptedReplica], results: list[Any], asking: Any
) -> tuple[Any, list[Call]]:
    task = asyncio.create_task(asking)
    calls = [await each.answer(result) for each, result in zip(replicas, results, strict=True)]
    return await task, calls


async def test_flushes_reach_all_replicas_and_their_pages_are_summed() -> None:
    async with front_of(2) as front, replicas_of(front, 2) as replicas:
        freed, calls = await asked(replicas, [3, 4], front.flush_cache(None, "mine"))
        assert freed == 7
        assert calls[0].question == FlushCache(namespaces=[None, "mine"])
        tokens = array("q", range(16))
        freed, calls = await asked(replicas, [1, 0], front.flush_prefix(tokens, "mine"))
        assert freed == 1
        assert isinstance(calls[1].question, FlushPrefix)


async def test_the_replica_of_a_session_is_told_what_the_session_waits_for() -> None:
    async with front_of(2) as front, replicas_of(front, 2) as replicas:
        front.expect_turn("a", "unknown", None)
        front.submit(of_session("a"))
        place = next(n for n, row in enumerate(front.describe()) if row["requests"])
        await replicas[place].submitted()
        front.expect_turn("a", "other", "another namespace")
        front.expect_turn("a", "tests", None)
        told = await replicas[place].next(ExpectTurn)
        assert told == ExpectTurn(session="a", label="tests", namespace=None)
        flushing = asyncio.create_task(front.flush_cache())
        for each in replicas:
            call = await each.next(Call | ExpectTurn)
            assert isinstance(call, Call), "nothing else was told"
            each.send(Answer(call_id=call.call_id, result=0))
        await flushing


async def test_a_request_that_ends_its_session_ends_it_on_all_replicas() -> None:
    async with front_of(2) as front, replicas_of(front, 2) as replicas:
        stream = front.submit(of_session("a", ends_session=True))
        place = next(n for n, row in enumerate(front.describe()) if row["requests"])
        await replicas[place].submitted()
        replicas[place].finish("r", 10)
        await read(stream)
        for each in replicas:
            assert (await each.answer(0)).question == EndSession(session="a")


async def test_a_request_without_a_replica_ends_its_session_that_was_ended() -> None:
    async with front_of() as front, replicas_of(front) as replicas:
        wanted = of_session("a")
        front.submit(wanted)
        await asked(replicas, [0], front.end_session("a"))
        assert wanted.cache.ends_session


def of_session(name: str, *, ends_session: bool = False) -> Request:
    wanted = request()
    wanted.cache = CacheOptions(session=name, ends_session=ends_session)
    return wanted


async def test_all_replicas_are_told_that_a_session_ends() -> None:
    async with front_of(2) as front, replicas_of(front, 2) as replicas:
        had, calls = await asked(replicas, [0, 1], front.end_session("a"))
        assert had
        assert calls[1].question == EndSession(session="a")
        had, _ = await asked(replicas, [0, 0], front.end_session("a"))
        assert not had


@pytest.mark.parametrize("place", [0, 1])
async def test_the_replica_that_has_the_pages_is_asked_for_its_room(place: int) -> None:
    async with front_of(2) as front, replicas_of(front, 2) as replicas:
        prompt = array("q", range(5, 5 + 64))
        keys = [*chain_keys(root_key(b"f" * 32, None), prompt, 16)]
        load = Load(running=0, waiting=0, kv_usage=0.0)
        replicas[place].send(Step(load=load, pages=[page_news(is_stored=True, keys=keys)]))
        await asked(replicas, [0, 0], front.flush_cache())  # so the news are there, too
        idle = in_idle_time(prompt)
        room, calls = await asked([replicas[place]], [CACHE], front.room_for(idle))
        assert (room, calls[0].question) == (7, CacheInfo())
        _, calls = await asked(replicas, [0, 0], front.flush_cache())
        assert [call.question for call in calls] == [FlushCache()] * 2, "the other was not asked"


async def test_observers_are_told_of_chunks_of_idle_time_and_not_of_their_requests() -> None:
    class Watcher(EngineObserver):
        def __init__(self) -> None:
            self.told: list[Any] = []

        def observe_delta(self, request: Request, delta: Delta, now: float) -> None:
            self.told.append(request.request_id)

        def observe_idle_chunk(self, replica: int) -> None:
            self.told.append(replica)

    async with front_of() as front, replicas_of(front) as (replica,):
        watcher = Watcher()
        front.metrics.observers.append(watcher)
        for end in (FinishReason.LENGTH, FinishReason.ABORT):
            stream = front.submit(in_idle_time([5]))
            await replica.submitted()
            if end is FinishReason.ABORT:
                front.abort("idle")
            replica.finish("idle", finish_reason=end)
            await read(stream)
        stream = front.submit(request())
        await replica.submitted()
        replica.finish("r", 10)
        await read(stream)
        assert watcher.told == [1, "r"]


async def test_a_report_counts_a_recorded_answer_as_prompt() -> None:
    async with front_of() as front, replicas_of(front) as (replica,):
        comparing = request(pooling=Pooling(compare_from=0))
        comparing.tokens.extend([8, 9])
        front.submit(comparing)
        await replica.submitted()
        (told,) = front.report("asked")["requests"]
        assert (told["prompt_tokens"], told["output_tokens"]) == (5, 0)


async def test_no_replica_has_no_room() -> None:
    async with front_of() as front, replicas_of(front) as (replica,):
        idle = in_idle_time([5])
        assert (await asked([replica], [CACHE], front.room_for(idle)))[0] == 7
        failed = asyncio.create_task(front.room_for(idle))
        await replica.answer_error(ForetokenError("a step failed"))
        assert await failed == 0
        replica.die()
        await until(lambda: not front.describe())
        assert await front.room_for(idle) == 0


async def test_reports_of_all_replicas_are_one() -> None:
    async with front_of(2) as front, replicas_of(front, 2) as replicas:
        cache, calls = await asked(replicas, [CACHE, CACHE], front.cache_info("mine"))
        assert calls[0].question == CacheInfo(namespace="mine")
        assert (cache["total_pages"], cache["hit_tokens"], cache["usage"]) == (20, 80, 0.2)
        assert [each["number"] for each in cache["replicas"]] == [1, 2]
        view, calls = await asked(replicas, [VIEW, VIEW], front.overview())
        assert calls[0].question == Overview()
        assert (view["running"], view["proposed"]) == (2, {"lm": 16})
        assert (view["acceptance_length"], view["parts"]) == (2.0, {"forward": 1.0})
        assert [box[0] for box in view["tree"]] == [0, 0, 2, 2]
        paths = [(each["replica"], each["boxes"]) for each in view["requests"]]
        assert paths == [(1, [0, 1]), (2, [2, 3])]
        sound = {"ok": True, "pages": {"total": 5}, "requests": {"running": 1}}
        audit, calls = await asked(replicas, [sound, sound], front.audit())
        assert calls[0].question == Audit()
        each = [{"number": number, **sound} for number in (1, 2)]
        total = {"ok": True, "pages": {"total": 10}, "requests": {"running": 2}}
        assert audit == total | {"replicas": each}
        broken = {"ok": False, "violation": "a page has two owners"}
        audit, _ = await asked(replicas, [sound, broken], front.audit())
        assert (audit["ok"], audit["violation"]) == (False, "replica 2: a page has two owners")


def test_metrics_of_replicas_have_their_label() -> None:
    text = b'# TYPE foretoken:running gauge\nforetoken:running{kind="a"} 3\n'

    async def body() -> None:
        async with front_of(2) as front, replicas_of(front, 2) as replicas:
            await asked(replicas, [text, text], front.metrics.refresh())
            front.submit(request())
            body = front.metrics.render()[0].decode()
            assert 'foretoken:running{kind="a",replica="1"} 3.0' in body
            assert 'foretoken:running{kind="a",replica="2"} 3.0' in body
            assert body.count("# TYPE foretoken:running gauge") == 1
            assert "foretoken:replicas 2.0" in body
            assert 'foretoken:replica_requests{replica="1"} 1.0' in body
            assert 'foretoken:replicas_lost_total{cause="closed"} 0.0' in body

    run(body())


async def test_a_replica_that_is_lost_meanwhile_is_left_out() -> None:
    async with front_of(2) as front, replicas_of(front, 2) as replicas:
        asking = asyncio.create_task(front.flush_cache())
        await replicas[0].answer(3)
        await replicas[1].next(Call)
        replicas[1].die()
        assert await asking == 3


async def test_a_replica_that_cannot_report_is_left_out_of_reports() -> None:
    async with front_of(2) as front, replicas_of(front, 2) as (first, second):
        asking = asyncio.create_task(front.cache_info())
        await first.answer_error(ForetokenError("not now"))
        await second.answer(CACHE)
        info = await asking
        assert (info["total_pages"], [each["number"] for each in info["replicas"]]) == (10, [2])
        assert len(front.describe()) == 2


async def test_metrics_do_not_wait_for_a_replica_that_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicas_of_front, "METRICS_SECONDS", 0.01)
    async with front_of() as front, replicas_of(front) as (replica,):
        await front.metrics.refresh()
        call = await replica.next(Call)
        replica.send(Answer(call_id=call.call_id, result=b"late"))
        freed, _ = await asked([replica], [3], front.flush_cache())
        assert freed == 3  # the late answer is no lie
