"""The layers of a decoder, one operation after another."""

from __future__ import annotations

from torch import Tensor

from .base import ForwardPlan, LayersOutput, Ops
from .weights import DecoderWeights


def run_layers(
    ops: Ops, weights: DecoderWeights, token_ids: Tensor, plan: ForwardPlan
) -> LayersOutput:
    """Compute token ids ``[T]``; writes KV to the pool."""
    residual = ops.embedding(token_ids, weights.embedding)
    x = ops.rms_norm(residual, weights.layers[0].input_norm, weights.norm_eps)
    following = (*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm)
    for index, next_norm in enumerate(following):
        x, residual = _layer(ops, weights, index, x, residual, next_norm, plan)
    return LayersOutput(x)


def _layer(
    ops: Ops,
    weights: DecoderWeights,
    index: int,
    x: Tensor,
    residual: Tensor,
    next_norm: Tensor,
    plan: ForwardPlan,
) -> tuple[Tensor, Tensor]:
    """Normed input and residual of a layer to those of the next."""
    layer, eps = weights.layers[index], weights.norm_eps
    q = ops.rope_write(ops.linear(x, layer.qkv), index, plan, layer.head_norm)
    attended = ops.attention(q, index, plan, layer.window)
    x = ops.linear(attended, layer.o)
    x, residual = ops.add_rms_norm(x, residual, layer.post_norm, eps)
    x = ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up)), layer.down)
    return ops.add_rms_norm(x, residual, next_norm, eps)
