"""Same seed, same tokens with a trained head drafting, on every backend of this machine."""

from __future__ import annotations

import pytest
import torch

from foretoken.core.ops.native import native_library
from support.equality_harness import House, shuffled
from support.tiny_pair import write_pair


@pytest.fixture(scope="module", params=["float32-torch", "bfloat16-native"])
def house(request, tmp_path_factory) -> House:
    torch.set_num_threads(1)
    dtype, backend = request.param.split("-")
    if backend == "native" and native_library() is None:
        pytest.skip("no native kernels on this machine")
    pair = write_pair(tmp_path_factory.mktemp("pair"), vocab_size=256)
    return House.load(pair, dtype, backend)


@pytest.mark.parametrize(
    "drafter",
    ["block", "reduced", "eagle", "medusa", "auto+block", "auto+eagle", "auto+medusa"],
)
def test_no_head_changes_a_token(house: House, drafter) -> None:
    house.check(house.run(shuffled(3)[::2], drafter, max_running=5))
    proposed = sum(request.usage.proposed_tokens for request in house.requests)
    assert proposed > 100


@pytest.mark.parametrize("drafter", ["block", "auto+eagle"])
def test_preemption_with_a_head_changes_no_token(house: House, drafter) -> None:
    served = house.run(shuffled(4)[:24], drafter, num_pages=59, max_batch_tokens=40)
    assert house.scheduler.num_preemptions > 0
    house.check(served)


@pytest.mark.parametrize(("drafter", "page_size"), [("block", 1), ("eagle", 1), ("eagle", 16)])
def test_a_hit_with_a_head_changes_no_token(house: House, drafter, page_size) -> None:
    order = shuffled(6)[:10]
    served = house.run(order, drafter, page_size=page_size, repeats=2)
    assert house.scheduler.cache.num_hits > 0
    for index in order:
        assert served[str(index)] == house.solo[str(index)]
