"""Recurrent models of transformers' modules in the engine: the tokens of each request alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foretoken.core.model.loader import load_decoder
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.radix_cache.audit import run as run_checks
from support.checkpoints import make_checkpoint
from support.equality_harness import House, shuffled
from support.fake_model import Driver
from support.tiny_models import save_tiny

pytestmark = pytest.mark.slow

NUM_REQUESTS = 4


@pytest.fixture(scope="module", params=["jamba", "mamba2"])
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> House:
    torch.set_num_threads(1)
    where: Path = tmp_path_factory.mktemp(request.param)
    target = load_decoder(save_tiny(where / "target", request.param, vocab_size=256))
    assert target.path == "transformers"
    draft = load_decoder(make_checkpoint(where / "draft", "qwen3", vocab_size=256))
    return House(target, draft, indices=range(NUM_REQUESTS))


def order(house: House, seed: int) -> list[int]:
    return [index for index in shuffled(seed) if str(index) in house.solo]


def check(house: House, served: dict[str, list[int]]) -> None:
    house.check(served)
    assert len(served) == NUM_REQUESTS
    run_checks(house.scheduler.checks())


@pytest.mark.parametrize("max_batch_tokens", [7, 48])
def test_chunks_of_any_size_change_no_token(house: House, max_batch_tokens: int) -> None:
    check(house, house.run(order(house, 1), None, max_batch_tokens=max_batch_tokens, poison=True))


@pytest.mark.parametrize("drafter", ["wrong", "perfect", "random"])
def test_drafts_over_page_ends_change_no_token(house: House, drafter: str) -> None:
    check(house, house.run(order(house, 2), drafter, depth=8, poison=True))


def test_a_few_slots_change_no_token(house: House) -> None:
    """Three slots: one request runs at a time, and one state is kept."""
    served = house.run(
        order(house, 3), "wrong", num_slots=3, state_interval=16, repeats=2, poison=True
    )
    check(house, served)
    assert house.scheduler.cache.states is not None
    assert house.scheduler.cache.states.num_evicted > 0


def test_prompts_resumed_at_kept_states_give_the_tokens_of_cold_ones(house: House) -> None:
    served = house.run(order(house, 5), "perfect", repeats=3, state_interval=16, num_slots=200)
    check(house, served)
    cached = [request.usage.cached_tokens for request in house.requests]
    assert sum(cached) > 0.5 * sum(request.prompt_len for request in house.requests)


class Preempting(Driver):
    """Preempts every request after each seventh step."""

    num_steps = 0

    def step(self) -> object:  # type: ignore[override]
        plan = super().step()
        self.num_steps += 1
        if self.num_steps % 7 == 0:
            for request in list(self.scheduler.running.values()):
                self.scheduler._preempt(request)
        return plan


def test_preempted_requests_go_on_with_the_same_tokens(house: House) -> None:
    check(house, house.run(order(house, 4), "random", drive=Preempting, poison=True))
    scheduler: Scheduler = house.scheduler
    assert scheduler.num_preemptions > NUM_REQUESTS
