"""A mixture of experts in plain PyTorch, one expert after another: the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base import Ops
from ..layers import linear_of_few, run_mlp
from ..weights import ExpertWeights, Routing


def run_experts(
    ops: Ops, x: Tensor, weights: ExpertWeights, routed_by: Tensor | None = None
) -> Tensor:
    """Return the sum of the outputs of each row's experts, [T, hidden], in the order of choice."""
    logits = ops.logits(x if routed_by is None else routed_by, weights.router)
    scores, chosen = route(logits, weights.routing, weights.choice_bias)
    if weights.factors is not None:
        scores = scores * weights.factors[chosen]
    # Slots of other ranks' experts stay 0.
    make = x.new_empty if len(weights.experts) == logits.shape[-1] else x.new_zeros
    slots = make((*chosen.shape, x.shape[-1]))
    here = range(weights.first, weights.first + len(weights.experts))
    for number in sorted(set(chosen.flatten().tolist()).intersection(here)):
        row, slot = (chosen == number).nonzero(as_tuple=True)
        mlp = weights.experts[number - weights.first]
        inner = ops.activate(linear_of_few(ops, x[row], mlp.gate_up), mlp.activation)
        slots[row, slot] = linear_of_few(ops, inner, mlp.down)
    out = torch.zeros_like(x, dtype=torch.float32)
    for slot in range(weights.routing.top_k):
        out += slots[:, slot].float() * scores[:, slot : slot + 1]
    if weights.shared is not None:
        shared = run_mlp(ops, x, weights.shared).float()
        if weights.shared_gate is not None:
            shared *= _sigmoid(ops.logits(x, weights.shared_gate))
        out += shared
    return out.to(x.dtype)


def route(logits: Tensor, routing: Routing, choice_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return each row's weights and experts, both ``[T, top_k]``, best first.

    ``logits``: [T, num_experts].
    """
    scores = logits if routing.of_chosen else _score(logits, routing)
    choice = scores if choice_bias is None else scores + choice_bias
    if routing.num_groups > 1:
        choice = _kept_groups(choice, routing)
    # A stable sort takes the first of equal scores, whatever else is in the row.
    chosen = choice.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, chosen)
    if routing.of_chosen:
        weights = _score(weights, routing)
    if routing.renorm is not None:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + routing.renorm)
    return weights * routing.factor, chosen


def _score(logits: Tensor, routing: Routing) -> Tensor:
    return logits.softmax(dim=-1) if routing.score == "softmax" else _sigmoid(logits)


def _sigmoid(x: Tensor) -> Tensor:
    # torch.sigmoid rounds the tail of a tensor unlike its body.
    return torch.exp(-x).add_(1.0).reciprocal_()


def _kept_groups(choice: Tensor, routing: Routing) -> Tensor:
    """Return the choice scores with minus infinity for experts outside the best groups."""
    groups = choice.view(len(choice), routing.num_groups, -1)
    num_judged = min(2 if routing.groups_by == "best two" else 1, groups.shape[-1])
    judged = groups.topk(num_judged, dim=-1).values.sum(dim=-1)
    best = judged.sort(dim=-1, descending=True, stable=True).indices[:, : routing.kept_groups]
    kept = torch.zeros_like(judged, dtype=torch.bool).scatter_(1, best, True)
    return groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
