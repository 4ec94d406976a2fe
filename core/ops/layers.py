"""The layers of a decoder, one operation after another."""

from __future__ import annotations

from torch import Tensor

from .base import DecoderWeights, ForwardPlan, LayersOutput, Ops
from .batch import Taps


def run_layers(
    ops: Ops,
    weights: DecoderWeights,
    token_ids: Tensor,
    plan: ForwardPlan,
    taps: Taps = (),
    *,
    tapped: Tensor | None = None,
) -> LayersOutput:
    """Compute token ids ``[T]``; writes KV to the pool.

    ``tapped`` [T, num_taps * hidden]: where the taps go; a new tensor if None.
    """
    residual = ops.embedding(token_ids, weights.embedding)
    if taps and tapped is None:
        tapped = residual.new_empty((len(residual), len(taps) * residual.shape[1]))
    _tap(tapped, taps, 0, residual)
    x = ops.rms_norm(residual, weights.layers[0].input_norm, weights.norm_eps)
    following = (*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm)
    for index, next_norm in enumerate(following):
        x, residual = _layer(ops, weights, index, x, residual, next_norm, plan)
        _tap(tapped, taps, index + 1, residual)
    return LayersOutput(x, taps=tapped)


def _tap(tapped: Tensor | None, taps: Taps, boundary: int, residual: Tensor) -> None:
    """Copy the residual stream at a boundary, if it is wanted."""
    if tapped is not None and boundary in taps:
        at, width = taps.index(boundary), residual.shape[1]
        tapped[:, at * width : (at + 1) * width].copy_(residual)


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
