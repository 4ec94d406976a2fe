"""Models with recurrent states: same seed, same tokens, whatever ran beside, before or instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor

from foretoken.core.execution.model_runner import ModelRunner
from foretoken.core.interface.output import StepOutput
from foretoken.core.interface.plan import StepPlan
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.native import native_library
from foretoken.core.ops.quantize import Quantize
from foretoken.core.ops.torch.torch_ops import TorchOps
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.radix_cache.audit import run as run_checks
from support.checkpoints import make_checkpoint
from support.equality_harness import REQUESTS, House, shuffled
from support.fake_model import Driver
from support.native_variants import slow


class Kind(NamedTuple):
    """A family, and how it is computed."""

    family: str
    dtype: Literal["float32", "bfloat16"]
    backend: Literal["torch", "native"]
    quantize: Quantize = "none"
    num_requests: int = 12


KINDS = {
    "torch": Kind("qwen3_5", "float32", "torch", num_requests=4),
    "native": Kind("qwen3_5", "float32", "native"),
    "native bfloat16": Kind("qwen3_next", "bfloat16", "native"),
    "native int8": Kind("qwen3_5", "bfloat16", "native", "int8"),
    "native int4": Kind("qwen3_5_moe", "bfloat16", "native", "int4"),
    "negative eigenvalues": Kind("olmo_hybrid", "bfloat16", "native", num_requests=4),
    "mamba torch": Kind("granite_hybrid_dense", "float32", "torch", num_requests=3),
    "mamba native": Kind("nemotron_h", "float32", "native"),
    "mamba beside attention": Kind("falcon_h1", "bfloat16", "native", num_requests=4),
    "mamba native int8": Kind("granite_hybrid", "bfloat16", "native", "int8", num_requests=6),
    "mamba native int4": Kind("nemotron_h", "bfloat16", "native", "int4", num_requests=6),
    "lightning torch": Kind("minimax", "float32", "torch", num_requests=3),
    "lightning native": Kind("minimax_scaled", "float32", "native"),
    "lightning native int4": Kind("minimax", "bfloat16", "native", "int4", num_requests=6),
    "conv torch": Kind("lfm2_biased", "float32", "torch", num_requests=4),
    "conv native": Kind("lfm2", "float32", "native"),
    "conv native int8": Kind("lfm2", "bfloat16", "native", "int8", num_requests=6),
    "conv native int4": Kind("lfm2_moe", "bfloat16", "native", "int4", num_requests=6),
}
CHUNKS = (1, 7, 16, 48)  # tokens of a step
DRAFTERS = ("wrong", "perfect", "random", "trees", "all", "lm", "eagle")
Take = Callable[[Sequence[Any], int, int], Any]  # the fixture `take`


# Widths that groups of 32 divide.
_SHARED_SIZES = {"vocab_size": 256, "intermediate_size": 96}
_SIZES: dict[str, dict[str, int]] = {
    "qwen3": _SHARED_SIZES | {"linear_value_head_dim": 32},
    "granite": _SHARED_SIZES,
    "falcon": _SHARED_SIZES,
    "minimax": _SHARED_SIZES | {"head_dim": 32},
    "lfm2": _SHARED_SIZES | {"moe_intermediate_size": 32},
    "olmo": _SHARED_SIZES,
    "nemotron": _SHARED_SIZES
    | {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32},
}


IN_TORCH = [name for name in KINDS if name.endswith("torch")]
NATIVE = [name for name in KINDS if name not in IN_TORCH]


@pytest.fixture(scope="module", params=[*NATIVE, *slow(*IN_TORCH)])
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> House:
    torch.set_num_threads(1)
    kind = KINDS[request.param]
    if kind.backend == "native" and native_library() is None:
        pytest.skip("no native kernels on this machine")
    where: Path = tmp_path_factory.mktemp(kind.family)
    folder = make_checkpoint(where / "target", kind.family, **_SIZES[kind.family.split("_")[0]])
    draft = make_checkpoint(where / "draft", "qwen3", vocab_size=256)
    options = {"dtype": kind.dtype, "exact": "batch", "backend": kind.backend}
    target = load_decoder(folder, **options, quantize=kind.quantize)  # type: ignore[arg-type]
    return House(
        target,
        load_decoder(draft, **options),  # type: ignore[arg-type]
        indices=range(kind.num_requests),
    )


def order(house: House, seed: int) -> list[int]:
    return [index for index in shuffled(seed) if str(index) in house.solo]


def check(house: House, served: dict[str, list[int]]) -> None:
    house.check(served)
    assert len(served) == len(house.solo)
    run_checks(house.scheduler.checks())


@pytest.mark.parametrize("place", range(2))
def test_chunks_of_any_size_change_no_token(house: House, place: int, take: Take) -> None:
    size = take(CHUNKS, 2, place)
    check(house, house.run(order(house, 1), None, max_batch_tokens=size, poison=True))


@pytest.mark.parametrize("place", range(3))
def test_drafts_over_page_ends_change_no_token(house: House, place: int, take: Take) -> None:
    """Drafts of eight tokens: most answers of sixteen tokens end a page."""
    drafter = take(DRAFTERS, 3, place)
    check(house, house.run(order(house, 2), drafter, depth=8, poison=True))


@pytest.mark.parametrize("drafter", ["self", "failing self", "unrounded self"])
def test_self_drafts_change_no_token_though_what_they_wrote_is_void(
    house: House, drafter: str
) -> None:
    """Drafts end with the page; of an unrounded copy they are right up to there."""
    if isinstance(house.target.ops, TorchOps) or house.target.ops.quantize == "int4":
        pytest.skip("no rough copy")
    served = house.run(order(house, 2), drafter, depth=8, repeats=2, state_interval=16)
    check(house, served)
    usages = [request.usage for request in house.requests]
    accepted = sum(usage.accepted_by_source.get("self", 0) for usage in usages)
    assert accepted > 10
    if drafter == "unrounded self":
        proposed = sum(usage.proposed_tokens for usage in usages)
        assert proposed - accepted <= 8 * len(usages)  # those behind the end alone


def test_a_few_slots_change_no_token(house: House) -> None:
    """Three slots: one request runs at a time, and one state is kept."""
    served = house.run(
        order(house, 3), "wrong", num_slots=3, state_interval=16, repeats=2, poison=True
    )
    check(house, served)
    assert house.scheduler.cache.states is not None
    assert house.scheduler.cache.states.num_evicted > 0


def test_preempted_requests_go_on_with_the_same_tokens(house: House) -> None:
    served = house.run(order(house, 4), "perfect", num_pages=12, max_batch_tokens=64, poison=True)
    check(house, served)
    assert house.scheduler.num_preemptions > 0 or len(served) < 12


@pytest.mark.parametrize("drafter", [None, "perfect"])
def test_prompts_resumed_at_kept_states_give_the_tokens_of_cold_ones(
    house: House, drafter: str | None
) -> None:
    served = house.run(order(house, 5), drafter, repeats=3, state_interval=16, num_slots=200)
    check(house, served)
    cached = [request.usage.cached_tokens for request in house.requests]
    assert sum(cached) > 0.5 * sum(request.prompt_len for request in house.requests)


class Preempting(Driver):
    """Preempts a request once, as soon as it has computed so many tokens."""

    at = 0

    def step(self) -> StepPlan:
        plan = super().step()
        for request in list(self.scheduler.running.values()):
            if request.num_computed >= self.at and not self.scheduler.num_preemptions:
                self.scheduler._preempt(request)
        return plan


def test_a_request_preempted_at_any_place_goes_on_with_the_same_tokens(
    house: House, take: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every fourth of 32 places over two pages, in the prompt and in the answer.

    Four kinds of model are preempted at places of which each has its own.
    """
    index = max((int(each) for each in house.solo), key=lambda each: len(REQUESTS[each][0]))
    end = len(REQUESTS[index][0]) + len(house.solo[str(index)]) - 1
    for at in range(end - 32 + take(range(4), 1, 0), end, 4):
        monkeypatch.setattr(Preempting, "at", at)
        served = house.run([index], None, max_batch_tokens=48, drive=Preempting, poison=True)
        house.check(served)
        assert house.scheduler.num_preemptions == 1
        assert house.requests[0].usage.cached_tokens == 0


class Failing(Driver):
    """Computes each step of decode rows twice: first it fails in one of the layers."""

    layer = 0
    num_failed = 0

    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        super().__init__(scheduler, runner)  # type: ignore[arg-type]
        self._compute, self._ops = runner.step, runner.decoder.ops
        runner.step = self._twice  # type: ignore[method-assign]

    def _twice(self, plan: StepPlan) -> StepOutput:
        if all(each.stop - each.start == 1 for each in plan.requests):
            with pytest.MonkeyPatch.context() as patch:
                for name in ("recur", "short_conv"):
                    patch.setattr(self._ops, name, self._fail(getattr(self._ops, name)))
                with pytest.raises(RuntimeError, match="a layer fails"):
                    self._compute(plan)
            Failing.num_failed += 1
        return self._compute(plan)

    def _fail(self, mix: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def failing(*arguments: Any) -> Tensor:
            *_, weights, _ = arguments
            if weights.layer == self.layer:
                raise RuntimeError("a layer fails")
            return mix(*arguments)

        return failing


@pytest.mark.parametrize("layer", range(3))
def test_a_step_that_failed_in_a_layer_is_computed_again_to_the_same_tokens(
    house: House, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers before it have folded a page already: they do not fold it twice."""
    if type(house.target.ops) is not TorchOps:
        pytest.skip("the native kernels compute all layers in one call")
    monkeypatch.setattr(Failing, "layer", layer)
    monkeypatch.setattr(Failing, "num_failed", 0)
    check(house, house.run(order(house, 7), "wrong", drive=Failing, poison=True))
    assert Failing.num_failed > 10
