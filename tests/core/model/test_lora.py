"""Adapters against transformers' model with the adapter in its weights; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.core.model.decoder import Decoder
from foretoken.core.model.loader import load_decoder
from foretoken.core.model.lora import load_lora
from foretoken.core.ops.lora import LoraWeights
from foretoken.core.ops.native import native_library
from support.adapters import ALL, FUSED, merged, write_adapter
from support.checkpoints import ModelDriver, make_reference, save
from support.greedy_streams import random_ids

KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama_biased": {},
    "phi3_partial": {"targets": FUSED},
    "glm": {"targets": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")},
    "cohere2": {},
    "gemma2": {},
    "gemma4": {"targets": ("q_proj", "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj")},
    "granite": {},
    "starcoder2": {"targets": ("q_proj", "v_proj", "c_fc", "c_proj")},
    "qwen3_5": {"targets": (*ALL, "in_proj_qkv", "in_proj_z", "out_proj")},
    "lfm2": {"targets": ("q_proj", "k_proj", "v_proj", "self_attn.out_proj", "w1", "w2", "w3")},
    "qwen3_moe": {"targets": ("q_proj", "v_proj", "o_proj")},
}
BACKENDS = ["torch", *(["native"] if native_library() is not None else [])]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def logits(decoder: Decoder, ids: list[int], adapter: LoraWeights | None) -> torch.Tensor:
    """Logits of all positions, in chunks of 5 and what is left."""
    driver = ModelDriver(decoder, page_size=16)
    driver.adapter = adapter
    sequence = driver.add(ids)
    return driver.prefill(sequence, 5, 6, len(ids))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_merged_model(kind: str, backend: Any, tmp_path: Path) -> None:
    model = make_reference(kind)
    save(model, tmp_path / "base")
    folder = write_adapter(tmp_path / "adapter", model, **KINDS[kind])
    decoder = load_decoder(tmp_path / "base", backend=backend)
    loaded = load_lora(folder, decoder, max_rank=16)
    assert loaded.rank == 4
    ids = random_ids(23)
    with torch.no_grad():
        expected = merged(model, **KINDS[kind])(torch.tensor([ids])).logits[0]
        plain = model(torch.tensor([ids])).logits[0]
    found = logits(decoder, ids, loaded.weights)
    deviation = float(expected.std())
    assert float((expected - plain).abs().max()) > 0.1 * deviation
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4 * deviation)
