"""The layers of a decoder, one operation after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import ForwardPlan, LayersOutput, Ops
from .batch import Taps
from .gemma4 import add_extras, token_inputs
from .mixers.mixer import linear_of_ranks
from .parallel import summed
from .weights import (
    DecoderWeights,
    ExpertWeights,
    JoinedInputs,
    LayerWeights,
    MlpWeights,
    PackedLinear,
)


def run_layers(
    ops: Ops,
    weights: DecoderWeights,
    token_ids: Tensor,
    plans: Sequence[ForwardPlan],
    taps: Taps = (),
    *,
    tapped: Tensor | None = None,
    given: Tensor | None = None,
    layer_vectors: Tensor | None = None,
) -> LayersOutput:
    """Compute token ids ``[T]`` and write their KV to the pool.

    ``plans``: one for each part of the pool. ``tapped`` [T, num_taps * hidden]: memory for taps;
    None: new memory. ``given``: `Wanted.inputs`. ``layer_vectors``: `Wanted.layer_vectors`.
    """
    known_ids = token_ids if given is None else token_ids.clamp(min=0)
    residual = ops.embedding(known_ids, weights.embedding)
    joined = None
    if weights.joined is not None:
        assert given is not None, "the model needs an input vector for each row"
        joined, residual = join(ops, weights.joined, residual, given)
    elif given is not None:
        residual = torch.where((token_ids < 0).unsqueeze(-1), given, residual)
    inputs = token_inputs(ops, weights, known_ids, residual)
    if taps and tapped is None:
        tapped = residual.new_empty((len(residual), len(taps) * residual.shape[1]))
    _tap(tapped, taps, 0, residual)
    first = weights.layers[0].mixer_norm
    x = residual if first is None else ops.norm(residual, first)
    x = x if joined is None else joined
    residual = x if weights.layers[0].norms_stream else residual
    following = (*(layer.mixer_norm for layer in weights.layers[1:]), weights.final_norm)
    for index, next_norm in enumerate(following):
        layer = weights.layers[index]
        plan = plans[layer.part]
        x, residual = _mixer_and_mlp(ops, layer, x, residual, plan)
        if layer.extras is not None:
            x, residual = add_extras(ops, layer.extras, x, residual, plan, inputs[index])
        if layer_vectors is not None and index < len(layer_vectors):
            x = torch.where((token_ids < 0).unsqueeze(-1), x + layer_vectors[index], x)
        x, residual = ops.add_norm(x, residual, next_norm, layer.factors[1])
        _tap(tapped, taps, index + 1, residual)
        residual = x if layer.norms_stream else residual
    return LayersOutput(x, taps=tapped)


def join(ops: Ops, weights: JoinedInputs, embedded: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first mixer's input ``[T, 2 * hidden]`` and the first residual stream [T, hidden].

    ``embedded`` [T, hidden]: token embeddings. ``given`` [T, hidden]: input vectors of the rows.
    `JoinedInputs` defines the result.
    """
    normed = ops.norm(given, weights.given_norm)
    x = torch.cat((ops.norm(embedded, weights.embedding_norm), normed), dim=-1)
    return x, normed if weights.norms_residual else given


def _tap(tapped: Tensor | None, taps: Taps, boundary: int, residual: Tensor) -> None:
    """Copy the residual stream at a boundary into ``tapped`` if ``taps`` has the boundary."""
    if tapped is not None and boundary in taps:
        at, width = taps.index(boundary), residual.shape[1]
        tapped[:, at * width : (at + 1) * width].copy_(residual)


def _mixer_and_mlp(
    ops: Ops, layer: LayerWeights, x: Tensor, residual: Tensor, plan: ForwardPlan
) -> tuple[Tensor, Tensor]:
    """Compute a layer's mixer and MLP from its normed input ``x`` and the residual stream.

    Returns the layer's last output, not yet added to the stream, and the stream, both [T, hidden].
    """
    mlp = layer.mlp
    if layer.mixer is not None:
        second = None if layer.second_mixer is None else layer.second_mixer.compute(ops, x, plan)
        mixed = layer.mixer.compute(ops, x, plan)
        if second is not None:
            mixed, _ = ops.add_norm(second, mixed, None)
        if layer.mixer_out_norm is not None:
            mixed = ops.norm(mixed, layer.mixer_out_norm)
        if mlp is None:
            return mixed, residual
        if layer.is_parallel:
            _, residual = ops.add_norm(mixed, residual, None)
        else:
            x, residual = ops.add_norm(mixed, residual, layer.mlp_norm, layer.factors[0])
            residual = x if layer.norms_stream else residual
    assert mlp is not None, "a layer has neither a mixer nor an MLP"
    if isinstance(mlp, ExpertWeights):
        x = summed(ops.experts(x, mlp, plan), mlp.comm)
    else:
        x = run_mlp(ops, x, mlp)
    return (x if layer.mlp_out_norm is None else ops.norm(x, layer.mlp_out_norm)), residual


def run_mlp(ops: Ops, x: Tensor, mlp: MlpWeights) -> Tensor:
    """Compute an MLP on rows ``[T, hidden]``."""
    inner = ops.activate(ops.linear(x, mlp.gate_up), mlp.activation)
    return linear_of_ranks(ops, inner, mlp.down, mlp.comm)


def linear_of_few(ops: Ops, x: Tensor, weight: PackedLinear) -> Tensor:
    """Compute ``[.., in_features] -> [.., out_features]``; pad the rows to `Ops.min_rows`."""
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if count < ops.min_rows:
        rows = torch.cat((rows, rows[-1:].expand(ops.min_rows - count, -1)))
    out = ops.linear(rows, weight)[:count]
    return out.view(*x.shape[:-1], out.shape[-1])


def write_kv(ops: Ops, layer: LayerWeights, x: Tensor, plan: ForwardPlan) -> None:
    """Write a layer's keys and values of rows ``[T, hidden]`` of the stream; compute no output."""
    assert layer.mixer is not None, "only attention has keys and values"
    x = x if layer.mixer_norm is None else ops.norm(x, layer.mixer_norm)
    layer.mixer.write_kv(ops, x, plan)
