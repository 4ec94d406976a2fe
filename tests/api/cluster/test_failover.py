"""Requests go on in another replica when theirs is lost, whatever they were at."""

from __future__ import annotations

from typing import Any

import pytest

from foretoken.api.cluster.wire.forms import ids_form
from foretoken.api.cluster.wire.messages import Abort, Beat, Leaving, Load
from foretoken.core.errors import DeadlineExceeded, EngineDead, QueueFull, Unavailable
from foretoken.core.interface.output import TokenLogprob
from foretoken.core.interface.request import Delta, FinishReason, Request, Usage
from foretoken.core.telemetry.observers import EngineObserver
from foretoken.radix_cache import Eviction
from support.scripted_replica import (
    front_of,
    in_idle_time,
    read,
    replicas_of,
    request,
    run,
    until,
)


async def test_a_request_that_waits_goes_on_as_it_was() -> None:
    async with front_of(2) as front, replicas_of(front, 2) as (first, second):
        stream = front.submit(request())
        sent = await first.submitted()
        first.die()
        assert await second.submitted() == sent
        second.finish("r", 10)
        assert (await read(stream)).token_ids == [10]


async def test_the_output_so_far_and_what_was_counted_go_along() -> None:
    loss = Eviction("evicted", 1.0)
    async with front_of(2) as front, replicas_of(front, 2) as (first, second):
        wanted = request()
        stream = front.submit(wanted)
        await first.submitted()
        before = Usage(cached_tokens=2, cache_loss=loss, queue_time=0.25, verify_steps=1,
                       proposed_tokens=4, accepted_tokens=1, closed_early=True)  # fmt: skip
        first.say("r", 10, 11, usage=before)
        first.say("r", 12, num_proposed=1, proposed_sources=["lm"])  # no usage with it
        await until(lambda: wanted.num_output == 3)
        first_token = wanted.usage.time_to_first_token
        first.die()
        moved = await second.submitted()
        assert (moved.prompt, moved.output) == (ids_form([5, 6, 7]), ids_form([10, 11, 12]))
        after = Usage(cached_tokens=3, queue_time=9.0, verify_steps=2, proposed_tokens=3,
                      accepted_tokens=2, completion_tokens=2)  # fmt: skip
        second.say("r", 13)
        second.finish("r", 14, usage=after)
        assert (await read(stream)).token_ids == [10, 11, 12, 13, 14]
        usage = wanted.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.moves) == (3, 5, 1)
        assert (usage.cached_tokens, usage.cache_loss is None) == (2, False)
        assert (usage.verify_steps, usage.proposed_tokens, usage.accepted_tokens) == (4, 8, 3)
        assert usage.closed_early
        assert usage.time_to_first_token == first_token
        assert 0.25 <= usage.queue_time < 9.0
        assert b"requests_moved_total 1.0" in front.metrics.render()[0]
        assert b'replicas_lost_total{cause="closed"} 1.0' in front.metrics.render()[0]


async def test_what_is_computed_in_idle_time_ends_with_its_replica() -> None:
    async with front_of(2) as front, replicas_of(front, 2) as replicas:
        stream = front.submit(in_idle_time([5] * 32))
        (place,) = [n for n, row in enumerate(front.describe()) if row["requests"]]
        lost, other = replicas[place], replicas[1 - place]
        await lost.submitted()
        lost.die()
        with pytest.raises(EngineDead, match="lost"):
            await read(stream)
        assert b"requests_moved_total 0.0" in front.metrics.render()[0]
        front.submit(request())
        assert (await other.submitted()).request_id == "r"


async def test_whoever_computed_the_prompt_has_its_counts() -> None:
    async with front_of(2) as front, replicas_of(front, 2) as (first, second):
        wanted = request()
        stream = front.submit(wanted)
        await first.submitted()
        first.die()  # before its first token
        await second.submitted()
        second.finish("r", 10, usage=Usage(cached_tokens=1, queue_time=0.5))
        await read(stream)
        assert (wanted.usage.cached_tokens, wanted.usage.queue_time >= 0.5) == (1, True)


async def test_log_probabilities_of_the_prompt_are_sent_once() -> None:
    async with front_of(2) as front, replicas_of(front, 2) as (first, second):
        stream = front.submit(request(logprobs=0, prompt_logprobs=0))
        await first.submitted()
        one = TokenLogprob(6, -1.0)
        first.say("r", prompt_logprobs=[one])
        await anext(stream)
        first.die()
        assert (await second.submitted()).num_prompt_logprobs == 1
        second.finish("r", 10, prompt_logprobs=[one], logprobs=[TokenLogprob(10, -0.5)])
        answer = await read(stream)
        assert (len(answer.prompt_logprobs), len(answer.logprobs)) == (1, 1)


async def test_stop_strings_are_watched_over_a_move() -> None:
    async with front_of(2) as front, replicas_of(front, 2) as (first, second):
        heard: list[int] = []
        wanted = request()
        wanted.on_token = heard.append
        wanted.shown_ids = frozenset({9})
        stream = front.submit(wanted)
        await first.submitted()
        first.say("r", 10)
        await anext(stream)
        first.die()
        moved = await second.submitted()
        assert (moved.shown_ids, moved.output) == ({9}, ids_form([10]))
        second.finish("r", 11, finish_reason=FinishReason.STOP, stop_reason="x")
        assert (await read(stream)).stop_reason == "x"
        assert heard == [10, 11]


async def test_a_replica_that_leaves_hands_its_requests_over() -> None:
    async with front_of(2) as front, replicas_of(front, 2) as (first, second):
        stream = front.submit(request())
        await first.submitted()
        first.say("r", 10)
        first.send(Leaving(reason="it stops"))
        first.say("r", 99)  # behind its farewell: not heard
        assert (await second.submitted()).output == ids_form([10])
        second.finish("r", 11)
        assert (await read(stream)).token_ids == [10, 11]
        assert b'replicas_lost_total{cause="left"} 1.0' in front.metrics.render()[0]


@pytest.mark.parametrize(
    "end",
    [{"error": EngineDead("steps failed")}, {"finish_reason": FinishReason.ABORT}],
    ids=["dead", "aborted"],
)
async def test_an_engine_that_dies_costs_no_answer(end: dict[str, Any]) -> None:
    async with front_of(2) as front, replicas_of(front, 2) as (first, second):
        stream = front.submit(request())
        await first.submitted()
        first.say("r", 10)
        first.say("r", **end)
        assert (await second.submitted()).output == ids_form([10])
        second.finish("r", 11)
        assert (await read(stream)).token_ids == [10, 11]
        assert await first.refusal()


async def test_a_deadline_that_ends_a_request_is_no_loss() -> None:
    async with front_of(2) as front, replicas_of(front, 2) as (first, _second):
        stream = front.submit(request(deadline=5.0))
        assert 0 < ((await first.submitted()).deadline or 0) <= 5.0
        first.say("r", 10)
        first.say("r", finish_reason=FinishReason.ABORT, stop_reason="deadline")
        answer = await read(stream)
        assert (answer.finish_reason, answer.stop_reason) == (FinishReason.ABORT, "deadline")
        assert len(front.describe()) == 2


async def test_a_request_that_has_lost_three_replicas_ends_with_an_error() -> None:
    async with front_of(4) as front, replicas_of(front, 4) as replicas:
        stream = front.submit(request())
        for each in replicas[:3]:
            await each.submitted()
            each.die()
        with pytest.raises(EngineDead, match="3 replicas were lost"):
            await read(stream)
        other = front.submit(request("s"))
        await replicas[3].submitted()
        replicas[3].finish("s", 10)
        assert (await read(other)).token_ids == [10]


async def test_without_any_replica_requests_wait_for_another() -> None:
    async with front_of() as front:
        async with replicas_of(front) as (first,):
            stream = front.submit(request())
            await first.submitted()
            first.say("r", 10)
            await anext(stream)
        await until(lambda: not front.describe())
        assert front.readiness == "no replica is connected"
        assert front.alive
        with pytest.raises(Unavailable, match="no replica"):
            front.submit(request("s"))
        async with replicas_of(front) as (second,):
            assert (await second.submitted()).output == ids_form([10])
            second.finish("r", 11)
            assert (await read(stream)).token_ids == [11]


async def test_requests_wait_no_longer_than_they_may() -> None:
    now = [0.0]
    async with front_of(clock=lambda: now[0], failover_seconds=30.0) as front:
        async with replicas_of(front) as (first,):
            stream, timed = front.submit(request()), front.submit(request("s", deadline=20.0))
            await first.submitted()
        await until(lambda: not front.describe())
        for now[0], is_late, is_over in ((19.0, False, False), (21.0, True, False),
                                         (29.0, True, False), (30.0, True, True)):  # fmt: skip
            front.beat()
            assert (timed.ended, stream.ended) == (is_late, is_over)
        with pytest.raises(DeadlineExceeded):
            await read(timed)
        with pytest.raises(Unavailable, match="no replica connected within 30 s"):
            await read(stream)


async def test_a_request_that_was_aborted_is_not_moved() -> None:
    async with front_of(2) as front, replicas_of(front, 2) as (first, _second):
        stream = front.submit(request())
        await first.submitted()
        front.abort("r")
        await first.next(Abort)
        first.die()
        assert (await read(stream)).finish_reason is FinishReason.ABORT
        assert [each["requests"] for each in front.describe()] == [0]


async def test_one_that_waits_for_a_replica_can_be_aborted() -> None:
    async with front_of() as front:
        async with replicas_of(front):
            stream = front.submit(request())
        await until(lambda: not front.describe())
        front.abort("r")
        assert (await read(stream)).finish_reason is FinishReason.ABORT


async def test_requests_of_a_lost_replica_wait_for_room() -> None:
    async with (
        front_of(2) as front,
        replicas_of(front, 2, max_running=1, max_queued=0) as (first, second),
    ):
        streams = [front.submit(request(name)) for name in "ab"]
        await first.submitted()
        await second.submitted()
        first.die()
        await until(lambda: len(front.describe()) == 1)
        second.finish("b", 20)
        assert (await read(streams[1])).token_ids == [20]
        assert (await second.submitted()).request_id == "a"
        second.finish("a", 10)
        assert (await read(streams[0])).token_ids == [10]


async def test_siblings_are_moved_with_their_own_output() -> None:
    async with front_of(2) as front, replicas_of(front, 2) as (first, second):
        streams = {}
        for name in ("a-0", "a-1", "a-2", "a-3"):
            streams[name] = front.submit(request(name))
        for each in (first, second):
            for _ in range(2):
                sent = await each.submitted()
                each.say(sent.request_id, int(sent.request_id[-1]) + 10)
        for stream in streams.values():
            await anext(stream)
        first.die()
        for _ in range(2):
            moved = await second.submitted()
            assert moved.output == ids_form([int(moved.request_id[-1]) + 10])
        for name, stream in streams.items():
            second.finish(name, int(name[-1]) + 20)
            assert (await read(stream)).token_ids == [int(name[-1]) + 20]


async def test_a_silent_replica_is_lost_and_not_heard_any_more() -> None:
    async with front_of(2) as front, replicas_of(front, 2) as (first, second):
        stream = front.submit(request())
        await first.submitted()
        front.beat()
        front.beat()
        second.send(Beat(load=Load(running=5, waiting=0, kv_usage=0.0)))
        await until(lambda: front.describe()[1]["running"] == 5)
        front.beat()
        assert (await second.submitted()).request_id == "r"
        first.say("r", 98)
        second.finish("r", 10)
        assert (await read(stream)).token_ids == [10]
        assert [each["number"] for each in front.describe()] == [2]
        assert b'replicas_lost_total{cause="silent"} 1.0' in front.metrics.render()[0]


def test_a_new_request_does_not_overtake_one_that_waits() -> None:
    refused: list[str] = []
    third = request("c")

    async def body() -> None:
        async with (
            front_of(2) as front,
            replicas_of(front, 2, max_running=1, max_queued=0) as (first, second),
        ):

            class Caller(EngineObserver):
                """Sends a request as soon as there is room for one."""

                def observe_delta(self, request: Request, delta: Delta, now: float) -> None:
                    if request.request_id == "b" and delta.terminal:
                        with pytest.raises(QueueFull):
                            front.submit(third)
                        refused.append("c")

            front.metrics.observers.append(Caller())
            streams = [front.submit(request(name)) for name in "ab"]
            await first.submitted()
            await second.submitted()
            first.die()
            await until(lambda: len(front.describe()) == 1)
            second.finish("b", 20)
            await read(streams[1])
            assert (await second.submitted()).request_id == "a"

    run(body())
    assert refused == ["c"]


async def test_the_time_without_a_replica_is_time_in_the_queue() -> None:
    now = [0.0]
    async with front_of(clock=lambda: now[0]) as front:
        wanted = request()
        async with replicas_of(front) as (first,):
            stream = front.submit(wanted)
            await first.submitted()
        await until(lambda: not front.describe())
        now[0] = 5.0
        async with replicas_of(front) as (second,):
            await second.submitted()
            now[0] = 7.0
            second.finish("r", 10, usage=Usage(queue_time=0.5))
            await read(stream)
        assert (wanted.usage.queue_time, wanted.usage.total_time) == (5.5, 7.0)


async def test_a_deadline_goes_on_in_the_next_replica() -> None:
    now = [0.0]
    async with (
        front_of(2, clock=lambda: now[0]) as front, replicas_of(front, 2) as (first, second)
    ):  # fmt: skip
        front.submit(request(deadline=5.0))
        assert (await first.submitted()).deadline == 5.0
        now[0] = 3.0
        first.die()
        assert (await second.submitted()).deadline == 2.0
