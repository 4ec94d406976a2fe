"""Several ranks: with drafts, trees, hits and preemption the tokens that they say without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType

from foretoken.core.interface.kv_codec import KvDtype
from foretoken.core.model.loader import load_decoder
from foretoken.core.ops.native import native_library
from support.checkpoints import make_checkpoint
from support.draft_trees import RandomTrees
from support.equality_harness import House, shuffled
from support.gguf_files import write_gguf
from support.rank_threads import logits_of, tp_decoder

WIDE = {"hidden_size": 128, "intermediate_size": 256}  # halves of columns end at groups of 32
KINDS: dict[str, tuple[str, int, str, str, dict[str, Any]]] = {
    "torch, 2 ranks": ("qwen3", 2, "float32", "torch", {}),
    "native, 4 ranks": ("qwen3", 4, "float32", "native", {}),
    "native bfloat16, int8 KV, 2 ranks": ("llama_biased", 2, "bfloat16", "native", {}),
    "whole experts, 2 ranks": (
        "qwen2_moe",
        2,
        "bfloat16",
        "native",
        {"moe_intermediate_size": 37},
    ),
    "GGUF, 2 ranks": ("llama", 2, "auto", "native", WIDE | {"head_dim": 32}),
}
COUNTS = {"torch": 9, "native": 24}  # requests
LIMITS = {"float32": 1e-5, "bfloat16": 0.1, "auto": 0.1}  # of log-probabilities to one process


@pytest.fixture(scope="module", params=KINDS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[House, dict[str, str]]]:
    torch.set_num_threads(1)
    kind, size, dtype, backend, sizes = KINDS[request.param]
    if backend == "native" and native_library() is None:
        pytest.skip("no native kernels on this machine")
    sizes = {"vocab_size": 256, "num_key_value_heads": 4, "num_hidden_layers": 2} | sizes
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), kind, **sizes)
    model = folder
    if dtype == "auto":
        model = write_gguf(folder, folder / "model.gguf", kind=GgmlType.Q8_0)
    options = {"dtype": dtype, "backend": backend}
    with tp_decoder(model, size, **options) as target:
        alone = load_decoder(model, **options)  # type: ignore[arg-type]
        kv_dtype: KvDtype = "int8" if kind == "llama_biased" else "auto"
        yield House(target, alone, kv_dtype, indices=range(COUNTS[backend])), options


def some(house: House, seed: int, count: int) -> list[int]:
    """Some of the requests whose answers are known."""
    return [index for index in shuffled(seed) if str(index) in house.solo][:count]


def test_trees_on_shared_pages_change_no_token(served: Any) -> None:
    """Every rank moves the slots of accepted branches."""
    house: House = served[0]
    house.check(
        house.run(
            some(house, 4, 16),
            None,
            speculator=RandomTrees(house.solo),
            max_batch_tokens=160,
            poison=True,
        )
    )
    usages = [request.usage for request in house.requests]
    assert sum(usage.accepted_by_source.get("path 1", 0) for usage in usages) > 5


def test_wrong_drafts_and_preemption_change_no_token(served: Any) -> None:
    house: House = served[0]
    answers = house.run(some(house, 8, 16), "wrong", num_pages=50, max_batch_tokens=40)
    assert house.scheduler.num_preemptions > 0
    house.check(answers)


def test_hits_and_drafts_of_a_model_of_one_process_change_no_token(served: Any) -> None:
    house: House = served[0]
    order = some(house, 6, 8)
    answers = house.run(order, "lm", page_size=16, repeats=2)
    assert house.scheduler.cache.num_hits > 0
    for index in order:
        assert answers[str(index)] == house.solo[str(index)]


def test_log_probabilities_are_close_to_those_of_one_process(served: Any) -> None:
    house, options = served
    draw = torch.Generator().manual_seed(1)
    chunks: Sequence[Sequence[int]] = [
        torch.randint(4, 250, (count,), generator=draw).tolist() for count in (40, 1, 5, 1)
    ]
    ranks, alone = (
        logits_of([decoder], chunks).log_softmax(dim=1) for decoder in (house.target, house.draft)
    )
    difference = (ranks - alone).abs().max().item()
    print(f"largest difference of a log-probability to one process: {difference:.1e}")
    assert difference < LIMITS[options["dtype"]]
