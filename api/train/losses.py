"""Losses whose value is the engine's and whose gradient is torch's.

A trainer's own forward pass rounds differently from the engine that sampled, so its importance
ratios are not 1 even for the policy that sampled. Here the engine's numbers replace the values, and
torch differentiates its forward pass of the same weights.
"""

from __future__ import annotations

import torch
from torch import Tensor


def engine_valued(values: Tensor, logprobs: Tensor) -> Tensor:
    """Return log-probabilities equal to ``values``, with the gradient of ``logprobs``.

    Both have the shape [num_tokens]. ``values``: the engine's log-probabilities, exactly
    returned; ``logprobs``: torch's, which must be finite. Raises ValueError for other shapes.
    """
    if values.shape != logprobs.shape:
        raise ValueError(f"{tuple(values.shape)} values for {tuple(logprobs.shape)} tokens")
    # A finite number minus itself is +0.0, and adding that changes no value.
    return values.to(logprobs.dtype) + (logprobs - logprobs.detach())


def importance_sampling(logprobs: Tensor, sampled: Tensor, advantages: Tensor) -> Tensor:
    """Return the negative sum of ratio times advantage over tokens, a scalar.

    All are [num_tokens]; the ratio of a token is exp(``logprobs`` - ``sampled``), exactly 1 where
    both are equal.
    """
    return -(torch.exp(logprobs - sampled) * advantages).sum()


def clipped(logprobs: Tensor, sampled: Tensor, advantages: Tensor, epsilon: float = 0.2) -> Tensor:
    """Return the negative sum of PPO's clipped objective over tokens, a scalar.

    All are [num_tokens]. Proximal Policy Optimization Algorithms, equation 7 (Schulman et al.,
    2017).
    """
    ratios = torch.exp(logprobs - sampled)
    bounded = ratios.clamp(1 - epsilon, 1 + epsilon)
    return -torch.minimum(ratios * advantages, bounded * advantages).sum()


def group_advantages(rewards: Tensor) -> Tensor:
    """Return the advantage of each answer in its group: [num_groups, num_answers].

    It is the reward minus the group's mean, divided by the group's standard deviation. A group of
    equal rewards has advantages of 0. DeepSeekMath, section 4.1 (Shao et al., 2024).
    """
    relative = rewards - rewards[:, :1]  # exactly 0 in a group of equal rewards
    spread = relative.std(dim=1, correction=0, keepdim=True)
    return (relative - relative.mean(dim=1, keepdim=True)) / (spread + 1e-4)
