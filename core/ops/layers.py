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
    """Compute token ids ``[T]`` and write their KV to the pool.

    ``plans``: one for each part of the pool. ``tapped`` [T, num_taps * hidden]: receives the taps;
    None: a new tensor does. ``given``: `Wanted.inputs`. ``layer_vectors``: `Wanted.layer_vectors`.
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
    """Return the first mixer's input, ``[T, 2 * hidden]``, and the residual stream [T, hidden].

    ``embedded`` and ``given`` are [T, hidden].
    """
    normed = ops.norm(given, weights.given_norm)
    x = torch.cat((ops.norm(embedded, weights.embedding_norm), normed), dim=-1)
    return x, normed if weights.norms_residual else given


def _tap(tapped: Tensor | None, taps: Taps, boundary: int, residual: Tensor) -> None:
    """Copy the residual stream at a boundary into ``tapped`` if ``taps`` has the boundary."""
    if tapped is not None and boundary in taps:
        at, width = taps.index(boundary), residual.shape[1]
        tapped[:, at * width : (at + 1) * width].copy_(residual)


def _mix_and_think(
    ops: Ops, layer: LayerWeights, x: Tensor, residual: Tensor, plan: ForwardPlan
) -> tuple[Tensor, Tensor]:
    """Compute a layer's mixer and MLP from its normed input ``x`` and the residual stream.

    Returns the last summand, not yet added to the stream, and the stream, both [T, hidden].
    """
    mlp = layer.mlp
    if layer.mixer is not None:
        mixed = _mix(ops, layer, layer.mixer, x, plan)
        if mlp is None:
            return mixed, residual
        if layer.is_parallel:
            _, residual = ops.add_norm(mixed, residual, None)
        else:
            x, residual = ops.add_norm(mixed, residual, layer.mlp_norm)
    assert mlp is not None, "a layer has neither a mixer nor an MLP"
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
    """Compute ``[T, in_features] -> [T, out_features]``, summed over ranks if there is a ``comm``.

    Each rank then has some of the columns. Its products are float32, so that only the sum is
    rounded.
    """
    if comm is None:
        return ops.linear(x, weight)
    return comm.sum(ops.logits(x, weight), x.dtype)


def linear_of_few(ops: Ops, x: Tensor, weight: PackedLinear) -> Tensor:
    """Compute ``[.., in_features] -> [.., out_features]`` for one or more rows."""
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if count < ops.min_rows:
        rows = torch.cat((rows, rows[-1:].expand(ops.min_rows - count, -1)))
    out = ops.linear(rows, weight)[:count]
    return out.view(*x.shape[:-1], out.shape[-1])


def write_kv(ops: Ops, layer: LayerWeights, x: Tensor, plan: ForwardPlan) -> None:
    """Write a layer's keys and values for rows ``[T, hidden]`` of the stream; compute no output."""
    mixer = layer.mixer
    x = x if layer.mixer_norm is None else ops.norm(x, layer.mixer_norm)
    if isinstance(mixer, LatentWeights):
        rows = _latent_rows(ops, mixer, x)
        ops.rope_write(rows, mixer.place.layer, plan, None, mixer.tables)
        return
    assert isinstance(mixer, AttentionWeights), "a layer without attention has no keys and values"
    qkv = ops.linear(x, mixer.qkv)
    if mixer.gate:
        qkv = qkv[:, : -mixer.gate].contiguous()
    ops.rope_write(qkv, mixer.place.layer, plan, mixer.head_norm, mixer.tables)


def _mix(
    ops: Ops, layer: LayerWeights, mixer: MixerWeights, x: Tensor, plan: ForwardPlan
) -> Tensor:
    """Return the summand that a layer's mixers add to the residual stream, ``[T, hidden]``."""
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
    """Compute attention over the pages, ``[T, hidden] -> [T, hidden]``."""
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
    """Compute attention over the latents in the pages, ``[T, hidden] -> [T, hidden]``."""
    index = mixer.place.layer
    q = ops.rope_write(_latent_rows(ops, mixer, x), index, plan, None, mixer.tables)
    read = ops.attention(q, index, plan, None)
    return ops.linear(_by_head(ops, read, mixer.values), mixer.o)


def _latent_rows(ops: Ops, mixer: LatentWeights, x: Tensor) -> Tensor:
    """Return each head's query and the key of rows, ``[T, (num_heads + 1) * key_dim]``.

    RoPE has not yet turned their last ``rope_dim`` items.
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
    """Multiply each head by its weight.

    ``[T, num_heads * in_features] -> [T, num_heads * out_features]``.
    """
    pairs = zip(x.chunk(len(weights), dim=1), weights, strict=True)
    return torch.cat([ops.linear(part.contiguous(), weight) for part, weight in pairs], dim=1)


def _recur(ops: Ops, mixer: RecurrentWeights, x: Tensor, plan: ForwardPlan) -> Tensor:
    """Compute a recurrent layer over the sequences' states, ``[T, hidden] -> [T, hidden]``."""
    mixed, gates = ops.linear(x, mixer.in_proj), ops.logits(x, mixer.gates)
    return ops.linear(ops.recur(mixed, gates, mixer, plan), mixer.out)


def _convolve(ops: Ops, mixer: ConvWeights, x: Tensor, plan: ForwardPlan) -> Tensor:
    """Compute a short convolution over rows and earlier ones, ``[T, hidden] -> [T, hidden]``."""
    return ops.linear(ops.short_conv(ops.linear(x, mixer.in_proj), mixer, plan), mixer.out)
