"""Measures the phases of inference on an engine in this process, one request or batch at a time.

Repeats take turns over all points, so that a slow spell of the machine affects all points alike.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from array import array
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ...api.build.engine_builder import LocalBuilt
from ...api.types.sampling_params import SamplingParams
from ...core.errors import ForetokenError, InvalidRequest
from ...core.interface.request import Request, Usage
from ...core.interface.sampling import SamplingMetadata
from ..common.report import Spread
from ..common.roofline import LENGTHS, POSITIONS, clipped
from .data import BatchPoint, DecodePoint, Depth, DepthPoint, PrefillPoint

DEPTHS: tuple[Depth, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8, "auto")
SHORT = 8  # Tokens of a prompt that leaves nothing in the cache, because it is shorter than a page.
BATCHES = (1, 2, 4, 8, 16, 32, 64)

Point = TypeVar("Point", bound=Hashable)
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Extent of a measurement. Lengths are in tokens; ``budget`` is the seconds for one point."""

    max_len: int = 32768  # Maximum length of a prompt.
    repeats: int = 5
    budget: float = 30.0
    decode_len: int = 32
    batch_len: int = 48
    depth_prompts: int = 6
    depth_prompt_len: int = 128
    depth_len: int = 96


QUICK = Sizes(
    max_len=2048,
    budget=2.0,
    decode_len=16,
    batch_len=24,
    depth_prompts=3,
    depth_prompt_len=64,
    depth_len=48,
)


@dataclass(slots=True)
class Served:
    """One answered request and the arrival times of its deltas, in seconds."""

    usage: Usage
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    num_first: int = 0  # Tokens of the first delta.

    @property
    def num_later(self) -> int:
        """Tokens after the first delta, which decode steps made."""
        return len(self.token_ids) - self.num_first

    @property
    def seconds(self) -> float:
        """Seconds from the first delta to the last."""
        return self.times[-1] - self.times[0]

    @property
    def pace(self) -> float:
        """Seconds per token after the first delta."""
        return self.seconds / self.num_later


@dataclass(slots=True)
class Lab:
    """A started engine, the text that prompts are cut from, and the extent of the measurement."""

    built: LocalBuilt
    text: Sequence[int]
    sizes: Sizes
    num_sent: int = 0

    @property
    def capacity(self) -> int:
        """Maximum number of tokens of a prompt and its answer together."""
        return self.built.max_model_len

    @property
    def page_size(self) -> int:
        """Tokens of a KV page."""
        return self.built.engine.scheduler.cache.page_size

    async def flush(self) -> None:
        """Forget all prompts, and the text that lookups search."""
        await self.built.engine.flush_cache()

    async def serve(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        *,
        depth: Depth = 0,
        temperature: float = 0.0,
        seed: int = 0,
        namespace: str | None = None,
    ) -> Served:
        """Answer one prompt with exactly ``num_tokens`` tokens.

        Its prefix is shared within ``namespace`` only.
        """
        self.num_sent += 1
        params = SamplingParams(
            temperature=temperature, max_tokens=num_tokens, ignore_eos=True, seed=seed
        )
        request = Request(
            request_id=f"phases-{self.num_sent}",
            tokens=array("q", prompt),
            sampling=SamplingMetadata(params=params, seed=seed, prompt_len=len(prompt)),
            depth=depth,
            namespace=namespace,
        )
        served = Served(request.usage)
        async for delta in self.built.engine.submit(request):
            served.times.append(time.perf_counter())
            served.token_ids += delta.token_ids
            served.num_first = served.num_first or len(delta.token_ids)
        return served

    async def rounds(
        self, points: Sequence[Point], measure: Callable[[Point], Awaitable[Found]]
    ) -> dict[Point, list[Found]]:
        """Measure every point once, then repeat each while its budget lasts."""
        found: dict[Point, list[Found]] = {point: [] for point in points}
        spent = dict.fromkeys(points, 0.0)
        for _ in range(self.sizes.repeats):
            for point in points:
                if found[point] and spent[point] >= self.sizes.budget:
                    continue
                began = time.monotonic()
                found[point].append(await measure(point))
                spent[point] += time.monotonic() - began
        return found


# -- prefill, cold and cached -------------------------------------------------------------------


async def measure_prefill(lab: Lab) -> list[PrefillPoint]:
    """Measure the time to the first token by prompt length, cold and again when cached."""
    lengths = clipped(LENGTHS, min(lab.sizes.max_len, lab.capacity - 1))

    async def once(length: int) -> tuple[Usage, Usage]:
        await lab.flush()
        # Not timed. Without it, only the second timed request would follow another request.
        await lab.serve(lab.text[: -SHORT - 1 : -1], 2)
        cold = await lab.serve(lab.text[:length], 1)
        cached = await lab.serve(lab.text[:length], 1)
        if cold.token_ids != cached.token_ids:
            raise ForetokenError("tokens differ between cold and cached: this is a bug")
        return cold.usage, cached.usage

    await once(lengths[0])  # Warm-up.
    found = await lab.rounds(lengths, once)
    return [
        PrefillPoint(
            prompt_len=length,
            num_cached=runs[0][1].cached_tokens,
            runs=len(runs),
            cold=Spread.of([cold.time_to_first_token for cold, _ in runs]),
            cached=Spread.of([cached.time_to_first_token for _, cached in runs]),
        )
        for length, runs in found.items()
    ]


# -- decode against position --------------------------------------------------------------------


async def measure_decode(lab: Lab) -> list[DecodePoint]:
    """Measure the time of a token by its position.

    Prompts are the beginnings of one text, shortest first, so that each finds the previous one in
    the cache.
    """
    num_tokens = min(lab.sizes.decode_len, max(2, lab.capacity // 4))
    lengths = clipped(POSITIONS, min(lab.sizes.max_len, lab.capacity) - num_tokens)
    if not lengths:
        raise InvalidRequest("max_len is too short to measure decoding", param="max_len")
    await lab.flush()
    for length in lengths:
        await lab.serve(lab.text[:length], 2)

    async def once(length: int) -> float:
        return (await lab.serve(lab.text[:length], num_tokens)).pace

    found = await lab.rounds(lengths, once)
    return [
        DecodePoint(position=length + num_tokens // 2, runs=len(paces), seconds=Spread.of(paces))
        for length, paces in found.items()
    ]


# -- batch size ---------------------------------------------------------------------------------


async def measure_batches(lab: Lab) -> list[BatchPoint]:
    """Measure throughput and time per token by the number of requests that decode together.

    Each has a prompt of its own, cached except for its last token, so all start in one step.
    """
    prompt_len = 2 * lab.page_size + 1
    num_tokens = min(lab.sizes.batch_len, lab.capacity - prompt_len)
    if num_tokens < 2:
        return []
    sizes = [size for size in BATCHES if size <= batches_that_fit(lab, prompt_len + num_tokens)]
    cuts = range(0, sizes[-1] * prompt_len, prompt_len)
    prompts = [lab.text[at : at + prompt_len] for at in cuts]
    await lab.flush()
    await asyncio.gather(*(lab.serve(prompt, 1) for prompt in prompts))

    async def once(size: int) -> list[Served]:
        return await asyncio.gather(*(lab.serve(each, num_tokens) for each in prompts[:size]))

    found = await lab.rounds(sizes, once)
    position = prompt_len + num_tokens // 2
    return [_batch_point(size, position, runs) for size, runs in found.items()]


def batches_that_fit(lab: Lab, num_tokens: int) -> int:
    """Return how many requests of ``num_tokens`` tokens fit into the pool and a step."""
    scheduler = lab.built.engine.scheduler
    pages = -(-num_tokens // lab.page_size) + 1
    return max(1, min(scheduler.limits.max_running, scheduler.cache.num_total_pages // pages))


def _batch_point(size: int, position: int, runs: Sequence[Sequence[Served]]) -> BatchPoint:
    return BatchPoint(
        size=size,
        position=position,
        runs=len(runs),
        rate=Spread.of([_rate(run) for run in runs]),
        seconds=Spread.of([statistics.median(s.pace for s in run) for run in runs]),
    )


def _rate(run: Sequence[Served]) -> float:
    """Return the tokens per second from the first token of any request to the last token of all."""
    spent = max(each.times[-1] for each in run) - min(each.times[0] for each in run)
    return sum(each.num_later for each in run) / spent


# -- depth of speculation -----------------------------------------------------------------------


async def measure_depths(lab: Lab, *, simulated: bool) -> tuple[list[DepthPoint], int]:
    """Measure tokens per step and time per token by draft depth, one request alone.

    Unless an oracle drafts (``simulated``), every run starts from an empty cache, so that lookups
    do not find earlier answers. Also returns the position of the token in the middle of an answer.
    """
    prompt_len = min(lab.sizes.depth_prompt_len, lab.capacity // 2)
    num_tokens = min(lab.sizes.depth_len, lab.capacity - prompt_len)
    starts = range(0, lab.sizes.depth_prompts * prompt_len, prompt_len)
    prompts = [lab.text[at : at + prompt_len] for at in starts]

    async def once(depth: Depth) -> list[Served]:
        if not simulated:
            await lab.flush()
        return [
            await lab.serve(prompt, num_tokens, depth=depth, temperature=1.0, seed=seed)
            for seed, prompt in enumerate(prompts)
        ]

    await once(1)  # This warms up, and records the answers for the oracle.
    found = await lab.rounds(DEPTHS, once)
    _check_equal([served for runs in found.values() for run in runs for served in run], prompts)
    points = [_depth_point(depth, runs) for depth, runs in found.items()]
    return points, prompt_len + num_tokens // 2


def _check_equal(served: Sequence[Served], prompts: Sequence[Sequence[int]]) -> None:
    """Raise `ForetokenError` if the tokens of a prompt depend on the draft depth."""
    for index, each in enumerate(served):
        if each.token_ids != served[index % len(prompts)].token_ids:
            raise ForetokenError("tokens differ between depths: this is a bug")


def _depth_point(depth: Depth, runs: Sequence[Sequence[Served]]) -> DepthPoint:
    served = [each for run in runs for each in run]
    proposed = sum(each.usage.proposed_tokens for each in served)
    accepted = sum(each.usage.accepted_tokens for each in served)
    # The first step belongs to the prompt.
    steps = sum(each.usage.verify_steps - 1 for each in served)
    return DepthPoint(
        depth=depth,
        runs=len(runs),
        tokens_per_step=sum(each.num_later for each in served) / steps,
        acceptance=accepted / proposed if proposed else None,
        seconds=Spread.of([_seconds_per_token(run) for run in runs]),
    )


def _seconds_per_token(run: Sequence[Served]) -> float:
    return sum(each.seconds for each in run) / sum(each.num_later for each in run)
