"""Speculation on over off, on the real engine, at rising concurrency.

Both settings run the same requests in turn, on the same engine and in the same process; the ratio
of each neighbouring pair is taken, so that a slow spell of the machine hits both. Texts: agent
edits as recorded (the target computes everything and is then made to say what was recorded);
fresh text, the model's own at temperature 1; adversarial text, random over few tokens, so that
every look-up finds something and nearly all of it is wrong.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...api.build.engine_builder import LocalBuilt
from ...api.types.sampling_params import SamplingParams
from ...core.interface.request import Request, Usage
from ...core.interface.sampling import SamplingMetadata
from ..common.replay import ReplayRunner
from ..common.report import Spread

Stream = tuple[list[int], list[int]]  # prompt, answer


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that run together, in the order of their arrival."""

    name: str
    streams: Sequence[Stream]
    is_replayed: bool
    temperature: float = 0.0


@dataclass(slots=True)
class Run:
    """One run over a load."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of all threads
    usages: list[Usage] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    num_hits: int = 0
    num_queries: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens served."""
        return sum(map(len, self.token_ids))

    def total(self, count: Callable[[Usage], int]) -> int:
        """Sum over the requests."""
        return sum(count(usage) for usage in self.usages)


async def _serve(built: LocalBuilt, request: Request, limit: asyncio.Semaphore, run: Run) -> None:
    async with limit:
        token_ids: list[int] = []
        async for delta in built.engine.submit(request):
            token_ids += delta.token_ids
        index = int(request.request_id)
        run.usages[index], run.token_ids[index] = request.usage, token_ids


async def run_once(built: LocalBuilt, load: Load, concurrency: int, depth: int | str) -> Run:
    """All requests of a load, ``concurrency`` at a time, from an empty cache."""
    engine = built.engine
    await engine.flush_cache()
    if isinstance(engine.runner, ReplayRunner):
        recorded = enumerate(load.streams) if load.is_replayed else ()
        engine.runner.recorded = {str(i): answer for i, (_, answer) in recorded}
    cache = engine.scheduler.cache
    run = Run(usages=[Usage()] * len(load.streams), token_ids=[[]] * len(load.streams))
    hits, queries = cache.num_hits, cache.num_queries
    limit = asyncio.Semaphore(concurrency)
    requests = [make_request(i, stream, load, depth) for i, stream in enumerate(load.streams)]
    began, cpu_began = time.perf_counter(), time.process_time()
    await asyncio.gather(*(_serve(built, request, limit, run) for request in requests))
    run.seconds = time.perf_counter() - began
    run.cpu_seconds = time.process_time() - cpu_began
    run.num_hits, run.num_queries = cache.num_hits - hits, cache.num_queries - queries
    return run


def make_request(index: int, stream: Stream, load: Load, depth: int | str) -> Request:
    """A request for the stream's answer, with drafts of this depth."""
    prompt, answer = stream
    params = SamplingParams(
        temperature=load.temperature, max_tokens=len(answer), ignore_eos=True, seed=index
    )
    return Request(
        request_id=str(index),
        tokens=array("q", prompt),
        sampling=SamplingMetadata(params=params, seed=index, prompt_len=len(prompt)),
        depth=depth,  # type: ignore[arg-type]
    )


async def compare(
    built: LocalBuilt, load: Load, concurrency: int, settings: Sequence[int | str], repeats: int
) -> list[dict[str, object]]:
    """Each setting beside off; one row of figures for each."""
    runs: dict[int | str, list[tuple[Run, Run]]] = {setting: [] for setting in settings}
    for repeat in range(repeats + 1):
        for setting in settings:
            pair: dict[int | str, Run] = {}
            for depth in (0, setting) if repeat % 2 else (setting, 0):
                pair[depth] = await run_once(built, load, concurrency, depth)
            if pair[0].token_ids != pair[setting].token_ids:
                raise SystemExit("tokens differ between settings: this is a bug")
            if repeat:  # the first warms up
                runs[setting].append((pair[0], pair[setting]))
    return [_figures(load, concurrency, setting, pairs) for setting, pairs in runs.items()]


def _figures(
    load: Load, concurrency: int, setting: int | str, pairs: Sequence[tuple[Run, Run]]
) -> dict[str, object]:
    ons = [on for _, on in pairs]
    proposed = sum(on.total(lambda u: u.proposed_tokens) for on in ons)
    accepted = sum(on.total(lambda u: u.accepted_tokens) for on in ons)
    steps = sum(on.total(lambda u: u.verify_steps) for on in ons)
    return {
        "text": load.name,
        "concurrency": concurrency,
        "speculation": setting,
        "on / off": Spread.of([off.seconds / on.seconds for off, on in pairs]),
        "on / off, CPU": Spread.of([off.cpu_seconds / on.cpu_seconds for off, on in pairs]),
        "tok/s off": Spread.of([off.num_tokens / off.seconds for off, _ in pairs]).median,
        "tok/s on": Spread.of([on.num_tokens / on.seconds for on in ons]).median,
        "tokens/step": sum(on.num_tokens for on in ons) / steps,
        "precision": accepted / proposed if proposed else "-",
        "hit rate on / off": Spread.of(
            [
                (on.num_hits / on.num_queries) / max(1e-9, off.num_hits / off.num_queries)
                for off, on in pairs
            ]
        ).median,
    }
