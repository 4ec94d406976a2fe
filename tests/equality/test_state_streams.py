"""Models with recurrent states: same seed, same tokens, whatever ran beside, before or instead."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch

from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.native import native_library
from foretoken.core.ops.quantize import Quantize
from foretoken.radix_cache.audit import run as run_checks
from support.checkpoints import make_checkpoint
from support.equality_harness import House, shuffled


class Kind(NamedTuple):
    """A family, and how it is computed."""

    family: str
    dtype: Literal["float32", "bfloat16"]
    backend: Literal["torch", "native"]
    quantize: Quantize = "none"


KINDS = {
    "torch": Kind("qwen3_5", "float32", "torch"),
    "native": Kind("qwen3_5", "float32", "native"),
    "native bfloat16": Kind("qwen3_next", "bfloat16", "native"),
    "native int8": Kind("qwen3_5", "bfloat16", "native", "int8"),
    "native int4": Kind("qwen3_5_moe", "bfloat16", "native", "int4"),
}
NUM_REQUESTS = 12


@pytest.fixture(scope="module", params=KINDS)
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> House:
    torch.set_num_threads(1)
    kind = KINDS[request.param]
    if kind.backend == "native" and native_library() is None:
        pytest.skip("no native kernels on this machine")
    where: Path = tmp_path_factory.mktemp(kind.family)
    # widths that groups of 32 divide
    sizes = {"vocab_size": 256, "intermediate_size": 96, "linear_value_head_dim": 32}
    folder = make_checkpoint(where / "target", kind.family, **sizes)
    draft = make_checkpoint(where / "draft", "qwen3", vocab_size=256)
    options = {"dtype": kind.dtype, "exact": "batch", "backend": kind.backend}
    target = load_decoder(folder, **options, quantize=kind.quantize)  # type: ignore[arg-type]
    return House(
        target,
        load_decoder(draft, **options),  # type: ignore[arg-type]
        num_requests=NUM_REQUESTS,
    )


def order(seed: int) -> list[int]:
    return [index for index in shuffled(seed) if index < NUM_REQUESTS]


def check(house: House, served: dict[str, list[int]]) -> None:
    house.check(served)
    assert len(served) == NUM_REQUESTS
    run_checks(house.scheduler.checks())


@pytest.mark.parametrize("max_batch_tokens", [1, 7, 16, 48])
def test_chunks_of_any_size_change_no_token(house: House, max_batch_tokens: int) -> None:
    check(house, house.run(order(1), None, max_batch_tokens=max_batch_tokens, poison=True))


@pytest.mark.parametrize("drafter", ["wrong", "perfect", "random", "trees", "all", "lm", "eagle"])
def test_drafts_over_page_ends_change_no_token(house: House, drafter: str) -> None:
    """Drafts of eight tokens: most answers of sixteen tokens end a page."""
    check(house, house.run(order(2), drafter, depth=8, poison=True))


def test_a_few_slots_change_no_token(house: House) -> None:
    """Three slots: one request runs at a time, and one state is kept."""
    served = house.run(order(3), "wrong", num_slots=3, state_interval=16, repeats=2, poison=True)
    check(house, served)
    assert house.scheduler.cache.states is not None
    assert house.scheduler.cache.states.num_evicted > 0


def test_preempted_requests_go_on_with_the_same_tokens(house: House) -> None:
    served = house.run(order(4), "perfect", num_pages=12, max_batch_tokens=64, poison=True)
    assert house.scheduler.num_preemptions > 0
    check(house, served)


@pytest.mark.parametrize("drafter", [None, "perfect"])
def test_prompts_resumed_at_kept_states_give_the_tokens_of_cold_ones(
    house: House, drafter: str | None
) -> None:
    served = house.run(order(5), drafter, repeats=3, state_interval=16, num_slots=200)
    check(house, served)
    cached = [request.usage.cached_tokens for request in house.requests]
    assert sum(cached) > 0.5 * sum(request.prompt_len for request in house.requests)
