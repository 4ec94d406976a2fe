"""The layers of a decoder, one operation after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import (
    DecoderWeights,
    ExpertWeights,
    ForwardPlan,
    LayersOutput,
    LayerWeights,
    MlpWeights,
    Ops,
    PackedLinear,
)
from .batch import Taps
from .gemma4 import add_extras, token_inputs


def run_layers(
    ops: Ops,
    weights: DecoderWeights,
    token_ids: Tensor,
    plans: Sequence[ForwardPlan],
    taps: Taps = (),
    *,
    tapped: Tensor | None = None,
    given: Tensor | None = None,
) -> LayersOutput:
    """Compute token ids ``[T]``; writes KV to the pool. ``plans``: of each of its parts.

    ``tapped`` [T, num_taps * hidden]: where the taps go; a new tensor if None. ``given``: as
    `Wanted.inputs`.
    """
    known_ids = token_ids if given is None else token_ids.clamp(min=0)
    residual = ops.embedding(known_ids, weights.embedding)
    if given is not None:
        residual = torch.where((token_ids < 0).unsqueeze(-1), given, residual)
    inputs = token_inputs(ops, weights, known_ids, residual)
    if taps and tapped is None:
        tapped = residual.new_empty((len(residual), len(taps) * residual.shape[1]))
    _tap(tapped, taps, 0, residual)
    first = weights.layers[0].attention_norm
    x = residual if first is None else ops.norm(residual, first)
    following = (*(layer.attention_norm for layer in weights.layers[1:]), weights.final_norm)
    for index, next_norm in enumerate(following):
        layer = weights.layers[index]
        plan, factor = plans[layer.place.part], 1.0
        x, residual = _attend_and_think(ops, layer, x, residual, plan)
        if layer.extras is not None:
            x, residual = add_extras(ops, layer.extras, x, residual, plan, inputs[index])
            factor = layer.extras.factor
        x, residual = ops.add_norm(x, residual, next_norm, factor)
        _tap(tapped, taps, index + 1, residual)
    return LayersOutput(x, taps=tapped)


def _tap(tapped: Tensor | None, taps: Taps, boundary: int, residual: Tensor) -> None:
    """Copy the residual stream at a boundary, if it is wanted."""
    if tapped is not None and boundary in taps:
        at, width = taps.index(boundary), residual.shape[1]
        tapped[:, at * width : (at + 1) * width].copy_(residual)


def _attend_and_think(
    ops: Ops, layer: LayerWeights, x: Tensor, residual: Tensor, plan: ForwardPlan
) -> tuple[Tensor, Tensor]:
    """Normed input and residual of a layer to the output of its MLP, and the residual stream."""
    attended = _attend(ops, layer, x, plan)
    if layer.is_parallel:
        _, residual = ops.add_norm(attended, residual, None)
    else:
        x, residual = ops.add_norm(attended, residual, layer.mlp_norm)
    mlp = layer.mlp
    x = ops.experts(x, mlp, plan) if isinstance(mlp, ExpertWeights) else run_mlp(ops, x, mlp)
    return (x if layer.mlp_out_norm is None else ops.norm(x, layer.mlp_out_norm)), residual


def run_mlp(ops: Ops, x: Tensor, mlp: MlpWeights) -> Tensor:
    """Compute an MLP on rows ``[T, hidden]``."""
    return ops.linear(ops.activate(ops.linear(x, mlp.gate_up), mlp.activation), mlp.down)


def linear_of_few(ops: Ops, x: Tensor, weight: PackedLinear) -> Tensor:
    """``[.., in_features] -> [.., out_features]`` for any number of rows from 1 up."""
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if count < ops.min_rows:
        rows = torch.cat((rows, rows[-1:].expand(ops.min_rows - count, -1)))
    out = ops.linear(rows, weight)[:count]
    return out.view(*x.shape[:-1], out.shape[-1])


def write_kv(ops: Ops, layer: LayerWeights, x: Tensor, plan: ForwardPlan) -> None:
    """Write a layer's keys and values of rows ``[T, hidden]`` of the stream, and no more."""
    x = x if layer.attention_norm is None else ops.norm(x, layer.attention_norm)
    qkv = ops.linear(x, layer.qkv)
    ops.rope_write(qkv, layer.place.layer, plan, layer.head_norm, layer.tables)


def _attend(ops: Ops, layer: LayerWeights, x: Tensor, plan: ForwardPlan) -> Tensor:
    """Compute the summand that attention adds to the residual stream, ``[T, hidden]``."""
    index = layer.place.layer
    q = ops.rope_write(ops.linear(x, layer.qkv), index, plan, layer.head_norm, layer.tables)
    attended = ops.attention(q, index, plan, layer.window, cap=layer.cap, sinks=layer.sinks)
    x = ops.linear(attended, layer.o)
    return x if layer.attention_out_norm is None else ops.norm(x, layer.attention_out_norm)
