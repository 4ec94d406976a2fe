"""LoraPolicy on the tiny checkpoint: torch's forward pass, and the merged weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from foretoken.api.build.model_files import BUILTIN
from foretoken.api.train.policy import FILE, LoraPolicy
from foretoken.api.train.rollouts import Tokens

TARGET = BUILTIN / "target"
GIVEN = [
    Tokens(tuple(range(300, 311)), (17, 401, 9)),
    Tokens((700,), (5,)),
    Tokens((12, 13), tuple(range(40, 60))),
]


@pytest.fixture(scope="module")
def policy() -> LoraPolicy:
    torch.set_num_threads(1)
    return LoraPolicy(TARGET, rank=4)


@pytest.fixture(scope="module")
def moved() -> LoraPolicy:
    policy = LoraPolicy(TARGET, rank=4)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for each in policy.parameters():
            each.add_(0.05 * torch.randn(each.shape, generator=generator))
    return policy


@torch.no_grad()
def transformers_logprobs(folder: Path, given: Tokens) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = model(torch.tensor([[*given.prompt, *given.answer]])).logits[0]
    rows = torch.log_softmax(logits[len(given.prompt) - 1 : -1], dim=-1)
    return rows.gather(1, torch.tensor(given.answer)[:, None]).squeeze(1)


def test_an_untrained_policy_is_its_checkpoint(policy: LoraPolicy, tmp_path: Path) -> None:
    digest = policy.write(tmp_path)
    base, written = load_file(TARGET / FILE), load_file(tmp_path / FILE)
    assert base.keys() == written.keys()
    assert all(torch.equal(base[name], written[name]) for name in base)
    assert policy.write(tmp_path) == digest
    assert {each.name for each in tmp_path.iterdir()} == {each.name for each in TARGET.iterdir()}


def test_rows_of_a_batch_are_those_of_transformers_alone(policy: LoraPolicy) -> None:
    with torch.no_grad():
        found = policy.logprobs(GIVEN)
    assert [len(each) for each in found] == [3, 1, 20]
    for given, each in zip(GIVEN, found, strict=True):
        assert torch.allclose(each, transformers_logprobs(TARGET, given), atol=1e-4)


def test_the_merged_weights_are_the_trained_policy(moved: LoraPolicy, tmp_path: Path) -> None:
    moved.write(tmp_path)
    with torch.no_grad():
        found = torch.cat(moved.logprobs(GIVEN))
    merged = torch.cat([transformers_logprobs(tmp_path, given) for given in GIVEN])
    base = torch.cat([transformers_logprobs(TARGET, given) for given in GIVEN])
    assert (found - merged).abs().max() < 0.15, "bfloat16 rounds the merged weights"
    assert (found - base).abs().max() > 1


def test_only_adapters_have_gradients_and_a_seed_makes_them(policy: LoraPolicy) -> None:
    sum(each.sum() for each in policy.logprobs(GIVEN)).backward()  # type: ignore[union-attr]
    trained = [*policy.parameters()]
    assert len(trained) == 2 * 7 * 6
    assert all(each.grad is not None for each in trained)
    assert any(bool(each.grad.abs().max() > 0) for each in trained if each.grad is not None)
    assert [each for each in policy.model.parameters() if each.requires_grad] != []
    assert sum(each.requires_grad for each in policy.model.parameters()) == len(trained)
    same, other = LoraPolicy(TARGET, rank=4), LoraPolicy(TARGET, rank=4, seed=1)
    assert torch.equal(next(same.parameters()), next(policy.parameters()))
    assert not torch.equal(next(other.parameters()), next(policy.parameters()))
