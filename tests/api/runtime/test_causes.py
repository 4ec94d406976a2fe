"""Prompts are counted by why they missed the cache, without work on the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import pytest

from foretoken import SamplingParams
from foretoken.api.runtime import cache_diagnostics
from foretoken.api.runtime.cache_diagnostics import Explainer
from foretoken.api.text.chat_template import INLINE_CHARS
from foretoken.core.interface.request import CacheOptions

TWO = SamplingParams(max_tokens=2, seed=0)
NUM_LONG = 150  # tokens that are too many to be compared on the event loop


@pytest.fixture(autouse=True)
def small_limit(monkeypatch) -> None:
    monkeypatch.setattr(cache_diagnostics, "APART_BYTES", 500)


@pytest.fixture
def comparisons(monkeypatch) -> Counter[str]:
    """Comparisons by the thread that they ran in."""
    explain, threads = Explainer.explain_among, Counter[str]()

    def watched(self, *args):
        threads[threading.current_thread().name] += 1
        return explain(self, *args)

    monkeypatch.setattr(Explainer, "explain_among", watched)
    return threads


async def ask(llm, prompt, cache=None):
    answer = await llm.open(prompt, TWO, cache=cache or CacheOptions())
    await llm.finish(answer)


async def counted(llm):
    """Counts above zero, when no comparison runs or waits."""
    while llm.miss_causes._tasks:
        await asyncio.wait(llm.miss_causes._tasks)
    return {cause: number for cause, number in llm.miss_causes.counts.items() if number}


def test_what_needs_no_comparison_is_counted_without_one(run, engine, comparisons):
    def answers(request):
        request.usage.cached_tokens = 2 if request.tokens[0] == 5 else 0
        return [7, 7]

    async def body(llm):
        llm.for_server(600)
        engine.answers = answers
        await ask(llm, [5, 6, 6])
        await ask(llm, [6])
        await ask(llm, [6, 6, 6], CacheOptions(read=False))
        assert await counted(llm) == {"hit": 1, "too_short": 1, "not_read": 1}
        assert not comparisons
        await ask(llm, [6, 6, 6])
        assert sum((await counted(llm)).values()) == 4
        assert comparisons == {threading.current_thread().name: 1}

    run(body)


@pytest.mark.parametrize("is_earlier_long", [True, False])
def test_a_comparison_with_much_leaves_the_event_loop(run, comparisons, is_earlier_long):
    async def body(llm):
        prompts = [[5] * NUM_LONG, [6, 6]] if is_earlier_long else [[6, 6], [5] * NUM_LONG]
        await ask(llm, prompts[0])
        llm.for_server(600)
        await ask(llm, prompts[1])
        assert await counted(llm) == {"first_seen": 1}
        assert comparisons == {"foretoken-causes": 1}

    run(body)


def test_few_comparisons_wait_and_no_text_waits_for_them(run, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()
    explain = Explainer.explain_among

    def slow(self, *args):
        begun.set()
        assert may_end.wait(60)
        return explain(self, *args)

    monkeypatch.setattr(Explainer, "explain_among", slow)

    async def body(llm):
        await ask(llm, [5] * NUM_LONG)
        llm.for_server(600)
        try:
            await ask(llm, [6, 6])
            assert await asyncio.to_thread(begun.wait, 60)
            for _ in range(cache_diagnostics.MAX_COMPARISONS + 3):
                await ask(llm, [6, 6])
            assert await llm.tokenizer.work(INLINE_CHARS + 1, lambda: "read") == "read"
            assert not any(llm.miss_causes.counts.values())
        finally:
            may_end.set()
        assert sum((await counted(llm)).values()) == 1 + cache_diagnostics.MAX_COMPARISONS

    run(body)
