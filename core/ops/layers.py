"""The layers of a decoder, one operation after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import (
    DecoderWeights,
    ExpertsBeside,
    ExpertWeights,
    ForwardPlan,
    LayersOutput,
    LayerWeights,
    MlpWeights,
    Ops,
    PackedLinear,
    TokenInputs,
    TokenInputWeights,
)
from .batch import Taps


def run_layers(
    ops: Ops,
    weights: DecoderWeights,
    token_ids: Tensor,
    plans: Sequence[ForwardPlan],
    taps: Taps = (),
    *,
    tapped: Tensor | None = None,
) -> LayersOutput:
    """Compute token ids ``[T]``; writes KV to the pool. ``plans``: of each of its parts.

    ``tapped`` [T, num_taps * hidden]: where the taps go; a new tensor if None.
    """
    residual = ops.embedding(token_ids, weights.embedding)
    inputs = _token_inputs(ops, weights.token_inputs, token_ids, residual)
    if taps and tapped is None:
        tapped = residual.new_empty((len(residual), len(taps) * residual.shape[1]))
    _tap(tapped, taps, 0, residual)
    first = weights.layers[0].attention_norm
    x = residual if first is None else ops.norm(residual, first)
    following = (*(layer.attention_norm for layer in weights.layers[1:]), weights.final_norm)
    for index, next_norm in enumerate(following):
        layer = weights.layers[index]
        x, residual = _attend_and_think(ops, layer, x, residual, plans[layer.place.part])
        if layer.token_input is not None:
            assert inputs is not None
            _, residual = ops.add_norm(x, residual, None)
            x = _add_input(ops, layer.token_input, residual, inputs, index)
        x, residual = ops.add_norm(x, residual, next_norm, layer.factor)
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
    """Normed input and residual of a layer to what its MLP adds to the stream, and the stream."""
    attended = _attend(ops, layer, x, plan)
    if layer.is_parallel:
        _, residual = ops.add_norm(attended, residual, None)
    else:
        x, residual = ops.add_norm(attended, residual, layer.mlp_norm)
    mlp = layer.mlp
    x = ops.experts(x, mlp, plan) if isinstance(mlp, ExpertWeights) else run_mlp(ops, x, mlp)
    if layer.beside is not None:
        x = _add_experts(ops, layer.beside, x, residual, plan)
    return (x if layer.mlp_out_norm is None else ops.norm(x, layer.mlp_out_norm)), residual


def _add_experts(
    ops: Ops, beside: ExpertsBeside, x: Tensor, residual: Tensor, plan: ForwardPlan
) -> Tensor:
    """What an MLP says, ``x``, and what the experts beside it say, added up."""
    read, routed_by = ops.norm(residual, beside.norm), ops.norm(residual, beside.router_norm)
    said = ops.norm(ops.experts(read, beside.experts, plan, routed_by), beside.out_norm)
    return ops.add_norm(said, ops.norm(x, beside.mlp_out_norm), None)[0]


def _token_inputs(
    ops: Ops, weights: TokenInputs | None, token_ids: Tensor, embedded: Tensor
) -> Tensor | None:
    """The inputs of all layers, ``[T, num_layers * width]``, where layers have such."""
    if weights is None:
        return None
    projected = ops.linear(embedded, weights.projection)
    normed = ops.norm(projected.view(-1, len(weights.norm.weight)), weights.norm)
    added = ops.embedding(token_ids, weights.table)
    return ops.add_norm(normed.view(projected.shape), added, None, weights.factor)[0]


def _add_input(
    ops: Ops, weights: TokenInputWeights, residual: Tensor, inputs: Tensor, index: int
) -> Tensor:
    """What a layer adds to the stream of the inputs that tokens have for it."""
    gate = ops.linear(residual, weights.gate)
    width = gate.shape[1]
    pair = torch.cat((gate, inputs[:, index * width : (index + 1) * width]), dim=1)
    said = ops.linear(ops.activate(pair, weights.activation), weights.out)
    return ops.norm(said, weights.out_norm)


def run_mlp(ops: Ops, x: Tensor, mlp: MlpWeights) -> Tensor:
    """What an MLP makes of rows ``[T, hidden]``."""
    return ops.linear(ops.activate(ops.linear(x, mlp.gate_up), mlp.activation), mlp.down)


def linear_of_few(ops: Ops, x: Tensor, weight: PackedLinear) -> Tensor:
    """``[.., in_features] -> [.., out_features]`` for any number of rows from 1 up."""
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if count < ops.min_rows:
        rows = torch.cat((rows, rows[-1:].expand(ops.min_rows - count, -1)))
    out = ops.linear(rows, weight)[:count]
    return out.view(*x.shape[:-1], out.shape[-1])


def _attend(ops: Ops, layer: LayerWeights, x: Tensor, plan: ForwardPlan) -> Tensor:
    """What attention adds to the stream."""
    index = layer.place.layer
    q = ops.rope_write(ops.linear(x, layer.qkv), index, plan, layer.head_norm, layer.tables)
    attended = ops.attention(q, index, plan, layer.window, cap=layer.cap, sinks=layer.sinks)
    x = ops.linear(attended, layer.o)
    return x if layer.attention_out_norm is None else ops.norm(x, layer.attention_out_norm)
