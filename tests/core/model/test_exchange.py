"""Weights copied over those of another checkpoint compute what a fresh load computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.core.errors import ModelLoadError
from foretoken.core.model.decoder import Decoder, OwnDecoder
from foretoken.core.model.drafting.rough_copy import rough_decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.model.weights.exchange import copy_tensors, pair_tensors
from foretoken.core.ops.native import native_library
from support.checkpoints import ModelDriver, make_checkpoint
from support.greedy_streams import random_ids

KINDS = ("llama_tied", "llama_biased", "qwen3_moe", "gemma2", "gpt_oss", "deepseek_v3")

pytestmark = pytest.mark.skipif(native_library() is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load(path: Path, **options: Any) -> OwnDecoder:
    decoder = load_decoder(path, backend="native", **options)
    assert isinstance(decoder, OwnDecoder)
    return decoder


def logits(decoder: Decoder) -> torch.Tensor:
    driver = ModelDriver(decoder, page_size=16)
    ids = random_ids(9, seed=5)
    return driver.prefill(driver.add(ids), 4, len(ids))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_a_fresh_load(kind: str, dtype: str, tmp_path: Path) -> None:
    paths = [make_checkpoint(tmp_path / str(seed), kind, seed=seed) for seed in (0, 1)]
    old, new = (load(path, dtype=dtype) for path in paths)
    before, expected = logits(old), logits(new)
    assert not torch.equal(before, expected)
    copy_tensors(pair_tensors(old.weights, new.weights))
    assert torch.equal(logits(old), expected)


def test_a_rough_copy_follows(tmp_path: Path) -> None:
    paths = [make_checkpoint(tmp_path / str(seed), "qwen3", seed=seed) for seed in (0, 1)]
    old, new = (rough_decoder(load(path)) for path in paths)
    expected = logits(new)
    copy_tensors(pair_tensors(old.weights, new.weights))
    assert torch.equal(logits(old), expected)


def test_weights_of_another_layout_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "qwen3")
    wide, narrow = load(path, dtype="float32"), load(path, dtype="bfloat16")
    with pytest.raises(ModelLoadError, match="cannot be replaced: "):
        pair_tensors(wide.weights, narrow.weights)


def test_numbers_that_the_structs_of_kernels_copy_are_refused(tmp_path: Path) -> None:
    paths = [make_checkpoint(tmp_path / str(seed), "gemma4", seed=seed) for seed in (0, 1)]
    old, new = map(load, paths)
    with pytest.raises(ModelLoadError, match=r"cannot be replaced: .*factors"):
        pair_tensors(old.weights, new.weights)
