"""Parts of a Gemma 4 layer that a Llama layer lacks; `Gemma4Extras` describes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import ForwardPlan, Ops
from .parallel import summed
from .weights import DecoderWeights, Gemma4Extras, ParallelExperts, TokenInputWeights


def token_inputs(
    ops: Ops, decoder: DecoderWeights, token_ids: Tensor, embedded: Tensor
) -> Sequence[Tensor | None]:
    """Return each layer's per-token inputs ``[T, width]``, each None without `TokenInputs`.

    ``embedded`` [T, hidden]: the tokens' rows of the embedding.
    """
    weights, num_layers = decoder.token_inputs, len(decoder.layers)
    if weights is None:
        return [None] * num_layers
    projected = ops.linear(embedded, weights.projection)
    normed = ops.norm(projected.view(-1, len(weights.norm.weight)), weights.norm)
    added = ops.embedding(token_ids, weights.table)
    inputs, _ = ops.add_norm(normed.view(projected.shape), added, None, weights.factor)
    return inputs.chunk(num_layers, dim=1)


def add_extras(
    ops: Ops,
    extras: Gemma4Extras,
    x: Tensor,
    residual: Tensor,
    plan: ForwardPlan,
    inputs: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute a layer's extras from the MLP's output ``x`` and the stream, both [T, hidden].

    ``inputs`` [T, width]: the layer's per-token inputs, if it has a ``token_input``. Returns the
    layer's last output, not yet added to the stream, and the stream.
    """
    if extras.experts is not None:
        x = _add_experts(ops, extras.experts, x, residual, plan)
    x = ops.norm(x, extras.out_norm)
    if extras.token_input is None:
        return x, residual
    assert inputs is not None
    _, residual = ops.add_norm(x, residual, None)
    return _gate_input(ops, extras.token_input, residual, inputs), residual


def _add_experts(
    ops: Ops, parallel: ParallelExperts, x: Tensor, residual: Tensor, plan: ForwardPlan
) -> Tensor:
    """Return the sum of the MLP's output ``x`` and the experts' output, each normed first."""
    read, routed_by = ops.norm(residual, parallel.norm), ops.norm(residual, parallel.router_norm)
    mixed = summed(ops.experts(read, parallel.experts, plan, routed_by), parallel.experts.comm)
    found = ops.norm(mixed, parallel.out_norm)
    return ops.add_norm(found, ops.norm(x, parallel.mlp_out_norm), None)[0]


def _gate_input(ops: Ops, weights: TokenInputWeights, residual: Tensor, inputs: Tensor) -> Tensor:
    """Return the per-token inputs gated by the stream, to be added to the stream."""
    pair = torch.cat((ops.linear(residual, weights.gate), inputs), dim=1)
    found = ops.linear(ops.activate(pair, weights.activation), weights.out)
    return ops.norm(found, weights.out_norm)
