"""The distillation loss of drafts: KL divergence and overlap with the target's distribution.

The target's distribution ``p`` is given over the ids that the draft knows: it need not add up to
1, for what is missing lies on other ids. ``q`` is the draft's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_PART = 2**18  # probabilities that are worked on together: they stay in a core's cache


class _KlOverlap(torch.autograd.Function):
    """``w KL(p, q) + (1 - w) (1 - sum min(p, q))`` with ``w = e^(-3 sum min(p, q))``, by row.

    KL finds the way from afar, the overlap is what acceptance counts; w is held fixed in the
    gradient. The gradient is computed along with the loss, a part of the rows at a time: passes
    over all of the probabilities would wait for memory (measured: a third of all training).
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
    """The losses of some rows; their gradients are written to ``grad``."""
    total = logits.logsumexp(dim=-1, keepdim=True)
    log_q = logits - total
    mass = p.sum(dim=-1, keepdim=True)
    kl = torch.special.xlogy(p, p).sum(dim=-1, keepdim=True)
    kl -= (p * log_q).sum(dim=-1, keepdim=True)
    q = log_q.exp_()
    overlap = torch.minimum(p, q).sum(dim=-1, keepdim=True)
    weight = torch.exp(-3 * overlap)
    below = q * (q < p)  # where more of q would be more overlap
    scale = weight * mass + (1 - weight) * below.sum(dim=-1, keepdim=True)
    grad.copy_(q.mul_(scale).sub_(p * weight).sub_(below.mul_(1 - weight)))
    losses: Tensor = weight * kl + (1 - weight) * (1 - overlap)
    return losses.squeeze(-1)


def kl_overlap_loss(logits: Tensor, p: Tensor, rows: Tensor) -> Tensor:
    """Loss of each row, ``[n]``.

    ``logits`` [n, draft_vocab] of the draft, ``p`` [num_rows, draft_vocab] of the target, of which
    ``rows`` [n] says which belongs to each.
    """
    out: Tensor = _KlOverlap.apply(logits, p, rows)  # type: ignore[no-untyped-call]
    return out


def slot_weights(num_slots: int, length: float) -> Tensor:
    """``e^(-j / length)`` of each slot of a block: the first decides whether others count."""
    return torch.exp(-torch.arange(num_slots) / length)


def pass_weights(num_passes: int) -> list[float]:
    """``0.8^i`` of each unrolled pass of EAGLE-3 (arXiv 2503.01840)."""
    return [0.8**i for i in range(num_passes)]


def gumbel(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Gumbel noise of a shape."""
    return -torch.empty(shape).exponential_(generator=generator).clamp_min_(1e-30).log_()
