"""A whole engine on the device, and prompts that are in its cache without being computed."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from ....api.build.engine_builder import LocalBuilt, build
from ....core.engine.engine import Engine
from ....core.errors import ForetokenError
from ....core.execution.model_runner import ModelRunner
from ...phases.measure import Lab, Served, Sizes
from .bed import PAGE_SIZE, fill
from .stage import Stage

MAX_RUNNING = 256


@asynccontextmanager
async def open_lab(
    stage: Stage,
    folder: Path | None,
    **options: Any,  # noqa: ANN401 - EngineConfig's
) -> AsyncIterator[Lab]:
    """Open a started engine that has the device to itself; folder None is the built-in pair."""
    given: dict[str, Any] = {
        "page_size": PAGE_SIZE,
        "max_running": MAX_RUNNING,
        "max_queued": 4 * MAX_RUNNING,
    }
    if folder is not None:
        given |= {"load_format": "random", "draft": "none", "speculation": "off"}
    built = build(folder, stage.place.config(**given | options))
    fill(runner(built).pool)  # This allocates the pool's memory before the timing.
    await built.engine.start()
    try:
        yield Lab(built, (), Sizes())
    finally:
        await built.engine.close()


def runner(built: LocalBuilt) -> ModelRunner:
    """Return the runner that computes the engine's steps."""
    return cast(ModelRunner, built.engine.runner)


def random_prompts(count: int, num_tokens: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Return random prompts without a common prefix."""
    rng = random.Random(seed)
    return [rng.choices(range(vocab_size), k=num_tokens) for _ in range(count)]


def plant(engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
    """Put prompts into the cache except for their last token, with arbitrary page contents.

    Requests with these prompts all begin to decode in the same step. Call it while no step runs.
    Raises `ForetokenError` if the pool is too small.
    """
    cache = engine.scheduler.cache
    for prompt in prompts:
        tokens = array("q", prompt)
        lease = cache.acquire(tokens)
        if not cache.extend(lease, len(tokens)):
            raise ForetokenError("the pool is too small for the prompts of this benchmark")
        cache.release(lease, tokens, len(tokens) - 1)


async def together(
    lab: Lab,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    **options: Any,  # noqa: ANN401 - Lab.serve's
) -> list[Served]:
    """Serve all prompts at once and return their answers of ``num_tokens`` each."""
    asked = (lab.serve(prompt, num_tokens, **options) for prompt in prompts)
    return list(await asyncio.gather(*asked))
