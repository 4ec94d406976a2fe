"""An engine whose steps overlap, in virtual time, and its readers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from foretoken.core.engine.engine import Engine
from foretoken.core.engine.inbox import TokenStream
from foretoken.core.engine.model_thread import Supervision
from foretoken.core.errors import ForetokenError
from foretoken.core.interface.plan import StepPlan
from foretoken.core.interface.protocols import NO_SPECULATION
from foretoken.core.interface.request import Delta, FinishReason, OnToken, Request
from support import virtual_time
from support.fake_model import make_request, make_scheduler
from support.virtual_thread import Ahead, Launching, OneByOne, a_second

PROMPTS = [[1 + i % 6, 2, 1 + i // 6] for i in range(9)]


def make_engine(
    runner: Ahead | None = None,
    *,
    overlap: bool = True,
    seconds: Callable[[], float | None] = a_second,
    step_timeout: float = 0.0,
    **options: Any,
) -> Engine:
    options.setdefault("speculator", NO_SPECULATION)
    return Engine(
        make_scheduler(**options),
        runner or Launching(),
        clock=virtual_time.now,
        make_thread=lambda name, on_start: OneByOne(seconds),
        supervision=Supervision(step_timeout=step_timeout),
        overlap=overlap,
    )


class Reader:
    """Reads a stream to its end."""

    def __init__(self, engine: Engine, name: str, prompt: list[int], **params: Any) -> None:
        params.setdefault("max_tokens", 8)
        self.request: Request = make_request(name, prompt, **params)
        self.stream: TokenStream = engine.submit(self.request)
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.end: Delta | ForetokenError = Delta()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for delta in self.stream:
                self.tokens += delta.token_ids
                self.times += [virtual_time.now()] * len(delta.token_ids)
                self.end = delta
        except ForetokenError as error:
            self.end = error

    @property
    def reason(self) -> tuple[FinishReason | None, object]:
        assert isinstance(self.end, Delta), self.end
        return self.end.finish_reason, self.end.stop_reason


async def read_all(*readers: Reader) -> None:
    await asyncio.gather(*(reader.task for reader in readers))


async def come_to_rest(engine: Engine) -> None:
    """Everybody ended, and no page is lost."""
    await engine._inbox.idle.wait()
    verdict = await engine.audit()
    assert verdict["ok"], verdict
    cache = engine.scheduler.cache
    assert cache.num_free_pages + cache.num_evictable_pages == cache.num_total_pages
    assert engine._step_executor.planned_ahead is None
    await engine.close()


def run(scenario: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(10_000):
            return await scenario()

    return virtual_time.run(bounded)


def stop_at(count: int, seen: list[int] | None = None) -> OnToken:
    """Ends an answer at its token of that number."""
    seen = [] if seen is None else seen

    def on_token(token_id: int) -> str | None:
        seen.append(token_id)
        return "enough" if len(seen) == count else None

    return on_token


def is_ahead(plan: StepPlan) -> bool:
    return any(row.is_ahead for row in plan.requests)
