"""The distillation loss of drafts: KL divergence and overlap with the target's distribution.

The target's distribution ``p`` covers only the ids that the draft knows, so its sum may be less
than 1. ``q`` is the draft's distribution.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_PART = 2**18  # number of probabilities processed together, which fit into a core's cache


class _KlOverlap(torch.autograd.Function):
    """``w KL(p, q) + (1 - w) (1 - overlap)`` of each row, with ``w = e^(-3 overlap)``.

    The overlap ``sum min(p, q)`` is the acceptance probability. The KL divergence gives useful
    gradients where the draft is far from the target. The weight w is treated as a constant in the
    gradient. Loss and gradient are computed together, for a part of the rows at a time, because
    passes over all probabilities are limited by memory bandwidth.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, p: Tensor, rows: Tensor) -> Tensor:  # noqa: ANN401
        grad = torch.empty_like(logits)
        losses = logits.new_empty(len(logits), dtype=torch.float32)
        size = max(1, _PART // logits.shape[1])
        for at in range(0, len(logits), size):
            part = slice(at, at + size)
            losses[part] = _part(logits[part].float(), p[rows[part]], grad[part])
        ctx.save_for_backward(grad)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (grad,) = ctx.saved_tensors
        return grad * grads[0].unsqueeze(-1).to(grad.dtype), None, None


def _part(logits: Tensor, p: Tensor, grad: Tensor) -> Tensor:
    """Return the losses of some rows; write their gradients to ``grad``."""
    total = logits.logsumexp(dim=-1, keepdim=True)
    log_q = logits - total
    mass = p.sum(dim=-1, keepdim=True)
    kl = torch.special.xlogy(p, p).sum(dim=-1, keepdim=True)
    kl -= (p * log_q).sum(dim=-1, keepdim=True)
    q = log_q.exp_()
    overlap = torch.minimum(p, q).sum(dim=-1, keepdim=True)
    weight = torch.exp(-3 * overlap)
    below = q * (q < p)  # A larger q increases the overlap only where q < p.
    scale = weight * mass + (1 - weight) * below.sum(dim=-1, keepdim=True)
    grad.copy_(q.mul_(scale).sub_(p * weight).sub_(below.mul_(1 - weight)))
    losses: Tensor = weight * kl + (1 - weight) * (1 - overlap)
    return losses.squeeze(-1)


def kl_overlap_loss(logits: Tensor, p: Tensor, rows: Tensor) -> Tensor:
    """Return the loss of each row, ``[n]``.

    ``logits`` [n, draft_vocab]: logits of the draft. ``p`` [num_rows, draft_vocab]: probabilities
    of the target. ``rows`` [n]: row of ``p`` for each row of the logits.
    """
    out: Tensor = _KlOverlap.apply(logits, p, rows)  # type: ignore[no-untyped-call]
    return out


def slot_weights(num_slots: int, length: float) -> Tensor:
    """Return the weight ``e^(-j / length)`` of each slot of a block, ``[num_slots]``.

    Early slots weigh more, because a rejected token makes the later ones worthless.
    """
    return torch.exp(-torch.arange(num_slots) / length)


def pass_weights(num_passes: int) -> list[float]:
    """Return the weight ``0.8^i`` of each unrolled pass of EAGLE-3 (arXiv 2503.01840)."""
    return [0.8**i for i in range(num_passes)]


def gumbel(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return Gumbel noise of the given shape."""
    return -torch.empty(shape).exponential_(generator=generator).clamp_min_(1e-30).log_()
