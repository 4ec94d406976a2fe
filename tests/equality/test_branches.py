"""Several guesses for the same positions: the one that gets furthest wins, and no token changes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from foretoken.core.interface.request import Request
from foretoken.core.interface.speculator import DraftPlan
from foretoken.core.interface.step import Draft
from foretoken.core.model import Decoder
from foretoken.core.ops.batch import ForwardOutput, RaggedBatch, Wanted
from foretoken.core.ops.kv_pool import KVPool
from support.equality_harness import REQUESTS, House, shuffled
from support.fixed_depth import FixedDepth
from support.tiny_pair import write_pair


class Trie(FixedDepth):
    """Guesses a wrong path and others beside it, of which one is right up to a random point."""

    def __init__(self, answers: dict[str, list[int]], *, right: int = 1) -> None:
        super().__init__(4)
        self._answers = answers
        self._right = right
        self._rng = random.Random(3)

    def plan(
        self, requests: Sequence[Request], limits: Sequence[int], *, budget: int, num_prefill: int
    ) -> Sequence[DraftPlan]:
        share = budget // max(1, len(requests))
        return [self._plan(*pair, share) for pair in zip(requests, limits, strict=True)]

    def _plan(self, request: Request, limit: int, share: int) -> DraftPlan:
        known = self._answers[request.request_id][request.num_output :]
        length = min(limit, 6, (share - 3) // 3)
        if length < 1:
            return DraftPlan()
        paths = [self._path(known[:length], index) for index in range(3)]
        main, *others = (Draft.of(path, f"path {index}") for index, path in enumerate(paths))
        return DraftPlan(draft=main, branches=others)

    def _path(self, known: list[int], index: int) -> list[int]:
        cut = self._rng.randrange(len(known) + 1) if index == self._right else 0
        cut = len(known) if index == self._right and self._rng.random() < 0.5 else cut
        return [*known[:cut], *((token + 1 + index) % 256 for token in known[cut:])]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> House:
    torch.set_num_threads(1)
    return House.load(write_pair(tmp_path_factory.mktemp("pair"), vocab_size=256), request.param)


@pytest.mark.parametrize("right", [0, 1, 2])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_branch_that_wins_changes_no_token(house: House, right: int, page_size: int) -> None:
    trie = Trie(house.solo, right=right)
    order = shuffled(right)[:20]
    served = house.run(
        order, None, speculator=trie, page_size=page_size, max_batch_tokens=96, poison=True
    )
    for index in order:
        assert served[str(index)] == house.solo[str(index)], REQUESTS[index][1].params
    won = sum(r.usage.accepted_by_source.get(f"path {right}", 0) for r in house.requests)
    assert won > 30
    assert won == sum(r.usage.accepted_tokens for r in house.requests)


def test_branches_are_dropped_when_pages_are_short(house: House) -> None:
    served = house.run(
        shuffled(5)[:12], None, speculator=Trie(house.solo), num_pages=65, max_batch_tokens=96
    )
    for request_id, tokens in served.items():
        assert tokens == house.solo[request_id]


def test_the_usage_counts_every_path(house: House) -> None:
    house.run([0, 2, 4], None, speculator=Trie(house.solo), max_batch_tokens=96)
    for request in house.requests:
        usage = request.usage
        assert usage.proposed_tokens == sum(usage.proposed_by_source.values())
        assert usage.proposed_by_source["path 0"] == usage.proposed_by_source["path 1"]
        assert usage.accepted_tokens + usage.verify_steps == usage.completion_tokens
        assert (
            sum(n * steps for n, steps in usage.steps_by_accepted.items()) == usage.accepted_tokens
        )


def test_the_pages_of_all_branches_of_a_step_are_copied_in_one_call_before_and_one_behind(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a call is a kernel, and calls are what a step waits for."""
    events: list[str | int] = []

    def copy_pages(pool: KVPool, sources: Sequence[int], targets: Sequence[int]) -> None:
        events.append(len(targets))
        copied(pool, sources, targets)

    def forward(
        decoder: Decoder, batch: RaggedBatch, pool: KVPool, wanted: Wanted
    ) -> ForwardOutput:
        events.append("forward")
        return computed(decoder, batch, pool, wanted)

    copied, computed = KVPool.copy_pages, Decoder.forward
    monkeypatch.setattr(KVPool, "copy_pages", copy_pages)
    monkeypatch.setattr(Decoder, "forward", forward)
    house.run(shuffled(5)[:8], None, speculator=Trie(house.solo), max_batch_tokens=96)
    steps = list(zip(*[iter(events)] * 3, strict=True))
    assert all(forward == "forward" for _, forward, _ in steps)
    opened, adopted = ([step[at] for step in steps] for at in (0, 2))
    assert max(opened) >= 6, "three branches of several rows"
    assert max(adopted) >= 2
