"""Pause, resume and swaps of the weights, on the model of hashes."""

from __future__ import annotations

import asyncio
import threading
from array import array
from dataclasses import replace

import pytest

from foretoken.core.engine.inbox import TokenStream
from foretoken.core.engine.rollouts.updatable_engine import PauseMode, UpdatableEngine
from foretoken.core.engine.rollouts.versions import VersionedUsage
from foretoken.core.errors import DeadlineExceeded, EngineDead, InvalidRequest
from foretoken.core.interface.output import StepOutput
from foretoken.core.interface.plan import StepPlan
from foretoken.core.interface.request import Delta, Request
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.radix_cache import PrefixCache
from foretoken.radix_cache.versioned import VersionedPrefixCache
from support.fake_model import FakeRunner, answer, make_request, make_scheduler
from support.fixed_depth import FixedDepth

PROMPT = [1, 2, 3, 4, 5, 6, 1, 2, 3]  # two pages and a token


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_engine(**options: object) -> UpdatableEngine:
    limits = make_scheduler().limits
    scheduler = Scheduler(VersionedPrefixCache(64, 4), limits, FixedDepth(0))
    return UpdatableEngine(scheduler, FakeRunner(4), **options)


async def collect(stream: TokenStream) -> tuple[list[int], Delta]:
    tokens: list[int] = []
    last = Delta()
    async for last in stream:
        tokens += last.token_ids
    return tokens, last


async def begun(engine: UpdatableEngine, name: str = "a", max_tokens: int = 50) -> TokenStream:
    """A stream of which the first token was read."""
    stream = engine.submit(make_request(name, PROMPT, max_tokens=max_tokens))
    await anext(stream)
    return stream


def spans(request: Request) -> list[tuple[int, str]]:
    assert isinstance(request.usage, VersionedUsage)
    return [*request.usage.weight_versions]


def nothing() -> None:
    """Copy no weights."""


async def test_keep_stops_requests_where_they_are_until_resume() -> None:
    engine = make_engine()
    await engine.start()
    stream = await begun(engine)
    await engine.pause("keep")
    assert engine.is_paused
    num_tokens = stream.request.num_output
    await asyncio.sleep(0)
    assert 0 < stream.request.num_output == num_tokens < 50
    later = engine.submit(make_request("b", [3, 2, 1]))
    await engine.audit()  # answered between two steps, also in a pause
    assert (later.request.num_output, later.ended) == (0, False)
    engine.resume()
    assert not engine.is_paused
    tokens, last = await collect(stream)
    assert [*stream.request.tokens[len(PROMPT) :]] == answer(PROMPT, 50)
    assert (tokens[-1], last.finish_reason) == (answer(PROMPT, 50)[-1], "length")
    assert (await collect(later))[0] == answer([3, 2, 1], 8)
    await engine.close()


async def test_abort_ends_running_requests_and_later_ones_wait() -> None:
    engine = make_engine()
    await engine.start()
    stream = await begun(engine)
    await engine.pause("abort")
    later = engine.submit(make_request("b", [3, 2, 1]))
    _, last = await collect(stream)
    assert (last.finish_reason, last.stop_reason) == ("abort", "pause")
    assert not later.ended
    engine.resume()
    assert (await collect(later))[0] == answer([3, 2, 1], 8)
    await engine.close()


async def test_abort_ends_preempted_requests_and_queued_ones_too() -> None:
    limits = replace(make_scheduler().limits, max_running=2)
    # Both running requests need more pages than there are, so that one of them is preempted.
    scheduler = Scheduler(VersionedPrefixCache(8, 4), limits, FixedDepth(0))
    engine = UpdatableEngine(scheduler, FakeRunner(4))
    await engine.start()
    streams = [await begun(engine, name, max_tokens=18) for name in "ab"]
    while not any(each.num_preemptions for each in scheduler.waiting.requests):
        for stream in streams:
            if not stream.ended:
                await anext(stream)
    streams.append(engine.submit(make_request("c", PROMPT)))
    await engine.pause("abort")
    for stream in streams:
        _, last = await collect(stream)
        assert (last.finish_reason, last.stop_reason) == ("abort", "pause")
    scheduler.audit()
    await engine.close()


async def test_a_pause_that_did_not_take_effect_raises_an_error() -> None:
    engine = make_engine()
    await engine.start()
    await begun(engine)
    first = asyncio.create_task(engine.pause("wait"))
    await asyncio.sleep(0)
    assert not engine.is_paused, "the request still runs"
    second = asyncio.create_task(engine.pause("keep"))
    with pytest.raises(InvalidRequest, match="replaced"):
        await first
    await second
    assert engine.is_paused
    engine.resume()
    third = asyncio.create_task(engine.pause("wait"))
    await asyncio.sleep(0)
    engine.resume()
    with pytest.raises(InvalidRequest, match="/resume"):
        await third
    fourth = asyncio.create_task(engine.pause("wait"))
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineDead):
        await fourth


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_a_second_pause_of_the_same_mode_changes_nothing(mode: PauseMode) -> None:
    engine = make_engine()
    await engine.start()
    await engine.pause(mode)
    later = engine.submit(make_request("b", [3, 2, 1]))
    await engine.pause(mode)
    assert engine.is_paused
    assert not later.ended
    assert later.request.num_output == 0
    engine.resume()
    assert (await collect(later))[0] == answer([3, 2, 1], 8)
    await engine.close()


async def test_a_pause_whose_caller_has_gone_before_it_took_effect_is_over() -> None:
    engine = make_engine()
    await engine.start()
    stream = await begun(engine)
    pausing = asyncio.create_task(engine.pause("wait"))
    await asyncio.sleep(0)
    pausing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pausing
    later = engine.submit(make_request("b", [3, 2, 1]))
    assert (await collect(later))[0] == answer([3, 2, 1], 8)
    await collect(stream)
    assert not engine.is_paused
    await engine.close()


async def test_wait_lets_earlier_requests_end_and_holds_later_ones() -> None:
    engine = make_engine()
    await engine.start()
    stream = await begun(engine)
    accepted = engine.submit(make_request("c", [2, 2, 2]))  # the scheduler does not have it yet
    pausing = asyncio.create_task(engine.pause("wait"))
    await asyncio.sleep(0)
    held = engine.submit(make_request("b", [3, 2, 1]))
    aborted = engine.submit(make_request("d", [3, 2, 1]))
    engine.abort("d")
    await pausing
    assert (stream.ended, accepted.ended, held.ended) == (True, True, False)
    assert (await collect(stream))[1].finish_reason == "length"
    assert (await collect(aborted))[1].finish_reason == "abort"
    assert held.request.num_computed == 0
    engine.resume()
    assert (await collect(held))[0] == answer([3, 2, 1], 8)
    await engine.close()


async def test_a_deadline_passes_in_a_pause() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    await engine.start()
    await engine.pause("keep")
    stream = engine.submit(make_request("a", PROMPT, deadline=5.0))
    clock.now = 6.0
    engine.abort("unknown")
    await engine.audit()  # a round of the loop
    with pytest.raises(DeadlineExceeded):
        await collect(stream)
    await engine.close()


async def test_another_mode_ends_what_a_pause_kept() -> None:
    engine = make_engine()
    await engine.start()
    stream = await begun(engine)
    await engine.pause("keep")
    await engine.pause("abort")
    assert (await collect(stream))[1].finish_reason == "abort"
    with pytest.raises(InvalidRequest, match="mode must be one of abort, wait, keep"):
        await engine.pause("stop")
    await engine.close()


async def test_closing_ends_a_pause_so_that_requests_can_end() -> None:
    engine = make_engine()
    await engine.start()
    stream = await begun(engine)
    await engine.pause("keep")
    await engine.close(drain_seconds=30.0)
    assert (await collect(stream))[1].finish_reason == "length"
    with pytest.raises(EngineDead):
        await engine.pause("keep")


async def test_old_pages_are_not_found_after_a_swap_even_if_they_are_in_use() -> None:
    engine = make_engine()
    await engine.start()
    kept = await begun(engine)
    await engine.pause("keep")
    assert await engine.swap_weights(nothing) == "1"
    engine.resume()
    new = engine.submit(make_request("b", PROMPT))
    await collect(new)
    assert new.request.usage.cached_tokens == 0
    again = engine.submit(make_request("c", PROMPT))
    await collect(again)
    assert again.request.usage.cached_tokens == 8
    await collect(kept)
    last = engine.submit(make_request("d", [*PROMPT, *answer(PROMPT, 20)]))
    await collect(last)
    # The pages that the kept request published when it ended belong to the former version.
    assert last.request.usage.cached_tokens < len(PROMPT) + 8
    assert (await engine.audit())["ok"]
    assert await engine.flush_cache() > 0
    await engine.close()


@pytest.mark.parametrize("is_published", [False, True])
def test_pages_of_a_former_version_are_free_once_their_lease_ends(is_published: bool) -> None:
    cache, tokens = VersionedPrefixCache(8, 4), array("q", range(9))
    old, other = (cache.acquire(tokens, namespace=name) for name in ("salt", "other"))
    for lease in (old, other):
        assert cache.extend(lease, 9)
        if is_published:
            cache.publish(lease, tokens, 9)
    cache.begin_version()
    assert cache.release(old, tokens, 9) == range(0)
    assert cache.num_free_pages == 5
    new = cache.acquire(tokens, namespace="salt")
    assert new.num_cached_tokens == 0
    assert cache.extend(new, 9)
    cache.release(new, tokens, 9)
    assert cache.match_len(tokens, namespace="salt") == 8
    cache.release(other, tokens, 9)
    assert cache.match_len(tokens, namespace="salt") == 8
    assert cache.num_free_pages == 6


async def test_spans_say_which_version_computed_each_token() -> None:
    engine = make_engine()
    await engine.start()
    kept = await begun(engine)
    await engine.pause("keep")
    waiting = engine.submit(make_request("b", [3, 2, 1]))
    first = kept.request.num_output
    assert await engine.swap_weights(nothing, "step-7") == engine.weight_version == "step-7"
    second = await engine.swap_weights(nothing)
    engine.resume()
    await collect(kept)
    await collect(waiting)
    assert second == "2"
    assert spans(kept.request) == [(0, "0"), (first, "2")], "step-7 computed nothing"
    assert spans(waiting.request) == [(0, "2")]
    new = engine.submit(make_request("c", [3, 2, 1]))
    await collect(new)
    assert spans(new.request) == [(0, "2")]
    await engine.close()


async def test_a_swap_runs_between_two_steps_of_a_busy_engine() -> None:
    engine = make_engine()
    await engine.start()
    streams = [await begun(engine, f"r{number}", 200) for number in range(4)]
    await engine.swap_weights(nothing)
    for stream in streams:
        await collect(stream)
        assert [*stream.request.tokens[len(PROMPT) :]] == answer(PROMPT, 200)
        assert [version for _, version in spans(stream.request)] == ["0", "1"]
    await engine.close()


class Gated(FakeRunner):
    """A step waits until `may_end` is set; `began` is set meanwhile."""

    def __init__(self) -> None:
        super().__init__(4)
        self.began, self.may_end = threading.Event(), threading.Event()
        self.in_step = False

    def step(self, plan: StepPlan) -> StepOutput:
        self.in_step, self.thread = True, threading.get_ident()
        self.began.set()
        self.may_end.wait(60)
        output = super().step(plan)
        self.in_step = False
        return output


async def test_a_swap_waits_for_the_step_that_runs_and_runs_in_its_thread() -> None:
    scheduler = Scheduler(VersionedPrefixCache(64, 4), make_scheduler().limits, FixedDepth(0))
    engine = UpdatableEngine(scheduler, runner := Gated())
    await engine.start()
    stream = engine.submit(make_request("a", PROMPT))
    await asyncio.to_thread(runner.began.wait, 60)
    copied: list[tuple[bool, bool]] = []

    def copy() -> None:
        copied.append((runner.in_step, threading.get_ident() == runner.thread))

    swapping = asyncio.create_task(engine.swap_weights(copy))
    await asyncio.sleep(0)
    assert copied == []
    runner.may_end.set()
    await swapping
    assert copied == [(False, True)]
    assert (await collect(stream))[0] == answer(PROMPT, 8)
    await engine.close()


async def test_an_error_of_a_swap_ends_the_engine_because_weights_may_be_half_written() -> None:
    engine = make_engine()
    await engine.start()

    def fail() -> None:
        raise RuntimeError("half written")

    with pytest.raises(EngineDead):
        await engine.swap_weights(fail)
    assert not engine.alive
    assert engine.weight_version == "0"
    await engine.close()


def test_an_engine_that_launches_ahead_or_has_another_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="launched ahead"):
        make_engine(overlap=True)
    plain = Scheduler(PrefixCache(64, 4), make_scheduler().limits)
    with pytest.raises(ValueError, match="VersionedPrefixCache"):
        UpdatableEngine(plain, FakeRunner(4))


def test_flushes_name_the_namespaces_of_the_present_version() -> None:
    cache = VersionedPrefixCache(16, 4)
    tokens = array("q", range(1, 10))
    for version in range(2):
        for namespace in (None, "salt", "\0group\0x"):
            lease = cache.acquire(tokens, namespace=namespace)
            assert lease.num_cached_tokens == 0
            cache.extend(lease, 9)
            cache.release(lease, tokens, 8)
        assert cache.match_len(tokens, namespace="salt") == 8
        assert cache.flush("salt") == 2
        assert cache.match_len(tokens, namespace="salt") == 0
        assert cache.flush("\0group") == 2
        assert cache.match_len(tokens) == 8
        assert cache.flush(None) == 2
        assert cache.num_free_pages == 16
        assert cache.begin_version() == 0, version
        cache.check([])
