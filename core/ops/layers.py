"""The layers of a decoder, one operation after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import ForwardPlan, LayersOutput, Ops
from .batch import Taps
from .gemma4 import add_extras, token_inputs
from .parallel import Comm, summed
from .weights import (
    AttentionWeights,
    ConvWeights,
    DecoderWeights,
    ExpertWeights,
    JoinedInputs,
    LatentWeights,
    LayerWeights,
    MixerWeights,
    MlpWeights,
    PackedLinear,
    RecurrentWeights,
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
    """Compute token ids ``[T]``; writes KV to the pool. ``plans``: of each of its parts.

    ``tapped`` [T, num_taps * hidden]: where the taps go; a new tensor if None. ``given``: as
    `Wanted.inputs`. ``layer_vectors``: as `Wanted.layer_vectors`.
    """
    known_ids = token_ids if given is None else token_ids.clamp(min=0)
    residual = ops.embedding(known_ids, weights.embedding)
    joined = None
    if weights.joined is not None:
        assert given is not None, "rows that are joined have a vector each"
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
    following = (*(layer.mixer_norm for layer in weights.layers[1:]), weights.final_norm)
    for index, next_norm in enumerate(following):
        layer = weights.layers[index]
        plan, factor = plans[layer.part], 1.0
        x, residual = _mix_and_think(ops, layer, x, residual, plan)
        if layer.extras is not None:
            x, residual = add_extras(ops, layer.extras, x, residual, plan, inputs[index])
            factor = layer.extras.factor
        if layer_vectors is not None and index < len(layer_vectors):
            x = torch.where((token_ids < 0).unsqueeze(-1), x + layer_vectors[index], x)
        x, residual = ops.add_norm(x, residual, next_norm, factor)
        _tap(tapped, taps, index + 1, residual)
    return LayersOutput(x, taps=tapped)


def join(ops: Ops, weights: JoinedInputs, embedded: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """Make the first mixer's input, ``[T, 2 * hidden]``, and the residual stream of these rows.

    ``embedded`` and ``given``: [T, hidden] both.
    """
    normed = ops.norm(given, weights.given_norm)
    x = torch.cat((ops.norm(embedded, weights.embedding_norm), normed), dim=-1)
    return x, normed if weights.norms_residual else given


def _tap(tapped: Tensor | None, taps: Taps, boundary: int, residual: Tensor) -> None:
    """Copy the residual stream at a boundary, if it is wanted."""
    if tapped is not None and boundary in taps:
        at, width = taps.index(boundary), residual.shape[1]
        tapped[:, at * width : (at + 1) * width].copy_(residual)


def _mix_and_think(
    ops: Ops, layer: LayerWeights, x: Tensor, residual: Tensor, plan: ForwardPlan
) -> tuple[Tensor, Tensor]:
    """Normed input and residual of a layer to what its last part adds to the stream, and that."""
    mlp = layer.mlp
    if layer.mixer is not None:
        mixed = _mix(ops, layer, layer.mixer, x, plan)
        if mlp is None:
            return mixed, residual
        if layer.is_parallel:
            _, residual = ops.add_norm(mixed, residual, None)
        else:
            x, residual = ops.add_norm(mixed, residual, layer.mlp_norm)
    assert mlp is not None, "a layer has a mixer or an MLP"
    if isinstance(mlp, ExpertWeights):
        x = summed(ops.experts(x, mlp, plan), mlp.comm)
    else:
        x = run_mlp(ops, x, mlp)
    return (x if layer.mlp_out_norm is None else ops.norm(x, layer.mlp_out_norm)), residual


def run_mlp(ops: Ops, x: Tensor, mlp: MlpWeights) -> Tensor:
    """Compute an MLP on rows ``[T, hidden]``."""
    inner = ops.activate(ops.linear(x, mlp.gate_up), mlp.activation)
    return _linear_of_ranks(ops, inner, mlp.down, mlp.comm)


def _linear_of_ranks(ops: Ops, x: Tensor, weight: PackedLinear, comm: Comm | None) -> Tensor:
    """``[T, in_features] -> [T, out_features]``, where each rank may have some of the columns.

    Products of such are float32 where the backend has them so: they are rounded once, as a sum.
    """
    if comm is None:
        return ops.linear(x, weight)
    return comm.sum(ops.logits(x, weight), x.dtype)


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
    mixer = layer.mixer
    x = x if layer.mixer_norm is None else ops.norm(x, layer.mixer_norm)
    if isinstance(mixer, LatentWeights):
        rows = _latent_rows(ops, mixer, x)
        ops.rope_write(rows, mixer.place.layer, plan, None, mixer.tables)
        return
    assert isinstance(mixer, AttentionWeights), "only attention has keys and values"
    qkv = ops.linear(x, mixer.qkv)
    if mixer.gate:
        qkv = qkv[:, : -mixer.gate].contiguous()
    ops.rope_write(qkv, mixer.place.layer, plan, mixer.head_norm, mixer.tables)


def _mix(
    ops: Ops, layer: LayerWeights, mixer: MixerWeights, x: Tensor, plan: ForwardPlan
) -> Tensor:
    """Compute the summand that a layer's mixers add to the residual stream, ``[T, hidden]``."""
    beside = None if layer.beside is None else _recur(ops, layer.beside, x, plan)
    if isinstance(mixer, AttentionWeights):
        x = _attend(ops, mixer, x, plan)
    elif isinstance(mixer, LatentWeights):
        x = _attend_latents(ops, mixer, x, plan)
    elif isinstance(mixer, ConvWeights):
        x = _convolve(ops, mixer, x, plan)
    else:
        x = _recur(ops, mixer, x, plan)
    if beside is not None:
        x, _ = ops.add_norm(beside, x, None)
    return x if layer.mixer_out_norm is None else ops.norm(x, layer.mixer_out_norm)


def _attend(ops: Ops, mixer: AttentionWeights, x: Tensor, plan: ForwardPlan) -> Tensor:
    """``[T, hidden]`` to the same, by attention over the pages."""
    index = mixer.place.layer
    qkv, gate = ops.linear(x, mixer.qkv), None
    if mixer.gate:
        qkv, gate = (part.contiguous() for part in qkv.tensor_split([-mixer.gate], dim=1))
    q = ops.rope_write(qkv, index, plan, mixer.head_norm, mixer.tables)
    attended = ops.attention(
        q, index, plan, mixer.window, cap=mixer.cap, sinks=mixer.sinks, is_mutual=mixer.is_mutual
    )
    if gate is not None:
        attended = ops.gate(attended, gate)
    return _linear_of_ranks(ops, attended, mixer.o, mixer.comm)


def _attend_latents(ops: Ops, mixer: LatentWeights, x: Tensor, plan: ForwardPlan) -> Tensor:
    """``[T, hidden]`` to the same, by attention over latents in the pages."""
    index = mixer.place.layer
    q = ops.rope_write(_latent_rows(ops, mixer, x), index, plan, None, mixer.tables)
    read = ops.attention(q, index, plan, None)
    return ops.linear(_by_head(ops, read, mixer.values), mixer.o)


def _latent_rows(ops: Ops, mixer: LatentWeights, x: Tensor) -> Tensor:
    """Rows ``[T, hidden]`` to every head's query and the key, ``[T, (num_heads + 1) * key_dim]``.

    Their last ``rope_dim`` items are still to be turned.
    """
    shape, num_heads = mixer.shape, len(mixer.keys)
    made = ops.linear(x, mixer.down)
    q, latent, key = made.tensor_split([-shape.key_dim, -shape.rope_dim], dim=1)
    if mixer.q_up is not None:
        assert mixer.q_norm is not None
        q = ops.linear(ops.norm(q.contiguous(), mixer.q_norm), mixer.q_up)
    by_head = q.view(len(q), num_heads, -1)
    nope, turning = torch.split(by_head, [shape.nope_dim, shape.rope_dim], dim=2)
    met = _by_head(ops, nope.flatten(1), mixer.keys).view(len(q), num_heads, -1)
    queries = torch.cat((met, turning), dim=2).flatten(1)
    return torch.cat((queries, ops.norm(latent.contiguous(), mixer.kv_norm), key), dim=1)


def _by_head(ops: Ops, x: Tensor, weights: Sequence[PackedLinear]) -> Tensor:
    """``[T, num_heads * in_features] -> [T, num_heads * out_features]``, by a weight a head."""
    pairs = zip(x.chunk(len(weights), dim=1), weights, strict=True)
    return torch.cat([ops.linear(part.contiguous(), weight) for part, weight in pairs], dim=1)


def _recur(ops: Ops, mixer: RecurrentWeights, x: Tensor, plan: ForwardPlan) -> Tensor:
    """``[T, hidden]`` to the same, by the states of the sequences."""
    mixed, gates = ops.linear(x, mixer.in_proj), ops.logits(x, mixer.gates)
    return ops.linear(ops.recur(mixed, gates, mixer, plan), mixer.out)


def _convolve(ops: Ops, mixer: ConvWeights, x: Tensor, plan: ForwardPlan) -> Tensor:
    """``[T, hidden]`` to the same, by the rows before each that a convolution reads."""
    return ops.linear(ops.short_conv(ops.linear(x, mixer.in_proj), mixer, plan), mixer.out)
