"""Prompts with images in the engine: the tokens of transformers' `generate`, however computed."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from foretoken.core.execution.model_runner import ModelRunner
from foretoken.core.execution.proposer import Proposer
from foretoken.core.interface.extras.images import PromptImage
from foretoken.core.interface.extras.request_extras import request_extras
from foretoken.core.interface.plan import StepPlan
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.images import tower_kernels
from foretoken.core.model.images.vision import Vision, load_vision
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.base import Ops
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.ops.native.native_ops import NativeOps
from foretoken.core.scheduling.chunk_budget import num_step_tokens
from foretoken.core.scheduling.request_table import SchedulerLimits
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.draft.proposers.lm_proposer import LmProposer
from foretoken.radix_cache import PrefixCache, StateSlots
from support.checkpoints import make_checkpoint, void_item
from support.equality_harness import SYNTHETIC, make_speculator
from support.fake_model import Driver
from support.fixed_depth import FixedDepth
from support.image_models import (
    CLASSES,
    GRIDS,
    MUTUAL,
    ROWS,
    SMALL_GEMMA4,
    make_prompt,
    prompt_tokens,
    random_inputs,
    reference_tokens,
    save_image_model,
)
from support.tiny_models import VOCAB

NUM_NEW = 12
NUM_PAGES = 400
PAGE = 4


class Asked(NamedTuple):
    """A prompt and what transformers says to it."""

    ids: list[int]
    images: tuple[PromptImage, ...]
    expected: list[int]


class Seeing:
    """A model that sees, its engine parts, and prompts with their answers."""

    def __init__(
        self,
        folder: Path,
        model_type: str,
        backend: str = "auto",
        *,
        is_mutual: bool = True,
        **text: Any,
    ) -> None:
        self.model_type, self.is_mutual = model_type, is_mutual
        self.path, self.reference = save_image_model(folder, model_type, **text)
        self.decoder = load_decoder(self.path, backend=backend)  # type: ignore[arg-type]
        self.texts = random.Random(3)

    def text(self, count: int) -> list[int]:
        return [self.texts.randrange(3, VOCAB - 2) for _ in range(count)]

    def ask(self, pieces: list[Any], *, salt: str | None = None) -> Asked:
        is_mutual = self.model_type in MUTUAL and self.is_mutual
        ids, images = make_prompt(self.model_type, pieces, salt=salt, is_mutual=is_mutual)
        given = [piece for piece in pieces if isinstance(piece, dict)]
        expected = reference_tokens(self.reference, self.model_type, ids, given, NUM_NEW)
        return Asked(ids, images, expected)

    def start(
        self,
        drafter: str | None = None,
        *,
        max_batch_tokens: int = 48,
        cache_bytes: int = 2**20,
        proposer: Callable[[dict[str, list[int]]], Proposer] | None = None,
        make_draft: Callable[[Decoder, KVPool], Proposer] | None = None,
        drive: type[Driver] = Driver,
    ) -> None:
        page_size, states, slots = PAGE, None, None
        if self.decoder.states:
            page_size = 16
            states = self.decoder.make_state_pool(24, 8, page_size=page_size)
            slots = StateSlots(24, 8, interval=16)
        cache = PrefixCache(NUM_PAGES, page_size, states=slots)
        limits = SchedulerLimits(
            max_batch_tokens=max_batch_tokens,
            max_running=8,
            max_queued=100,
            max_model_len=300,
            vocab_size=self.decoder.config.vocab_size,
            takes_images=True,
        )
        pool = self.decoder.make_pool(NUM_PAGES, page_size=page_size, states=states)
        pool.data.fill_(void_item(pool))
        self.vision = self.load_vision(cache_bytes, kernels=self.decoder.ops)
        made = None
        self.targets: dict[str, list[int]] = {}
        if proposer is not None:
            made = proposer(self.targets)
        elif make_draft is not None:
            made = make_draft(self.decoder, pool)
        runner = ModelRunner(self.decoder, pool, made, vision=self.vision)
        speculator = make_speculator(drafter) if drafter else FixedDepth(4 if made else 0)
        self.scheduler = Scheduler(cache, limits, speculator)
        self.driver = drive(self.scheduler, runner)

    def load_vision(self, cache_bytes: int = 0, *, kernels: Ops | None = None) -> Vision | None:
        ops = self.decoder.ops
        kernels = kernels if isinstance(kernels, NativeOps) else None
        return load_vision(self.path, self.decoder, ops, cache_bytes=cache_bytes, kernels=kernels)

    def serve(self, asked: Sequence[Asked], *, namespace: str | None = None) -> list[Request]:
        """Serve all at once, and compare with what is expected."""
        first = len(self.targets)
        requests = [
            Request(
                request_id=str(first + index),
                tokens=prompt_tokens(each.ids, each.images),
                sampling=SamplingMetadata(
                    params=TokenSamplingParams(temperature=0, max_tokens=NUM_NEW),
                    seed=0,
                    prompt_len=len(each.ids),
                ),
                namespace=namespace,
                extras=request_extras(None, each.images),
            )
            for index, each in enumerate(asked)
        ]
        for request, each in zip(requests, asked, strict=True):
            self.targets[request.request_id] = each.expected
        self.driver.add(*requests)
        self.driver.run()
        served = [self.driver.served[request.request_id] for request in requests]
        assert served == [each.expected for each in asked]
        return requests


@pytest.fixture(autouse=True)
def short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels compute the attention of tiny towers, too."""
    monkeypatch.setattr(tower_kernels, "LEAST_ROWS", 1)


@pytest.fixture(scope="module", params=sorted(CLASSES))
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    torch.set_num_threads(1)
    return Seeing(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    torch.set_num_threads(1)
    return Seeing(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    torch.set_num_threads(1)
    return Seeing(tmp_path_factory.mktemp("gemma3"), "gemma3")


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    torch.set_num_threads(1)
    return Seeing(tmp_path_factory.mktemp("smolvlm"), "smolvlm")


def one_and_three(model: Seeing) -> list[Asked]:
    """One image, three with text between, none, and the same text with another image."""
    image = [random_inputs(model.model_type, seed) for seed in range(4)]
    opening, rest = model.text(9), model.text(6)
    is_framed = model.model_type in (*GRIDS, *MUTUAL)  # there are tokens around them
    between = [model.text(1)] if is_framed else []
    asked = [
        model.ask([opening, image[0], rest]),
        model.ask(
            [model.text(3), image[1], model.text(2), image[2], *between, image[0], model.text(5)]
        ),
        model.ask([model.text(30)]),
        model.ask([opening, image[3], rest]),
    ]
    assert asked[0].expected != asked[3].expected, "the image decides nothing"
    return asked


def test_a_tower_s_attention_is_the_kernels(
    smolvlm: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside native kernels torch has one thread, which took most of the time of an image."""
    if not isinstance(smolvlm.decoder.ops, NativeOps):
        pytest.skip("no native kernels")
    asked = smolvlm.ask([smolvlm.text(3), random_inputs("smolvlm", 5), smolvlm.text(2)])
    vision, torchs = smolvlm.load_vision(kernels=smolvlm.decoder.ops), smolvlm.load_vision()
    assert vision is not None
    assert torchs is not None
    expected = torchs.vectors(asked.images[0])
    mutual: list[bool] = []
    attention = NativeOps.attention

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        mutual.append(options["is_mutual"])
        return attention(*args, **options)

    monkeypatch.setattr(NativeOps, "attention", noted)
    assert torch.allclose(vision.vectors(asked.images[0]), expected, atol=1e-5)
    layers = smolvlm.reference.config.vision_config.num_hidden_layers
    assert mutual == [True] * layers


@pytest.mark.parametrize("max_batch_tokens", [7, 64])
def test_images_give_the_tokens_of_generate_in_chunks_of_any_size(
    seeing: Seeing, max_batch_tokens: int
) -> None:
    seeing.start(max_batch_tokens=max_batch_tokens)
    seeing.serve(one_and_three(seeing))


@pytest.mark.parametrize("max_batch_tokens", [2, 7])
def test_images_of_several_tiles_in_torch(tmp_path: Path, max_batch_tokens: int) -> None:
    """Steps of one row have copies of it, which write the same KV."""
    model = Seeing(tmp_path, "idefics3", backend="torch")
    model.start(max_batch_tokens=max_batch_tokens)
    tiles = random_inputs("idefics3", 5, num_tiles=3)
    model.serve([model.ask([model.text(4), tiles, model.text(4)])])


def test_images_with_vectors_behind_layers_in_torch(tmp_path: Path) -> None:
    model = Seeing(tmp_path, "qwen3_vl", backend="torch")
    model.start(max_batch_tokens=7)
    model.serve(one_and_three(model))


def test_images_whose_rows_see_each_other_in_torch(tmp_path: Path) -> None:
    model = Seeing(tmp_path, "gemma3", backend="torch")
    model.start(max_batch_tokens=7)
    model.serve(one_and_three(model))


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_images_beside_tokens_with_inputs_of_their_own(tmp_path: Path, backend: str) -> None:
    """The small Gemma 4: a row of an image has the inputs of the padding token."""
    model = Seeing(tmp_path, "gemma4", backend, is_mutual=False, **SMALL_GEMMA4)
    model.start(max_batch_tokens=7)
    model.serve(one_and_three(model))


def test_a_hit_that_ends_among_rows_that_see_each_other(gemma3: Seeing) -> None:
    """Cached rows of the image were computed with all of it, and the rest are, too."""
    gemma3.start(max_batch_tokens=64)
    opening, image = gemma3.text(9), random_inputs("gemma3", 0)
    gemma3.serve([gemma3.ask([opening, image, gemma3.text(8)])])
    (request,) = gemma3.serve([gemma3.ask([opening, image, gemma3.text(9)])])
    assert len(opening) < request.usage.cached_tokens < len(opening) + ROWS["gemma3"]


def test_no_chunk_ends_among_rows_that_see_each_other(gemma3: Seeing) -> None:
    """Nor do the images of two requests both go beyond the tokens of one step."""
    plans: list[StepPlan] = []

    class Noting(Driver):
        def step(self) -> StepPlan:
            plans.append(super().step())
            return plans[-1]

    gemma3.start(max_batch_tokens=7, drive=Noting)
    asked = [
        gemma3.ask([gemma3.text(9 + at), random_inputs("gemma3", at), gemma3.text(6)])
        for at in range(3)
    ]
    gemma3.serve(asked)
    runs = {str(at): each.images[0].runs[0] for at, each in enumerate(asked)}
    for plan in plans:
        assert num_step_tokens(plan.requests) < 7 + ROWS["gemma3"]
        for each in plan.requests:
            first, count = runs[each.request_id]
            assert not first < each.stop < first + count


@pytest.mark.parametrize("drafter", ["perfect", "wrong", "trees"])
@pytest.mark.parametrize("name", ["smolvlm", "qwen", "gemma3"])
def test_images_with_drafts(request: pytest.FixtureRequest, name: str, drafter: str) -> None:
    model: Seeing = request.getfixturevalue(name)
    model.start(proposer=SYNTHETIC[drafter], max_batch_tokens=16)
    asked = one_and_three(model)
    model.serve(asked)
    model.serve(asked)


def test_images_with_look_ups_that_reach_into_another_prompt_s_image(smolvlm: Seeing) -> None:
    """The answer of one prompt is the beginning of another, which goes on with an image."""
    smolvlm.start("all", max_batch_tokens=32)
    opening = smolvlm.text(9)
    first = smolvlm.ask([opening])
    image = random_inputs("smolvlm", 0)
    smolvlm.serve([smolvlm.ask([[*opening, *first.expected[:4]], image, smolvlm.text(3)])])
    smolvlm.serve([first])


def test_images_with_a_draft_model_that_sees_none(smolvlm: Seeing, tmp_path: Path) -> None:
    draft = load_decoder(make_checkpoint(tmp_path, "qwen3", vocab_size=VOCAB))

    def proposer(_: Decoder, __: KVPool) -> Proposer:
        return LmProposer(draft, draft.make_pool(NUM_PAGES, page_size=PAGE), window=16)

    smolvlm.start(make_draft=proposer, max_batch_tokens=16)
    smolvlm.serve(one_and_three(smolvlm))


class Preempting(Driver):
    """Preempts every request after each fifth step."""

    num_steps = 0

    def step(self) -> Any:
        plan = super().step()
        self.num_steps += 1
        if self.num_steps % 5 == 0:
            for request in list(self.scheduler.running.values()):
                self.scheduler._preempt(request)
        return plan


def test_images_of_preempted_requests(seeing: Seeing) -> None:
    seeing.start(max_batch_tokens=7, drive=Preempting)
    seeing.serve(one_and_three(seeing))
    assert seeing.scheduler.num_preemptions > 4


@pytest.fixture(params=["smolvlm", "gemma3"])
def cached(request: pytest.FixtureRequest) -> Seeing:
    found: Seeing = request.getfixturevalue(request.param)
    return found


def test_an_image_in_the_next_turn_is_not_computed_again_and_hits_all_pages(
    cached: Seeing,
) -> None:
    cached.start(max_batch_tokens=16)
    assert cached.vision is not None
    image = random_inputs(cached.model_type, 0)
    opening, rows = cached.text(9), ROWS.get(cached.model_type, 4)
    first = cached.ask([opening, image, cached.text(7)])
    cached.serve([first])
    assert cached.vision.num_computed == 1
    answered = first.ids[len(opening) + rows :] + first.expected
    turn = cached.ask([opening, image, answered, [7, 8, 9]])
    (second,) = cached.serve([turn])
    assert cached.vision.num_computed == 1
    known = len(first.ids) + NUM_NEW - 1  # the last token's KV was never computed
    assert second.usage.cached_tokens == known // PAGE * PAGE
    assert second.usage.image_tokens == rows


def test_a_changed_pixel_hits_nothing_behind_it(cached: Seeing) -> None:
    cached.start(max_batch_tokens=16)
    assert cached.vision is not None
    image, opening, rest = random_inputs(cached.model_type, 0), cached.text(8), cached.text(20)
    cached.serve([cached.ask([opening, image, rest])])
    changed = {name: each.copy() for name, each in image.items()}
    changed["pixel_values"].flat[100] += 0.5
    (request,) = cached.serve([cached.ask([opening, changed, rest])])
    assert request.usage.cached_tokens == len(opening)
    assert cached.vision.num_computed == 2


def test_two_salts_share_nothing(cached: Seeing) -> None:
    cached.start(max_batch_tokens=16)
    assert cached.vision is not None
    pieces = [cached.text(8), random_inputs(cached.model_type, 0), cached.text(20)]
    one, other = (cached.ask(pieces, salt=salt) for salt in "ab")
    cached.serve([one], namespace="a")
    (request,) = cached.serve([other], namespace="b")
    assert request.usage.cached_tokens == 0
    assert cached.vision.num_computed == 2
    assert one.images[0].ids() != other.images[0].ids()


def test_vectors_are_kept_within_their_memory_and_the_last_in_any_case(smolvlm: Seeing) -> None:
    smolvlm.start(max_batch_tokens=7, cache_bytes=1)
    assert smolvlm.vision is not None
    smolvlm.serve([smolvlm.ask([smolvlm.text(3), random_inputs("smolvlm", 0), smolvlm.text(8)])])
    assert smolvlm.vision.num_computed == 1  # in two chunks
    asked = one_and_three(smolvlm)
    smolvlm.serve(asked[:2])
    assert len(smolvlm.vision._kept) == 1


def test_ids_of_rows_are_negative_and_fit_32_bits(smolvlm: Seeing) -> None:
    _, images = make_prompt("smolvlm", [random_inputs("smolvlm", 0), [3]])
    ids = images[0].ids()
    assert len(set(ids)) == 4
    assert all(-(2**31) <= each < 0 for each in ids)
    assert isinstance(ids, array)
