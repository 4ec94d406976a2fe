"""The same requests in any order, batch, pool and chunk size, with any drafter: the same tokens."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from . import loop as loops
from .asks import Ask, Asks
from .clients import Client
from .drafting import SPECULATORS
from .faults import Faults
from .loop import SimulatedLoop
from .verdict import check_end
from .world import Findings, Shape, World

NUM_REQUESTS, NUM_WAYS = 10, 4
LONGEST = 48  # tokens that every pool has room for


def requests(seed: int) -> list[Ask]:
    """Requests that nothing but their own parameters ends."""
    asks = Asks(random.Random(f"asks {seed}"))
    drawn = (replace(asks.one(is_plain=True), depth=None, max_tokens=30) for _ in range(10**6))
    return list(islice((ask for ask in drawn if len(ask.prompt) < LONGEST), NUM_REQUESTS))


def way(rng: random.Random, speculator: str) -> Shape:
    """A way to serve them: every request fits, and little more."""
    page_size = rng.choice([1, 2, 4, 16])
    return replace(
        Shape.draw(rng),
        page_size=page_size,
        num_pages=-(-LONGEST // page_size) + rng.choice([0, 1, 40]),
        max_running=rng.choice([4, 8]),
        max_queued=NUM_REQUESTS,
        max_model_len=LONGEST,
        speculator=speculator,
    )


def serve(asks: list[Ask], shape: Shape, seed: int) -> tuple[dict[str, list[int]], Findings]:
    """Ask all at once, in random order; return each one's tokens, by its place in ``asks``."""

    async def scenario(loop: SimulatedLoop) -> tuple[dict[str, list[int]], Findings]:
        rng = random.Random(f"order {seed}")
        world = World(loop, seed, shape=shape, faults=Faults(rng, frozenset()))
        await world.engine.start()
        order = rng.sample(range(len(asks)), len(asks))
        await asyncio.gather(
            *(Client(world, "", rng).fast(asks[index], str(index)) for index in order)
        )
        await check_end(world)
        told = {told.request.request_id: told.tokens for told in world.told}
        return told, world.findings()

    return loops.run(scenario, seed)


@pytest.mark.parametrize("speculator", SPECULATORS)
def test_no_way_to_serve_requests_changes_a_token(speculator: str) -> None:
    sums: Counter[str] = Counter()
    for seed in range(NUM_WAYS):
        asks = requests(seed % 3)
        alone = {str(i): list(ask.right(LONGEST)[0]) for i, ask in enumerate(asks)}
        told, findings = serve(asks, way(random.Random(f"{speculator} {seed}"), speculator), seed)
        assert told == alone
        sums["preempted"] += findings.num_preemptions
        sums["accepted"] += findings.num_accepted
    assert sums["preempted"], "no pool was ever short, so nothing was shown"
    assert bool(sums["accepted"]) == (speculator != "off")


def test_the_answers_known_in_advance_are_those_of_requests_served_alone() -> None:
    for index, ask in enumerate(requests(0)):
        told, _ = serve([ask], way(random.Random(index), "off"), index)
        assert told == {"0": list(ask.right(LONGEST)[0])}
