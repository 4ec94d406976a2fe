"""Losses with the engine's values and torch's gradient, and the estimates of the numerics check."""

from __future__ import annotations

import pytest
import torch

from foretoken.api.train.losses import (
    clipped,
    engine_valued,
    group_advantages,
    importance_sampling,
)
from foretoken.api.train.numerics import kl_sample_train

SAMPLED = torch.tensor([-0.1, -2.7182817, -13.5, -1e-7])
ADVANTAGES = torch.tensor([1.5, -0.5, 2.0, 0.25])


def torchs_own() -> torch.Tensor:
    """The log-probabilities of a trainer, which rounds differently, with a gradient."""
    return (SAMPLED + torch.tensor([1e-3, -2e-4, 5e-3, 1e-8])).requires_grad_()


def test_the_value_is_the_engines_in_every_bit_and_the_gradient_is_torchs() -> None:
    own = torchs_own()
    valued = engine_valued(SAMPLED, own)
    assert torch.equal(valued, SAMPLED)
    valued.mul(ADVANTAGES).sum().backward()
    assert own.grad is not None
    assert torch.equal(own.grad, ADVANTAGES)


def test_values_of_other_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(4,\) values for \(3,\) tokens"):
        engine_valued(SAMPLED, torch.zeros(3))


@pytest.mark.parametrize("loss", [importance_sampling, clipped])
def test_at_the_sampling_policy_ratios_are_1_and_the_gradient_is_the_policy_gradient(
    loss: object,
) -> None:
    own = torchs_own()
    found = loss(engine_valued(SAMPLED, own), SAMPLED, ADVANTAGES)  # type: ignore[operator]
    assert found.item() == -ADVANTAGES.sum().item()
    found.backward()
    assert own.grad is not None
    assert torch.equal(own.grad, -ADVANTAGES)


def test_the_clipped_loss_has_no_gradient_where_the_ratio_has_moved_far_enough() -> None:
    moved = (SAMPLED + torch.tensor([0.5, -0.5, -0.5, 0.1])).requires_grad_()
    clipped(moved, SAMPLED, ADVANTAGES).backward()
    assert moved.grad is not None
    assert [bool(each) for each in moved.grad] == [False, False, True, True]


def test_advantages_are_rewards_relative_to_their_group() -> None:
    found = group_advantages(torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.7, 0.7, 0.7, 0.7]]))
    assert found[0].tolist() == pytest.approx([-1, 1, -1, 1], abs=1e-3)
    assert found[1].abs().max() < 1e-2
    assert torch.equal(group_advantages(torch.full((1, 8), 0.2)), torch.zeros(1, 8))


def test_the_estimates_are_the_mean_difference_and_half_the_mean_square() -> None:
    found = kl_sample_train([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0], [-2.75]])
    assert found.v1 == pytest.approx((0.5 + 0.0 - 0.25) / 3)
    assert found.v2 == pytest.approx((0.25 + 0.0625) / 6)
    assert (found.num_tokens, found.num_different) == (3, 2)
    assert kl_sample_train([[-1.0]], [[-1.0]]) == (0.0, 0.0, 1, 0)
    with pytest.raises(ValueError, match="no tokens"):
        kl_sample_train([[]], [[]])
    with pytest.raises(ValueError, match="shorter"):
        kl_sample_train([[-1.0, -2.0]], [[-1.0]])
