"""What a draft's distribution has to come close to, and how near it is.

The target's distribution ``p`` is given over the ids that the draft knows, as log-probabilities
that need not add up to 1: what is missing lies on other ids. ``q`` is the draft's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

FLOOR = -1e30


class _Closeness(torch.autograd.Function):
    """``w KL(p, q) + (1 - w) (1 - sum min(p, q))`` with ``w = e^(-3 sum min(p, q))``, by row.

    KL finds the way from afar, the overlap is what acceptance counts (LK losses, w held fixed in
    the gradient). The gradient is computed along with the loss: nothing of the size of the logits
    but the gradient is kept.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, log_p: Tensor) -> Tensor:  # noqa: ANN401
        log_q = torch.log_softmax(logits.float(), dim=-1)
        p, q = log_p.exp(), log_q.exp()
        mass = p.sum(dim=-1, keepdim=True)
        overlap = torch.minimum(p, q).sum(dim=-1, keepdim=True)
        kl = (p * (log_p.clamp_min(FLOOR) - log_q)).sum(dim=-1, keepdim=True)
        weight = torch.exp(-3 * overlap)
        below = q.masked_fill(q >= p, 0.0)  # where more of q would be more overlap
        grad = weight * (mass * q - p)
        grad -= (1 - weight) * (below - q * below.sum(dim=-1, keepdim=True))
        ctx.save_for_backward(grad.to(logits.dtype))
        return (weight * kl + (1 - weight) * (1 - overlap)).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        (grad,) = ctx.saved_tensors
        return grad * grads[0].unsqueeze(-1).to(grad.dtype), None


def closeness_loss(logits: Tensor, log_p: Tensor) -> Tensor:
    """Loss of each row, ``[rows]``; ``logits`` and ``log_p`` [rows, draft_vocab]."""
    out: Tensor = _Closeness.apply(logits, log_p)  # type: ignore[no-untyped-call]
    return out


def slot_weights(num_slots: int, length: float) -> Tensor:
    """``e^(-j / length)`` of each slot of a block: the first decides whether others count."""
    return torch.exp(-torch.arange(num_slots) / length)


def pass_weights(num_passes: int) -> list[float]:
    """``0.8^i`` of each unrolled pass of EAGLE-3 (arXiv 2503.01840)."""
    return [0.8**i for i in range(num_passes)]


def agreement(logits: Tensor, log_p: Tensor, temperature: float, noise: Tensor) -> Tensor:
    """Whether target and draft choose the same id, ``[rows]`` of 0 and 1.

    Both add the same Gumbel ``noise`` [rows, draft_vocab + 1], as verification does; at temperature
    0 there is none. The last column stands for all ids that the draft does not know: a choice among
    them is never met.
    """
    if temperature == 0:
        mine, theirs = logits.argmax(dim=-1), log_p.argmax(dim=-1)
        best = log_p.amax(dim=-1)
        return ((mine == theirs) & (best >= _outside(log_p))).float()
    scaled = log_p / temperature
    # Of what lies outside only the mass at temperature 1 is known: an upper bound below that.
    outside = _outside(log_p).unsqueeze(-1) / temperature
    target = torch.cat((scaled, outside), dim=-1) + noise
    mine = (logits.float() / temperature + noise[:, :-1]).argmax(dim=-1)
    return (target.argmax(dim=-1) == mine).float()


def _outside(log_p: Tensor) -> Tensor:
    """Log of the mass on ids that the draft does not know, ``[rows]``."""
    return torch.log1p(-log_p.exp().sum(dim=-1).clamp(max=1 - 1e-7))


def gumbel(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Gumbel noise of a shape."""
    return -torch.empty(shape).exponential_(generator=generator).clamp_min_(1e-30).log_()


def mean_run(hits: Tensor) -> list[float]:
    """Of ``hits`` [chains, depth]: how many chains are right up to each depth, as shares."""
    if not len(hits):
        return [math.nan] * hits.shape[1]
    runs: list[float] = hits.cumprod(dim=-1).mean(dim=0).tolist()
    return runs
