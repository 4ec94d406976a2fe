"""The numbers of a prompt's branches have the bits of prompts that end with them."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest

from foretoken.core.execution.model_runner import ModelRunner
from foretoken.core.interface.sampling import BranchPooling, Pooling
from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.scheduling.request_table import SchedulerLimits
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.radix_cache import PrefixCache
from support.checkpoints import make_checkpoint
from support.fake_model import Driver, make_request
from support.fixed_depth import FixedDepth

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB_SIZE, PAGE_SIZE, NUM_PAGES = 40, 4, 120
READ = (3, 1, 4)


@pytest.fixture(scope="module", params=["torch", "native"])
def decoder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Decoder:
    """Layers with a window of 50 positions and without."""
    folder = tmp_path_factory.mktemp("branches")
    path: Path = make_checkpoint(folder, "qwen3_layer_types", vocab_size=VOCAB_SIZE)
    return load_decoder(path, backend=request.param, dtype="float32", exact="batch")


def drive(decoder: Decoder) -> Driver:
    limits = SchedulerLimits(
        max_batch_tokens=24, max_running=6, max_queued=120, max_model_len=200,
        vocab_size=VOCAB_SIZE,
    )  # fmt: skip
    pool = decoder.make_pool(NUM_PAGES, page_size=PAGE_SIZE)
    scheduler = Scheduler(PrefixCache(NUM_PAGES, PAGE_SIZE), limits, FixedDepth(0))
    return Driver(scheduler, ModelRunner(decoder, pool))


def path_of(branches: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.append(branches[node])
        node = parents[node]
    return path[::-1]


def check(decoder: Decoder, rng: random.Random, length: int, parents: Sequence[int]) -> None:
    """Each path reads what a prompt that ends with it reads."""
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
    branches = [rng.randrange(VOCAB_SIZE) for _ in parents]
    pooling = Pooling(
        READ, is_normalized=True, branches=tuple(BranchPooling(each, READ) for each in parents)
    )
    driver = drive(decoder)
    driver.add(
        make_request("answer", prompt[:20], max_tokens=30, stop_ids=()),
        make_request("all", [*prompt, *branches], pooling=pooling, depth=0),
    )
    driver.run()
    found = driver.pooled["all"]
    alone = drive(decoder)
    for node in range(-1, len(parents)):
        tokens = [*prompt, *path_of(branches, parents, node)]
        alone.add(make_request(str(node), tokens, pooling=Pooling(READ, is_normalized=True)))
    alone.run()
    wanted = [alone.pooled[str(node)] for node in range(-1, len(parents))]
    assert array("f", found).tolist() == [each for numbers in wanted for each in numbers]


@pytest.mark.parametrize("length", [1, 30, 62, 127])
def test_branches_read_what_prompts_that_end_with_them_read(decoder: Decoder, length: int) -> None:
    rng = random.Random(length)
    parents = [-1, 0, 1, 0, -1, 4, 4, *(rng.randrange(-1, at) for at in range(7, 12))]
    check(decoder, rng, length, parents)


@pytest.mark.parametrize("length", [2, 61])
def test_long_branches_beside_the_trunk_are_like_prompts_too(decoder: Decoder, length: int) -> None:
    """Longer than the window of a layer, and the second one leaves the first in its middle."""
    parents = [-1, -1, *range(1, 70), 30, *range(71, 100)]
    check(decoder, random.Random(length), length, parents)


def test_a_later_prompt_reads_no_page_of_a_branch(decoder: Decoder) -> None:
    """The branches fill pages, and the later prompt has their tokens in the same order."""
    prompt, branches = [7] * 8, [1, 2, 3, 4, 5, 6, 7, 8]
    pooling = Pooling(READ, branches=tuple(BranchPooling(-1, READ) for _ in branches))
    text = [*prompt, *branches, 9]
    driver, alone = drive(decoder), drive(decoder)
    driver.add(make_request("branches", [*prompt, *branches], pooling=pooling, depth=0))
    driver.run()
    for each in (driver, alone):
        each.add(make_request("text", text, pooling=Pooling(READ)))
        each.run()
    assert driver.pooled["text"] == alone.pooled["text"]
