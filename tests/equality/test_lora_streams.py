"""Requests of several adapters in one batch: the tokens of each alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from foretoken.core.interface.extras.request_extras import request_extras
from foretoken.core.interface.request import Request
from foretoken.core.model.adapters.lora import load_lora
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.lora import LoraWeights
from foretoken.core.ops.native import native_library
from foretoken.radix_cache.audit import run as run_checks
from support.adapters import write_adapter
from support.checkpoints import make_reference, save
from support.draft_trees import TreeDepth
from support.equality_harness import House, shuffled
from support.native_variants import slow

NUM_REQUESTS = 16
Backend = Literal["torch", "native"]


class AdaptedHouse(House):
    """Every fourth request is the base's, the others are of three adapters."""

    adapters: list[LoraWeights]
    shares = False  # pages with other adapters, which is wrong

    def _request(self, index: int) -> Request:
        request = super()._request(index)
        if number := index // 2 % 4:
            request.extras = request_extras(self.adapters[number - 1], ())
            request.namespace = None if self.shares else f"adapter {number}"
        return request


@pytest.fixture(
    scope="module", params=[*slow("torch float32"), "native bfloat16", "native float32"]
)
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> House:
    backend, dtype = request.param.split()
    if backend == "native" and native_library() is None:
        pytest.skip("no native kernels on this machine")
    torch.set_num_threads(1)
    where: Path = tmp_path_factory.mktemp("house")
    model = make_reference("qwen3", vocab_size=256)
    save(model, where / "target")
    save(make_reference("qwen3", seed=1, vocab_size=256), where / "draft")
    options: dict[str, Any] = {"dtype": dtype, "exact": "batch", "backend": backend}
    target = load_decoder(where / "target", **options)
    AdaptedHouse.adapters = [
        load_lora(
            write_adapter(where / f"adapter-{n}", model, rank=rank, seed=n, targets=targets),
            target,
            max_rank=16,
        ).weights
        for n, (rank, targets) in enumerate(
            [(4, ("q_proj", "k_proj", "v_proj", "o_proj")), (16, ("down_proj",)), (3, ("up_proj",))]
        )
    ]
    return AdaptedHouse(
        target, load_decoder(where / "draft", **options), indices=range(NUM_REQUESTS)
    )


def order(house: House, seed: int) -> list[int]:
    return [index for index in shuffled(seed) if str(index) in house.solo]


def check(house: House, served: dict[str, list[int]]) -> None:
    house.check(served)
    assert len(served) == NUM_REQUESTS
    run_checks(house.scheduler.checks())


def test_adapters_change_the_tokens(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdaptedHouse, "_request", House._request)
    plain = house.run(order(house, 1), None)
    changed = [index for index in plain if plain[index] != house.solo[index]]
    assert all(int(index) // 2 % 4 for index in changed)
    assert len(changed) > NUM_REQUESTS // 2


@pytest.mark.parametrize("max_batch_tokens", [7, 48])
def test_chunks_beside_other_adapters_change_no_token(house: House, max_batch_tokens: int) -> None:
    check(house, house.run(order(house, 1), None, max_batch_tokens=max_batch_tokens, poison=True))


def test_trees_of_adapted_requests_change_no_token(house: House) -> None:
    served = house.run(
        order(house, 7), "trees", speculator=TreeDepth(10), max_batch_tokens=160, poison=True
    )
    check(house, served)
    assert sum(request.usage.accepted_tokens for request in house.requests) > 40


@pytest.mark.parametrize("drafter", ["wrong", "perfect", "auto+lm"])
def test_drafts_of_adapted_requests_change_no_token(house: House, drafter: str) -> None:
    check(house, house.run(order(house, 2), drafter, depth=4, repeats=2))


def test_an_adapter_reads_no_page_of_another(house: House) -> None:
    """Prompts that begin alike hit within their own namespace alone."""
    served = house.run(order(house, 3), None, repeats=2)
    check(house, served)
    assert sum(request.usage.cached_tokens for request in house.requests) > 0


def test_a_shared_page_would_change_tokens(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the harness: without namespaces the tokens are others."""
    monkeypatch.setattr(AdaptedHouse, "shares", True)
    served = house.run(order(house, 3), None, repeats=2)
    assert any(tokens != house.solo[index] for index, tokens in served.items())
