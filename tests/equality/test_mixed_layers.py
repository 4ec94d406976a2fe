"""Heads of two sizes, layers that read the keys of others, latents: same seed, same tokens."""

from __future__ import annotations

import pytest
import torch

from foretoken.core.ops.native import native_library
from support.checkpoints import make_checkpoint
from support.draft_trees import RandomTrees
from support.equality_harness import House, shuffled
from support.native_variants import slow

KINDS = {
    "torch": ("gemma4_shared", "float32", "torch", "auto"),
    "native bfloat16": ("gemma4_shared", "bfloat16", "native", "auto"),
    "native int8": ("gemma4_experts", "bfloat16", "native", "int8"),
    "mla torch": ("deepseek_v2", "float32", "torch", "auto"),
    "mla native": ("deepseek_v3", "float32", "native", "auto"),
    "mla native bfloat16": ("glm4_moe_lite", "bfloat16", "native", "auto"),
}

ORDER = shuffled(4)[:16]


IN_TORCH = [name for name in KINDS if name.endswith("torch")]
NATIVE = [name for name in KINDS if name not in IN_TORCH]


@pytest.fixture(scope="module", params=[*NATIVE, *slow(*IN_TORCH)])
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> House:
    torch.set_num_threads(1)
    kind, dtype, backend, kv_dtype = KINDS[request.param]
    if backend == "native" and native_library() is None:
        pytest.skip("no native kernels on this machine")
    sizes = {"vocab_size": 256}
    if kind.startswith("gemma4"):
        sizes |= {"vocab_size_per_layer_input": 256}
    folder = make_checkpoint(tmp_path_factory.mktemp(kind), kind, **sizes)
    pair = (folder, folder)
    return House.load(pair, dtype, backend, kv_dtype, indices=ORDER)  # type: ignore[arg-type]


def test_trees_and_shared_pages_change_no_token(house: House) -> None:
    """Accepted nodes are moved, slot by slot, over the layers of both kinds."""
    trees = RandomTrees(house.solo)
    house.check(house.run(ORDER, None, speculator=trees, max_batch_tokens=160, poison=True))
    usages = [request.usage for request in house.requests]
    assert sum(usage.accepted_by_source.get("path 1", 0) for usage in usages) > 10


def test_wrong_drafts_and_preemption_change_no_token(house: House) -> None:
    served = house.run(ORDER[::-1], "wrong", num_pages=59, max_batch_tokens=40, poison=True)
    assert house.scheduler.num_preemptions > 0
    house.check(served)


def test_a_cached_prompt_gives_the_tokens_of_a_cold_one(house: House) -> None:
    order = ORDER[:8]
    served = house.run(order, "lm", page_size=16, repeats=2)
    assert house.scheduler.cache.num_hits > 0
    for index in order:
        assert served[str(index)] == house.solo[str(index)]
